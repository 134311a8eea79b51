"""From layer ranges to a whole, proved Plan: workers to stages, and who sums with whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice

from odyssey.plan.approximation import Approximation
from odyssey.plan.moves import Keep, keep_runs, move_runs
from odyssey.plan.pipelines import NOTHING, Pipeline, Stage, blocks_of, span_layers
from odyssey.plan.plan import Plan, Reduction, Route, Schedule, StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs
from strategies.building.effort import MANY_WORKERS
from strategies.building.moves import moves
from strategies.situation import Situation

Slot = tuple[int, int, Worker | None]
"""Layers `[first, stop)` of a stage, and the worker that should have it if it holds them all."""
Span = tuple[int, int]
"""Layers `[first, stop)`."""


def batch_of(situation: Situation) -> tuple[int, int]:
    """(global batch, micro-batch): of the plan in force, of the profile at the start."""
    known = situation.plan or situation.profile
    return known.global_batch, known.micro_batch


def n_micro_batches_of(situation: Situation) -> int:
    """Micro-batches a step."""
    global_batch, micro_batch = batch_of(situation)
    return -(-global_batch // micro_batch)


def compose(
    situation: Situation,
    strategy: str,
    pipelines: Sequence[Sequence[Stage]],
    shares: Sequence[int],
    *,
    samples: Sequence[int | None] = (),
    routes: Sequence[Route] = (),
    schedule: Schedule | None = None,
    spawned: Sequence[Worker] = (),
    keeps: Sequence[Keep] = (),
    approximation: Approximation | None = None,
) -> Plan:
    """A plan of these stages, with `shares` micro-batches to each pipeline; `samples`: of each, where they are cut. `keeps`:
    what workers hold beside their stages.

    It is proved but for its moves, whose proof takes long: that of the plan that is taken is made in the end
    (strategies/search/table.py).

    Raises PlanError if it contradicts itself.
    """
    global_batch, micro_batch = batch_of(situation)
    profile = situation.profile
    built = []
    first = 0
    for stages, share, n_samples in zip(pipelines, shares, samples or [None] * len(shares), strict=True):
        built.append(Pipeline(tuple(stages), first, first + share, n_samples))
        first += share
    needed = {
        stage.worker: span_layers(stage.first, stage.stop)
        for stages in pipelines
        for stage in stages
        if stage.worker is not None
    }
    for keep in keeps:
        needed[keep.worker] = needed.get(keep.worker, NOTHING) | span_layers(keep.first, keep.stop)
    at_start = situation.plan is None
    plan = Plan(
        generation=situation.generation,
        strategy=strategy,
        step=situation.step,
        global_batch=global_batch,
        micro_batch=micro_batch,
        n_layers=len(profile.layers),
        blocks=blocks_of(built),
        reductions=reductions(needed.values(), len(profile.layers), profile.ties),
        ties=profile.ties,
        routes=tuple(routes),
        schedule=schedule or Schedule(),
        move_runs=() if at_start else move_runs(moves(situation, needed)),
        keep_runs=keep_runs(keeps),
        spawned=tuple(sorted(spawned)),
        idle=tuple(sorted(set(situation.alive) - set(needed))),
        state_from=StateFrom.SCRIPT if at_start else StateFrom.HOLDERS,
        approximation=approximation,
        is_sharded=profile.is_sharded,
    )
    return prove(plan)


# -- reductions --------------------------------------------------------------------------------------------------------


def reductions(held: Iterable[frozenset[int]], n_layers: int, ties: Sequence[Sequence[int]]) -> tuple[Reduction, ...]:
    """One for all layers and ties of equal holders. `held`: by each worker."""
    kinds = list(enumerate(set(held)))
    holders = [frozenset(kind for kind, layers in kinds if layer in layers) for layer in range(n_layers)]
    units: dict[frozenset[int], tuple[list[int], list[int]]] = {}
    for layer, its in enumerate(holders):
        units.setdefault(its, ([], []))[0].append(layer)
    for t, tie in enumerate(ties):
        units.setdefault(frozenset().union(*(holders[layer] for layer in tie)), ([], []))[1].append(t)
    return tuple(Reduction(tuple(layers), tuple(tied)) for layers, tied in units.values())


# -- state -------------------------------------------------------------------------------------------------------------


def assign(situation: Situation, slots: Sequence[Slot], workers: Sequence[Worker]) -> list[Worker]:
    """A worker for each slot so that the fewest bytes move (Odyssey: the Hungarian method).

    A worker that holds exactly a slot's layers gets it first: some optimum does that, as what two workers swapped for it
    would lack can only be more. Only what is left needs the matrix.
    """
    if situation.plan is None:
        return list(workers[: len(slots)])
    held = situation.held
    nothing: frozenset[int] = frozenset()
    layers_of = {span: frozenset(range(*span)) for span in {(first, stop) for first, stop, _ in slots}}
    free = dict.fromkeys(workers)
    chosen: dict[int, Worker] = {}
    for i, (first, stop, preferred) in enumerate(slots):
        if preferred in free and preferred is not None and held.get(preferred, nothing) >= layers_of[first, stop]:
            chosen[i] = preferred
            del free[preferred]
    by_layers: dict[frozenset[int], list[Worker]] = {}
    for worker in reversed(free):
        by_layers.setdefault(held.get(worker, nothing), []).append(worker)
    for i, (first, stop, _) in enumerate(slots):
        if i not in chosen and (exact := by_layers.get(layers_of[first, stop])):
            chosen[i] = exact.pop()
            del free[chosen[i]]
    left = [i for i in range(len(slots)) if i not in chosen]
    if left:
        chosen.update(fewest_bytes(situation, {i: slots[i] for i in left}, list(free)))
    return [chosen[i] for i in range(len(slots))]


def fewest_bytes(situation: Situation, slots: Mapping[int, Slot], workers: Sequence[Worker]) -> dict[int, Worker]:
    """Slots of equal layers and workers that hold equal layers are classes: how many of each go to each is all there is to
    decide, and the matrix has one row and one column for each class (a transportation problem), however many workers there are.
    """
    slots_of: dict[Span, list[int]] = {}
    for i, (first, stop, _) in slots.items():
        slots_of.setdefault((first, stop), []).append(i)
    workers_of: dict[Span, list[Worker]] = {}
    for worker in workers:
        workers_of.setdefault(span_of(situation.held.get(worker, frozenset())), []).append(worker)
    sums = [0, *accumulate(Costs(situation.profile).move_bytes)]
    lacking = [[lacking_bytes(sums, layers, span) for span in workers_of] for layers in slots_of]
    shares = _transported(lacking, [len(row) for row in slots_of.values()], [len(column) for column in workers_of.values()])
    chosen: dict[int, Worker] = {}
    taken = dict.fromkeys(workers_of, 0)
    for row, own in zip(shares, slots_of.values(), strict=True):
        places = iter(own)
        for n, (span, candidates) in zip(row, workers_of.items(), strict=True):
            chosen.update(zip(islice(places, n), candidates[taken[span] : taken[span] + n], strict=True))
            taken[span] += n
    return chosen


def lacking_bytes(sums: Sequence[int], layers: Span, span: Span) -> int:
    """Bytes of `layers` that are not in `span`."""
    (first, stop), low, high = layers, max(layers[0], span[0]), min(layers[1], span[1])
    return sums[stop] - sums[first] - (sums[high] - sums[low] if low < high else 0)


def _transported(cost: Sequence[Sequence[int]], rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """How many of each row go to each column at the least cost: all of a row, at most what a column has.

    Not many in all: the Hungarian method on single ones, which is quicker. Else the linear program, whose vertices are whole.
    """
    if len(columns) == 1:
        return [[n] for n in rows]
    import numpy

    if sum(columns) <= MANY_WORKERS:
        from scipy.optimize import linear_sum_assignment

        row_of, column_of = (numpy.repeat(numpy.arange(len(sizes)), sizes) for sizes in (rows, columns))
        chosen = linear_sum_assignment(numpy.array(cost, dtype=float)[row_of][:, column_of])
        shares = numpy.zeros((len(rows), len(columns)), dtype=int)
        numpy.add.at(shares, (row_of[chosen[0]], column_of[chosen[1]]), 1)
        return [[int(n) for n in row] for row in shares]
    from scipy.optimize import linprog

    eye, scale = numpy.eye, max(1, max(map(max, cost)))
    all_of_row = numpy.kron(eye(len(rows)), numpy.ones(len(columns)))
    most_of_column = numpy.kron(numpy.ones(len(rows)), eye(len(columns)))
    flat = numpy.array(cost, dtype=float).ravel() / scale
    solved = linprog(flat, most_of_column, columns, all_of_row, rows, method="highs-ds")
    assert solved.x is not None, solved.message
    return [[round(n) for n in row] for row in solved.x.reshape(len(rows), len(columns))]


@lru_cache(maxsize=1 << 14)
def span_of(layers: frozenset[int]) -> Span:
    """The range that a worker holds; workers hold contiguous ranges, of anything else the part from its first layer on."""
    if not layers:
        return (0, 0)
    first = min(layers)
    stop = first
    while stop in layers:
        stop += 1
    return (first, stop)
