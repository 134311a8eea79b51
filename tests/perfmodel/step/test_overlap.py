"""Reductions within the backward, priced: by hand, and against a dumb simulation that goes layer by layer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.plan import Compute, ComputeOrder, Plan, Schedule
from odyssey.plan.schedule import Receive, Reduce, Send, program
from perfmodel.profile.profile import Link, Profile
from perfmodel.step.timeline import timeline_of
from tests.examples import examples
from tests.odyssey.plan.test_schedule import added_from, plain, plans
from tests.planning import first_plan, layer, order_of, price, profile

MB = 2**20
BUCKET_BYTES = 25 * MB


def replicas(n_layers: int, gradient_mb: int, **given: object) -> Profile:
    """Layers that take a second each of F, I and W; two workers reduce 10 MB in a second."""
    rows = [layer(str(i), gradient_bytes=gradient_mb * MB) for i in range(n_layers)]
    return profile(rows, 2, intra=Link(0.0, 10.0 * MB), **given)  # type: ignore[arg-type]


def test_each_layer_is_reduced_while_those_below_it_compute() -> None:
    """F until 4, a layer's backward every 2 s, and 3 s to reduce it: from 6, 9, 12 and 15, done at 18 and not at 12 + 12."""
    of = replicas(4, 30)
    plan = first_plan(of, "2x1", 2)
    timeline = timeline_of(plan, of)
    assert timeline.step_s == pytest.approx(18.0)
    (reduced,) = [span for span in timeline.spans(plan, 1) if isinstance(span.op, Reduce)]
    assert (reduced.start_s, reduced.end_s) == pytest.approx((6.0, 18.0))


def test_a_backward_beside_reductions_takes_longer_and_so_do_those_behind_it() -> None:
    """6 of its 8 s are beside reductions: they take half as long again, 3 s more."""
    of = replicas(4, 30)
    slowed = replace(of, cluster=replace(of.cluster, beside_reduction=1.5))
    plan = first_plan(of, "2x1", 2)
    assert timeline_of(plan, slowed).step_s == pytest.approx(18.0 + 3.0)
    assert price(plan, slowed, seconds_to_change=1e9).step_s == pytest.approx(21.0)
    alone = first_plan(of, "1x2", 2)
    assert timeline_of(alone, slowed).step_s == timeline_of(alone, of).step_s, "nothing is reduced there"


def test_what_is_quicker_than_the_backward_is_hidden_but_for_the_last() -> None:
    of = profile([layer(str(i), gradient_bytes=30 * MB) for i in range(4)], 2, intra=Link(0.0, 30.0 * MB))
    assert timeline_of(first_plan(of, "2x1", 2), of).step_s == pytest.approx(12.0 + 1.0)


def test_small_layers_share_a_reduction() -> None:
    """13 MB each: layers 3 and 2 are ready at 8, the others at 12."""
    assert timeline_of(first_plan(replicas(4, 13), "2x1", 2), replicas(4, 13)).step_s == pytest.approx(12.0 + 2.6)


def test_in_halves_it_is_the_weight_gradient_that_completes_them() -> None:
    """F until 2, I until 4, layer 1 at 5, layer 0 at 6."""
    rows = [layer(str(i), gradient_bytes=30 * MB) for i in range(3)]
    of = profile(rows, 2, intra=Link(0.0, 30.0 * MB))
    plan = plain([[(0, 1), (1, 3)], [(0, 1), (1, 3)]], [1, 1])
    orders = tuple(order_of(worker, f"1F{k} 1I{k} 1W{k}") for k, worker in ((0, 1), (1, 3)))
    split = _with(plan, orders)
    reduced = next(span for span in timeline_of(split, of).spans(split, 1) if isinstance(span.op, Reduce))
    assert (reduced.start_s, reduced.end_s) == pytest.approx((1 + 4 + 1, 1 + 4 + 2 + 1))


def _with(plan: Plan, orders: tuple[ComputeOrder, ...]) -> Plan:
    return replace(plan, global_batch=2, micro_batch=1, schedule=Schedule(orders=orders))


def test_ranks_that_share_a_core_complete_their_layers_as_much_later() -> None:
    """Two on one core take twice as long for all: layer 1 at 4 + 4, layer 0 at 12."""
    of = replicas(2, 30, cores=1)
    assert timeline_of(first_plan(of, "2x1", 2), of).step_s == pytest.approx(12.0 + 3.0)
    plan = first_plan(of, "2x1", 2)
    reduced = next(span for span in timeline_of(plan, of).spans(plan, 0) if isinstance(span.op, Reduce))
    assert reduced.start_s == pytest.approx(8.0)


# -- dumb ----------------------------------------------------------------------------------------------------------------


def dumb_step_s(plan: Plan, of: Profile, bytes_per_s: float) -> float:
    """Every op a row of layers, each started when what it needs is done; then one reduction at a time."""
    rows: dict[int, list[tuple[object, int, float]]] = {}
    for worker in plan.workers:
        rows[worker] = []
        for op in program(plan, worker):
            if isinstance(op, Compute):
                layers = plan.layer_range(op.micro_batch, op.stage).layers
                part = plan.samples.n_of(op.micro_batch) / of.micro_batch
                for number in layers if op.kind == "F" else reversed(layers):
                    x = of.layers[number]
                    its = {"F": x.forward_s, "B": x.backward_s, "I": x.input_gradient_s, "W": x.weight_gradient_s}
                    rows[worker].append((op, number, its[op.kind] * part))
            elif isinstance(op, Send | Receive):
                rows[worker].append((op, -1, 0.0))
    end: dict[tuple[int, int], float] = {}
    sent_at = {(w, op): i for w, row in rows.items() for i, (op, _, _) in enumerate(row) if isinstance(op, Send)}
    changed = True
    while changed:
        changed = False
        for worker, row in rows.items():
            for i, (op, _, seconds) in enumerate(row):
                now = end.get((worker, i - 1), 0.0)
                if isinstance(op, Receive):
                    send = (op.peer, sent_at[op.peer, Send(op.kind, op.stage, op.micro_batch, worker)])
                    now = max(now, end.get(send, 0.0))
                if end.get((worker, i)) != now + seconds:
                    end[worker, i] = now + seconds
                    changed = True
    waiting = []
    for group in plan.reduce:
        mine: list[int] = []
        for number in sorted(group.layers, reverse=True):
            mine.append(number)
            size = sum(of.layers[x].gradient_bytes for x in mine)
            if size >= BUCKET_BYTES or number == min(group.layers):
                adds = [
                    end[w, i]
                    for w in group.workers
                    for i, (op, x, _) in enumerate(rows[w])
                    if isinstance(op, Compute) and op.kind in "BW" and x >= added_from(plan, w, number)
                ]
                n = len(group.workers)
                if n > 1 and size:
                    waiting.append((max(adds, default=0.0), -number, group.workers, 2 * (n - 1) / n * size / bytes_per_s))
                mine = []
    busy = dict.fromkeys(plan.workers, 0.0)
    while waiting:  # whichever can start first goes first
        start, *first = min((max(one[0], *(busy[w] for w in one[2])), *one) for one in waiting)
        waiting.remove(tuple(first))
        busy.update(dict.fromkeys(first[2], start + first[3]))
    return max(*end.values(), *busy.values())


@settings(max_examples=examples(60))
@given(plan=plans(), data=st.data())
def test_any_plan_takes_what_a_dumb_simulation_layer_by_layer_takes(plan: Plan, data: st.DataObject) -> None:
    seconds, sizes = st.floats(0.1, 5.0), st.sampled_from([0, 5 * MB, 20 * MB, 30 * MB, 90 * MB])
    rows = [
        layer(str(i), data.draw(seconds), data.draw(seconds), data.draw(seconds), gradient_bytes=data.draw(sizes))
        for i in range(plan.n_layers)
    ]
    of = profile(rows, plan.global_batch, plan.micro_batch)
    of = _slow_reductions(of, 20.0 * MB)
    got = timeline_of(plan, of).step_s
    assert got == pytest.approx(dumb_step_s(plan, of, 20.0 * MB))
    assert price(plan, of, seconds_to_change=1e9).step_s == got


def _slow_reductions(of: Profile, bytes_per_s: float) -> Profile:
    """Links that carry outputs (which have no bytes here) in no time, and gradients at this rate."""
    link = Link(0.0, bytes_per_s)
    return replace(of, cluster=replace(of.cluster, intra_host=link, inter_host=link))


# -- interfaces that the ranks of a host share ---------------------------------------------------------------------------


def test_reductions_of_one_host_go_through_its_interface_one_after_the_other() -> None:
    """Two pipelines of two stages, each stage's replicas on two hosts: both groups leave by the same two interfaces.

    Stage 1 is done at 4 (a layer each, one micro-batch), stage 0 at 6. 60 MB take 6 s where 10 MB leave in a second.
    """
    rows = [layer(str(i), gradient_bytes=60 * MB) for i in range(2)]
    alone = profile(rows, 2, ranks_per_node=2, inter=Link(0.0, 10.0 * MB))
    plan = replace(plain([[(0, 1), (1, 2)]] * 2, [1] * 2), global_batch=2, micro_batch=1)
    assert {(stage.worker or 0) // 2 for stage in plan.pipelines[0].stages} == {0}
    assert timeline_of(plan, alone).step_s == pytest.approx(6 + 6)
    shared = replace(alone, cluster=replace(alone.cluster, interface_bandwidth=10.0 * MB))
    assert timeline_of(plan, shared).step_s == pytest.approx(4 + 6 + 6)
    assert price(plan, shared, seconds_to_change=1e9).step_s == timeline_of(plan, shared).step_s


def test_a_reduction_within_a_host_takes_no_interface() -> None:
    of = replicas(2, 30)
    of = replace(of, cluster=replace(of.cluster, interface_bandwidth=1.0))
    assert timeline_of(first_plan(of, "2x1", 2), of).step_s == pytest.approx(4 + 3 + 3)


def test_pipelines_that_leave_a_host_together_share_its_interface() -> None:
    """Four workers on each of two hosts, a stage of all pipelines on each: four messages at once, each a fourth as fast."""
    rows = [layer(str(i), output_bytes=100) for i in range(2)]
    of = profile(rows, 4, ranks_per_node=4, inter=Link(0.5, 100.0))
    places = [[(0, 1), (1, 2)]] * 4
    plan = replace(plain(places, [1] * 4), global_batch=4, micro_batch=1)
    node_of = {worker: worker % 2 for worker in plan.workers}
    alone_s = timeline_of(plan, of, node_of).step_s
    assert alone_s == pytest.approx(6 + 2 * (0.5 + 1))
    shared = replace(of, cluster=replace(of.cluster, interface_bandwidth=100.0))
    assert timeline_of(plan, shared, node_of).step_s == pytest.approx(6 + 2 * (0.5 + 4))
    assert price(plan, shared, seconds_to_change=1e9, node_of=node_of).step_s == timeline_of(plan, shared, node_of).step_s
    wide = replace(of, cluster=replace(of.cluster, interface_bandwidth=1000.0))
    assert timeline_of(plan, wide, node_of).step_s == alone_s


def test_a_plan_whose_pipelines_leave_their_hosts_more_often_is_priced_anew() -> None:
    """The same pipeline, alone on its hosts and beside another: nothing is remembered of the one for the other."""
    rows = [layer(str(i), output_bytes=100) for i in range(2)]
    of = profile(rows, 2, ranks_per_node=2, inter=Link(0.0, 100.0))
    of = replace(of, cluster=replace(of.cluster, interface_bandwidth=100.0))
    plan = replace(plain([[(0, 1), (1, 2)]] * 2, [1, 1]), global_batch=2, micro_batch=1)
    apart, beside = {0: 0, 1: 1, 2: 2, 3: 3}, {0: 0, 1: 1, 2: 0, 3: 1}
    prices = [price(plan, of, seconds_to_change=1e9, node_of=node_of).step_s for node_of in (apart, beside, apart)]
    assert prices == pytest.approx([6 + 2, 6 + 4, 6 + 2])
