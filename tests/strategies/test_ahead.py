"""Plans that think of the next loss: what they leave for it against enumeration, and jobs that go on as long as they can."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import StateLost, UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from perfmodel.goodput.objective import useful_rate
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile import catalog
from perfmodel.profile.profile import Link, Profile, Recovery
from strategies.building.layouts import layouts, quick_best_s
from strategies.building.shapes import shapes_of
from strategies.search import best, initial_plan, search
from strategies.search.next_loss import NODE_SHARE, closed_step_s
from strategies.situation import Aim, Candidate, Objective, Protect
from tests.examples import examples
from tests.planning import first_plan, layer, profile, situation, unsplit, without

PAPER = Aim(Objective.PAPER)
LINK = Link(1e-5, 1e9)


def job(n_layers: int, n_fit: int, n_micro_batches: int = 16, ranks_per_node: int = 1000) -> Profile:
    """Layers of one size, of which `n_fit` fit a worker's memory."""
    rows = [layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=10**6, gradient_bytes=10**6) for i in range(n_layers)]
    memory = n_fit * 2 * 10**6
    return profile(rows, n_micro_batches, intra=LINK, inter=LINK, memory_bytes=memory, ranks_per_node=ranks_per_node)


def keeps_every_layer(plan: Plan, lost: Collection[int]) -> bool:
    held = [layer for worker in plan.workers if worker not in lost for layer in plan.holds[worker]]
    return set(held) == set(range(plan.n_layers))


def chosen_of(table: list[Candidate]) -> Plan:
    chosen = best(table)
    assert chosen is not None and chosen.plan is not None
    return chosen.plan


# -- what a plan leaves for the next loss ----------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    layout=st.sampled_from(["2x3", "3x2", "4x1", "3+2+1", "4+2", "1x5", "2x2"]),
    per_node=st.sampled_from([1, 2, 3, 1000]),
    n_workers=st.integers(6, 7),
    lost=st.sets(st.integers(0, 5), max_size=2),
)
def test_holders_and_ends_are_those_of_every_loss_in_turn(layout: str, per_node: int, n_workers: int, lost: set[int]) -> None:
    of = job(6, 6, ranks_per_node=per_node)
    plan = first_plan(of, layout, n_workers)
    if not keeps_every_layer(plan, lost):
        return
    table = search(situation(of, plan, without(plan, *lost))) if lost else initial_plan(situation(of, None, range(6)), layout)
    for candidate in table:
        if candidate.plan is None:
            continue
        at_next_loss, its = candidate.at_next_loss, candidate.plan
        assert at_next_loss is not None
        everyone = without(its)
        nodes: dict[int, list[int]] = {}
        for worker in everyone:
            nodes.setdefault(worker // per_node, []).append(worker)
        fewest = next(n for n in range(1, 8) if not all(keeps_every_layer(its, some) for some in combinations(everyone, n)))
        assert at_next_loss.n_holders == fewest
        assert (at_next_loss.n_nodes == 1) == any(not keeps_every_layer(its, node) for node in nodes.values())
        ranks_that_end = sum(not keeps_every_layer(its, [worker]) for worker in everyone) / len(everyone)
        nodes_that_end = sum(not keeps_every_layer(its, node) for node in nodes.values()) / len(nodes)
        assert at_next_loss.share_of_restarts == pytest.approx((1 - NODE_SHARE) * ranks_that_end + NODE_SHARE * nodes_that_end)
        assert sum(loss.share for loss in at_next_loss.next_losses) == pytest.approx(1)


def test_a_worth_is_the_mean_of_the_rates_until_and_after_the_next_loss() -> None:
    """Two workers with a copy each, on two nodes: whichever is lost, a single one goes on at half the speed."""
    of = job(4, 4, n_micro_batches=8, ranks_per_node=1)
    (candidate,) = initial_plan(situation(of, None, range(2), seconds_to_change=50.0), "2x1")
    assert candidate.estimate is not None and candidate.at_next_loss is not None
    change, recovery = ExpectedChange(50.0), of.recovery
    alone_s = 8 * 4 * 0.03
    assert all(loss.step_s == pytest.approx(alone_s, rel=0.01) for loss in candidate.at_next_loss.next_losses)
    pause_s = sum(loss.share * loss.pause_s for loss in candidate.at_next_loss.next_losses)
    least_s = recovery.detect_s + recovery.pause_s + candidate.estimate.transition.groups_s + recovery.warm_up_s
    assert least_s <= pause_s < least_s + 0.1  # moves, of those that regroup
    until = useful_rate(8, candidate.estimate.step_s, candidate.estimate.transition.total_s, change)
    after = useful_rate(8, alone_s, pause_s, change)
    assert candidate.estimate.objective == pytest.approx((until + after) / 2, rel=0.005)


def test_where_the_launcher_may_start_all_again_the_last_holder_costs_that_and_no_new_job() -> None:
    """1x4: any loss is one of a last holder. A checkpoint is read as it is written, and half an interval of steps is redone."""
    of = replace(job(4, 4), recovery=Recovery(spawn_s=7.0, save_s=2.0, resubmit_s=900.0))
    known = situation(of, None, range(4), seconds_to_change=10_000.0, aim=Aim(protect=Protect.NONE))
    told = {}
    for can_restart in (False, True):
        candidate = initial_plan(replace(known, can_restart=can_restart), "1x4")[0]
        at_next_loss = candidate.at_next_loss
        assert (
            at_next_loss is not None and candidate.estimate is not None and at_next_loss.share_of_restarts == pytest.approx(1)
        )
        of_one_rank = max(at_next_loss.next_losses, key=lambda loss: loss.share)
        assert of_one_rank.restart_s == pytest.approx((7.0 + 2.0 if can_restart else 900.0) + (2 * 2.0 * 10_000.0) ** 0.5 / 2)
        closed_s = closed_step_s(known, 4 if can_restart else 3)
        assert closed_s is not None and of_one_rank.step_s == pytest.approx(max(closed_s, candidate.estimate.step_s))
        told[can_restart] = at_next_loss.cost_s, candidate.reason
    assert told[False][0] - told[True][0] == pytest.approx(900.0 - 9.0)
    assert "ends the job in 100 % of cases" in told[False][1] and "start again" not in told[False][1]
    assert "has all ranks start again in 100 % of cases" in told[True][1] and "ends the job" not in told[True][1]


def test_no_plan_is_better_for_leading_to_a_restart() -> None:
    """One micro-batch is quickest on one worker, as stages cost transfers: a restart, which could lead there, is no reason to
    take more stages."""
    recovery = Recovery(spawn_s=0.5, save_s=10.0)
    of = replace(job(6, 6, n_micro_batches=1), recovery=recovery)
    slow = replace(of, cluster=replace(of.cluster, intra_host=Link(0.1, 1e9), inter_host=Link(0.1, 1e9)))
    known = situation(slow, None, range(4), seconds_to_change=443.0, aim=Aim(protect=Protect.NONE))
    objectives = []
    for layout in ("1x2", "1x3", "1x4"):
        chosen = best(initial_plan(replace(known, can_restart=True), layout))
        assert chosen is not None and chosen.estimate is not None and chosen.at_next_loss is not None
        ended = [loss.step_s for loss in chosen.at_next_loss.next_losses if loss.restart_s > 0 and loss.step_s is not None]
        assert ended and min(ended) >= chosen.estimate.step_s
        objectives.append(chosen.estimate.objective)
    assert objectives == sorted(objectives, reverse=True)


@pytest.mark.parametrize("n_workers", [5, 9, 16, 17, 31, 32])
def test_the_quick_best_is_near_the_best_layout(n_workers: int) -> None:
    of = unsplit(catalog.load_job("gpt3-3.35b-a100-32").profile)
    shapes = shapes_of(of, of.global_batch)
    found = shapes.closed_s(shapes.count(layouts(shapes, n_workers, 1)[0]))
    assert found * (1 - 1e-9) <= quick_best_s(shapes, n_workers) < 1.1 * found


@pytest.mark.parametrize(
    ("name", "part", "n_workers"),
    [
        ("gpt3-3.35b-a100-32", 0.3, 24),
        ("gpt3-3.35b-a100-32", 1.0, 31),
        ("gpt3-6.7b-a100-32", 1.0, 24),
    ],
)
def test_what_follows_a_loss_is_priced_as_what_will_be_found_with_backwards_in_halves(
    name: str, part: float, n_workers: int
) -> None:
    """With all memory and with so much of it; priced in 1F1B it would be 3 to 9 % slower."""
    of = catalog.load_job(name).profile
    of = replace(of, cluster=replace(of.cluster, memory_bytes=round(part * of.cluster.memory_bytes)))
    start = situation(of, None, range(n_workers))
    found = best(initial_plan(start, "auto"))
    assert found is not None and found.plan is not None and found.estimate is not None
    assert found.plan.schedule.rule == "split"
    assert closed_step_s(start, n_workers) == pytest.approx(found.estimate.step_s, rel=0.025)
    assert closed_step_s(replace(start, profile=unsplit(of)), n_workers) > 1.03 * found.estimate.step_s


@pytest.mark.parametrize("cores", [None, 4])
def test_halves_that_take_longer_than_the_whole_are_not_expected_where_they_gain_nothing(cores: int | None) -> None:
    of = replace(job(4, 2, n_micro_batches=8), halves_scale=1.5)
    of = replace(of, cluster=replace(of.cluster, cores=cores))
    for n_workers in (2, 3, 4):
        start = situation(of, None, range(n_workers))
        found = best(initial_plan(start, "auto"))
        assert found is not None and found.plan is not None and found.estimate is not None
        assert found.plan.schedule.rule == "1f1b" and len(found.plan.pipelines[0].stages) > 1
        assert closed_step_s(start, n_workers) == pytest.approx(found.estimate.step_s, rel=0.03)


def test_where_too_few_are_left_for_any_layout_the_next_loss_leaves_nothing() -> None:
    of = job(6, 2)
    found = [c for c in initial_plan(situation(of, None, range(3)), "auto") if c.plan is not None]
    assert found
    assert {loss.step_s for c in found if c.at_next_loss is not None for loss in c.at_next_loss.next_losses} == {None}


# -- jobs that go on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "n_fit", "n_workers", "n_micro_batches"),
    [
        *((4, 4, 5, 2), (6, 3, 5, 5), (5, 5, 4, 5)),
        *(
            pytest.param(*job, marks=pytest.mark.soak)
            for job in [(4, 4, 5, 5), (4, 2, 6, 2), (4, 2, 6, 5), (6, 3, 5, 2), (5, 5, 4, 2), (6, 2, 7, 2), (6, 2, 7, 5)]
        ),
    ],
)
def test_a_second_holder_is_kept_after_any_losses_as_long_as_memory_has_room_for_one(
    n_layers: int, n_fit: int, n_workers: int, n_micro_batches: int
) -> None:
    """All sequences of losses of one rank. Two copies of the model fit n workers if n is twice what one needs at least."""
    of = job(n_layers, n_fit, n_micro_batches)
    least = -(-n_layers // n_fit)
    seen: set[tuple[object, ...]] = set()

    def go_on(plan: Plan) -> None:
        alive = without(plan)
        layout = tuple((stage.worker, stage.first, stage.stop) for pipeline in plan.pipelines for stage in pipeline.stages)
        if (layout, plan.idle) in seen:
            return
        seen.add((layout, plan.idle))
        for lost in alive:
            left = without(plan, lost)
            if not keeps_every_layer(plan, [lost]):
                assert len(alive) < 2 * least, f"{layout_of(plan)} of {len(alive)} ends with rank {lost}"
            elif len(left) >= least:
                go_on(chosen_of(search(situation(of, plan, left))))

    go_on(chosen_of(initial_plan(situation(of, None, range(n_workers)), "auto")))
    assert len(seen) > 1


def seventeen() -> tuple[Profile, Plan]:
    """A model like GPT-3 2.7B (Brown et al. 2020, table 2.1) on 18 A100, one a node. Its embedding is large and links are slow,
    so that one pipeline, which reduces nothing, is the fastest there is for 17."""
    cluster = catalog._read("a100-32", "clusters", catalog.ClusterFile)
    cluster = replace(cluster, ranks_per_node=1, inter_host=replace(cluster.inter_host, bandwidth=2e9))
    model = catalog.ModelFile("like gpt3-2.7b", n_blocks=32, hidden=2560, sequence=2048, vocabulary=104_000)
    of = unsplit(catalog.analytic(model, cluster, 80, 1))
    return of, chosen_of(initial_plan(situation(of, None, range(18)), "auto"))


def test_a_layout_that_the_next_loss_ends_is_not_taken_for_a_hundredth() -> None:
    of, plan = seventeen()
    after = situation(of, plan, without(plan, 7), seconds_to_change=86400.0, aim=Aim(protect=Protect.NONE))

    papers, ours = best(search(replace(after, aim=PAPER))), best(search(after))

    assert papers is not None and papers.plan is not None and layout_of(papers.plan) == "1x17"
    assert ours is not None and ours.plan is not None and ours.at_next_loss is not None and ours.at_next_loss.n_holders >= 2
    assert papers.estimate is not None and ours.estimate is not None
    assert papers.estimate.step_s < ours.estimate.step_s < 1.01 * papers.estimate.step_s
    exposed = [c for c in search(after) if c.plan is not None and layout_of(c.plan) == "1x17"]
    assert all("one rank alone holds some layer" in c.reason and "ends the job in" in c.reason for c in exposed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_a_job_of_seventeen_goes_on_through_twelve_losses(seed: int) -> None:
    of, plan = seventeen()
    draw = random.Random(seed)
    for _ in range(12):
        plan = chosen_of(search(situation(of, plan, without(plan, draw.choice(without(plan))))))
    assert len(without(plan)) == 6


@pytest.mark.parametrize(
    ("n_layers", "n_micro_batches", "per_node", "bandwidth"), [(7, 12, 5, 1e9), (9, 20, 4, 3e8), (13, 12, 5, 3e8)]
)
def test_a_first_layout_survives_the_loss_of_a_node_where_that_costs_little(
    n_layers: int, n_micro_batches: int, per_node: int, bandwidth: float
) -> None:
    """On two nodes, where in the fastest all holders of some layer are on one of them."""
    rows = [
        layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=10**6, gradient_bytes=10**6, output_bytes=10**4)
        for i in range(n_layers)
    ]
    memory_bytes = (n_layers // 2 + 1) * 2 * 10**6 + 10**5
    inter = Link(1e-5, bandwidth)
    of = profile(rows, n_micro_batches, intra=LINK, inter=inter, memory_bytes=memory_bytes, ranks_per_node=per_node)
    of = unsplit(of)
    start = situation(of, None, range(2 * per_node))
    nodes = (range(per_node), range(per_node, 2 * per_node))

    ours, papers = chosen_of(initial_plan(start, "auto")), chosen_of(initial_plan(replace(start, aim=PAPER), "auto"))

    assert not all(keeps_every_layer(papers, node) for node in nodes)
    assert all(keeps_every_layer(ours, node) for node in nodes)
    assert ours.estimate is not None and papers.estimate is not None
    assert ours.estimate.step_s < 1.05 * papers.estimate.step_s


# -- what has to be survived ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("survive", [0, 1, 2, 3])
def test_what_is_asked_for_is_survived_wherever_it_hits(survive: int) -> None:
    of = job(4, 4, ranks_per_node=2)
    plan = chosen_of(initial_plan(situation(of, None, range(8), aim=Aim(survive=survive)), "auto"))
    assert all(keeps_every_layer(plan, lost) for lost in combinations(range(8), survive))
    nodes = [(rank, rank + 1) for rank in range(0, 8, 2)]
    safe = chosen_of(initial_plan(situation(of, None, range(8), aim=Aim(survive_nodes=survive)), "auto"))
    assert all(keeps_every_layer(safe, sum(lost, ())) for lost in combinations(nodes, survive))


def test_after_losses_as_much_as_can_be_is_survived() -> None:
    of = job(4, 2)
    aim = Aim(survive=2)
    plan = chosen_of(initial_plan(situation(of, None, range(6), aim=aim), "auto"))
    assert layout_of(plan) == "3x2"
    for lost in (1, 4):
        plan = chosen_of(search(situation(of, plan, without(plan, lost), aim=aim)))
        assert all(keeps_every_layer(plan, [rank]) for rank in without(plan)), layout_of(plan)


@pytest.mark.parametrize(
    ("aim", "layout", "error"),
    [
        (Aim(survive=3), "auto", "--survive 3: no layout of 6 ranks does: some layer has 3 of the 4 holders that it takes"),
        (
            Aim(survive=1, protect=Protect.NONE),
            "1x6",
            "--survive 1: layout 1x6 does not: some layer has 1 of the 2 holders that it takes",
        ),
        (
            Aim(survive_nodes=2),
            "auto",
            "--survive-nodes 2: no layout of 6 ranks does: some layer has its holders on 2 of the 3",
        ),
    ],
)
def test_what_no_layout_survives_is_an_error(aim: Aim, layout: str, error: str) -> None:
    of = job(6, 3, ranks_per_node=3)
    with pytest.raises(UsageError) as caught:
        initial_plan(situation(of, None, range(6), aim=aim), layout)
    assert caught.value.what.startswith(error) and caught.value.help


def test_the_loss_of_the_last_holder_is_still_an_error() -> None:
    of = job(4, 4)
    plan = first_plan(of, "1x2", 2)
    with pytest.raises(StateLost):
        search(situation(of, plan, [1]))
