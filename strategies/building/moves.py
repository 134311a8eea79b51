"""The moves of state that a plan needs: what each worker lacks, from who holds it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from odyssey.plan import Move, Stage
from perfmodel.costs import Costs
from strategies.situation import Situation


def moves(situation: Situation, needed: Mapping[int, Stage]) -> tuple[Move, ...]:
    """What each worker lacks, from holders on the same host first, then from those that send least."""
    costs = Costs(situation.profile, situation.node_of)
    held = situation.held
    missing: list[tuple[int, int]] = []
    nothing: frozenset[int] = frozenset()
    for target in sorted(needed):
        stage, has = needed[target], held.get(target, nothing)
        if not has.issuperset(stage.layers):
            missing += [(layer, target) for layer in stage.layers if layer not in has]
    if not missing:
        return ()
    wanted = {layer for layer, _ in missing}
    hosts = {costs.host(target) for _, target in missing}
    alive = set(situation.alive)
    anywhere: dict[int, list[tuple[int, int]]] = {layer: [] for layer in wanted}
    on_host: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for worker in sorted(held):
        if worker in alive:
            host = costs.host(worker)
            for layer in wanted & held[worker]:
                anywhere[layer].append((0, worker))
                if host in hosts:
                    on_host.setdefault((layer, host), []).append((0, worker))
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
