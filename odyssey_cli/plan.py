"""`odyssey plan`: what would be done if ranks were lost, without starting any."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from odyssey.errors import UsageError
from odyssey.plan import Plan
from odyssey_cli import arguments as text
from odyssey_cli import quantities, source
from odyssey_cli.candidates import candidate_table, reasons
from odyssey_cli.errors import ExitCode
from odyssey_cli.grid import idle_line, plan_grid
from odyssey_cli.rank_state import RankState
from strategies.situation import Candidate


class Answer(msgspec.Struct, frozen=True):
    """What `odyssey plan` says. `after`: the plan of the best candidate, None where nothing can go on.

    `n_cases`: how many sets of lost ranks were looked at; `lost` is the worst of them.
    """

    source: str
    now: Plan
    lost: tuple[int, ...]
    n_cases: int
    after: Plan | None
    candidates: tuple[Candidate, ...]
    seconds_to_change: float
    search_s: float

    def is_chosen(self, candidate: Candidate) -> bool:
        return candidate.plan is not None and candidate.plan == self.after


def plan(
    source_text: str | None,
    *,
    fail: int | None,
    fail_ranks: str | None,
    layout: str,
    nodes: int | None,
    nproc_per_node: int | None,
    mtbf: str | None,
    as_json: bool,
) -> int:
    """Answer on stdout; returns the exit code: FAILED if no plan survives the loss."""
    if fail is not None and fail_ranks is not None:
        raise UsageError("--fail and --fail-ranks exclude each other", "give one of them")
    if fail is not None:
        text.count(fail, "--fail", 1)
    ranks = text.ranks(fail_ranks, "--fail-ranks") if fail_ranks is not None else None
    text.layout(layout)
    mtbf_s = text.duration_s(mtbf, "--mtbf") if mtbf is not None else None
    found = source.find(source_text)
    answer = _ask(found, fail or 1, ranks, layout, nodes, nproc_per_node, mtbf_s)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    else:
        console = Console(highlight=False)
        ascii_only = not console.encoding.lower().startswith("utf")
        console.print(render(answer, console.width, ascii_only=ascii_only))
    return ExitCode.OK if answer.after is not None else ExitCode.FAILED


def render(answer: Answer, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The layout now and after, the table of candidates, and the reasons."""
    now = answer.now
    now_rate = _samples_per_s(now)
    lost_states = dict.fromkeys(answer.lost, RankState.LOST)
    parts: list[RenderableType] = [
        Text.assemble(("now", "bold"), "  ", ", ".join(_facts(now)), (f"  {answer.source}", "dim")),
        plan_grid(now, {}, width, ascii_only=ascii_only),
        "",
    ]
    what = f"without {quantities.ranks(answer.lost)}"
    worst = f"  (the worst of {quantities.plural(answer.n_cases, 'case')})" if answer.n_cases > 1 else ""
    title = Text.assemble((what, "bold"), "  ")
    if answer.after is not None:
        title.append(", ".join(_facts(answer.after, now_rate)))
    else:
        title.append("no plan survives this", style="bold red")
    title.append(worst, style="dim")
    parts.append(title)
    if answer.after is not None:
        outside = idle_line(answer.after, lost_states, ascii_only=ascii_only)
        parts += [plan_grid(answer.after, lost_states, width, ascii_only=ascii_only), *([outside] if outside else [])]
    table = candidate_table(answer.candidates, answer.is_chosen, now_rate, with_reasons=False, ascii_only=ascii_only)
    expects = f"next change expected in {quantities.seconds(answer.seconds_to_change)}"
    parts += ["", table, "", reasons(answer.candidates, answer.is_chosen), "", Text(_footer(answer, expects), style="dim")]
    return Group(*parts)


def _footer(answer: Answer, expects: str) -> str:
    score = "score: useful samples a second until then"
    return f"{expects}; {score}; searched in {quantities.seconds(answer.search_s)}"


def _facts(plan: Plan, now_samples_per_s: float | None = None) -> Sequence[str]:
    facts = [f"layout {plan.layout()}"]
    if now_samples_per_s is not None:
        facts.insert(0, plan.strategy)
    rate = _samples_per_s(plan)
    if plan.estimate is not None and rate is not None:
        facts += [f"{quantities.seconds(plan.estimate.step_s)} a step", f"{quantities.rate(rate)} samples/s"]
        if now_samples_per_s:
            facts.append(f"{quantities.percent(rate / now_samples_per_s)} of now")
            facts.append(f"after {quantities.seconds(plan.estimate.transition.total_s)}")
    return facts


def _samples_per_s(plan: Plan) -> float | None:
    return plan.global_batch / plan.estimate.step_s if plan.estimate is not None else None


def _ask(
    found: source.Source,
    fail: int,
    ranks: tuple[int, ...] | None,
    layout: str,
    nodes: int | None,
    nproc_per_node: int | None,
    mtbf_s: float | None,
) -> Answer:
    raise NotImplementedError
