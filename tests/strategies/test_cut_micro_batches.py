"""Plans that cut micro-batches: every sample once, dealt out as well as can be, and only where that wins and is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import PlanError
from odyssey.plan.form import form_of
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, Plan, Reduction, Schedule, decode, encode, under
from odyssey.plan.proof import prove
from odyssey.plan.schedule import dependency_order, program
from perfmodel.profile import catalog
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.work import work_of
from strategies.building.compose import reductions
from strategies.search import answer, best, initial_plan, search
from strategies.search.cut_micro_batches import cut
from strategies.situation import Candidate
from tests.planning import first_plan, layer, price, profile, situation, without


def rows_of(ranges: Sequence[Sequence[int]], samples: Sequence[int], micro_batch: int) -> list[Pipeline]:
    """Pipelines cut at these layers, with so many samples each, on workers 0, 1, …"""
    found, worker, first = [], 0, 0
    for cuts, n_samples in zip(ranges, samples, strict=True):
        stages = tuple(Stage(worker + s, a, b) for s, (a, b) in enumerate(pairwise(cuts)))
        worker += len(stages)
        stop = first + (n_samples + micro_batch - 1) // micro_batch
        found.append(Pipeline(stages, first, stop, n_samples))
        first = stop
    return found


def plan_of(pipelines: Sequence[Pipeline], global_batch: int, micro_batch: int, schedule: Schedule | None = None) -> Plan:
    n_layers = pipelines[0].stages[-1].stop
    held = [frozenset(stage.layers) for its in pipelines for stage in its.stages if stage.worker is not None]
    return Plan(
        generation=0,
        strategy="test",
        step=0,
        global_batch=global_batch,
        micro_batch=micro_batch,
        n_layers=n_layers,
        blocks=blocks_of(pipelines),
        reductions=reductions(held, n_layers, ()),
        schedule=schedule or Schedule(),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    n_layers = draw(st.integers(1, 4))
    micro_batch = draw(st.integers(1, 5))
    samples = draw(st.lists(st.integers(1, 17), min_size=1, max_size=4))
    ranges = [
        [0, *sorted(draw(st.sets(st.integers(1, n_layers - 1)) if n_layers > 1 else st.just(set[int]()))), n_layers]
        for _ in samples
    ]
    schedule = Schedule()
    if draw(st.booleans()):
        schedule = Schedule("split", draw(st.sampled_from([None, 1.0, 1.5])), work_of(profile(n_layers, 1)))
    return plan_of(rows_of(ranges, samples, micro_batch), sum(samples), micro_batch, schedule)


@given(plans())
def test_every_sample_is_in_one_micro_batch_and_none_is_larger_than_a_whole_one(plan: Plan) -> None:
    assert prove(plan).is_cut
    found: list[int] = []
    for k in range(plan.n_micro_batches):
        positions = plan.samples.positions(k)
        assert 1 <= len(positions) == plan.samples.n_of(k) <= plan.micro_batch
        found += positions
    assert found == list(range(plan.global_batch))
    by_pipeline = [sum(plan.samples.n_of(k) for k in its.micro_batches) for its in plan.pipelines]
    assert by_pipeline == list(map(plan.samples.n_in, plan.pipelines))
    assert decode(encode(plan)) == plan


@given(plans())
def test_the_programs_of_all_workers_run_each_sample_through_each_layer_once(plan: Plan) -> None:
    programs = {worker: program(plan, worker) for worker in plan.workers}
    forward: Counter[tuple[int, int]] = Counter()
    backward: Counter[tuple[int, int]] = Counter()
    for _, op in dependency_order(programs):
        if isinstance(op, Compute) and op.kind in "FBW":
            passed = forward if op.kind == "F" else backward
            passed.update(
                (i, n)
                for i in plan.samples.positions(op.micro_batch)
                for n in plan.layer_range(op.micro_batch, op.stage).layers
            )
    everything = dict.fromkeys(((i, n) for i in range(plan.global_batch) for n in range(plan.n_layers)), 1)
    assert forward == everything and backward == everything


P = plan_of(rows_of([[0, 2]] * 3, (5, 6, 4), 2), 15, 2)


def with_samples(*samples: int | None) -> Plan:
    return replace(P, blocks=blocks_of(replace(its, n_samples=n) for its, n in zip(P.pipelines, samples, strict=True)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (with_samples(5, 6, 3), "pipeline 2 has 3 samples in 2 micro-batches|the pipelines have 14 samples, a step has 15"),
        (with_samples(6, 6, 4), "the pipelines have 16 samples, a step has 15"),
        (with_samples(7, 4, 4), "pipeline 0 has 7 samples in 3 micro-batches"),
        (with_samples(5, 6, 0), "pipeline 2 has 0 samples"),
        (with_samples(5, -1, 11), "pipeline 1 has -1 samples"),
        (with_samples(5, None, 4), "pipeline 1 does not say"),
    ],
)
def test_the_proof_refuses_samples_that_are_lost_or_twice(wrong: Plan, says: str) -> None:
    prove(P)
    with pytest.raises(PlanError, match=says):
        prove(wrong)


def test_a_cut_plan_says_so_in_a_word() -> None:
    assert form_of(P) == "3x1 cut"
    assert form_of(under(P, Schedule("split", 1.5))) == "3x1 cut split 1.5x"


# -- shares ---------------------------------------------------------------------------------------------------------------


def compositions(total: int, n: int) -> Iterator[tuple[int, ...]]:
    if n == 1:
        yield (total,)
        return
    for first in range(1, total - n + 2):
        for rest in compositions(total - first, n - 1):
            yield (first, *rest)


def exact(micro_batch: int, global_batch: int, **options: object) -> Profile:
    """A profile of three layers, where cutting is exact. A sample passes them forth and back in one, two and one seconds."""
    rows = [
        layer(str(i), weight * micro_batch / 3, weight * micro_batch / 3, weight * micro_batch / 3)
        for i, weight in enumerate((1, 2, 1))
    ]
    return replace(profile(rows, global_batch, micro_batch, **options), uncut="")  # type: ignore[arg-type]


@given(
    st.integers(2, 4),
    st.integers(4, 14),
    st.lists(st.sampled_from([(0, 3), (0, 2, 3), (0, 1, 3)]), min_size=2, max_size=3),
)
def test_no_other_shares_are_faster_by_the_closed_form(
    micro_batch: int, global_batch: int, ranges: list[tuple[int, ...]]
) -> None:
    of = exact(micro_batch, global_batch)
    n = -(-global_batch // micro_batch)
    if n < len(ranges):
        return
    shares = [1] * (len(ranges) - 1) + [n - len(ranges) + 1]
    starts = [0, *accumulate(shares)]
    whole = [
        replace(its, first_micro_batch=a, stop_micro_batch=b, n_samples=None)
        for its, (a, b) in zip(rows_of(ranges, [micro_batch] * len(ranges), micro_batch), pairwise(starts), strict=True)
    ]
    other = cut(prove(plan_of(whole, global_batch, micro_batch)), Costs(of))
    weights = (0, 1, 3, 4)

    def seconds(samples: Sequence[int]) -> float:
        """One micro-batch through all stages, and the slowest stage's turns for all other samples."""
        slowest = [max(weights[b] - weights[a] for a, b in pairwise(cuts)) for cuts in ranges]
        return max(4 * micro_batch + (n_samples - micro_batch) * turn for n_samples, turn in zip(samples, slowest, strict=True))

    least = min(map(seconds, compositions(global_batch, len(ranges))))
    if other is not None:
        assert seconds(list(map(other.samples.n_in, other.pipelines))) == pytest.approx(least)
    else:
        samples = [min(b * micro_batch, global_batch) - a * micro_batch for a, b in pairwise(starts)]
        rounded_up = [-(-n_samples // micro_batch) * micro_batch for n_samples in samples]
        assert least >= 0.99 * seconds(rounded_up) - 1e-9


# -- candidates -----------------------------------------------------------------------------------------------------------

ONE_EACH = 32


def after_a_loss(of: Profile) -> list[Candidate]:
    """Search after a loss among 32 ranks that hold the whole model each."""
    plan = first_plan(of, f"{ONE_EACH}x1", ONE_EACH)
    return search(situation(of, plan, without(plan, 7)))


def test_31_survivors_do_not_wait_for_one_that_has_five_micro_batches() -> None:
    of = exact(4, 512)
    chosen = best(after_a_loss(of))
    assert chosen is not None and chosen.plan is not None and chosen.estimate is not None
    prove(chosen.plan)
    assert form_of(chosen.plan) == "31x1 cut"
    assert Counter(map(chosen.plan.samples.n_in, chosen.plan.pipelines)) == {17: 16, 16: 15}
    assert chosen.estimate.step_s == pytest.approx(17 * 4), "samples of the busiest, at four seconds each"
    whole = [c.estimate for c in after_a_loss(of) if c.plan is not None and c.estimate is not None and not c.plan.is_cut]
    assert min(estimate.step_s for estimate in whole) == pytest.approx(20 * 4)


def test_where_it_is_not_exact_it_is_not_offered_and_the_table_says_why() -> None:
    of = replace(exact(4, 512), uncut="layer 2.Block draws random numbers")
    table = after_a_loss(of)
    assert not any(candidate.plan is not None and candidate.plan.is_cut for candidate in table)
    said = [candidate for candidate in table if candidate.plan is None and "draws random numbers" in candidate.reason]
    assert len(said) == 1
    assert said[0].reason == "31x1 cut would take 15 % less, but is not exact: layer 2.Block draws random numbers"


@pytest.mark.parametrize("of", [exact(4, 31 * 16), exact(1, 128)], ids=["all have four", "of one sample"])
def test_nothing_is_cut_where_nothing_is_gained(of: Profile) -> None:
    plan = first_plan(of, f"{ONE_EACH}x1", ONE_EACH)
    table = search(situation(of, plan, without(plan, 7)))
    assert not any(candidate.plan is not None and candidate.plan.is_cut for candidate in table)
    assert not any("cut" in candidate.reason for candidate in table)


def test_a_loss_under_a_cut_plan_leaves_every_sample_in_every_candidate() -> None:
    of = exact(4, 54)
    table = initial_plan(situation(of, None, range(8)), "4x2")
    plan = next(c.plan for c in table if c.plan is not None and c.plan.is_cut)
    for lost in plan.workers:
        after = search(situation(of, plan, without(plan, lost)))
        strategies = {candidate.strategy for candidate in after if candidate.plan is not None}
        assert strategies >= {"reroute", "shrink", "repartition"}
        for candidate in after:
            if candidate.plan is not None:
                dependency_order({worker: program(candidate.plan, worker) for worker in candidate.plan.workers})
                n_micro_batches = range(prove(candidate.plan).n_micro_batches)
                assert sum(map(candidate.plan.samples.n_of, n_micro_batches)) == 54


def test_a_cut_plan_costs_what_its_samples_do() -> None:
    """Pipelines of one stage only add up."""
    of = exact(4, 30)
    plan = prove(plan_of(rows_of([[0, 3]] * 3, (13, 9, 8), 4), 30, 4))
    assert price(plan, of, seconds_to_change=3600.0).step_s == pytest.approx(13 * 4)


def test_a_model_of_a_file_says_whether_it_draws() -> None:
    assert catalog.load("gpt3-medium-a100-32")[0].uncut == ""
    assert "dropout" in catalog.load("bert-large-a40-30")[0].uncut


def test_the_profile_keeps_why_micro_batches_stay_whole() -> None:
    of = replace(exact(4, 30), uncut="the loss draws random numbers")
    assert msgspec.json.decode(msgspec.json.encode(of), type=Profile).uncut == of.uncut
    assert profile(3, 8).uncut, "who has not looked does not cut"


def test_reductions_are_by_who_holds_layers_whatever_they_share() -> None:
    assert [group.workers for group in P.reduce] == [(0, 1, 2)] and isinstance(P.reductions[0], Reduction)


# -- where it turns out not to be exact -----------------------------------------------------------------------------------


def test_a_job_goes_on_in_whole_micro_batches_when_a_layer_begins_to_draw() -> None:
    of = exact(4, 54)
    plan = next(c.plan for c in initial_plan(situation(of, None, range(8)), "4x2") if c.plan is not None and c.plan.is_cut)
    routed = next(c.plan for c in search(situation(of, plan, without(plan, 3)), "reroute") if c.plan is not None)
    assert routed.is_cut and routed.routes
    for before in (plan, routed):
        alive = situation(replace(of, uncut="layer 1 draws random numbers"), before, before.workers)
        chosen = best(answer(alive))
        assert chosen is not None and chosen.plan is not None
        prove(chosen.plan, before.holds)
        assert not chosen.plan.is_cut and chosen.plan.workers == before.workers
        dependency_order({worker: program(chosen.plan, worker) for worker in chosen.plan.workers})
    lost = situation(replace(of, uncut="layer 1 draws random numbers"), plan, without(plan, 3))
    assert all(candidate.plan is None or not candidate.plan.is_cut for candidate in search(lost))
