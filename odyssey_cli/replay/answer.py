"""How the answer of `odyssey replay` looks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from odyssey_cli.display import quantities
from odyssey_cli.display.fitted_table import FittedTable
from odyssey_cli.display.page import page
from odyssey_cli.replay.ask import Answer
from odyssey_cli.replay.outcome import Outcome

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#%"
CAUSES = (
    ("slower", "slower_s"),
    ("redone", "redone_s"),
    ("transition", "transition_s"),
    ("restart", "restart_s"),
    ("saving", "checkpoint_s"),
    ("waiting", "waiting_s"),
)
"""Column -> field of Totals."""


def show(answer: Answer) -> None:
    """Print it on stdout."""
    console = page()
    console.print(render(answer, console.width, ascii_only=not console.encoding.lower().startswith("utf")))


def render(answer: Answer, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The trace, the table of policies, their throughput over time, and what has to be known to read it."""
    trace = answer.trace
    facts = f"{quantities.plural(trace.n_losses, 'loss', 'losses')} in {quantities.seconds(trace.length_s)}"
    nodes = f"{quantities.plural(trace.n_nodes, 'node')} of {quantities.plural(answer.ranks_per_node, 'rank')}"
    step = quantities.seconds(answer.step_s)
    parts: list[RenderableType] = [
        Text.assemble(("trace", "bold"), f"  {trace.name}: {facts}", (f"  {trace.format}", "dim")),
        Text.assemble(("job", "bold"), f"    {answer.source}: {nodes}, layout {answer.layout}, {step} a step without failures"),
        *(Text(f"       {note}", style="dim") for note in answer.notes),
        "",
        policy_table(answer.outcomes),
        "",
        chart(answer.outcomes, trace.length_s, width, ascii_only=ascii_only),
        "",
        Text("\n".join(_footer(answer)), style="dim"),
    ]
    return Group(*parts)


def policy_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each policy, most useful first: where its time went, in per cent."""
    table = FittedTable(least=("idle", "returns"))
    table.add_column("policy", no_wrap=True)
    table.add_column("useful", justify="right", no_wrap=True)
    for name, _ in CAUSES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("returns", justify="right", no_wrap=True)
    table.add_column("idle", justify="right", no_wrap=True)
    ranked = sorted(outcomes, key=lambda outcome: -outcome.useful)
    for outcome in ranked:
        totals, length_s = outcome.totals, outcome.length_s
        shares = [share(getattr(totals, field) / length_s) for _, field in CAUSES]
        idle = f"{outcome.result.idle_node_s / 3600:,.0f} h"
        row = [outcome.policy, share(outcome.useful), *shares, str(outcome.result.n_returns), idle]
        table.add_row(*row, style="bold" if outcome is ranked[0] else "")
    return table


def share(value: float) -> str:
    """A share of the time: `86.1 %`, `0.02 %`, `0`."""
    if abs(value) < 0.00005:
        return "0"
    return f"{value * 100:.1f} %" if abs(value) >= 0.0095 else f"{value * 100:.2f} %"


def chart(outcomes: Sequence[Outcome], length_s: float, width: int, *, ascii_only: bool = False) -> RenderableType:
    """A line for each policy: its useful throughput over time, full height as without failures."""
    label = max(len(outcome.policy) for outcome in outcomes)
    n_bins = max(10, min(width, 110) - label - 3)
    blocks = _ASCII if ascii_only else _BLOCKS
    lines: list[RenderableType] = []
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.useful):
        line = "".join(blocks[_level(value, len(blocks))] for value in outcome.over_time(n_bins))
        lines.append(Text.assemble(f"{outcome.policy:<{label}}  ", (line, "green")))
    end = quantities.seconds(length_s)
    lines.append(Text(f"{'':<{label}}  0{end:>{n_bins - 1}}", style="dim"))
    return Group(*lines)


def _level(value: float, n_levels: int) -> int:
    """Which block: the lowest one that can be seen for anything above nothing."""
    if value < 0.005:
        return 0
    return max(1, min(n_levels - 1, round(value * (n_levels - 1))))


def _footer(answer: Answer) -> list[str]:
    restart_costs = answer.restart_costs
    n_ranks = answer.trace.n_nodes * answer.ranks_per_node
    every = (
        f"every {quantities.seconds(restart_costs.every_s)}" if restart_costs.every_s is not None else "at the best interval"
    )
    is_more = any(outcome.useful > 1 for outcome in answer.outcomes)
    return [
        "useful: kept steps, against all nodes without failures; then the rest of the time by its cause",
        *([f"more than 100 %: after a failure a layout was taken that is faster than {answer.layout}"] if is_more else []),
        "returns: to a checkpoint; idle: hours of healthy nodes without work",
        f"a checkpoint takes {quantities.seconds(restart_costs.save_s)}, {every}; a restart of all nodes "
        f"{quantities.seconds(restart_costs.restart_of(n_ranks))}; docs/operators/replay.md has what is assumed",
    ]
