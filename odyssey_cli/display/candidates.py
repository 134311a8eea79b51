"""The table of candidates: what every strategy offered, its price, and why one of them was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from odyssey_cli.display import quantities
from strategies.situation import Candidate, Outlook


def candidate_table(
    candidates: Sequence[Candidate],
    is_chosen: Callable[[Candidate], bool],
    now_samples_per_s: float | None,
    *,
    max_rows: int = 100,
    with_reasons: bool = True,
    ascii_only: bool = False,
) -> Table:
    """One row a candidate, the chosen one marked, the best first.

    `now_samples_per_s`: the throughput before the loss, to which `rate` is relative. `with_reasons`: a last column with
    the reasons, cut to the width; `reasons` gives them whole.
    """
    looks_ahead = any(next_loss(candidate.outlook) != "-" for candidate in candidates)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("", width=1)
    table.add_column("strategy", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for name in ("step", "rate", "transition", "memory", "score", *(("next loss",) if looks_ahead else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if with_reasons:
        table.add_column("")
    for candidate in candidates[:max_rows]:
        chosen = is_chosen(candidate)
        mark = Text((">" if ascii_only else "▸") if chosen else "", style="green")
        row_style = "" if chosen else "dim"
        cells = [mark, Text(candidate.strategy, style="bold green" if chosen else row_style)]
        cells += [Text(cell, style=row_style) for cell in _numbers(candidate, now_samples_per_s)]
        if looks_ahead:
            cells.append(Text(next_loss(candidate.outlook), style=row_style))
        if with_reasons:
            cells.append(Text(candidate.reason, style="dim", no_wrap=True, overflow="ellipsis"))
        table.add_row(*cells)
    if len(candidates) > max_rows:
        table.add_row("", Text(f"and {len(candidates) - max_rows} more", style="dim"))
    return table


def reasons(candidates: Sequence[Candidate], is_chosen: Callable[[Candidate], bool]) -> Table:
    """Why each candidate won, lost or is infeasible, whole."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for candidate in candidates:
        name = candidate.strategy if candidate.plan is None else f"{candidate.strategy} {candidate.plan.form()}"
        table.add_row(Text(name, style="green" if is_chosen(candidate) else ""), Text(candidate.reason, style="dim"))
    return table


def _numbers(candidate: Candidate, now_samples_per_s: float | None) -> list[str]:
    """Layout, step time, rate, transition, memory, score; `-` where there is nothing to price."""
    layout = candidate.plan.form() if candidate.plan is not None else "-"
    estimate = candidate.estimate
    if estimate is None:
        return [layout, "-", "-", "-", "-", "-"]
    relative = "-"
    if candidate.plan is not None and now_samples_per_s:
        relative = quantities.percent(candidate.plan.global_batch / estimate.step_s / now_samples_per_s)
    return [
        layout,
        quantities.seconds(estimate.step_s),
        relative,
        quantities.seconds(estimate.transition.total_s),
        quantities.size(estimate.peak_bytes),
        quantities.rate(estimate.objective) if candidate.plan is not None else "-",
    ]


def next_loss(outlook: Outlook | None) -> str:
    """What the next loss takes from training; `-` where nobody looked ahead."""
    return quantities.seconds(outlook.cost_s) if outlook is not None and outlook.next_losses else "-"
