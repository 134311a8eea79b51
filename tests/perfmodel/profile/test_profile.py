"""Profiles: merged from measurements, refined by real steps and transitions, computed from YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from launcher.joblog.events import GenerationStarted
from odyssey.errors import ProfileError
from odyssey.plan.moves import Move, move_runs
from odyssey.plan.pipelines import Stage
from odyssey.protocol.model_spec import Boundary, LayerCost, LayerSpec, ModelSpec
from odyssey.protocol.reports import Measured, OpTime, Trial
from odyssey.protocol.trial import trial_plan
from perfmodel.profile.catalog import load
from perfmodel.profile.merge import MOVE_BYTE_S, OP_OVERHEAD_S, check_model, merge
from perfmodel.profile.profile import Link, Profile, Recovery, read, write
from perfmodel.refine import SCALE_WEIGHT, STEP_WEIGHT, TRANSITION_WEIGHT, calibrate, refresh, rescale, tried
from perfmodel.step.costs import Costs
from perfmodel.step.timeline import timeline_of
from tests.planning import first_plan, layer, price, profile

MODEL = ModelSpec(
    layers=tuple(LayerSpec(f"layer {i}", f"digest {i}", 10, 11, 3) for i in range(3)),
    ties=((0, 2),),
    tie_bytes=(8,),
    global_batch=8,
    micro_batch=2,
    n_samples=100,
    seed=0,
    device="cpu",
)


def cost(layer: int, forward_s: float = 1.0) -> LayerCost:
    return LayerCost(layer, forward_s, 2.0, 3.0, 0.5, 10, 20, 30, 40)


def measured(layers: list[LayerCost], *, last: bool = False, latency_s: float = 0.1, memory: int = 100) -> Measured:
    return Measured(
        generation=0,
        costs=tuple(layers),
        boundaries=(Boundary(layers[0].layer, 2, "*", ()),) if layers else (),
        latency_s=None if last else latency_s,
        bandwidth=None if last else 1e6,
        group_s=0.3,
        op_overhead_s=None,
        loss_s=0.25 if last else None,
        runtime_bytes=50,
        memory_bytes=memory,
    )


def merged(reports: list[Measured], hosts: Sequence[int] | None = None) -> Profile:
    where = [0] * len(reports) if hosts is None else hosts
    return merge(MODEL, reports, where, ranks_per_node=8, nodes_per_host=1, cores=None, model_name="toy")


def test_what_ranks_measured_becomes_a_profile() -> None:
    of = merged([measured([cost(0), cost(1)]), measured([cost(2)], memory=90), measured([cost(2, 3.0)], last=True)])
    assert [x.forward_s for x in of.layers] == [1.0, 1.0, 2.0]
    assert of.layers[0].digest == "digest 0" and of.layers[0].buffer_bytes == 3 and of.layers[0].gradient_bytes == 11
    assert of.cluster.memory_bytes == 90 and of.runtime_bytes == 50 and of.loss_s == 0.25
    assert of.cluster.intra_host == Link(0.1, 1e6)
    assert of.ties == MODEL.ties and [b.layer for b in of.boundaries] == [0, 2]
    assert of.recovery.groups_member_s == pytest.approx((0.3 - Recovery().groups_base_s) / 3)


@pytest.mark.parametrize(
    ("n_ranks", "cores", "found", "crowding", "alone_s"),
    [
        (2, 2, 1.25, 1.25, 0.8),
        (2, 3, 1.25, 1.5, 0.8),
        (3, 2, 1.25, 1.25, 0.8),
        (2, 2, 0.9, 1.0, 1.0),
        (2, 2, 9.0, 2.0, 0.5),
        (2, 64, 1.25, 2.0, 0.8),
    ],
)
def test_what_ranks_measure_together_they_would_do_alone_in_less(
    n_ranks: int, cores: int, found: float, crowding: float, alone_s: float
) -> None:
    """The last rank has measured alone as well; what cannot be is the noise of a machine."""
    reports = [measured([cost(i)], last=i == 2) for i in range(3)][-n_ranks:]
    reports[0] = msgspec.structs.replace(reports[0], costs=tuple(cost(i) for i in range(4 - n_ranks)))
    reports[-1] = msgspec.structs.replace(reports[-1], crowding=found)
    of = merge(MODEL, reports, [0] * n_ranks, ranks_per_node=8, nodes_per_host=1, cores=cores, model_name="toy")
    assert of.cluster.crowding == pytest.approx(crowding)
    assert [x.forward_s for x in of.layers] == pytest.approx([alone_s] * 3)
    assert [x.optimizer_s for x in of.layers] == pytest.approx([0.5 * alone_s] * 3)


def test_micro_batches_may_be_cut_if_no_rank_knows_why_not() -> None:
    reports = [measured([cost(0), cost(1)]), measured([cost(2)], last=True)]
    free, drawing, silent = "", "layer 2 draws random numbers", reports[1].uncut
    for last, expected in ((free, free), (drawing, drawing), (silent, silent)):
        told = [msgspec.structs.replace(report, uncut=why) for report, why in zip(reports, (free, last), strict=True)]
        assert merged(told).uncut == expected
    assert silent, "a rank that has not looked does not say that they may"


def test_an_op_costs_what_the_middle_rank_measured_or_the_stated_default() -> None:
    reports = [measured([cost(0)]), measured([cost(1)]), measured([cost(2)]), measured([cost(2)], last=True)]
    assert merged(reports).op_overhead_s == OP_OVERHEAD_S
    known = [
        msgspec.structs.replace(report, op_overhead_s=s) for report, s in zip(reports, (3e-4, 1e-4, None, 9e-4), strict=True)
    ]
    assert merged(known).op_overhead_s == 3e-4


def test_a_byte_that_moves_takes_what_the_first_ranks_measured_or_the_stated_default() -> None:
    reports = [measured([cost(0)]), measured([cost(1), cost(2)], last=True)]
    assert merged(reports).recovery.move_byte_s == MOVE_BYTE_S
    assert merged([msgspec.structs.replace(reports[0], move_byte_s=2e-9), reports[1]]).recovery.move_byte_s == 2e-9


@pytest.mark.parametrize(
    ("latencies_s", "hosts", "intra_s", "inter_s"),
    [
        ((0.1, 0.9, 0.1), (0, 0, 1, 1), 0.1, 0.9),
        ((0.9, 0.1, 0.1), (0, 1, 1, 1), 0.1, 0.9),
        ((0.1, 0.1, 0.1), (0, 0, 0, 0), 0.1, 0.1),
        ((0.9, 0.9, 0.9), (0, 1, 2, 3), 0.9, 0.9),
    ],
)
def test_links_within_and_between_hosts_are_told_apart(
    latencies_s: tuple[float, ...], hosts: tuple[int, ...], intra_s: float, inter_s: float
) -> None:
    reports = [measured([cost(i)], latency_s=latency_s) for i, latency_s in enumerate(latencies_s)]
    cluster = merged([*reports, measured([cost(2)], last=True)], hosts).cluster
    assert (cluster.intra_host.latency_s, cluster.inter_host.latency_s) == (intra_s, inter_s)


def test_one_rank_alone_needs_no_link() -> None:
    assert merged([measured([cost(0), cost(1), cost(2)], last=True)]).cluster.intra_host.bandwidth > 0


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([], "no rank has measured"),
        ([measured([cost(0)]), measured([cost(2)], last=True)], "layers 1 have no measurement"),
        ([measured([cost(0), cost(1), cost(2)])], "loss_s has no measurement"),
        ([measured([cost(0), cost(1), cost(2, 0.0)], last=True)], r"layers\[2\].forward_s: expected a number > 0, got 0"),
        ([measured([cost(0), cost(1)], last=True), measured([cost(2)], last=True)], "link from place 0"),
    ],
)
def test_a_missing_measurement_is_an_error_and_never_zero(reports: list[Measured], says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        merged(reports)


def test_a_profile_belongs_to_its_model_only() -> None:
    of = merged([measured([cost(0), cost(1), cost(2)], last=True)])
    check_model(of, MODEL)
    with pytest.raises(ProfileError, match="has 3 layers, the model has 2"):
        check_model(of, msgspec.structs.replace(MODEL, layers=MODEL.layers[:2]))
    other = (*MODEL.layers[:2], msgspec.structs.replace(MODEL.layers[2], digest="other"))
    with pytest.raises(ProfileError, match=r"layers\[2\]"):
        check_model(of, msgspec.structs.replace(MODEL, layers=other))
    with pytest.raises(ProfileError, match="micro_batch"):
        check_model(of, msgspec.structs.replace(MODEL, micro_batch=4))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    of = merged([measured([cost(0), cost(1), cost(2)], last=True)])
    write(of, tmp_path / "profile.json")
    assert read(tmp_path / "profile.json") == of
    assert load(tmp_path / "profile.json") == (of, "auto")


# -- refinement --------------------------------------------------------------------------------------------------------


def test_real_op_times_move_the_layers_of_their_range_in_proportion() -> None:
    of = profile([layer("a", 1.0), layer("b", 3.0), layer("c", 1.0)], 1, op_overhead_s=0.5)
    after = refresh(of, [OpTime("F", 0, 2, 10, 8.0)])
    factor = 1 + STEP_WEIGHT * (8.0 / 4.0 - 1)
    assert [x.forward_s for x in after.layers] == pytest.approx([factor, 3 * factor, 1.0])
    assert [x.backward_s for x in after.layers] == [2.0, 2.0, 2.0]


def test_repeated_op_times_converge_to_what_is_measured() -> None:
    of = profile(2, 1, loss_s=0.5)
    for _ in range(60):
        of = refresh(of, [OpTime("F", 0, 2, 10, 4.5), OpTime("B", 0, 1, 10, 6.0), OpTime("W", 1, 2, 10, 0.25)])
    assert sum(x.forward_s for x in of.layers) == pytest.approx(4.0)
    assert of.layers[0].input_gradient_s == pytest.approx(3.0) and of.layers[0].weight_gradient_s == pytest.approx(3.0)
    assert of.layers[1].weight_gradient_s == pytest.approx(0.25) and of.layers[1].input_gradient_s == 1.0


def test_without_a_gradient_of_the_input_the_first_stage_has_its_whole_backward_in_w() -> None:
    of = profile([layer("a", i=0.0), layer("b")], 1)
    assert Costs(of).compute_s("I", 0, 2, 1) == 0.0 and Costs(of).compute_s("W", 0, 2, 1) == 3.0
    assert Costs(of).compute_s("I", 1, 2, 1) == 1.0 and Costs(of).compute_s("W", 1, 2, 1) == 1.0
    for _ in range(60):
        of = refresh(of, [OpTime("I", 0, 2, 5, 0.001), OpTime("W", 0, 2, 5, 6.0)])
    assert [x.input_gradient_s for x in of.layers] == pytest.approx([0.0, 2.0])
    assert [x.weight_gradient_s for x in of.layers] == pytest.approx([2.0, 2.0])


def test_op_times_that_say_nothing_change_nothing() -> None:
    of = profile(2, 1, op_overhead_s=0.5)
    empty = [OpTime("F", 0, 2, 0, 9.0), OpTime("F", 0, 2, 5, 0.0), OpTime("O", 0, 0, 0, 9.0)]
    assert refresh(of, [*empty, OpTime("S", 0, 2, 5, 1.0)]) == of


def test_the_halves_of_a_backward_cost_what_they_were_measured_to() -> None:
    """Over all layers that have both; never less than the whole, and at most twice as much."""
    rows = [msgspec.structs.replace(cost(i), halves_s=halves_s) for i, halves_s in enumerate((0.0, 6.0, 6.5))]
    assert merged([measured(rows, last=True)]).halves_scale == pytest.approx(12.5 / 10)
    for halves_s, scale in ((4.0, 1.0), (99.0, 2.0), (0.0, 1.0)):
        rows = [msgspec.structs.replace(cost(i), halves_s=halves_s) for i in range(3)]
        assert merged([measured(rows, last=True)]).halves_scale == scale


def test_what_reductions_slow_down_is_the_median_over_the_ranks() -> None:
    reports = [
        msgspec.structs.replace(measured([cost(i)], last=i == 2), beside_reduction=slower)
        for i, slower in enumerate((1.1, 1.6, 1.2))
    ]
    assert merged(reports).cluster.beside_reduction == 1.2
    assert merged([measured([cost(i) for i in range(3)], last=True)]).cluster.beside_reduction == 1.0


def test_a_real_transition_moves_the_parts_that_took_place() -> None:
    rows = [layer(str(i), parameter_bytes=100) for i in range(2)]
    of = profile(rows, 4, intra=Link(0.0, 100.0), recovery=Recovery(0.1, 0.2, 1.0, 0.5, 0.01, move_layer_s=0.0))
    plan = msgspec.structs.replace(first_plan(of, "2x2", 4), move_runs=move_runs((Move(0, 0, 2),)))
    went = GenerationStarted(0.3, None, None, 0.5 + 6 * 0.05, 3.0, 5.0, rest_s=0.9, proof_s=0.2)
    first = calibrate(of, plan, went)
    assert first.recovery.n_seen == 1, "and what had a default before counts in full"
    assert first.recovery.detect_s == pytest.approx(0.3) and first.recovery.groups_member_s == pytest.approx(0.05)
    assert first.recovery.moves_scale == pytest.approx(3) and first.recovery.rest_s == pytest.approx(0.7)
    assert first.recovery.pause_s == 0.2 and first.recovery.spawn_s == 1.0, "these did not take place"
    went = msgspec.structs.replace(went, detect_s=0.5, pause_s=0.4, spawn_s=0.1, groups_s=0.5 + 6 * 0.25)
    after = calibrate(first, plan, went).recovery
    assert after.detect_s == pytest.approx(0.3 + TRANSITION_WEIGHT * 0.2)
    assert after.pause_s == pytest.approx(0.2 + TRANSITION_WEIGHT * 0.2)
    assert after.spawn_s == pytest.approx(1.0 - TRANSITION_WEIGHT * 0.9)
    assert after.groups_member_s == pytest.approx(0.05 + TRANSITION_WEIGHT * 0.2)
    assert after.moves_scale == pytest.approx(3)


def test_the_first_moves_count_in_full_whatever_transitions_there_were_without_any() -> None:
    of = profile([layer(str(i), parameter_bytes=100) for i in range(2)], 4, intra=Link(0.0, 100.0))
    plan = first_plan(of, "2x2", 4)
    moving = msgspec.structs.replace(plan, move_runs=move_runs((Move(0, 0, 2),)))
    went = GenerationStarted(0.3, None, None, 0.5, 3.0, 5.0)
    without = calibrate(of, plan, went)
    assert (without.recovery.n_seen, without.recovery.moves_scale) == (1, 1.0)
    expected_s = price(moving, of, seconds_to_change=1e4).transition.moves_s
    first = calibrate(without, moving, went)
    assert first.recovery.moves_scale == pytest.approx(3.0 / expected_s)
    second = calibrate(first, moving, msgspec.structs.replace(went, moves_s=6.0))
    assert second.recovery.moves_scale == pytest.approx((1 + TRANSITION_WEIGHT) * 3.0 / expected_s)


def test_a_transition_that_was_seen_is_foretold_part_by_part() -> None:
    of = profile([layer(str(i), parameter_bytes=100) for i in range(2)], 4)
    plan = msgspec.structs.replace(first_plan(of, "2x2", 4), move_runs=move_runs((Move(0, 0, 2),)))
    went = GenerationStarted(None, 0.4, 0.1, 0.6, 3.0, 5.0, rest_s=0.9, proof_s=0.2)
    parts = price(plan, calibrate(of, plan, went), seconds_to_change=1e4).transition
    assert (parts.groups_s, parts.moves_s, parts.rest_s) == pytest.approx((0.6, 3.0, 0.9))


def test_the_first_start_shows_what_groups_and_proofs_take_and_nothing_of_a_loss() -> None:
    of = profile([layer("a", parameter_bytes=100), layer("b", parameter_bytes=300)], 4)
    plan = first_plan(of, "2x2", 4)
    after = calibrate(of, plan, GenerationStarted(None, None, None, 0.5, 7.0, None, rest_s=0.6, proof_s=0.4)).recovery
    assert after.n_seen == 0 and after.moves_scale == of.recovery.moves_scale
    forward_s, backward_s = of.layers[0].forward_s, of.layers[0].backward_s
    in_backward = backward_s / (forward_s + backward_s)  # of all moments
    left_s = in_backward * backward_s / 2 + (1 - in_backward) * forward_s / 2
    assert after.pause_s == pytest.approx(left_s), "half an op is left"
    assert after.pause_s > of.recovery.pause_s
    again = calibrate(msgspec.structs.replace(of, recovery=after), plan, GenerationStarted(None, None, None, 0.5, 7.0, None))
    assert again.recovery.pause_s == after.pause_s, "a start that is made again says no more"
    without_optimizer = Costs(of).move_bytes[1] / Costs(of).state_per_parameter
    assert after.rest_s == pytest.approx(0.2) and after.proof_byte_s == pytest.approx(0.4 / without_optimizer)
    wider = first_plan(of, "2x1", 4)
    parts = price(wider, msgspec.structs.replace(of, recovery=after), seconds_to_change=1e4).transition
    assert parts.rest_s == pytest.approx(0.2 + 0.4 * sum(Costs(of).move_bytes) / without_optimizer)


def test_a_trial_at_the_start_gives_the_first_price_in_full() -> None:
    of = profile(2, 1, op_overhead_s=0.5)
    chain = trial_plan(0, (Stage(0, 0, 1), Stage(1, 1, 2)), msgspec.structs.replace(MODEL, layers=MODEL.layers[:2], ties=()))
    times = [(OpTime("F", 0, 1, 5, 3.0), OpTime("O", 0, 0, 5, 0.1)), (OpTime("B", 1, 2, 5, 8.0), OpTime("O", 0, 0, 5, 0.3))]
    reports = [
        msgspec.structs.replace(measured([cost(0)]), trial=Trial(of_rank, trial_s, 0.0))
        for of_rank, trial_s in zip(times, (50.0, 52.0), strict=True)
    ]
    after = tried(of, chain, reports)
    assert after.layers[0].forward_s == 3.0 and after.layers[1].forward_s == of.layers[1].forward_s
    assert after.layers[1].backward_s == 8.0 and after.op_overhead_s == pytest.approx(0.2)
    assert price(chain, after, seconds_to_change=1e4).step_s == pytest.approx(51.0)
    assert tried(of, chain, [measured([cost(0)])]) == of, "where nothing was tried nothing is learnt"


def test_a_trial_shows_what_a_proof_takes_and_the_first_start_then_does_not() -> None:
    """There, all ranks begin at once, and optimizers have no state yet."""
    of = profile([layer("a", parameter_bytes=100), layer("b", parameter_bytes=300)], 4)
    chain = trial_plan(0, (Stage(0, 0, 1), Stage(1, 1, 2)), msgspec.structs.replace(MODEL, layers=MODEL.layers[:2], ties=()))
    sizes = Costs(of).move_bytes
    reports = [
        msgspec.structs.replace(measured([cost(number)]), trial=Trial((), 1.0, 2.0 * sizes[number])) for number in range(2)
    ]
    after = tried(of, chain, reports)
    assert after.recovery.proof_byte_s == pytest.approx(2.0)
    started = calibrate(
        after, first_plan(of, "2x2", 4), GenerationStarted(None, None, None, 0.5, 0.0, None, rest_s=9.0, proof_s=8.0)
    )
    assert started.recovery.proof_byte_s == pytest.approx(2.0) and started.recovery.rest_s == pytest.approx(1.0)


def test_what_an_op_costs_beside_its_computation_is_learnt() -> None:
    of = profile(2, 1, op_overhead_s=0.5)
    after = refresh(of, [OpTime("O", 0, 0, 7, 1.5)])
    assert after.op_overhead_s == pytest.approx(0.5 + STEP_WEIGHT * 1.0)
    assert after.layers == of.layers


def test_the_scale_of_step_times_moves_towards_what_was_measured() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2x2", 4)
    modelled_s = timeline_of(plan, of).step_s
    once = rescale(of, plan, 1.5 * modelled_s)
    assert once.step_scale == pytest.approx(1 + SCALE_WEIGHT * 0.5)
    assert price(plan, once, seconds_to_change=1e4).step_s == pytest.approx(modelled_s * once.step_scale)
    for _ in range(20):
        once = rescale(once, plan, 1.5 * modelled_s)
    assert once.step_scale == pytest.approx(1.5)
