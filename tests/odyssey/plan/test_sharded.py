"""Plans of a sharded model: every micro-batch counts once, a copy's workers stay in step, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import PlanError
from odyssey.plan.approximation import Approximation, LowRank
from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.needs import Needs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, Plan, Reduction, Route, Schedule, decode, encode
from odyssey.plan.proof import prove
from odyssey.plan.schedule import Commit, OptimizerStep, Receive, Reduce, Send, dependency_order, program
from odyssey.plan.sharded import copies_of, counts, reader, together
from tests.planning import order_of


def sharded_plan(
    copies: Sequence[Sequence[int]], shares: Sequence[int], keepers: Sequence[int] = (), idle: Sequence[int] = ()
) -> Plan:
    """Each of `copies` has its workers by shard, and so many micro-batches, of two samples but for the step's last one."""
    n_shards = len(copies[0])
    starts = [0, *accumulate(shares)]
    pipelines = [
        Pipeline(tuple(Stage(worker, shard, shard + 1) for shard, worker in enumerate(copy)), starts[c], starts[c + 1])
        for c, copy in enumerate(copies)
    ]
    return Plan(
        generation=3,
        strategy="test",
        step=7,
        global_batch=2 * sum(shares) - 1,
        micro_batch=2,
        n_layers=n_shards,
        blocks=blocks_of(pipelines),
        reductions=tuple(Reduction((shard,), ()) for shard in range(n_shards)),
        keep_runs=keep_runs(Keep(worker, worker % n_shards, worker % n_shards + 1) for worker in keepers),
        idle=tuple(sorted(idle)),
        is_sharded=True,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Copies of any ranks that have their shards, and of the others some that keep theirs, and some that idle."""
    n_shards, n_copies = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    n_columns = n_copies + draw(st.integers(0, 2))
    columns = [draw(st.permutations([shard + n_shards * c for c in range(n_columns)])) for shard in range(n_shards)]
    copies = [[column[c] for column in columns] for c in range(n_copies)]
    shares = [draw(st.integers(1, 3 * n_shards)) for _ in range(n_copies)]
    others = [worker for column in columns for worker in column[n_copies:]]
    keepers = [worker for worker in others if draw(st.booleans())]
    return prove(sharded_plan(copies, shares, keepers, [worker for worker in others if worker not in keepers]))


def copy_of(plan: Plan, micro_batch: int) -> Pipeline:
    return next(its for its in plan.pipelines if its.first_micro_batch <= micro_batch < its.stop_micro_batch)


def holders_of(plan: Plan, shard: int) -> tuple[int, ...]:
    """Those of all that have work, by their numbers."""
    return tuple(sorted(worker for worker in plan.workers if worker % plan.n_layers == shard))


def computed(plan: Plan, worker: int) -> list[Compute]:
    return [op for op in program(plan, worker) if isinstance(op, Compute)]


# -- who computes and who counts ----------------------------------------------------------------------------------------


@given(plans())
def test_each_micro_batch_is_counted_by_one_worker_of_its_copy_and_that_one_reads_it(plan: Plan) -> None:
    counted: dict[int, list[int]] = {k: [] for k in range(plan.n_micro_batches)}
    for worker in plan.workers:
        for op in computed(plan, worker):
            if op.kind == "F" and counts(plan, op.micro_batch, op.stage):
                counted[op.micro_batch].append(worker)
    for k, workers in counted.items():
        assert workers == [reader(plan, k)], k
        assert workers[0] in copy_of(plan, k).workers


@given(plans())
def test_a_full_turn_has_a_micro_batch_for_each_and_in_the_last_one_the_others_compute_its_first_once_more(plan: Plan) -> None:
    for its in plan.pipelines:
        in_turns = list(zip(*([op.micro_batch for op in together(plan, w)[::2]] for w in its.workers), strict=True))
        left = list(its.micro_batches)
        for turn in in_turns:
            own, left = left[: len(turn)], left[len(turn) :]
            assert list(turn[: len(own)]) == own and set(turn[len(own) :]) <= {own[0]}
        assert not left


@given(plans())
def test_the_workers_of_a_copy_compute_as_often_forward_and_backward_in_turn(plan: Plan) -> None:
    for its in plan.pipelines:
        n_turns = sum(1 for _ in range(0, len(its.micro_batches), plan.n_layers))
        for worker in its.workers:
            ops = computed(plan, worker)
            assert [op.kind for op in ops] == ["F", "B"] * n_turns
            assert [op.micro_batch for op in ops[::2]] == [op.micro_batch for op in ops[1::2]]
            assert {op.stage for op in ops} == {worker % plan.n_layers}


@given(plans())
def test_no_program_sends_or_receives_and_all_end_whatever_the_others_do(plan: Plan) -> None:
    programs = {worker: program(plan, worker) for worker in plan.workers}
    assert not any(isinstance(op, Send | Receive) for ops in programs.values() for op in ops)
    assert len(dependency_order(programs)) == sum(map(len, programs.values()))


@given(plans())
def test_a_program_is_its_turns_and_then_its_reduction_the_commit_point_and_the_step(plan: Plan) -> None:
    """What a micro-batch keeps goes before the next one begins. Who keeps its shard has no turns."""
    for worker in plan.workers:
        *turns, reduction, commit, step = program(plan, worker)
        group = next(g for g, its in enumerate(plan.reduce) if its.layers == (worker % plan.n_layers,))
        assert [reduction, commit, step] == [Reduce(group), Commit(), OptimizerStep()]
        in_turns = [op for op in turns[::3] if isinstance(op, Compute)]
        assert list(map(str, turns)) == [f"{op.stage}{kind}{op.micro_batch}" for op in in_turns for kind in ("F", "B", "D")]
        assert bool(turns) == (worker in plan.place)


@given(plans())
def test_the_holders_of_a_shard_sum_it_those_that_keep_it_too(plan: Plan) -> None:
    for group in plan.reduce:
        assert group.workers == holders_of(plan, group.layers[0])


def test_who_keeps_its_shard_only_sums_and_steps() -> None:
    plan = prove(sharded_plan([[0, 1]], [3], keepers=[3], idle=[2]))
    assert {worker: " ".join(map(str, program(plan, worker))) for worker in (0, 1, 3)} == {
        0: "0F0 0B0 0D0 0F2 0B2 0D2 G0 C S",
        1: "1F1 1B1 1D1 1F2 1B2 1D2 G1 C S",
        3: "G1 C S",
    }
    assert program(plan, 2) == []
    assert counts(plan, 2, 0) and not counts(plan, 2, 1)


def test_of_a_model_that_is_not_sharded_all_counts_and_the_first_stage_reads() -> None:
    plan = replace(sharded_plan([[0, 1], [2, 3]], [2, 2]), is_sharded=False)
    assert all(counts(plan, k, stage) for k in range(4) for stage in range(2))
    assert [reader(plan, k) for k in range(4)] == [0, 0, 2, 2]
    assert copies_of(plan) == ()


# -- groups -------------------------------------------------------------------------------------------------------------


@given(plans())
def test_each_worker_has_a_group_with_its_copy_and_one_with_the_holders_of_its_shard(plan: Plan) -> None:
    copies = [tuple(sorted(its.workers)) for its in plan.pipelines]
    for worker in plan.workers:
        needs = Needs.of(plan, worker)
        names = {over.members: name.split()[0] for over, name in needs.sums_of(worker).items() if not over.is_branch}
        expected = {copy: "copy" for copy in copies if worker in copy}
        holders = holders_of(plan, worker % plan.n_layers)
        expected |= {holders: "reduce"} if len(holders) > 1 else {}
        assert names == expected
        assert needs.copies == tuple(copies) and needs.peers == () and needs.pairs_of(worker) == []


def test_a_chain_of_shards_is_one_copy_and_one_of_layers_is_none() -> None:
    chain = [Stage(4, 0, 1), Stage(1, 1, 2), Stage(2, 2, 3)]
    assert Needs.of_chain(chain, 1, is_sharded=True).copies == ((1, 2, 4),)
    assert Needs.of_chain(chain, 1).copies == ()


@given(plans())
def test_a_plan_is_the_same_when_it_has_been_written_and_read(plan: Plan) -> None:
    assert decode(encode(plan)) == plan and decode(encode(plan)).is_sharded
    assert [program(decode(encode(plan)), worker) for worker in plan.workers] == [program(plan, w) for w in plan.workers]


# -- the proof ----------------------------------------------------------------------------------------------------------


def with_stages(plan: Plan, *stages: Stage) -> Plan:
    """These in place of those of the last copy."""
    *others, last = plan.pipelines
    return replace(plan, blocks=blocks_of([*others, replace(last, stages=stages)]))


def without_worker(plan: Plan) -> Plan:
    """A lost stage's micro-batches go to the other copy's worker, as they would where layers are no shards."""
    lost = with_stages(plan, Stage(None, 0, 1), Stage(4, 1, 2), Stage(5, 2, 3))
    return replace(lost, routes=tuple(Route(k, 0, 0) for k in plan.pipelines[-1].micro_batches))


def cut(plan: Plan) -> Plan:
    """There are as many micro-batches, and the first copy's last one is smaller than the step's last."""
    first, last = plan.pipelines
    n = 2 * len(first.micro_batches) - 1
    return replace(plan, blocks=blocks_of([replace(first, n_samples=n), replace(last, n_samples=plan.global_batch - n)]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda plan: with_stages(plan, Stage(3, 0, 2), Stage(5, 2, 3)),
            "pipeline 1 stage 0 has 2 shards of the model, expected one",
        ),
        (without_worker, "pipeline 1 stage 0 has no worker, and the model is sharded"),
        (cut, "the micro-batches of a sharded model stay whole and in their order"),
        (lambda plan: replace(plan, schedule=Schedule(orders=(order_of(0, "0F0 0B0"),))), "whole and in their order"),
        (lambda plan: replace(plan, schedule=Schedule(rule="split")), "whole and in their order"),
        (
            lambda plan: replace(plan, approximation=Approximation((0,), LowRank(), ())),
            "the backward of a sharded model is exact",
        ),
        (lambda plan: replace(plan, idle=(7,)), "worker 7 is idle and keeps layers"),
        (lambda plan: replace(plan, idle=(4,)), "worker 4 is idle and in pipeline 1 stage 1"),
        (lambda plan: replace(plan, keep_runs=()), None),
        (lambda plan: replace(plan, is_sharded=False), "worker 7 keeps layers .* and has no stage"),
        (lambda plan: replace(plan, is_sharded=False, keep_runs=()), None),
    ],
    ids=[
        "two shards",
        "no worker",
        "cut",
        "order",
        "split",
        "approximate",
        "idle keeps",
        "idle works",
        "fewer",
        "layers",
        "plain",
    ],
)
def test_what_no_copies_of_shards_can_be_is_refused(change: Callable[[Plan], Plan], says: str | None) -> None:
    """And where what is wrong with a plan is taken away it is none any more."""
    plan = prove(sharded_plan([[0, 1, 2], [3, 4, 5]], [4, 2], keepers=[7]))
    if says is None:
        prove(change(plan))
        return
    with pytest.raises(PlanError, match=says):
        prove(change(plan))


def test_who_keeps_a_shard_must_hold_it_or_receive_it() -> None:
    plan = sharded_plan([[0, 1]], [2], keepers=[3])
    prove(plan, {0: {0}, 1: {1}, 3: {1}})
    with pytest.raises(PlanError, match="worker 3 needs layer 1 and nobody sends it"):
        prove(plan, {0: {0}, 1: {1}})
