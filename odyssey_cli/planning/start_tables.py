"""How the answers of `odyssey plan --layouts` and `--spares` look."""

from __future__ import annotations

import sys

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from odyssey.codec import to_json
from odyssey_cli.display import quantities
from odyssey_cli.display.candidates import next_loss
from odyssey_cli.display.fitted_table import FittedTable
from odyssey_cli.display.page import page
from odyssey_cli.planning.answer import survives
from odyssey_cli.planning.starts import Layouts, Spare, Spares, Start

_MODELLED = (
    "modelled: a rank is lost, or every fourth time a whole node, ones that idle as often as others, and nothing comes back. "
    "Those that are left, idle ones too, take the best layout for as many as they are. Left out: processes that start again in "
    "place, and saving checkpoints."
)
_NEXT_LOSS = "next loss costs: what it takes from training in the mean"
_WIDE = 105


def show(answer: Layouts | Spares, *, as_json: bool) -> None:
    """Print it on stdout."""
    if as_json:
        sys.stdout.buffer.write(to_json(answer) + b"\n")
        return
    console = page()
    ascii_only = not console.encoding.lower().startswith("utf")
    console.print(render(answer, console.width, ascii_only=ascii_only))


def render(answer: Layouts | Spares, width: int, *, ascii_only: bool = False) -> RenderableType:
    """What was asked about, the tables, and what has to be known to read them."""
    mark = ">" if ascii_only else "▸"
    parts = _layouts(answer, mark, is_wide=width >= _WIDE) if isinstance(answer, Layouts) else _spares(answer, mark)
    change, horizon = answer.expected_change, quantities.seconds(answer.horizon_s)
    title = Text.assemble((quantities.plural(answer.n_ranks, "rank"), "bold"), (f"  {answer.source}", "dim"))
    rate = f"a loss expected in {quantities.seconds(change.seconds)} ({change.source})"
    footer = (
        f"{rate}\n"
        f"useful: samples a second in the mean over {horizon} (--horizon), less what is stopped, redone or slower\n"
        f"{_MODELLED}\n"
        f"searched in {quantities.seconds(answer.search_s)}"
    )
    return Group(title, *parts, "", Text(footer, style="dim"))


def _layouts(answer: Layouts, mark: str, *, is_wide: bool) -> list[RenderableType]:
    table = _table(
        "", "layout", "memory", "step", "samples/s", "useful", "next loss costs", "ends", *(["survives"] if is_wide else [])
    )
    for start in answer.starts:
        chosen = start.layout == answer.chosen
        memory, step = quantities.size(start.peak_bytes), quantities.seconds(start.step_s)
        cells = [start.form, memory, step, *_cells(start), quantities.percent(start.at_next_loss.share_of_restarts)]
        cells += [survives(start.at_next_loss)] if is_wide else []
        table.add_row(Text(mark if chosen else "", style="green"), *cells, style="bold" if chosen else "")
    notes = [
        *(f"{layout}: {reason}" for layout, reason in answer.refused),
        f"{mark} what the job starts with; `--layout` asks for another one",
        f"memory: of the {quantities.size(answer.memory_bytes)} that a rank may take",
        f"{_NEXT_LOSS}; ends: the share of losses that end the job",
    ]
    return ["", table, "", Text("\n".join(notes), style="dim")]


def _spares(answer: Spares, mark: str) -> list[RenderableType]:
    """Those that are added in a table of their own, with what they would do as workers."""
    columns = ("", "idle", "layout", "samples/s", "useful", "next loss costs", "after it")
    held_back, added, best = _table(*columns), _table(*columns, "at work"), answer.best
    for spare in answer.held_back:
        chosen = Text(mark if spare is best else "", style="green")
        held_back.add_row(chosen, *_spare_cells(spare), style="bold" if spare is best else "")
    for spare in answer.added:
        at_work = "-" if spare.training is None else precise(spare.training.lifetime_value.samples_per_s)
        added.add_row("", *_spare_cells(spare), at_work)
    notes = [
        _advice(answer),
        f"{_NEXT_LOSS}; after it: samples a second then, of those before (idle ranks may train then)",
        "at work: what would be useful if those that are added trained from the start",
    ]
    ranks = quantities.plural(answer.n_ranks, "rank")
    return [
        *("", Text(f"held back, of {ranks}", style="dim"), held_back),
        *("", Text(f"added to {ranks}", style="dim"), added),
        *("", Text("\n".join(notes), style="dim")),
    ]


def _advice(answer: Spares) -> str:
    best = answer.best
    if best is None:
        return "no layout, however many are held back"
    return "most useful work with none held back" if best.n_idle == 0 else f"most useful work with {best.n_idle} held back"


def _spare_cells(spare: Spare) -> list[str]:
    start = spare.start
    if start is None:
        return [str(spare.n_idle), "no layout", *["-"] * 4]
    after = quantities.percent(start.lifetime_value.after_per_s / start.samples_per_s)
    return [str(start.n_idle), start.form, *_cells(start), after]


def _cells(start: Start) -> list[str]:
    rates = precise(start.samples_per_s), precise(start.lifetime_value.samples_per_s)
    return [*rates, next_loss(start.at_next_loss)]


def precise(value: float) -> str:
    """A rate with four digits, as rows differ little: `157.3`, `12,345`."""
    digits = 3 - (len(str(int(value))) - 1)
    return f"{value:,.{max(0, digits)}f}"


def _table(*columns: str) -> Table:
    """Numbers on the right."""
    table = FittedTable(least=("survives", "memory", "idle", "ends", "next loss costs", "after it"))
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "layout", "survives") else "right", no_wrap=True)
    return table
