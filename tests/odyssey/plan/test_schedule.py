"""Programs: ops as text, the order of 1F1B, and that random plans expand to programs that end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey.errors import PlanError
from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, Plan, Route, Schedule
from odyssey.plan.proof import prove
from odyssey.plan.schedule import (
    Commit,
    Drop,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
    compute_order,
    dependency_order,
    gradients_taken,
    grid,
    one_forward_one_backward,
    program,
)
from perfmodel.step.costs import Costs
from strategies.building.compose import reductions
from strategies.building.ordering import order
from tests.perfmodel.step.programs import kept_gradients
from tests.planning import order_of, profile
from tests.strategies.test_zero_bubble import plans as split_plans


def test_1f1b_of_the_middle_stage_is_the_published_one() -> None:
    assert " ".join(map(str, one_forward_one_backward(1, 3, range(4)))) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"


def test_1f1b_with_fewer_micro_batches_than_stages_only_warms_up_and_cools_down() -> None:
    assert " ".join(map(str, one_forward_one_backward(0, 4, range(2)))) == "0F0 0F1 0B0 0B1"


def test_a_program_sends_receives_reduces_and_drops_where_it_should() -> None:
    plan = plain([[(0, 1), (1, 2)], [(0, 1), (1, 2)]], [1, 1])
    assert " ".join(map(str, program(plan, 1))) == "0F0<0 1F0 1B0 1D0 G1 1B0>0 C S"
    assert " ".join(map(str, program(plan, 2))) == "0F1 0F1>3 1B1<3 0B1 0D1 G0 C S"


def test_a_routed_micro_batch_crosses_to_the_other_pipeline_and_back() -> None:
    plan = plain([[(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]], [1, 1], lost=[(1, 1)])
    plan = with_orders(plan)
    assert "0F1>1" in map(str, program(plan, 3))
    assert {"0F1<3", "1F1", "1F1>5"} <= set(map(str, program(plan, 1)))
    assert "1F1<1" in map(str, program(plan, 5))


def test_workers_that_wait_for_each_other_are_reported_with_their_ops() -> None:
    plan = plain([[(0, 1), (1, 2)]], [2])
    orders = (order_of(0, "0F0 0B0 0F1 0B1"), order_of(1, "1F1 1B1 1F0 1B0"))
    bad = msgspec.structs.replace(plan, schedule=Schedule(orders=orders))
    with pytest.raises(PlanError, match="wait for each other") as caught:
        dependency_order({worker: program(bad, worker) for worker in bad.workers})
    assert "<-- here" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0F1 0B0", "ends inside micro-batch 1"),
        ("0F0 0B0", "misses micro-batch 1"),
        ("0F0 0B0 0B1 0F1", "0B1 stands where"),
        ("0F0 0I0 0B0 0F1 0B1", "0B0 stands where"),
        ("0F0 0B0 0F1 0B1 1F0 1B0", "has foreign micro-batch 0 at stage 1"),
    ],
)
def test_an_explicit_order_must_run_everything_once(text: str, says: str) -> None:
    plan = msgspec.structs.replace(plain([[(0, 1), (1, 2)]], [2]), schedule=Schedule(orders=(order_of(0, text),)))
    with pytest.raises(PlanError, match=says):
        program(plan, 0)


def test_the_grid_has_one_line_a_worker_and_marks_where_it_stands() -> None:
    plan = plain([[(0, 1), (1, 2)]], [2])
    picture = grid({worker: program(plan, worker) for worker in plan.workers}, {1: 3})
    assert picture.splitlines()[0].split()[:4] == ["worker", "0", "0F0", "0F1"]
    assert "<-- here" in picture.splitlines()[1]


# -- random plans ------------------------------------------------------------------------------------------------------


def plain(
    splits: list[list[tuple[int, int]]],
    shares: list[int],
    lost: list[tuple[int, int]] | None = None,
    keeps: Sequence[Keep] = (),
) -> Plan:
    """Pipelines of these layer ranges; micro-batches of lost (pipeline, stage) go to the first that hold the layers."""
    lost = lost or []
    n_layers = splits[0][-1][1]
    first_workers = [0, *accumulate(len(split) for split in splits)]
    rows = [
        [Stage(None if (p, s) in lost else first_workers[p] + s, first, stop) for s, (first, stop) in enumerate(split)]
        for p, split in enumerate(splits)
    ]
    starts = [0, *accumulate(shares)]
    holds = {stage.worker: set(stage.layers) for row in rows for stage in row if stage.worker is not None}
    keeps = [keep for keep in keeps if keep.worker in holds]
    for keep in keeps:
        holds[keep.worker].update(keep.layers)
    routes = []
    for p, s in lost:
        stage = rows[p][s]
        hosts = [worker for worker, layers in holds.items() if layers.issuperset(stage.layers)]
        routes += [Route(k, s, hosts[j % len(hosts)]) for j, k in enumerate(range(starts[p], starts[p + 1]))]
    return prove(
        Plan(
            generation=0,
            strategy="test",
            step=0,
            global_batch=sum(shares) * 2 - 1,
            micro_batch=2,
            n_layers=n_layers,
            blocks=blocks_of(Pipeline(tuple(row), starts[p], starts[p + 1]) for p, row in enumerate(rows)),
            reductions=reductions(map(frozenset, holds.values()), n_layers, ()),
            routes=tuple(routes),
            keep_runs=keep_runs(keeps),
        )
    )


def with_orders(plan: Plan, split: bool = False) -> Plan:
    costs = Costs(profile(plan.n_layers, plan.global_batch, plan.micro_batch))
    nothing = dict.fromkeys(plan.workers, 0)
    orders = order(plan, costs, split=split, forwards_first=not split, caps=nothing, room=nothing).orders
    return msgspec.structs.replace(plan, schedule=Schedule(orders=orders))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    n_layers = draw(st.integers(2, 6))
    splits = []
    for _ in range(draw(st.integers(2, 4))):
        inner = draw(st.sets(st.integers(1, n_layers - 1), max_size=3))
        cuts = [0, *sorted(inner), n_layers]
        splits.append(list(pairwise(cuts)))
    shares = [draw(st.integers(1, 5)) for _ in splits]
    places = [(p, s) for p, split in enumerate(splits) for s in range(len(split))]
    keeps = []
    for worker in draw(st.sets(st.integers(0, len(places) - 1), max_size=3)):
        p, s = places[worker]
        other = draw(st.integers(0, len(splits[p]) - 1))
        if other != s:
            keeps.append(Keep(worker, *splits[p][other]))
    lost: list[tuple[int, int]] = []
    for place in draw(st.lists(st.sampled_from(places), max_size=3, unique=True)):
        left = [splits[p][s] for p, s in places if (p, s) not in [*lost, place]]
        gone = [splits[p][s] for p, s in [*lost, place]]
        if all(any(a <= first and stop <= b for a, b in left) for first, stop in gone) and covers_all(left, n_layers):
            lost.append(place)
    return with_orders(plain(splits, shares, lost, keeps), split=draw(st.booleans()))


def added_from(plan: Plan, worker: int, lowest: int) -> int:
    """The layer with whose gradient all is complete that `worker` adds to the layers from `lowest` on: where it only keeps the
    lowest of them that it holds, it waits for the next one below that it adds to."""
    ops = compute_order(plan, worker)
    added = {layer for op in ops for layer in plan.layer_range(op.micro_batch, op.stage).layers}
    first = min(layer for layer in plan.holds[worker] if layer >= lowest)
    return max((layer for layer in added if layer <= first), default=lowest)


def covers_all(ranges: list[tuple[int, int]], n_layers: int) -> bool:
    return {layer for first, stop in ranges for layer in range(first, stop)} == set(range(n_layers))


@given(plans())
def test_programs_of_any_valid_plan_end_and_run_everything_exactly_once(plan: Plan) -> None:
    programs = {worker: program(plan, worker) for worker in plan.workers}
    done = dependency_order(programs)
    assert len(done) == sum(map(len, programs.values()))
    ran = Counter((op.kind, op.stage, op.micro_batch) for _, op in done if isinstance(op, Compute))
    for p, pipeline in enumerate(plan.pipelines):
        for k in pipeline.micro_batches:
            for s in range(len(pipeline.stages)):
                assert ran.pop(("F", s, k)) == 1, p
                assert (ran.pop(("B", s, k), 0), ran.pop(("I", s, k), 0), ran.pop(("W", s, k), 0)) in ((1, 0, 0), (0, 1, 1))
    assert not ran
    at = {str(op): i for i, (_, op) in enumerate(done) if isinstance(op, Compute)}
    for _, op in done:
        if isinstance(op, Compute) and op.kind in "BI":
            assert at[f"{op.stage}F{op.micro_batch}"] < at[str(op)]


@given(plans())
def test_every_sample_of_a_step_is_used_exactly_once(plan: Plan) -> None:
    """I6."""
    last = [len(pipeline.stages) - 1 for pipeline in plan.pipelines]
    used: list[int] = []
    for worker in plan.workers:
        for op in program(plan, worker):
            if isinstance(op, Compute) and op.kind == "F" and op.stage == last[plan.home[op.micro_batch]]:
                start = op.micro_batch * plan.micro_batch
                used += range(start, start + plan.samples.n_of(op.micro_batch))
    assert sorted(used) == list(range(plan.global_batch))


@given(plans())
def test_activations_are_dropped_once_behind_their_last_use_and_every_group_is_reduced(plan: Plan) -> None:
    for worker in plan.workers:
        ops_of = program(plan, worker)
        live: set[tuple[int, int]] = set()
        for op in ops_of:
            if isinstance(op, Compute) and op.kind == "F":
                live.add((op.stage, op.micro_batch))
            elif isinstance(op, Drop):
                live.remove((op.stage, op.micro_batch))
        assert not live
        reduced = [op.group for op in ops_of if isinstance(op, Reduce)]
        assert sorted(reduced) == [g for g, group in enumerate(plan.reduce) if worker in group.workers]
        assert ops_of[-2:] == [Commit(), OptimizerStep()]


@given(plans())
def test_messages_between_two_workers_are_received_in_the_order_in_which_they_are_sent(plan: Plan) -> None:
    sent: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for worker in plan.workers:
        for op in program(plan, worker):
            if isinstance(op, Send):
                sent.setdefault((op.kind, worker, op.peer), []).append((op.stage, op.micro_batch))
            elif isinstance(op, Receive):
                received.setdefault((op.kind, op.peer, worker), []).append((op.stage, op.micro_batch))
    assert sent == received


@given(plans())
def test_a_gradient_is_let_go_of_at_once_and_only_where_it_must_have_been_received(plan: Plan) -> None:
    """By clocks: what each worker knows of how far others have come, from all that it has received, directly or not."""
    programs = {worker: program(plan, worker) for worker in plan.workers}
    at = {worker: {op: i for i, op in enumerate(ops)} for worker, ops in programs.items()}
    knows: dict[int, dict[int, int]] = {worker: {} for worker in programs}
    sent: dict[tuple[int, Send], dict[int, int]] = {}
    kept: dict[int, list[int]] = {worker: [] for worker in programs}
    taken = {worker: gradients_taken(plan, worker) for worker in programs}
    n_kept: Counter[int] = Counter()
    for worker, op in dependency_order(programs):
        if isinstance(op, Receive):
            theirs = sent[op.peer, Send(op.kind, op.stage, op.micro_batch, worker)]
            knows[worker] |= {peer: max(it, knows[worker].get(peer, -1)) for peer, it in theirs.items()}
            for gradient in (taken[worker] or {}).get(op, ()):
                received = Receive("B", gradient.stage, gradient.micro_batch, worker)
                assert at[gradient.peer][received] < knows[worker][gradient.peer]
                n_kept[worker] -= 1
        elif isinstance(op, Send):
            sent[worker, op] = knows[worker] | {worker: at[worker][op]}
            n_kept[worker] += op.kind == "B"
        kept[worker].append(n_kept[worker])
    for worker, found in taken.items():
        assert found is None or kept[worker] == kept_gradients(programs, worker)


@given(st.one_of(plans(), split_plans()))
def test_a_worker_that_may_wait_for_old_gradients_never_stands_still(plan: Plan) -> None:
    """Also where each waits until the very gradient that it sends has been received."""
    programs = {worker: program(plan, worker) for worker in plan.workers}
    waits = {worker for worker in programs if gradients_taken(plan, worker) is None}
    position, sent, received = dict.fromkeys(programs, 0), set[Receive](), set[Receive]()
    left = sum(map(len, programs.values()))
    moving = True
    while moving:
        moving = False
        for worker, ops in programs.items():
            while position[worker] < len(ops):
                op = ops[position[worker]]
                if isinstance(op, Send):
                    message = Receive(op.kind, op.stage, op.micro_batch, worker)
                    sent.add(message)
                    if op.kind == "B" and worker in waits and message not in received:
                        break
                elif isinstance(op, Receive):
                    if op not in sent:
                        break
                    received.add(op)
                position[worker] += 1
                left -= 1
                moving = True
    assert left == 0


@given(plans())
def test_a_reduction_starts_behind_the_last_computation_that_adds_to_its_gradients(plan: Plan) -> None:
    for worker in plan.workers:
        added: set[int] = set()
        for op in reversed(program(plan, worker)):
            if isinstance(op, Compute) and op.kind in ("B", "W"):
                added |= set(plan.layer_range(op.micro_batch, op.stage).layers)
            elif isinstance(op, Reduce):
                assert added.isdisjoint(plan.reduce[op.group].layers)
