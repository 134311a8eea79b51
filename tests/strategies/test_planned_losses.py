"""Losses that are alike: one search answers all of a class. Against all permutations, and against searches for each loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations, product
from math import comb

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import PlanError, StateLost
from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.pipelines import blocks_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from odyssey.plan.renaming import renamed
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Link, Profile
from strategies.search import best, initial_plan, search
from strategies.search.loss_classes import LossClasses
from strategies.search.planned_losses import MOST_PAIRS, LossKind, answer_for, key_of, losses, symmetries
from strategies.situation import Situation
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, without

LAYOUTS = ["2x3", "3x2", "4x1", "3+2+1", "2x2", "2+2+1", "1x4", "2x1", "3x1+2"]


def job(global_batch: int, micro_batch: int = 1, nodes_per_host: int = 1, uncut: str = "it draws random numbers") -> Profile:
    rows = [layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=10**6, gradient_bytes=10**6) for i in range(6)]
    slow, fast = Link(1e-4, 1e8), Link(1e-5, 1e9)
    of = profile(rows, global_batch, micro_batch, intra=fast, inter=slow, memory_bytes=10**9, ranks_per_node=2)
    return replace(of, cluster=replace(of.cluster, nodes_per_host=nodes_per_host), uncut=uncut)


def whole_of(of: Profile, plan: Plan, node_of: Mapping[int, int]) -> Situation:
    return replace(situation(of, plan, without(plan)), node_of=dict(node_of))


def after(whole: Situation, lost: tuple[int, ...], respawnable: tuple[int, ...] = ()) -> Situation:
    plan = whole.plan
    assert plan is not None
    lost_them = situation(whole.profile, plan, without(plan, *lost), respawnable=respawnable)
    return replace(lost_them, node_of=whole.node_of, slow=whole.slow)


@st.composite
def wholes(draw: st.DrawFn, *, is_regular: bool = False) -> Situation:
    """A job that runs, by a first plan or by one that has lost ranks."""
    of = job(
        *draw(st.sampled_from([(6, 1), (7, 1), (12, 1), (23, 2)])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(["", "no"])),
    )
    layout = draw(st.sampled_from(LAYOUTS))
    n_workers = {"2x3": 6, "3x2": 6, "3+2+1": 6, "2+2+1": 5, "3x1+2": 5, "2x1": 2}.get(layout, 4) + draw(st.integers(0, 2))
    plan = first_plan(of, layout, n_workers)
    if draw(st.booleans()):
        table = initial_plan(situation(of, None, range(n_workers)), layout)
        plan = draw(st.sampled_from([candidate.plan for candidate in table if candidate.plan is not None]))
    if is_regular:
        per_node = draw(st.sampled_from([1, 2, 3, 1000]))
        node_of = {worker: worker // per_node for worker in range(n_workers)}
    else:
        node_of = {worker: draw(st.integers(0, 3)) for worker in range(n_workers)}
    whole = whole_of(of, plan, node_of)
    if not is_regular and draw(st.booleans()):
        lost = draw(st.integers(0, n_workers - 1))
        try:
            table = search(after(whole, (lost,)))
        except StateLost:
            assume(False)
        found = [candidate.plan for candidate in table if candidate.plan is not None]
        whole = whole_of(of, draw(st.sampled_from(found)), node_of)
    slow = draw(st.dictionaries(st.integers(0, n_workers - 1), st.sampled_from([1.5, 2.0]), max_size=2))
    return replace(whole, slow=slow)


def symmetries_by_trial(whole: Situation) -> Iterator[dict[int, int]]:
    """Every permutation of pipelines and idle workers that leaves all as it is and as fast, by trying them all."""
    plan = whole.plan
    assert plan is not None
    pipelines = list(plan.pipelines)
    fixed = {plan.home[route.micro_batch] for route in plan.routes} | {plan.place[route.worker][0] for route in plan.routes}
    fixed |= {plan.place[worker][0] for worker in plan.schedule.order_of}

    def look(p: int) -> object:
        its = pipelines[p]
        return [(stage.first, stage.stop) for stage in its.stages], len(its.micro_batches), plan.samples.n_in(plan.pipelines[p])

    n = len(pipelines)
    per_host = whole.profile.cluster.nodes_per_host
    for order, idle in product(permutations(range(n)), permutations(plan.idle)):
        if any(p != q and (p in fixed or look(p) != look(q)) for p, q in enumerate(order)):
            continue
        names = dict(zip(plan.idle, idle, strict=True))
        for p, q in enumerate(order):
            names |= {a.worker: b.worker for a, b in zip(pipelines[p].stages, pipelines[q].stages, strict=True)}
        names.pop(None, None)  # type: ignore[call-overload]
        node_of, slow = whole.node_of, whole.slow
        if all(slow.get(a, 1.0) == slow.get(b, 1.0) for a, b in names.items()) and all(
            (node_of[a] // size == node_of[b] // size) == (node_of[names[a]] // size == node_of[names[b]] // size)
            for a, b in combinations(names, 2)
            for size in (1, per_host)
        ):
            yield names


def alike_by_trial(whole: Situation, of: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(names[worker] for worker in of) for names in symmetries_by_trial(whole)}


def some_losses(whole: Situation) -> list[tuple[int, ...]]:
    """Lose each rank, each two, and of each node but the only one."""
    ranks = whole.alive
    nodes: dict[int, list[int]] = {}
    for worker in ranks:
        nodes.setdefault(whole.node_of[worker], []).append(worker)
    of_nodes = map(tuple, nodes.values()) if len(nodes) > 1 else ()
    return [*((rank,) for rank in ranks), *combinations(ranks, 2), *of_nodes]


# -- which are alike -----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(wholes())
def test_losses_of_one_class_are_alike(whole: Situation) -> None:
    alike = symmetries(whole)
    first: dict[bytes, tuple[int, ...]] = {}
    for lost in some_losses(whole):
        found = first.setdefault(alike.key(lost), lost)
        names = alike.names(found, lost)
        if len(found) != len(lost) or frozenset(lost) not in alike_by_trial(whole, found):
            pytest.fail(f"{lost} is not as {found}")
        assert names is not None
        assert {worker: names.get(worker, worker) for worker in whole.alive} in list(symmetries_by_trial(whole))
        assert {names.get(worker, worker) for worker in found} == set(lost)


@settings(max_examples=examples(20))
@given(wholes(is_regular=True))
def test_losses_that_are_alike_are_of_one_class_where_nodes_are_filled_in_turn(whole: Situation) -> None:
    alike = symmetries(whole)
    for lost in some_losses(whole):
        keys = {alike.key(tuple(other)) for other in alike_by_trial(whole, lost)}
        assert keys == {alike.key(lost)}


@settings(max_examples=examples(20))
@given(wholes(), st.booleans())
def test_classes_hold_every_loss_once(whole: Situation, may_respawn: bool) -> None:
    alike = symmetries(whole)
    found = losses(alike, may_respawn)
    n = len(whole.alive)
    n_nodes = len({whole.node_of[worker] for worker in whole.alive})
    singles = [loss for loss in found.values() if loss.kind is LossKind.RANK]
    assert len({key_of(alike, (rank,), may_respawn) for rank in whole.alive}) == len(singles)
    assert sum(loss.n_alike for loss in singles) == n
    for key, loss in found.items():
        assert key == key_of(alike, loss.lost, loss.may_return)
    pairs = {key_of(alike, pair, may_respawn): 0 for pair in combinations(whole.alive, 2)}
    for pair in combinations(whole.alive, 2):
        pairs[key_of(alike, pair, may_respawn)] += 1
    for key, n_alike in pairs.items():
        if key in found and found[key].kind is LossKind.PAIR:
            assert found[key].n_alike == n_alike
        else:
            assert key in found or len(pairs) > MOST_PAIRS
    if n_nodes > 1:
        nodes = {key_of(alike, its, False) for its in alike.on_nodes()}
        assert nodes <= found.keys()
    of_several = [loss.kind for loss in found.values() if loss.n_alike > 1]
    of_one = [loss.kind for loss in found.values() if loss.n_alike == 1]
    assert of_several == sorted(of_several) and of_one == sorted(of_one)


def test_thousands_of_ranks_are_a_few_classes() -> None:
    """512 pipelines of 4 stages, two to a node of 8: one class for each stage, one node, and pairs by where they are."""
    of = replace(profile(8, 4096), cluster=replace(profile(8, 1).cluster, ranks_per_node=8))
    plan = first_plan(of, "512x4", 2048)
    found = list(losses(symmetries(replace(situation(of, plan, plan.workers), node_of={})), False).values())
    assert [(len(loss.lost), loss.n_alike) for loss in found[:5]] == [(1, 512)] * 4 + [(8, 256)]
    assert sum(loss.n_alike for loss in found[5:]) == comb(2048, 2)
    assert len(found[5:]) == 10 + 10 + 6  # on two nodes, in two pipelines of a node, in one pipeline


def test_pipelines_may_be_on_nodes_in_any_order() -> None:
    """Two groups of three pipelines, on two nodes each: the second group has its last two the other way round."""
    on = [(0, 0), (0, 1), (1, 0), (2, 2), (3, 2), (2, 3)]
    of = job(12)
    plan = first_plan(of, "6x2", 12)
    node_of = {
        stage.worker: node
        for its, row in zip(plan.pipelines, on, strict=True)
        for stage, node in zip(its.stages, row, strict=True)
        if stage.worker is not None
    }
    alike = LossClasses(plan, plan.workers, node_of, of.cluster)
    for p, q in [(0, 3), (1, 5), (2, 4)]:
        for a, b in zip(plan.pipelines[p].stages, plan.pipelines[q].stages, strict=True):
            assert a.worker is not None and b.worker is not None
            assert alike.key((a.worker,)) == alike.key((b.worker,))
            assert alike.names((a.worker,), (b.worker,)) is not None


def test_a_pipeline_that_takes_others_in_is_like_no_other() -> None:
    of = job(12)
    plan = first_plan(of, "4x1", 4)
    whole = whole_of(of, plan, dict.fromkeys(range(4), 0))
    table = search(after(whole, (0,)), "reroute")
    rerouted = table[0].plan
    assert rerouted is not None and rerouted.routes
    taking = {route.worker for route in rerouted.routes}
    alike = symmetries(whole_of(of, rerouted, dict.fromkeys(range(4), 0)))
    assert len({alike.key((rank,)) for rank in taking}) == len(taking)


def test_names_that_leave_nodes_as_they_are_not_are_refused() -> None:
    of = job(12)
    plan = first_plan(of, "4x1", 4)
    alike = LossClasses(plan, range(4), {0: 0, 1: 0, 2: 1, 3: 2}, of.cluster)
    assert alike.is_symmetry({0: 1, 1: 0}) and alike.is_symmetry({2: 3, 3: 2})
    assert not alike.is_symmetry({0: 2, 2: 0})
    assert not alike.is_symmetry({0: 1})


# -- the plan for one is that for the others --------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(wholes(), st.randoms(use_true_random=False), st.booleans())
def test_a_renamed_table_is_one_for_the_other_loss(whole: Situation, draw: object, returns: bool) -> None:
    alike = symmetries(whole)
    classes: dict[bytes, list[tuple[int, ...]]] = {}
    for lost in some_losses(whole):
        classes.setdefault(alike.key(lost), []).append(lost)
    several = [its for its in classes.values() if len(its) > 1]
    assume(several)
    its = draw.choice(several)  # type: ignore[attr-defined]
    found, lost = its[0], draw.choice(its[1:])  # type: ignore[attr-defined]
    names = alike.names(found, lost)
    assert names is not None
    there, here = (after(whole, gone, gone if returns else ()) for gone in (found, lost))
    try:
        table = search(there)
    except StateLost:
        with pytest.raises(StateLost):
            search(here)
        return
    for candidate in answer_for(table, names, here.generation, here.step):
        plan, estimate = candidate.plan, candidate.estimate
        if plan is None or estimate is None:
            continue
        prove(plan, here.held)
        assert set(plan.workers) | set(plan.idle) == set(here.alive) | set(plan.spawned)
        priced = price(plan, whole.profile, seconds_to_change=3600.0, node_of=whole.node_of, slow=whole.slow)
        assert priced.step_s == pytest.approx(estimate.step_s)
        assert priced.peak_bytes == estimate.peak_bytes
        assert priced.transition.moves_s == pytest.approx(estimate.transition.moves_s)
    mine, direct = best(table), best(search(here))
    assert mine is not None and direct is not None and mine.estimate is not None and direct.estimate is not None
    # which of several ways that look as good a search tries depends on the order of pipelines: of 1,310 cases one was 0.8 % off
    assert mine.estimate.objective == pytest.approx(direct.estimate.objective, rel=0.02)


@settings(max_examples=examples(20))
@given(wholes(), st.data())
def test_a_plan_under_other_names_is_the_same_plan(whole: Situation, data: st.DataObject) -> None:
    plan = whole.plan
    assert plan is not None
    everyone = sorted({*plan.workers, *plan.idle})
    names = dict(zip(everyone, data.draw(st.permutations(everyone)), strict=True))
    other = renamed(plan, names)
    assert [[(stage.worker, stage.first, stage.stop) for stage in its.stages] for its in other.pipelines] == [
        [(None if stage.worker is None else names[stage.worker], stage.first, stage.stop) for stage in its.stages]
        for its in plan.pipelines
    ]
    assert other.blocks == blocks_of(other.pipelines)
    assert [(move.layer, names[move.source], names[move.target]) for move in plan.moves] == [
        (move.layer, move.source, move.target) for move in other.moves
    ]
    assert {names[worker]: order.ops for worker, order in plan.schedule.order_of.items()} == {
        worker: order.ops for worker, order in other.schedule.order_of.items()
    }
    back = renamed(other, {new: old for old, new in names.items()})
    assert back.moves == plan.moves and replace(back, move_runs=plan.move_runs) == plan
    prove(other)


def test_pipelines_that_keep_other_layers_are_not_alike() -> None:
    of = job(12)
    plan = first_plan(of, "3x2", 6)
    last = plan.n_layers
    first = plan.pipelines[0].stages[0].stop
    for keeps, n_classes in (([(0, first, last)], 4), ([(w, first, last) for w in (0, 2, 4)], 2)):
        kept = replace(plan, keep_runs=keep_runs(Keep(Worker(w), a, b) for w, a, b in keeps))
        alike = symmetries(whole_of(of, kept, dict.fromkeys(range(6), 0)))
        assert len({key_of(alike, (Worker(w),), False) for w in range(6)}) == n_classes
        names = alike.names((Worker(2),), (Worker(4),))
        assert names is not None
        other = renamed(kept, names)
        assert other.keeps == {names.get(worker, worker): layers for worker, layers in kept.keeps.items()} == kept.keeps


def test_names_that_do_not_fit_are_found_out_by_the_proof() -> None:
    of = job(12)
    plan = first_plan(of, "2x2", 4)
    whole = whole_of(of, plan, dict.fromkeys(range(4), 0))
    table = answer_for(search(after(whole, (0,))), {0: 1, 1: 0}, plan.generation + 1, 0)
    held = after(whole, (1,)).held
    wrong = 0
    for candidate in table:
        if candidate.plan is not None:
            try:
                prove(candidate.plan, held)
            except PlanError:
                wrong += 1
    assert wrong


def test_reasons_are_those_of_the_loss_that_happened() -> None:
    of = job(12)
    plan = first_plan(of, "2x2", 4)
    whole = whole_of(of, plan, dict.fromkeys(range(4), 0))
    alike = symmetries(whole)
    for found, lost in [((0,), (2,)), ((0, 3), (2, 1))]:
        names = alike.names(found, lost)
        assert names is not None
        answer = answer_for(search(after(whole, found)), names, 1, 0)
        assert {c.strategy: c.reason for c in answer} == {c.strategy: c.reason for c in search(after(whole, lost))}


def test_the_loss_of_a_slow_worker_is_like_no_other_and_neither_is_that_of_its_pipeline() -> None:
    """Four pipelines of two stages on one node: the slow worker, its neighbour, and six more of two kinds."""
    of = job(12)
    plan = first_plan(of, "4x2", 8)
    whole = replace(whole_of(of, plan, dict.fromkeys(range(8), 0)), slow={2: 1.5})
    of_ranks = {loss.lost: loss.n_alike for loss in losses(symmetries(whole), False).values() if loss.kind is LossKind.RANK}
    slow, neighbour = (2,), next((w,) for p in plan.pipelines if 2 in p.workers for w in p.workers if w != 2)
    assert sorted(of_ranks.values()) == [1, 1, 3, 3]
    assert of_ranks[slow] == of_ranks[neighbour] == 1
