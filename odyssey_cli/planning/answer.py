"""How the answer of `odyssey plan` looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher.joblog.wording import faults_texts, ranks_text
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, all_ranks_of
from odyssey.protocol.calls import ranks_alike
from odyssey_cli.display import quantities
from odyssey_cli.display.candidates import (
    Columns,
    candidate_table,
    fitted,
    forms,
    near_equal_text,
    next_loss,
    rate_note,
    reasons,
    row_mark,
    score,
    step_name,
    step_spread,
    why,
)
from odyssey_cli.display.fitted_table import FittedTable
from odyssey_cli.display.layout_grid import idle_line, plan_grid
from odyssey_cli.display.layout_words import legend, wrapped
from odyssey_cli.display.page import page
from odyssey_cli.display.rank_state import RankState
from odyssey_cli.display.render import WIDE
from odyssey_cli.planning.ask import Answer
from odyssey_cli.timeline.change import sentences
from strategies.search import best
from strategies.search.dryrun import Joined, Outcome
from strategies.search.lifetime_value import LifetimeValue
from strategies.situation import AtNextLoss, Candidate, Objective

_MOST_OUTCOMES = 12


def show(answer: Answer) -> None:
    """Print it on stdout."""
    console = page()
    ascii_only = not console.encoding.lower().startswith("utf")
    console.print(render(answer, console.width, ascii_only=ascii_only))


def render(answer: Answer, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The layout now; the losses looked at; of the worst one that training survives the layout after it and all candidates; the
    same for those who come."""
    idle_states = dict.fromkeys(all_ranks_of(answer.now.idle), RankState.IDLE)
    parts: list[RenderableType] = [
        Text.assemble(("now", "bold"), "  ", _facts(answer.now)),
        Text(f"     {answer.source}", style="dim"),
        Text(wrapped("     ", answer.now, width), style="dim"),
        plan_grid(answer.now, idle_states, width, ascii_only=ascii_only),
    ]
    if answer.now.idle and (idle := idle_line(answer.now, {}, ascii_only=ascii_only)):
        parts.append(idle)
    if len(answer.starts) > 1:
        parts += ["", Text("layouts to start with", style="dim"), start_table(answer, width, ascii_only)]
    if len(answer.outcomes) > 1:
        parts += ["", Text(f"losses  {answer.method}", style="dim"), outcome_table(answer)]
    if answer.shown is not None:
        parts += ["", *_outcome(answer, answer.shown, width, ascii_only)]
    if answer.joined is not None:
        parts += ["", *_grown(answer, answer.joined, width, ascii_only)]
    change = answer.expected_change
    footer = f"next change expected in {quantities.seconds(change.seconds)} ({change.source})\n{_cost(answer)}"
    parts += ["", Text(f"{footer}\n{_score(answer, ascii_only)}\n{_searched(answer)}", style="dim"), ""]
    tables = (answer.starts, *(outcome.candidates for outcome in answer.outcomes), _joined_table(answer))
    parts.append(Text("\n".join(legend([form_of(answer.now), *forms(chain(*tables))])), style="dim"))
    if faults := faults_texts(candidate for table in tables for candidate in table):
        parts += ["", Text("\n".join(faults), style="yellow")]
    return Group(*parts)


def _cost(answer: Answer) -> str:
    """What the next loss takes, and what failures cost of every hour, as the layout now stands."""
    at_next_loss, lifetime_value = answer.at_next_loss, answer.lifetime_value
    part = at_next_loss.share_of_restarts
    ends = f"; {quantities.percent(part)} of losses end the job" if part >= 0.005 else ""
    return f"a loss takes {quantities.seconds(at_next_loss.cost_s)} from training{ends}\n{hourly(lifetime_value)}"


def hourly(lifetime_value: LifetimeValue) -> str:
    """What failures cost of every hour of a job, in seconds of training."""
    lost, stopped, slower = (
        quantities.seconds(3600 * part)
        for part in (lifetime_value.lost, lifetime_value.stopped, max(0.0, lifetime_value.slower))
    )
    over = f"over {quantities.seconds(lifetime_value.horizon_s)}, with {lifetime_value.n_losses:.2g} losses"
    return f"failures cost {lost} of every hour {over}: {stopped} stopped or redone, {slower} by slower steps"


def _score(answer: Answer, ascii_only: bool) -> str:
    """What the score is, and what the marks of spread and near-equal scores mean."""
    until = "the loss after the next" if answer.aim.objective is Objective.AHEAD else "the next loss (eq. 8)"
    score = f"score: useful samples a second until {until}"
    priced = [*answer.starts, *(answer.shown.candidates if answer.shown is not None else ()), *_joined_table(answer)]
    if not (spread := step_spread(priced, ascii_only=ascii_only)):
        return score
    near_equal = near_equal_text(priced, ascii_only=ascii_only)
    return f"{score}\nsteps {spread} beside each other: half are nearer" + (f"; {near_equal}" if near_equal else "")


def start_table(answer: Answer, width: int, ascii_only: bool) -> Table:
    """What a job could start with, best first: what it survives, and its expected useful throughput."""
    whole, plain = (_start_columns(answer, with_spread=with_spread, ascii_only=ascii_only) for with_spread in (True, False))
    columns = fitted(whole, plain, width, ("next loss costs", "samples/s", "survives"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", width=1, no_wrap=True)
    for i, (name, *_) in enumerate(columns):  # the layout alone gives way where there is no room
        table.add_column(name, justify="left" if name in ("layout", "survives") else "right", no_wrap=i > 0)
    for candidate, *cells in zip(_startable(answer), *(column[1:] for column in columns), strict=True):
        chosen = candidate.plan is answer.now
        texts = [Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells]
        mark = row_mark(candidate, is_chosen=chosen, ascii_only=ascii_only)
        table.add_row(mark, *texts, style="bold" if chosen else "")
    return table


def _startable(answer: Answer) -> list[Candidate]:
    return [candidate for candidate in answer.starts if candidate.plan is not None]


def _start_columns(answer: Answer, *, with_spread: bool, ascii_only: bool) -> Columns:
    step = step_name(answer.starts, ascii_only=ascii_only) if with_spread else "step"
    rows = [["layout", step, "samples/s", "score", "next loss costs", "survives"]]
    for candidate in _startable(answer):
        plan, estimate, at_next_loss = candidate.plan, candidate.estimate, candidate.at_next_loss
        assert plan is not None and estimate is not None and at_next_loss is not None
        rows.append(
            [
                form_of(plan),
                quantities.seconds(estimate.step_s),
                quantities.rate(plan.global_batch / estimate.step_s),
                score(candidate, with_spread=with_spread, ascii_only=ascii_only),
                next_loss(at_next_loss),
                survives(at_next_loss),
            ]
        )
    return [list(column) for column in zip(*rows, strict=True)]


def survives(at_next_loss: AtNextLoss) -> str:
    """The losses after which every layer has a holder, wherever they hit."""
    ranks, nodes = at_next_loss.n_holders - 1, at_next_loss.n_nodes - 1
    text = f"any {quantities.plural(ranks, 'rank')}" if ranks else "no loss"
    return f"{text}, any {quantities.plural(nodes, 'node')}" if nodes else text


def _joined_table(answer: Answer) -> tuple[Candidate, ...]:
    return () if answer.joined is None else answer.joined.candidates


def _outcome(answer: Answer, outcome: Outcome, width: int, ascii_only: bool) -> list[RenderableType]:
    """What is done after the losses."""
    chosen = answer.chosen
    title = Text.assemble((f"without {ranks_text(outcome.ranks)}", "bold"), "  ")
    if chosen is None or chosen.plan is None or chosen.estimate is None:
        title.append("training cannot go on", style="bold red")
        parts: list[RenderableType] = [title]
        if outcome.lost_state:
            parts.append(Text(outcome.lost_state))
    else:
        states = dict.fromkeys(outcome.ranks, RankState.LOST)
        told = sentences(answer.now, chosen.plan, outcome.ranks)
        parts = _chosen(answer, title, chosen, chosen.plan, states, told, width, ascii_only)
    return [*parts, *_candidates(answer, outcome.candidates, chosen, width, ascii_only)]


def _grown(answer: Answer, joined: Joined, width: int, ascii_only: bool) -> list[RenderableType]:
    """What is done when the others have come, and whether it pays."""
    before = answer.now if answer.shown is None or answer.chosen is None else answer.chosen.plan
    assert before is not None
    then = "then with" if answer.shown is not None else "with"
    title = Text.assemble((f"{then} {ranks_alike(joined.ranks)}", "bold"), "  ")
    chosen = joined.chosen
    if chosen is None or chosen.plan is None:
        title.append("there is no plan", style="bold red")
        parts: list[RenderableType] = [title]
    else:
        idle = joined.ranks if chosen is joined.standing_by else all_ranks_of(chosen.plan.idle)
        states = dict.fromkeys(idle, RankState.IDLE)
        told = () if chosen is joined.standing_by else sentences(before, chosen.plan, ())
        parts = _chosen(answer, title, chosen, chosen.plan, states, told, width, ascii_only)
        parts += ["", *(Text(line) for line in _whether_it_pays(answer, joined))]
    return [*parts, *_candidates(answer, joined.candidates, chosen, width, ascii_only)]


def _chosen(
    answer: Answer,
    title: Text,
    chosen: Candidate,
    plan: Plan,
    states: Mapping[Rank, RankState],
    told: Sequence[str],
    width: int,
    ascii_only: bool,
) -> list[RenderableType]:
    """The plan that is taken: in a line, as a picture, and in sentences."""
    assert chosen.estimate is not None
    rate = quantities.percent(answer.step_s / chosen.estimate.step_s)
    title.append(
        f"{chosen.strategy}, layout {form_of(plan)}, {quantities.seconds(chosen.estimate.step_s)} a step, {rate} of now"
    )
    grid = plan_grid(plan, states, width, ascii_only=ascii_only)
    parts: list[RenderableType] = [title, Text(wrapped("     ", plan, width), style="dim"), grid]
    outside = idle_line(plan, states, ascii_only=ascii_only)
    parts += [outside] if outside is not None else []
    parts += [""] if told else []
    return [*parts, *(Text(line, style="dim") for line in told)]


def _whether_it_pays(answer: Answer, joined: Joined) -> list[str]:
    """To take them in, against going on as before: by the score, and when the transition is made good."""
    taking, standing = joined.taking_in, joined.standing_by
    they, pronoun = ("they stand", "them") if len(joined.ranks) > 1 else ("it stands", "it")
    if taking is None or taking.estimate is None:
        return [f"no plan has work for {ranks_alike(joined.ranks)}: {they} by"]
    if standing is None or standing.estimate is None:
        return [f"the layout cannot go on as it is, so {pronoun} has to be taken in"]
    step_s, before_s = taking.estimate.step_s, standing.estimate.step_s
    stop_s = taking.estimate.transition.total_s
    pays = joined.chosen is taking
    scores = f"a score of {quantities.rate(taking.estimate.objective)} against {quantities.rate(standing.estimate.objective)}"
    lines = [f"to take {pronoun} in {'pays' if pays else 'does not pay'}: {scores} if {they} by"]
    ahead = f"groups take {quantities.seconds(taking.estimate.beside_s)} beside the training, then all stop for"
    if step_s < before_s:
        made_good_s = stop_s * before_s / (before_s - step_s)
        change = quantities.seconds(answer.expected_change.seconds)
        good = f"made good within {quantities.seconds(made_good_s)}; the next change is expected in {change}"
    else:
        good = "and steps are no shorter: it is weighed by what it leaves for the next loss"
    return [*lines, f"{ahead} {quantities.seconds(stop_s)}, {good}"]


def _candidates(
    answer: Answer, candidates: Sequence[Candidate], chosen: Candidate | None, width: int, ascii_only: bool
) -> list[RenderableType]:
    """The table, and reasons that its numbers don't tell."""
    if not candidates:
        return []
    now_rate = answer.now.global_batch / answer.step_s

    def is_chosen(candidate: object) -> bool:
        return candidate is chosen

    wide = width >= WIDE  # else the reasons that the numbers don't tell stand below
    table = candidate_table(candidates, is_chosen, now_rate, width, with_reasons=wide, ascii_only=ascii_only)
    parts: list[RenderableType] = ["", table]
    parts += [
        Text(note) for note in (why(candidates, is_chosen, answer.aim.objective), rate_note(candidates, now_rate)) if note
    ]
    explained = [candidate for candidate in candidates if candidate.plan is None]
    return parts if wide or not explained else [*parts, "", reasons(explained, is_chosen)]


def outcome_table(answer: Answer) -> Table:
    """A row for each thing that comes of a loss: an example, how many losses come to that, and what would be done."""
    table = FittedTable(least=("losses", "transition", "layout"))
    table.add_column("ranks lost", no_wrap=True)
    table.add_column("then", no_wrap=True)
    table.add_column("losses", justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for name in ("step", "rate", "transition"):
        table.add_column(name, justify="right", no_wrap=True)
    alike: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in answer.outcomes:
        alike.setdefault(_outcome_cells(answer, outcome), []).append(outcome)
    rows = list(alike.items())
    n_left_out = max(0, len(rows) - _MOST_OUTCOMES)
    middle = _MOST_OUTCOMES // 2
    for i, ((then, *cells), outcomes) in enumerate(rows):
        if n_left_out and i == middle:
            table.add_row(Text(f"and {n_left_out} kinds between", style="dim"))
        if n_left_out and middle <= i < middle + n_left_out:
            continue
        is_shown = answer.shown in outcomes
        example = answer.shown if is_shown and answer.shown is not None else outcomes[0]
        ranks, n_alike = ", ".join(map(str, example.ranks)), sum(outcome.n_alike for outcome in outcomes)
        table.add_row(ranks, then, str(n_alike), *cells, style="bold" if is_shown else "")
    return table


def _outcome_cells(answer: Answer, outcome: Outcome) -> tuple[str, ...]:
    """What is done, the layout, its step, the rate and the transition."""
    chosen = best(outcome.candidates)
    if chosen is None or chosen.plan is None or chosen.estimate is None:
        return "cannot go on", "-", "-", "-", "-"
    rate = quantities.percent(answer.step_s / chosen.estimate.step_s)
    transition = quantities.seconds(chosen.estimate.transition.total_s)
    return chosen.strategy, form_of(chosen.plan), quantities.seconds(chosen.estimate.step_s), rate, transition


def _facts(plan: Plan) -> str:
    facts = [f"layout {form_of(plan)}"]
    if plan.estimate is not None:
        facts.append(f"{quantities.seconds(plan.estimate.step_s)} a step")
        facts.append(f"{quantities.rate(plan.global_batch / plan.estimate.step_s)} samples/s")
    return ", ".join(facts)


def _searched(answer: Answer) -> str:
    return f"searched in {quantities.seconds(answer.search_s)}"
