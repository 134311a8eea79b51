"""Buckets: what of a reduction starts when; the oracle goes through the programs layer by layer."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.model.model import Model
from odyssey.plan import buckets as rules
from odyssey.plan.buckets import Bucket, Start, buckets, cuts, starts
from odyssey.plan.needs import Needs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, Plan, Reduction, Schedule
from odyssey.plan.proof import prove
from odyssey.plan.schedule import Reduce, program
from odyssey.protocol.model_spec import ModelSpec
from odyssey.runtime.backend import Backend
from odyssey.runtime.data import MapStyle
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from odyssey.runtime.tally import Tally
from tests import models
from tests.odyssey.plan.test_schedule import added_from, plain, plans, with_orders
from tests.planning import order_of

MB = 2**20


@st.composite
def sized_plans(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """A plan, and the bytes of its layers' gradients."""
    plan = draw(plans())
    sizes = st.sampled_from([0, MB, 10 * MB, 24 * MB, 25 * MB, 100 * MB])
    return plan, draw(st.lists(sizes, min_size=plan.n_layers, max_size=plan.n_layers))


def starts_of(plan: Plan, sizes: list[int]) -> dict[int, tuple[Start, ...]]:
    return {worker: starts(plan, worker, program(plan, worker), sizes, ()) for worker in plan.workers}


@given(sized_plans())
def test_every_layer_of_a_group_is_in_one_bucket_and_buckets_are_no_larger_than_need_be(drawn: tuple[Plan, list[int]]) -> None:
    plan, sizes = drawn
    for g, group in enumerate(plan.reduce):
        its = buckets(plan, g, sizes, ())
        assert sorted(layer for bucket in its for layer in bucket.layers) == list(group.layers)
        assert [layer for bucket in its for layer in bucket.layers] == sorted(group.layers, reverse=True)
        for bucket in its if len(group.workers) > 1 else []:
            assert bucket.size_bytes == sum(sizes[layer] for layer in bucket.layers)
            assert bucket.size_bytes - sizes[bucket.lowest] < 25 * MB
            assert bucket.size_bytes >= 25 * MB or bucket is its[-1]


def test_a_tie_is_in_the_bucket_of_its_lowest_layer() -> None:
    reduction = Reduction((0, 1, 2, 3), (0, 1))
    plan = replace(plain([[(0, 4)], [(0, 4)]], [1, 1]), ties=((1, 3), (0, 2)), reductions=(reduction,))
    found = buckets(plan, 0, [30 * MB, 10 * MB, 20 * MB, 30 * MB], [20 * MB, MB])
    assert found == [
        Bucket(0, 3, (3,), (), 30 * MB),
        Bucket(0, 1, (2, 1), (), 30 * MB),
        Bucket(0, 0, (0,), (0,), 50 * MB),
        Bucket(0, 0, (), (1,), MB),
    ]


@given(sized_plans())
def test_a_bucket_starts_when_nothing_adds_to_it_or_to_layers_above_any_more_and_no_later(
    drawn: tuple[Plan, list[int]],
) -> None:
    plan, sizes = drawn
    for worker, its in starts_of(plan, sizes).items():
        added = [(None, plan.n_layers)]  # what the worker does, layer by layer
        for op in program(plan, worker):
            if isinstance(op, Compute) and op.kind in "BW":
                added += [(op, layer) for layer in reversed(plan.layer_range(op.micro_batch, op.stage).layers)]
        for start in its:
            lowest = added_from(plan, worker, start.bucket.lowest)
            adds = [i for i, (_, layer) in enumerate(added) if lowest <= layer < plan.n_layers]
            assert added[max(adds, default=0)][0] == start.op
            assert start.op is None or added[max(adds)][1] == start.layer


@given(sized_plans())
def test_no_order_of_starts_makes_workers_wait_for_each_other(drawn: tuple[Plan, list[int]]) -> None:
    """Even where a worker can be in one collective only, as in a queue of a device."""
    plan, sizes = drawn
    queues = {worker: deque(start.bucket for start in its) for worker, its in starts_of(plan, sizes).items()}
    while any(queues.values()):
        heads = {queue[0] for queue in queues.values() if queue}
        ready = [b for b in heads if all(queues[w] and queues[w][0] == b for w in plan.reduce[b.group].workers)]
        assert ready, heads
        for worker in plan.reduce[ready[0].group].workers:
            queues[worker].popleft()


@given(sized_plans())
def test_behind_a_groups_reduce_op_all_of_it_has_started(drawn: tuple[Plan, list[int]]) -> None:
    plan, sizes = drawn
    for worker, its in starts_of(plan, sizes).items():
        ops = program(plan, worker)
        at = {op: i for i, op in enumerate(ops)}
        for i, start in enumerate(its):
            for earlier in its[: i + 1]:
                begun = -1 if earlier.op is None else at[earlier.op]
                assert begun < at[Reduce(start.bucket.group)] or earlier.bucket.group != start.bucket.group


def test_a_stage_is_cut_where_a_bucket_starts_within_its_backward() -> None:
    plan = plain([[(0, 3), (3, 6)], [(0, 3), (3, 6)]], [2, 2])
    its = starts(plan, 1, program(plan, 1), [30 * MB] * 6, ())
    assert [(start.bucket.layers, str(start.op), start.layer) for start in its] == [
        ((5,), "1B1", 5),
        ((4,), "1B1", 4),
        ((3,), "1B1", 3),
    ]
    assert cuts(plan, its) == {(1, 1): {4, 5}}


def test_a_layer_that_routed_micro_batches_add_to_later_waits_for_them() -> None:
    plan = with_orders(plain([[(0, 1), (1, 2)], [(0, 1), (1, 2)], [(0, 2)]], [1, 1, 2], lost=[(0, 1)]))
    host = next(route.worker for route in plan.routes)
    order = [op for op in program(plan, host) if isinstance(op, Compute) and op.kind == "B"]
    its = starts(plan, host, program(plan, host), [30 * MB] * 2, ())
    last = [op for op in order if 1 in plan.layer_range(op.micro_batch, op.stage).layers][-1]
    assert next(start for start in its if 1 in start.bucket.layers).op == last


# -- in an engine ------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class Given(NamedTuple):
    """To a reduction: what it sums in place, a copy as it is when it starts, and copies of all gradients then."""

    sums: torch.Tensor
    copy: torch.Tensor
    gradients: dict[str, torch.Tensor]


class Done:
    """The work of a sum that nobody adds to."""

    def wait(self) -> None:
        pass


def named(made: Engine) -> dict[str, torch.nn.Parameter]:
    return {name: p for shard in made.model.shards for name, p in made.model.parameters_of(shard).items() if p.requires_grad}


def engine(variant: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[Given]]:
    """Worker 0 of a plan without its partners, and what it gives to its reductions."""
    model = Model(lambda: models.build_layers(variant, dropout=0.1), lambda params: torch.optim.SGD(params, 0.1), None, CPU, 0)
    model.hold_built(plan.holds[0])
    spec = ModelSpec((), (), (), plan.global_batch, plan.micro_batch, 96, 0, "cpu")
    job_spec = JobSpec(spec, models.loss_for(variant), None, None, None, 0, None)
    groups = Groups(to_nobody, 1, Needs(plan.workers), 0, CPU)
    given: list[Given] = []

    def sums(tensor: torch.Tensor, members: object) -> Done:
        gradients = {name: p.grad.clone() for name, p in named(made).items()}
        given.append(Given(tensor, tensor.clone(), gradients))
        return Done()

    monkeypatch.setattr(groups, "all_reduce", sums)
    data = Prefetcher(MapStyle(models.data_for(variant), Sampler(96, 0), plan))
    made = Engine(plan, 0, model, job_spec, Backend(), data, groups, (), Tally(plan.n_layers, plan.ties))
    return made, given


def replicas(variant: str, order: str = "") -> Plan:
    """Two of the whole model, two micro-batches each."""
    ties = {"tied": ((0, 5),), "shared": ((1, 2, 3, 4),)}.get(variant, ())
    reduction = Reduction(tuple(range(6)), tuple(range(len(ties))))
    schedule = Schedule(orders=(order_of(0, order),)) if order else Schedule()
    stages = [(Stage(worker, 0, 6),) for worker in range(2)]
    pipelines = (Pipeline(stages[0], 0, 2), Pipeline(stages[1], 2, 4))
    return prove(Plan(1, "test", 0, 8, 2, 6, blocks_of(pipelines), (reduction,), ties=ties, schedule=schedule))


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("order", ["", "0F0 0F1 0B1 0B0", "0F0 0I0 0F1 0I1 0W1 0W0"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 25 * MB])
def test_what_is_reduced_is_the_whole_sum_and_the_same_as_without_buckets(
    variant: str, order: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "BUCKET_BYTES", 10**12)
    whole, _ = engine(variant, replicas(variant, order), monkeypatch)
    whole.run_step(0)
    whole.groups.release()
    monkeypatch.setattr(rules, "BUCKET_BYTES", bucket_bytes)
    cut, given = engine(variant, replicas(variant, order), monkeypatch)
    cut.run_step(0)
    cut.groups.release()
    gradients = {name: p.grad for name, p in named(whole).items()}
    assert all(torch.equal(one.sums, one.copy) for one in given), "nothing was added to it afterwards"
    assert sum(one.sums.numel() for one in given) == sum(p.numel() for p in named(cut).values())
    for name, parameter in named(cut).items():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-13), name
    if bucket_bytes == 1:
        assert len(given) == len([shard for shard in cut.model.shards.values() if shard.trainable])
        went_on = [name for name, p in named(cut).items() if not torch.equal(p.grad, given[0].gradients[name])]
        assert went_on, "the first one started before the backward had ended"
