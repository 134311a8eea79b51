"""From layer ranges to a whole, validated Plan: workers to stages, reduce groups in rounds, moves from who holds what."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from odyssey.plan import Move, Pipeline, Plan, ReduceGroup, Route, Schedule, Stage, StateFrom
from perfmodel.costs import Costs
from strategies.situation import Situation

LARGE_ASSIGNMENT = 2000
"""Beyond this many workers without an exact place the assignment is greedy: the matrix would take seconds."""

Slot = tuple[int, int, int | None]
"""Layers `[first, stop)` of a stage, and the worker that should have it if it holds them all."""


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
    routes: Sequence[Route] = (),
    schedule: Schedule | None = None,
    spawned: Sequence[int] = (),
) -> Plan:
    """A validated plan of these stages, with `shares` micro-batches to each pipeline.

    Raises PlanError if it contradicts itself or the state that the survivors hold.
    """
    global_batch, micro_batch = batch_of(situation)
    profile = situation.profile
    built = []
    first = 0
    for stages, share in zip(pipelines, shares, strict=True):
        built.append(Pipeline(tuple(stages), first, first + share))
        first += share
    needed = {stage.worker: stage for stages in pipelines for stage in stages if stage.worker is not None}
    at_start = situation.plan is None
    plan = Plan(
        generation=situation.generation,
        strategy=strategy,
        step=situation.step,
        global_batch=global_batch,
        micro_batch=micro_batch,
        n_layers=len(profile.layers),
        pipelines=tuple(built),
        reduce=reduce_groups(needed, len(profile.layers), profile.ties),
        ties=profile.ties,
        routes=tuple(routes),
        schedule=schedule or Schedule(),
        moves=() if at_start else moves(situation, needed),
        spawned=tuple(sorted(spawned)),
        idle=tuple(sorted(set(situation.alive) - set(needed))),
        state_from=StateFrom.SCRIPT if at_start else StateFrom.HOLDERS,
    )
    return plan.validate(None if at_start else situation.held)


# -- reductions --------------------------------------------------------------------------------------------------------


def reduce_groups(stages: Mapping[int, Stage], n_layers: int, ties: Sequence[Sequence[int]]) -> tuple[ReduceGroup, ...]:
    """One group for all layers and ties of equal holders, in rounds in which no worker is twice."""
    holders: list[list[int]] = [[] for _ in range(n_layers)]
    for worker in sorted(stages):
        for layer in stages[worker].layers:
            holders[layer].append(worker)
    units: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for layer, workers in enumerate(holders):
        units.setdefault(tuple(workers), ([], []))[0].append(layer)
    for t, tie in enumerate(ties):
        union = tuple(sorted({worker for layer in tie for worker in holders[layer]}))
        units.setdefault(union, ([], []))[1].append(t)
    rounds = _rounds(list(units))
    return tuple(
        ReduceGroup(workers, tuple(layers), tuple(tied), number)
        for (workers, (layers, tied)), number in zip(units.items(), rounds, strict=True)
    )


def _rounds(groups: Sequence[tuple[int, ...]]) -> list[int]:
    """A colour for each group so that groups that share a worker differ (DSATUR, as in Odyssey)."""
    sets = [frozenset(group) for group in groups]
    if sum(map(len, sets)) == len(frozenset().union(*sets)):
        return [0] * len(groups)
    neighbours = [[j for j, other in enumerate(sets) if i != j and not own.isdisjoint(other)] for i, own in enumerate(sets)]
    taken: list[set[int]] = [set() for _ in sets]  # colours next to each
    colours: dict[int, int] = {}
    while len(colours) < len(sets):
        # The one with the fewest colours left, among those the one with most neighbours.
        i = max((i for i in range(len(sets)) if i not in colours), key=lambda i: (len(taken[i]), len(neighbours[i])))
        colours[i] = next(colour for colour in count() if colour not in taken[i])
        for j in neighbours[i]:
            taken[j].add(colours[i])
    return [colours[i] for i in range(len(sets))]


# -- state -------------------------------------------------------------------------------------------------------------


def moves(situation: Situation, needed: Mapping[int, Stage]) -> tuple[Move, ...]:
    """What each worker lacks, from holders on the same host first, then from those that send least."""
    costs = Costs(situation.profile, situation.node_of)
    held = situation.held
    missing: list[tuple[int, int]] = []
    nothing: frozenset[int] = frozenset()
    for target in sorted(needed):
        stage, has = needed[target], held.get(target, nothing)
        missing += [(layer, target) for layer in stage.layers if layer not in has]
    if not missing:
        return ()
    wanted = {layer for layer, _ in missing}
    alive = set(situation.alive)
    anywhere: dict[int, list[tuple[int, int]]] = {layer: [] for layer in wanted}
    on_host: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for worker in sorted(held):
        if worker in alive:
            for layer in wanted & held[worker]:
                anywhere[layer].append((0, worker))
                on_host.setdefault((layer, costs.host(worker)), []).append((0, worker))
    sent: dict[int, int] = {}
    result = []
    for layer, target in sorted(missing, key=lambda lack: (len(anywhere[lack[0]]), lack)):
        sources = on_host.get((layer, costs.host(target))) or anywhere[layer]
        if sources:
            source = _least_loaded(sources, sent)
            sent[source] = sent.get(source, 0) + costs.move_bytes[layer]
            result.append(Move(layer, source, target))
    return tuple(sorted(result, key=lambda move: (move.target, move.layer)))


def _least_loaded(heap: list[tuple[int, int]], sent: Mapping[int, int]) -> int:
    """The worker of a heap of (bytes sent, worker) that has sent least; entries are brought up to date as they surface."""
    while heap[0][0] != sent.get(heap[0][1], 0):
        worker = heap[0][1]
        heapq.heapreplace(heap, (sent.get(worker, 0), worker))
    return heap[0][1]


def assign(situation: Situation, slots: Sequence[Slot], workers: Sequence[int]) -> list[int]:
    """A worker for each slot so that the fewest bytes move (Odyssey: the Hungarian method).

    A worker that holds exactly a slot's layers gets it first: some optimum does that, as what two workers swapped for it
    would lack can only be more. Only what is left needs the matrix.
    """
    if situation.plan is None:
        return list(workers[: len(slots)])
    held = situation.held
    nothing: frozenset[int] = frozenset()
    free = dict.fromkeys(workers)
    chosen: dict[int, int] = {}
    for i, (first, stop, preferred) in enumerate(slots):
        if preferred in free and preferred is not None and held.get(preferred, nothing).issuperset(range(first, stop)):
            chosen[i] = preferred
            del free[preferred]
    by_layers: dict[frozenset[int], list[int]] = {}
    for worker in reversed(free):
        by_layers.setdefault(held.get(worker, nothing), []).append(worker)
    for i, (first, stop, _) in enumerate(slots):
        if i not in chosen and (exact := by_layers.get(frozenset(range(first, stop)))):
            chosen[i] = exact.pop()
            del free[chosen[i]]
    left = [i for i in range(len(slots)) if i not in chosen]
    if left:
        chosen.update(_fewest_bytes(situation, {i: slots[i] for i in left}, list(free)))
    return [chosen[i] for i in range(len(slots))]


def _fewest_bytes(situation: Situation, slots: Mapping[int, Slot], workers: Sequence[int]) -> dict[int, int]:
    sums = [0]
    for size in Costs(situation.profile).move_bytes:
        sums.append(sums[-1] + size)
    spans = {worker: _span(situation.held.get(worker, frozenset())) for worker in workers}
    lacks: dict[tuple[int, int, tuple[int, int]], int] = {}

    def lacking(slot: Slot, worker: int) -> int:
        first, stop, _ = slot
        key = (first, stop, spans[worker])
        if key not in lacks:
            low, high = max(first, key[2][0]), min(stop, key[2][1])
            lacks[key] = sums[stop] - sums[first] - (sums[high] - sums[low] if low < high else 0)
        return lacks[key]

    if len(workers) == 1:
        return {next(iter(slots)): workers[0]}
    if len(workers) > LARGE_ASSIGNMENT:
        return _class_by_class(slots, spans, lacking)
    from scipy.optimize import linear_sum_assignment

    matrix = [[lacking(slot, worker) for worker in workers] for slot in slots.values()]
    rows, columns = linear_sum_assignment(matrix)
    numbers = list(slots)
    return {numbers[int(row)]: workers[int(column)] for row, column in zip(rows, columns, strict=True)}


def _class_by_class(
    slots: Mapping[int, Slot], spans: Mapping[int, tuple[int, int]], lacking: Callable[[Slot, int], int]
) -> dict[int, int]:
    """Greedy: slots of equal layers to workers that hold equal layers, the pair that lacks least first."""
    slots_of: dict[tuple[int, int], list[int]] = {}
    for i, (first, stop, _) in slots.items():
        slots_of.setdefault((first, stop), []).append(i)
    workers_of: dict[tuple[int, int], list[int]] = {}
    for worker in sorted(spans, reverse=True):
        workers_of.setdefault(spans[worker], []).append(worker)
    pairs = sorted(
        (lacking((*layers, None), workers[0]), layers, span) for layers in slots_of for span, workers in workers_of.items()
    )
    chosen: dict[int, int] = {}
    for _, layers, span in pairs:
        while slots_of[layers] and workers_of[span]:
            chosen[slots_of[layers].pop(0)] = workers_of[span].pop()
    return chosen


def _span(layers: frozenset[int]) -> tuple[int, int]:
    """The range that a worker holds; workers hold contiguous ranges, of anything else the part from its first layer on."""
    if not layers:
        return (0, 0)
    first = min(layers)
    stop = first
    while stop in layers:
        stop += 1
    return (first, stop)
