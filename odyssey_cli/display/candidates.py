"""The table of candidates: what every strategy offered, its price with its spread, and why one of them was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table
from rich.text import Text

from odyssey.plan.form import form_of
from odyssey_cli.display import quantities
from perfmodel.profile.profile import Cluster
from strategies.situation import AtNextLoss, Candidate, Objective

Columns = list[list[str]]
"""A table's columns, each with its name first."""
LEAST_LAYOUT = 10
_LEAST = ("memory", "next loss costs", "transition", "rate")
"""Columns that go first where there is too little room."""


def candidate_table(
    candidates: Sequence[Candidate],
    is_chosen: Callable[[Candidate], bool],
    now_samples_per_s: float | None,
    width: int,
    *,
    max_rows: int = 100,
    with_reasons: bool = True,
    ascii_only: bool = False,
) -> Table:
    """One row a candidate, the best first; the chosen one is marked, and those that are near-equal to the best. Among those
    that read the same, of one strategy with one form of layout, the best stands for the others.

    `now_samples_per_s`: the throughput before the loss, to which `rate` is relative. Spreads are beside the numbers where
    `width` has room for them. `with_reasons`: a last column with the reasons, cut to the width; `reasons` gives them whole.
    """
    shown = distinct(candidates, is_chosen)[:max_rows]
    whole, plain = (
        _columns(shown, now_samples_per_s, with_spread=with_spread, ascii_only=ascii_only) for with_spread in (True, False)
    )
    columns = fitted(whole, plain, width, _LEAST)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False, caption_justify="left")
    table.add_column("", width=1, no_wrap=True)
    for i, (name, *_) in enumerate(columns):  # the layout alone gives way where there is no room
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i != 1)
    if with_reasons:
        table.add_column("")
    for i, candidate in enumerate(shown):
        chosen = is_chosen(candidate)
        styles = ["bold green" if chosen else "dim", *("" if chosen else "dim" for _ in columns[1:])]
        cells = [row_mark(candidate, is_chosen=chosen, ascii_only=ascii_only)]
        for column, style in zip(columns, styles, strict=True):
            cells.append(Text(column[i + 1], style=style, no_wrap=True, overflow="ellipsis"))
        if with_reasons:
            cells.append(Text(candidate.reason, style="dim", no_wrap=True, overflow="ellipsis"))
        table.add_row(*cells)
    if len(candidates) > len(shown):
        table.caption = Text(f"   and {len(candidates) - len(shown)} more", style="not italic")
    return table


def distinct(candidates: Sequence[Candidate], is_chosen: Callable[[Candidate], bool]) -> list[Candidate]:
    """Those of which no better one, or the chosen one, reads the same."""
    chosen = {_reading(candidate) for candidate in candidates if is_chosen(candidate)}
    found: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        if is_chosen(candidate) or _reading(candidate) not in chosen:
            found.setdefault(_reading(candidate), candidate)
    return list(found.values())


def _reading(candidate: Candidate) -> tuple[str, str]:
    return candidate.strategy, "-" if candidate.plan is None else form_of(candidate.plan)


def fitted(columns: Columns, plain: Columns, width: int, least: Sequence[str]) -> Columns:
    """The columns if they stand whole behind that of the marks; else `plain`, without those of `least` in turn as long as there
    is too little room. Only then may the layout be cut, to `LEAST_LAYOUT`."""
    if _width(columns) <= width:
        return columns
    for name in least:
        if _width(plain) <= width:
            break
        plain = [column for column in plain if column[0] != name]
    return plain


def _width(columns: Columns) -> int:
    return 1 + sum(2 + max(map(len, column)) for column in columns)


def _columns(
    candidates: Sequence[Candidate], now_samples_per_s: float | None, *, with_spread: bool, ascii_only: bool
) -> Columns:
    """With their names; `-` where there is nothing to price."""
    step = step_name(candidates, ascii_only=ascii_only) if with_spread else "step"
    looks_ahead = any(next_loss(candidate.at_next_loss) != "-" for candidate in candidates)
    rows = [["strategy", "layout", step, "rate", "transition", "memory", "score", "next loss costs"]]
    for candidate in candidates:
        plan, estimate = candidate.plan, candidate.estimate
        cells = [*_reading(candidate), *["-"] * 6]
        if estimate is not None:
            cells[2] = quantities.seconds(estimate.step_s)
            if plan is not None and now_samples_per_s:
                cells[3] = quantities.percent(plan.global_batch / estimate.step_s / now_samples_per_s)
            cells[4:6] = quantities.seconds(estimate.transition.total_s), quantities.size(estimate.peak_bytes)
            cells[6] = score(candidate, with_spread=with_spread, ascii_only=ascii_only)
            cells[7] = next_loss(candidate.at_next_loss)
        rows.append(cells)
    return [list(column) for column in zip(*rows, strict=True)][: 8 if looks_ahead else 7]


def why(candidates: Sequence[Candidate], is_chosen: Callable[[Candidate], bool], objective: Objective) -> str:
    """Why the chosen one won, in a sentence, from the scores; empty where none was."""
    priced = [candidate for candidate in candidates if candidate.plan is not None and candidate.estimate is not None]
    chosen = next((candidate for candidate in priced if is_chosen(candidate)), None)
    if chosen is None or chosen.estimate is None:
        return ""
    others = [candidate for candidate in distinct(priced, is_chosen) if candidate is not chosen]
    if not others:
        return f"{chosen.strategy}: nothing else can go on"
    other = others[0]
    assert other.plan is not None and other.estimate is not None
    name = form_of(other.plan) if other.strategy == chosen.strategy else other.strategy
    until = "until the loss after the next" if objective is Objective.AHEAD else "until the next loss"
    mine, its = chosen.estimate.objective, other.estimate.objective
    if mine < its:
        return f"{chosen.strategy}: before {name}, which has more useful samples/s {until}, but {other.reason}"
    if its <= 0 or mine / its < 1.0005:
        return f"{chosen.strategy}: as many useful samples/s as {name} {until}"
    more = f"{(mine / its - 1) * 100:.1f} %" if mine / its < 1.0995 else quantities.percent(mine / its - 1)
    return f"{chosen.strategy}: best, {more} more useful samples/s than {name} {until}"


def rate_note(candidates: Sequence[Candidate], now_samples_per_s: float | None, cluster: Cluster | None = None) -> str:
    """Why a rate is above 100 %, where one is, as far as it is known."""
    rates = [
        candidate.plan.global_batch / candidate.estimate.step_s / now_samples_per_s
        for candidate in candidates
        if candidate.plan is not None and candidate.estimate is not None and now_samples_per_s
    ]
    if max(rates, default=0.0) < 1.005:
        return ""
    before = "at the same prices the layout before was not the fastest one"
    if cluster is not None and cluster.cores is not None and cluster.ranks_per_node * cluster.nodes_per_host > cluster.cores:
        return f"rate above 100 %: {before}, as all its ranks share {quantities.plural(cluster.cores, 'core')}"
    return f"rate above 100 %: {before}"


def forms(candidates: Iterable[Candidate]) -> list[str]:
    """The layouts of those that have a plan."""
    return [form_of(candidate.plan) for candidate in candidates if candidate.plan is not None]


def reasons(candidates: Sequence[Candidate], is_chosen: Callable[[Candidate], bool]) -> Table:
    """Why each candidate won, lost or is infeasible, whole."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for candidate in candidates:
        name = candidate.strategy if candidate.plan is None else f"{candidate.strategy} {form_of(candidate.plan)}"
        table.add_row(Text(name, style="green" if is_chosen(candidate) else ""), Text(candidate.reason, style="dim"))
    return table


def row_mark(candidate: Candidate, *, is_chosen: bool, ascii_only: bool = False) -> Text:
    """Mark the chosen one, and those that are as good as the best as far as prices can tell."""
    if is_chosen:
        return Text(">" if ascii_only else "▸", style="green")
    return Text(_near_equal_mark(ascii_only) if candidate.is_near_equal else "", style="dim")


def _near_equal_mark(ascii_only: bool) -> str:
    return "~" if ascii_only else "≈"


def step_name(candidates: Sequence[Candidate], *, ascii_only: bool = False) -> str:
    """`step ±6 %`: the spread of step times is the same in all rows."""
    return f"step {spread}" if (spread := step_spread(candidates, ascii_only=ascii_only)) else "step"


def step_spread(candidates: Sequence[Candidate], *, ascii_only: bool = False) -> str:
    """`±6 %`, empty where nothing is priced."""
    spread = next((candidate.spread for candidate in candidates if candidate.spread is not None), None)
    return "" if spread is None else f"{'+-' if ascii_only else '±'}{quantities.percent(spread.step)}"


def score(candidate: Candidate, *, with_spread: bool = True, ascii_only: bool = False) -> str:
    """The objective and its spread; `-` of what cannot be taken."""
    if candidate.plan is None or candidate.estimate is None:
        return "-"
    if candidate.spread is None or not with_spread:
        return quantities.rate(candidate.estimate.objective)
    return quantities.rate_within(candidate.estimate.objective, candidate.worth_spread, ascii_only=ascii_only)


def near_equal_text(candidates: Sequence[Candidate], *, ascii_only: bool = False) -> str:
    """What the mark of near-equal scores means, if there are any."""
    return (
        f"{_near_equal_mark(ascii_only)} as good within the spread"
        if any(candidate.is_near_equal for candidate in candidates)
        else ""
    )


def next_loss(at_next_loss: AtNextLoss | None) -> str:
    """What the next loss takes from training; `-` where nobody looked ahead."""
    return quantities.seconds(at_next_loss.cost_s) if at_next_loss is not None and at_next_loss.next_losses else "-"
