"""A layout as a picture: one row a pipeline, one cell a stage with its rank, its state and its layers.

It takes the most talkative form that fits the width: `● 3  layers 8-11`, `● 3  8-11`, `● 3`, `●`. Layers that a rank keeps
beside those that it runs stand behind a plus; `≈` marks a rank whose backward is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from odyssey.plan.pipelines import spans_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, all_ranks_of, ranks_of
from odyssey_cli.display import quantities
from odyssey_cli.display.rank_state import RankState, glyph, style

_N_FORMS = 4


def plan_grid(
    plan: Plan, states: Mapping[Rank, RankState], width: int, max_rows: int = 16, *, ascii_only: bool = False
) -> Table:
    """Pipelines x stages of `plan`. A rank without a state in `states` is taken to run.

    Rows beyond `max_rows` are counted, not shown; those with a rank that does not run come first then.
    """
    n_stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    shown = _rows_to_show(plan, states, max_rows)
    row_name, column_name = ("copy", "shard") if plan.is_sharded else ("pipeline", "stage")
    label = len(f"{row_name} {max(shown)}")
    for form in range(_N_FORMS):
        rows = [_cells(plan, p, states, form, ascii_only) for p in shown]
        widths = [max((row[s].cell_len for row in rows if s < len(row)), default=0) for s in range(n_stages)]
        if form == _N_FORMS - 1 or label + sum(column + 3 for column in widths) <= width:
            break
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    for _ in range(n_stages):
        grid.add_column(no_wrap=True)
    if form < 2:
        grid.add_row("", *(Text(f"{column_name} {s}", style="dim") for s in range(n_stages)))
    for p, row in zip(shown, rows, strict=True):
        grid.add_row(f"{row_name} {p}", *row, *[""] * (n_stages - len(row)))
    if len(shown) < len(plan.pipelines):
        grid.add_row(Text(f"and {len(plan.pipelines) - len(shown)} more"))
    return grid


def idle_line(plan: Plan, states: Mapping[Rank, RankState], *, ascii_only: bool = False) -> Text | None:
    """The ranks outside the layout: those that only keep layers, idle ones and lost ones."""
    used = set(all_ranks_of(plan.place))
    keeping = {rank: plan.keeps[worker] for worker in plan.keeps if worker not in plan.place for rank in ranks_of(worker)}
    outside = sorted({*all_ranks_of(plan.idle), *keeping, *(rank for rank, state in states.items() if rank not in used)})
    if not outside:
        return None
    line = Text().append("outside      ", style="dim")
    for rank in outside[:16]:
        state = states.get(rank, RankState.RUNNING if rank in keeping else RankState.IDLE)
        line.append(f"{glyph(state, ascii_only)} {rank}", style=style(state))
        is_well = rank in keeping and state is RankState.RUNNING
        line.append(f" keeps shard {min(keeping[rank])}   " if is_well else f" {state.value}   ", style="dim")
    if len(outside) > 16:
        line.append(f"and {len(outside) - 16} more", style="dim")
    return line


def _rows_to_show(plan: Plan, states: Mapping[Rank, RankState], max_rows: int) -> list[int]:
    everything = range(len(plan.pipelines))
    if len(everything) <= max_rows:
        return list(everything)

    def is_calm(p: int) -> bool:
        pipeline = plan.pipelines[p]
        ranks = all_ranks_of(pipeline.workers)
        return pipeline.is_complete and all(states.get(rank, RankState.RUNNING) is RankState.RUNNING for rank in ranks)

    return sorted(sorted(everything, key=is_calm)[:max_rows])


def _cells(plan: Plan, p: int, states: Mapping[Rank, RankState], form: int, ascii_only: bool) -> list[Text]:
    cells = []
    for s, stage in enumerate(plan.pipelines[p].stages):
        layers = quantities.layers(stage.first, stage.stop)
        if stage.worker is None:
            by = all_ranks_of(sorted({plan.runner(k, s) for k in plan.pipelines[p].micro_batches}))
            cell = Text().append(glyph(RankState.LOST, ascii_only), style=style(RankState.LOST))
            if form < 3:
                arrow = "->" if ascii_only else "→"
                names = ",".join(map(str, by)) if len(by) <= 3 else f"{by[0]},{by[1]} and {len(by) - 2} more"
                what = f" {arrow} {names}" if form < 2 else f" {arrow} {by[0]}{'…' if len(by) > 1 and not ascii_only else ''}"
                cell.append(what, style="yellow")
        else:
            cell = Text()
            for rank in ranks_of(stage.worker):
                state = states.get(rank, RankState.RUNNING)
                cell.append(glyph(state, ascii_only), style=style(state))
                if form < 3:
                    cell.append(f" {rank}", style="bold red" if state is RankState.LOST else "bold")
            if form < 3 and stage.worker in plan.approximate:
                cell.append(" ~" if ascii_only else " ≈", style="yellow")
        if plan.is_sharded:
            pass  # the column says which one it is
        elif form == 0:
            cell.append(f"  layers {layers}" if stage.stop > stage.first + 1 else f"  layer {layers}", style="dim")
        elif form == 1:
            cell.append(f"  {layers}", style="dim")
        if form < 2 and stage.worker is not None and stage.worker in plan.keeps:
            kept = spans_of(plan.keeps[stage.worker])
            cell.append(f" +{','.join(quantities.layers(*span) for span in kept)}", style="dim")
        cells.append(cell)
    return cells
