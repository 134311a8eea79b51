"""The price of a plan of a sharded model, against arithmetic: turns of a whole pass each, and the end of the step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.plan import Plan
from perfmodel.profile.profile import Link, Profile
from perfmodel.step.timeline import timeline_of
from strategies.search import answer, best
from strategies.search.next_loss import closed_step_s
from tests.examples import examples
from tests.odyssey.plan.test_sharded import plans, sharded_plan
from tests.planning import layer, price, profile, sharded, situation


def job(plan: Plan, passes: list[tuple[float, float]], **rest: float) -> Profile:
    """`passes`: forward and backward of the whole model, as the holder of each shard has measured them."""
    rows = [
        replace(layer(str(i), forward, backward / 2, backward / 2), optimizer_s=0.25)
        for i, (forward, backward) in enumerate(passes)
    ]
    return sharded(replace(profile(rows, plan.global_batch, plan.micro_batch, op_overhead_s=0.125), **rest))


def n_turns(n_micro_batches: int, n_shards: int) -> int:
    """By dealing: a turn is over when each has had one, or there are none left."""
    turns = 0
    while n_micro_batches > 0:
        n_micro_batches -= n_shards
        turns += 1
    return turns


def computed_s(plan: Plan, passes: list[tuple[float, float]], slow: dict[int, float]) -> float:
    """The time of the worker that computes longest: forward and backward of each turn, with what an op costs beside. Of a copy
    that has nothing but the step's last micro-batch a pass is shorter."""
    found = 0.0
    for its in plan.pipelines:
        samples = range(plan.micro_batch * its.first_micro_batch, plan.global_batch)[: plan.micro_batch]
        for shard, worker in enumerate(its.workers):
            pass_s = sum(passes[shard]) * len(samples) / plan.micro_batch + 2 * 0.125
            found = max(found, n_turns(len(its.micro_batches), len(passes)) * pass_s * slow.get(worker, 1.0))
    return found


def whole(plan: Plan) -> Plan:
    """With all of its last micro-batch."""
    return replace(plan, global_batch=plan.n_micro_batches * plan.micro_batch)


SECONDS = st.integers(1, 40).map(lambda n: n / 8)


@settings(max_examples=examples(200))
@given(plan=plans(), data=st.data())
def test_a_step_takes_the_turns_of_the_fullest_copy_and_its_end(plan: Plan, data: st.DataObject) -> None:
    """To the bit, as all seconds are eighths. A last micro-batch that is smaller makes no turn shorter but one of its own."""
    passes = data.draw(st.lists(st.tuples(SECONDS, SECONDS), min_size=plan.n_layers, max_size=plan.n_layers))
    slow = data.draw(st.dictionaries(st.sampled_from(sorted(plan.place)), st.sampled_from([1.5, 2.0]), max_size=2))
    of = job(plan, passes, commit_s=0.5)

    step_s = price(plan, of, seconds_to_change=1e9, slow=slow).step_s

    end_s = 0.5 + (0.25 + 0.125) * max(slow.get(worker, 1.0) for worker in plan.place)
    assert step_s == computed_s(plan, passes, slow) + end_s
    assert timeline_of(plan, of, slow=slow).step_s == step_s


@settings(max_examples=examples(60))
@given(plan=plans().map(whole))
def test_equal_passes_take_as_many_turns_as_the_fullest_copy_has(plan: Plan) -> None:
    most = max(len(its.micro_batches) for its in plan.pipelines)
    of = job(plan, [(1.0, 2.0)] * plan.n_layers, step_scale=2.0)
    assert price(plan, of, seconds_to_change=1e9).step_s == 2 * (n_turns(most, plan.n_layers) * 3.25 + 0.375)


@settings(max_examples=examples(60))
@given(plan=plans().map(whole))
def test_each_op_of_a_turn_stands_behind_the_one_before(plan: Plan) -> None:
    of = job(plan, [(1.0, 2.0)] * plan.n_layers)
    its = timeline_of(plan, of)
    for worker in plan.place:
        spans = [(span.start_s, span.end_s) for span in its.spans(plan, worker) if type(span.op).__name__ == "Compute"]
        turns = n_turns(len(plan.pipelines[plan.place[worker][0]].micro_batches), plan.n_layers)
        expected = [(3.25 * t, 3.25 * t + 1.125, 3.25 * (t + 1)) for t in range(turns)]
        assert spans == [span for a, b, c in expected for span in ((a, b), (b, c))]


def test_reductions_of_shards_wait_for_the_last_turn_of_all_holders_and_run_side_by_side() -> None:
    """A ring of n holders sends 2 (n - 1) / n times the four bytes, one a second. Who only keeps a shard has its part in that,
    and nobody waits for it."""
    slow_link = Link(0.0, 1.0)
    rows = [layer(str(i), 1.0, 1.0, 1.0, gradient_bytes=4) for i in range(2)]
    of = sharded(profile(rows, 7, 2, intra=slow_link, inter=slow_link))
    turns_s = 2 * 3.0
    assert price(sharded_plan([[0, 1], [2, 3]], [1, 3]), of, seconds_to_change=1e9).step_s == turns_s + 4.0
    kept = price(sharded_plan([[0, 1], [2, 3]], [1, 3], keepers=[5]), of, seconds_to_change=1e9).step_s
    assert kept == pytest.approx(turns_s + 2 * 4 * 2 / 3)
    alone = price(sharded_plan([[0, 1]], [4]), of, seconds_to_change=1e9).step_s
    assert alone == turns_s


def test_a_worker_keeps_the_activations_of_one_micro_batch_and_the_state_of_its_shard() -> None:
    sizes = {"parameter_bytes": 100, "gradient_bytes": 100, "optimizer_bytes": 200, "activation_bytes": 7000}
    of = sharded(profile([layer(str(i), **sizes) for i in range(3)], 11, 2))
    one, more = (
        price(sharded_plan([[0, 1, 2]], [n]), replace(of, global_batch=2 * n - 1), seconds_to_change=1e9) for n in (2, 9)
    )
    assert one.peak_bytes == more.peak_bytes
    assert 7000 + 400 <= more.peak_bytes < 2 * 7000


@settings(max_examples=examples(60))
@given(n_shards=st.integers(2, 5), n_copies=st.integers(1, 5), n_more=st.integers(0, 9), n_idle=st.integers(0, 1))
def test_the_closed_form_of_the_best_layout_is_the_price_of_the_plan_that_there_is(
    n_shards: int, n_copies: int, n_more: int, n_idle: int
) -> None:
    n_workers = n_shards * n_copies + n_idle
    rows = [layer(str(i), 1.0 + i, 1.0, 0.5) for i in range(n_shards)]
    now = situation(replace(sharded(profile(rows, n_copies + n_more)), step_scale=2.0), None, range(n_workers))
    found = best(answer(now))
    assert found is not None and found.estimate is not None
    assert closed_step_s(now, n_workers) == found.estimate.step_s
    assert closed_step_s(now, n_shards - 1) is None
