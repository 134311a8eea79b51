"""Moves of state: what is missing arrives once, from who has it, hardly later than the busiest allows; and the price of it."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.plan.moves import Move
from odyssey.plan.pipelines import span_layers
from perfmodel.profile.profile import Link, Profile, Recovery
from perfmodel.step.costs import Costs
from perfmodel.transition.moving import move_ends, moves_s
from strategies.building.moves import improved, moves
from strategies.situation import Situation
from tests.examples import examples
from tests.planning import busiest_s, first_plan, layer, profile, situation

Needed = dict[int, frozenset[int]]


def cluster_of(sizes: list[int], *, ranks_per_node: int = 1000, inter: float = 100.0, shared: float | None = None) -> Profile:
    """Layers of so many bytes at 100 bytes a second within a host, and a second more for each move."""
    rows = [layer(str(i), parameter_bytes=size) for i, size in enumerate(sizes)]
    recovery = Recovery(move_layer_s=1.0)
    of = profile(rows, 1000, ranks_per_node=ranks_per_node, intra=Link(0, 100.0), inter=Link(0, inter), recovery=recovery)
    return msgspec.structs.replace(of, cluster=msgspec.structs.replace(of.cluster, interface_bandwidth=shared))


def state_of(of: Profile, held: dict[int, frozenset[int]]) -> Situation:
    return situation(of, first_plan(of, "1x1", 1), sorted(held), held=held)


@st.composite
def transitions(draw: st.DrawFn) -> tuple[Situation, Needed]:
    """Workers hold ranges of layers and shall hold others; every layer has a holder."""
    sizes = draw(st.lists(st.sampled_from([0, 100, 100, 100, 300, 900]), min_size=1, max_size=8))
    n_workers = draw(st.integers(1, 12))
    ends = st.tuples(st.integers(0, len(sizes)), st.integers(0, len(sizes))).map(sorted)
    held = {worker: frozenset(range(*draw(ends))) for worker in range(n_workers)}
    held[draw(st.integers(0, n_workers))] = frozenset(range(len(sizes)))
    needed = {}
    for worker in held:
        layers = span_layers(*draw(ends)) | span_layers(*draw(ends))
        if layers:
            needed[worker] = layers
    inter, shared = draw(st.sampled_from([(100.0, None), (10.0, None), (50.0, 25.0), (50.0, 200.0)]))
    of = cluster_of(sizes, ranks_per_node=draw(st.integers(1, 6)), inter=inter, shared=shared)
    return state_of(of, held), needed


def simulated(plan: tuple[Move, ...], of: Profile) -> dict[int, float]:
    """Each worker takes its moves from the front of a queue of its own, as the ranks do, each host's interface likewise; time
    goes on from end to end. The time of each worker's last end; fails where all wait."""
    per_node, cluster = of.cluster.ranks_per_node, of.cluster
    queues: dict[object, list[int]] = defaultdict(list)
    uses: list[dict[object, float]] = []
    for i, move in enumerate(plan):
        size = of.layers[move.layer].parameter_bytes
        a, b = move.source // per_node, move.target // per_node
        rate = cluster.intra_host.bandwidth if a == b else cluster.inter_host.bandwidth
        use: dict[object, float] = {}
        if a != b and cluster.interface_bandwidth is not None:
            rate = min(rate, cluster.interface_bandwidth)
            use = dict.fromkeys((f"out of {a}", f"into {b}"), size / cluster.interface_bandwidth)
        use |= dict.fromkeys((move.source, move.target), size / rate + of.recovery.move_layer_s)
        uses.append(use)
        for one in use:
            queues[one].append(i)
    free: dict[object, float] = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        ready = [i for i in {queue[0] for queue in queues.values() if queue} if all(queues[one][0] == i for one in uses[i])]
        assert ready, "all wait for each other"
        i = min(ready, key=lambda i: max(free[one] for one in uses[i]))
        start = max(free[one] for one in uses[i])
        for one, seconds in uses[i].items():
            free[one] = start + seconds
            queues[one].pop(0)
    return {worker: end for worker, end in free.items() if isinstance(worker, int)}


@given(transitions())
@settings(max_examples=examples(150))
def test_what_is_missing_arrives_once_from_who_has_it_by_then(case: tuple[Situation, Needed]) -> None:
    state, needed = case
    first = moves(state, needed)
    for plan in (first, improved(first, state)) if first else (first,):
        has = {worker: set(layers) for worker, layers in state.held.items()}
        for move in plan:
            assert move.layer in has[move.source] and move.layer not in has[move.target]
            has[move.target].add(move.layer)
        for worker in state.held:
            wanted = needed.get(worker, set())
            assert has[worker] == set(state.held[worker]) | wanted


@given(transitions())
@settings(max_examples=examples(150))
def test_the_price_is_the_time_that_workers_take_who_follow_the_order(case: tuple[Situation, Needed]) -> None:
    state, needed = case
    plan, costs = moves(state, needed), Costs(state.profile, state.node_of)
    assert move_ends(plan, costs) == pytest.approx(simulated(plan, state.profile))


@given(transitions())
@settings(max_examples=examples(150))
def test_more_thought_never_costs_time_and_rounds_stay_near_the_bound(case: tuple[Situation, Needed]) -> None:
    """Three workers who each send to the next need three rounds, where each is busy for two: half as much again. No move is
    longer than the busiest is busy, so a list schedule is within twice the bound (Graham) but for what is passed on."""
    state, needed = case
    costs = Costs(state.profile, state.node_of)
    first = moves(state, needed)
    if not first:
        return
    best = improved(first, state)
    assert moves_s(best, costs) <= moves_s(first, costs) * (1 + 1e-9)
    assert busiest_s(best, costs) <= moves_s(best, costs) * (1 + 1e-9)
    received = {move.target for move in best} & {move.source for move in best}
    if not any((move.layer, move.source) in {(m.layer, m.target) for m in best} for move in best) and not received:
        assert moves_s(best, costs) <= 2 * busiest_s(best, costs)


def test_targets_of_the_same_layers_receive_them_in_rounds() -> None:
    """Four holders, four targets, eight layers: nobody waits."""
    of = cluster_of([100] * 8)
    held = {worker: frozenset(range(8)) for worker in range(4)} | dict.fromkeys(range(4, 8), frozenset[int]())
    state = state_of(of, held)
    plan = moves(state, {worker: span_layers(0, 8) for worker in range(4, 8)})
    assert moves_s(plan, Costs(of)) == pytest.approx(8 * 2.0)


def test_who_has_received_a_layer_passes_it_on() -> None:
    """One holder, seven targets, one layer: three rounds, and not seven."""
    of = cluster_of([100])
    held = {0: frozenset({0})} | dict.fromkeys(range(1, 8), frozenset[int]())
    plan = moves(state_of(of, held), {worker: span_layers(0, 1) for worker in range(8)})
    assert moves_s(plan, Costs(of)) == pytest.approx(3 * 2.0)


def test_the_same_host_is_preferred_unless_it_has_more_to_send_than_anybody() -> None:
    of = cluster_of([100] * 4, ranks_per_node=3, inter=50.0)
    held = {0: frozenset(range(4)), 3: frozenset(range(4)), 1: frozenset[int](), 2: frozenset[int]()}
    state = state_of(of, held)
    assert {move.source for move in moves(state, {1: span_layers(0, 4)})} == {0}
    both = moves(state, {1: span_layers(0, 4), 2: span_layers(0, 4)})
    best = improved(both, state)
    assert moves_s(best, Costs(of)) < 8 * 2.0, "rank 0 alone would send eight"


def test_moves_of_different_workers_go_side_by_side_and_of_one_worker_in_turn() -> None:
    rows = [layer(str(i), parameter_bytes=60, optimizer_bytes=40) for i in range(4)]
    costs = Costs(profile(rows, 4, intra=Link(0.5, 100.0), recovery=Recovery(move_layer_s=0.25)))
    assert moves_s([Move(0, 0, 1), Move(1, 2, 3)], costs) == pytest.approx(1.5 + 0.25)
    assert moves_s([Move(0, 0, 1), Move(1, 0, 3)], costs) == pytest.approx(3.0 + 2 * 0.25)
    assert moves_s([Move(0, 0, 1), Move(1, 1, 2), Move(2, 3, 0)], costs) == pytest.approx(3.0 + 2 * 0.25)


def test_bytes_take_as_long_as_the_slower_of_link_and_processor_between_hosts_and_what_was_measured_within_one() -> None:
    of = cluster_of([100] * 2, ranks_per_node=1, inter=10.0)
    slow = msgspec.structs.replace(of, recovery=Recovery(move_layer_s=1.0, move_byte_s=0.05))
    assert moves_s([Move(0, 0, 1)], Costs(slow)) == pytest.approx(10.0 + 1.0)
    at_once = msgspec.structs.replace(slow, cluster=msgspec.structs.replace(slow.cluster, ranks_per_node=2))
    assert moves_s([Move(0, 0, 1)], Costs(at_once)) == pytest.approx(5.0 + 1.0)
    read = msgspec.structs.replace(at_once, recovery=Recovery(move_layer_s=1.0, move_byte_s=0.001))
    assert 1 / read.cluster.intra_host.bandwidth > 0.001
    assert moves_s([Move(0, 0, 1)], Costs(read)) == pytest.approx(0.1 + 1.0)


def test_moves_share_the_interfaces_of_their_hosts() -> None:
    """Ranks 0 and 1 of a host each send a layer of 100 bytes to another host: one after the other through the interface."""
    of = cluster_of([100] * 3, ranks_per_node=2, inter=10.0, shared=5.0)
    plan = (Move(0, 0, 2), Move(1, 1, 4), Move(2, 2, 3))
    ends = move_ends(plan, Costs(of))
    assert ends[0] == pytest.approx(20.0 + 1.0), "the interface is slower than the link"
    assert ends[1] == ends[4] == pytest.approx(2 * 20.0 + 1.0), "and busy"
    assert ends[2] == ends[3] == pytest.approx(ends[0] + 1.0 + 1.0), "not within the host"
    assert busiest_s(plan, Costs(of)) == pytest.approx(40.0)
