"""Which worker does two workers' work when a worker is lost, what that costs, and when it may not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import PlanError
from odyssey.plan.approximation import ApproximateCost, Approximation, LowRank, Without, without
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan, decode, encode
from odyssey.plan.proof import prove
from odyssey.plan.renaming import renamed
from odyssey.plan.schedule import program
from perfmodel.profile import catalog
from perfmodel.profile.profile import Profile
from perfmodel.step.timeline import timeline_of
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Candidate, Protect
from tests.planning import first_plan, layer, price, profile, situation
from tests.planning import without as alive_without

ALLOWED = Aim(approximate=LowRank(), protect=Protect.NONE)
NAMES = ("norm.weight", "attention.weight")


def job(n_layers: int = 4, *, backward_s: float = 1.0, refresh_s: float = 0.0, ends: bool = True, **options: object) -> Profile:
    """A job of unit costs: forward 1, backward 2, approximately `backward_s`. `ends`: the first and last layer have no
    attention."""
    its = ApproximateCost(backward_s, 10, refresh_s, NAMES)
    rows = [
        replace(
            layer(str(i), activation_bytes=40, parameter_bytes=100),
            approximate="it has none" if ends and i in (0, n_layers - 1) else its,
        )
        for i in range(n_layers)
    ]
    return profile(rows, 8, **options)  # type: ignore[arg-type]


def after(of: Profile, layout: str, n_workers: int, *lost: int, aim: Aim = ALLOWED) -> list[Candidate]:
    before = first_plan(of, layout, n_workers)
    return search(situation(of, before, alive_without(before, *lost), aim=aim), "neighbour")


def chosen(table: list[Candidate]) -> Plan:
    found = best(table)
    assert found is not None and found.plan is not None
    return found.plan


# -- who does both -----------------------------------------------------------------------------------------------------


def test_one_worker_with_the_same_stage_does_both_and_the_others_go_on_exactly() -> None:
    plan = chosen(after(job(), "3x2", 6, 3))
    assert plan.strategy == "neighbour" and form_of(plan) == "3x2 -1 approximate"
    (host,) = plan.approximate
    lost = next((p, s) for p, its in enumerate(plan.pipelines) for s, stage in enumerate(its.stages) if stage.worker is None)
    assert plan.runs[host] == frozenset(plan.pipelines[lost[0]].stages[lost[1]].layers)
    assert {route.worker for route in plan.routes} == {host}
    assert plan.approximation == Approximation((host,), LowRank(), (Without(1, 3, NAMES),))
    assert plan.schedule.rule == "1f1b" and not plan.moves


def test_two_lost_stages_have_a_worker_each() -> None:
    plan = chosen(after(job(), "3x2", 6, 2, 5))
    assert len(plan.approximate) == 2


def test_a_worker_that_keeps_the_lost_stage_does_both() -> None:
    of = job()
    aim = Aim(approximate=LowRank(), protect=Protect.STATE)
    before = chosen(initial_plan(situation(of, None, range(3), aim=aim), "1x3"))
    plan = chosen(search(situation(of, before, alive_without(before, 1), aim=aim), "neighbour"))
    assert plan.strategy == "neighbour" and plan.approximate == {0}


@pytest.mark.parametrize("left", [0, 1])
def test_any_worker_that_is_left_alone_may_do_both_as_one_stage(left: int) -> None:
    of = job(ends=False)
    aim = Aim(approximate=LowRank(), protect=Protect.STATE)
    before = chosen(initial_plan(situation(of, None, range(2), aim=aim), "1x2"))
    table = search(situation(of, before, [left], aim=aim), "neighbour")
    found = {form_of(row.plan): row.plan.approximate for row in table if row.plan is not None and row.strategy == "neighbour"}
    assert found["1x1 approximate"] == {left}


# -- what it costs -----------------------------------------------------------------------------------------------------


@given(st.floats(0.1, 2.0), st.floats(0.0, 5.0), st.integers(1, 400))
def test_the_price_is_the_sum_of_what_the_doubled_worker_does(backward_s: float, refresh_s: float, steps: int) -> None:
    """One stage: all of a step's eight micro-batches, forward 4, backward 2 at each end and `backward_s` at the two others."""
    of = job(backward_s=backward_s, refresh_s=refresh_s)
    plan = chosen(after(of, "2x1", 2, 1, aim=Aim(approximate=LowRank(4, steps), protect=Protect.NONE)))
    found = price(plan, of, seconds_to_change=1e6)
    assert found.step_s == pytest.approx(8 * (4 + 2 * 2 + 2 * backward_s) + 2 * refresh_s / steps)
    assert found.transition.warm_up_s == pytest.approx(2 * refresh_s)


def test_cells_that_are_walked_take_as_long_as_programs_that_run() -> None:
    of = job(backward_s=0.7)
    for layout, n_workers, lost in (("3x2", 6, 3), ("2x4", 8, 5), ("4x1", 4, 0)):
        plan = chosen(after(job(8 if layout == "2x4" else 4, backward_s=0.7), layout, n_workers, lost))
        its = of if plan.n_layers == 4 else job(8, backward_s=0.7)
        assert price(plan, its, seconds_to_change=1e6).step_s == pytest.approx(timeline_of(plan, its).step_s)


def test_less_memory_is_kept() -> None:
    """Each micro-batch keeps 10 bytes in the place of 40 at layers with an approximate backward; all eight live at once."""
    of = job(ends=False)
    plan = chosen(after(of, "2x1", 2, 1))
    exact = replace(plan, approximation=None)
    peaks = [price(its, of, seconds_to_change=1e6).peak_bytes for its in (plan, exact)]
    assert peaks[1] - peaks[0] == 8 * 4 * (40 - 10)


def test_two_pipelines_are_better_off_with_it_and_eight_without() -> None:
    """Where one of two workers is lost the other one does twice as much; where one of eight is, all do an eighth more."""
    of = job(backward_s=1.2, ends=False)
    for n, better in ((2, "neighbour"), (8, "reroute")):
        before = first_plan(of, f"{n}x2", 2 * n)
        table = search(situation(of, before, alive_without(before, 1), aim=ALLOWED))
        rows = [its for its in table if its.plan is not None and its.strategy in ("neighbour", "reroute")]
        assert min(rows, key=lambda row: row.estimate.step_s if row.estimate else 0.0).strategy == better


# -- when it is not there ----------------------------------------------------------------------------------------------


def reasons(table: list[Candidate]) -> list[str]:
    return [row.reason for row in table if row.strategy == "neighbour" and row.plan is None]


def test_it_is_not_proposed_unless_it_is_allowed() -> None:
    assert reasons(after(job(), "2x1", 2, 1, aim=Aim(protect=Protect.NONE))) == [
        "its gradients are approximate, which --allow-approximate allows"
    ]


def test_a_model_without_attention_is_refused_with_the_reason() -> None:
    rows = [replace(layer(str(i)), approximate="" if i else "its attention is nowhere") for i in range(4)]
    assert reasons(after(profile(rows, 8), "2x1", 2, 1)) == ["no layer has an approximate backward: its attention is nowhere"]
    assert reasons(after(profile(4, 8), "2x1", 2, 1)) == [
        "no layer has an approximate backward: the profile was measured without --allow-approximate"
    ]


def test_what_nobody_holds_is_nobodys_to_do() -> None:
    before = first_plan(job(), "2x2", 4)
    table = search(situation(job(), before, alive_without(before, 1), aim=ALLOWED), "neighbour")
    assert chosen(table).approximate == {3}


def test_it_ends_when_the_lost_worker_is_back() -> None:
    of = job(ends=False)
    plan = chosen(after(of, "2x2", 4, 3))
    table = search(replace(situation(of, plan, range(4), aim=ALLOWED), is_running=True))
    assert chosen(table).approximation is None


# -- configured jobs ---------------------------------------------------------------------------------------------------


def test_a_configured_transformer_goes_back_in_less_than_it_does_exactly() -> None:
    """Attention and feed-forward forward, the latter again, and back to its input: 1.33 times one worker's work where both take
    as long, as here, 1.56 times for 1 : 2; what is of low rank comes on top."""
    of, _ = catalog.load("gpt3-medium-a100-32")
    block = of.layers[1]
    assert isinstance(block.approximate, ApproximateCost)
    both = 2 * (block.forward_s + block.approximate.backward_s) / (block.forward_s + block.backward_s)
    assert 4 / 3 < both < 1.56
    assert 0 < block.approximate.activation_bytes < block.activation_bytes / 4


# -- the plan itself ---------------------------------------------------------------------------------------------------


def test_a_plan_with_it_is_written_renamed_and_proved() -> None:
    plan = chosen(after(job(), "3x2", 6, 3))
    assert decode(encode(plan)) == plan and prove(plan) is plan
    (host,) = plan.approximate
    other = renamed(plan, {host: 3, 3: host})
    assert other.approximate == {3} and prove(other)
    assert [str(op) for op in program(other, 3)] == [str(op) for op in program(plan, host)]
    for wrong in (Approximation((3,), LowRank(), ()), Approximation((), LowRank(), ()), Approximation((1, 0), LowRank(), ())):
        with pytest.raises(PlanError):
            prove(replace(plan, approximation=wrong))
    with pytest.raises(PlanError, match="do not follow"):
        prove(replace(plan, approximation=Approximation((host,), LowRank(), (Without(2, 4, NAMES), Without(1, 2, NAMES)))))


def test_names_of_layers_that_are_alike_are_written_once() -> None:
    assert without([(), NAMES, NAMES, ("other",), ()]) == (Without(1, 3, NAMES), Without(3, 4, ("other",)))
