"""Layouts: splits, shares and the choice of lengths against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.layout import parse_layout
from odyssey.plan.pipelines import Stage
from perfmodel.profile import catalog
from perfmodel.profile.profile import Link, Profile
from strategies.building import compose
from strategies.building.closed_form import Shape, distribute, slowest_s
from strategies.building.compose import assign
from strategies.building.layout_to_plan import realise
from strategies.building.layouts import layouts
from strategies.building.moves import moves
from strategies.building.placement_score import PlacementScore
from strategies.building.shapes import Shapes
from strategies.search import initial_plan, search
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, without

costs = st.floats(0.05, 5.0)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("auto", None), ("2x4", (4, 4)), ("1x1", (1,)), ("3+2+3", (3, 2, 3)), ("5", (5,)), ("2x4+3", (4, 4, 3))],
)
def test_a_layout_is_read_as_lengths(text: str, lengths: tuple[int, ...] | None) -> None:
    assert parse_layout(text) == lengths


@pytest.mark.parametrize("text", ["", "0x4", "2x0", "2x", "x4", "3+", "3+0", "-1", "2 x 4", "Auto"])
def test_anything_else_is_no_layout(text: str) -> None:
    with pytest.raises(UsageError, match="is no layout"):
        parse_layout(text)


# -- layers to stages --------------------------------------------------------------------------------------------------


def all_splits(n_layers: int, n_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, n_layers) for inner in combinations(range(1, n_layers), n_stages - 1)]


@given(seconds=st.lists(costs, min_size=1, max_size=8), n_stages=st.integers(1, 8))
def test_a_split_has_the_least_bottleneck_of_all_splits(seconds: list[float], n_stages: int) -> None:
    of = profile([layer(str(i), s, 0, 0) for i, s in enumerate(seconds)], 4)
    shape = Shapes(of, 4).of(n_stages)
    if n_stages > len(seconds):
        assert shape is None
        return
    best = min(max(sum(seconds[a:b]) for a, b in pairwise(cuts)) for cuts in all_splits(len(seconds), n_stages))
    assert shape is not None
    assert shape.bottleneck_s == pytest.approx(best, rel=1e-5)
    assert [a for a, _ in shape.ranges] == [0, *(b for _, b in shape.ranges[:-1])]
    assert shape.ranges[-1][1] == len(seconds) and all(a < b for a, b in shape.ranges)


@given(
    sizes=st.lists(st.tuples(costs, st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=7),
    n_stages=st.integers(1, 5),
    memory=st.integers(20, 400),
)
@example(sizes=[(1.0, 0, 0), (1.0, 0, 0), (1.0, 0, 0), (1.0, 0, 11), (1.0, 0, 0)], n_stages=4, memory=20)
def test_a_split_fits_the_memory_and_is_found_whenever_one_does(
    sizes: list[tuple[float, int, int]], n_stages: int, memory: int
) -> None:
    rows = [layer(str(i), s, 0, 0, parameter_bytes=state, activation_bytes=act) for i, (s, state, act) in enumerate(sizes)]
    shape = Shapes(profile(rows, 3, memory_bytes=memory), 3).of(n_stages)

    def fits(cuts: tuple[int, ...]) -> bool:
        return all(
            sum(state + min(n_stages - s, 3) * act for _, state, act in sizes[a:b]) <= memory
            for s, (a, b) in enumerate(pairwise(cuts))
        )

    feasible = [cuts for cuts in all_splits(len(sizes), n_stages) if fits(cuts)] if n_stages <= len(sizes) else []
    if shape is None:
        assert not feasible
        return
    assert fits((0, *(b for _, b in shape.ranges)))
    best = min(max(sum(s for s, _, _ in sizes[a:b]) for a, b in pairwise(cuts)) for cuts in feasible)
    assert shape.bottleneck_s == pytest.approx(best, rel=1e-5)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6),
    sent=st.integers(0, 20),
    logits=st.integers(0, 200),
    n_stages=st.integers(1, 4),
    n_micro_batches=st.integers(1, 5),
    ties=st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=2), st.integers(1, 100)), max_size=3),
)
def test_a_split_is_found_from_the_memory_on_that_the_best_one_takes_by_its_price(
    sizes: list[tuple[int, int]],
    sent: int,
    logits: int,
    n_stages: int,
    n_micro_batches: int,
    ties: list[tuple[set[int], int]],
) -> None:
    n_layers, n_stages = len(sizes), min(n_stages, len(sizes))
    rows = [
        layer(str(i), parameter_bytes=state, activation_bytes=act, output_bytes=sent if i < n_layers - 1 else logits)
        for i, (state, act) in enumerate(sizes)
    ]
    within = {tuple(sorted(tie)): size for tie, size in ties if max(tie) < n_layers}
    of = profile(rows, n_micro_batches, ties=tuple(within), tie_bytes=tuple(within.values()))
    start = situation(of, None, range(n_stages))

    def peak_bytes(cuts: tuple[int, ...]) -> int:
        stages = [Stage(worker, *layers) for worker, layers in enumerate(pairwise(cuts))]
        plan = compose.compose(start, "initial", [stages], [n_micro_batches])
        return price(plan, of, seconds_to_change=1.0).peak_bytes

    least = min(map(peak_bytes, all_splits(n_layers, n_stages)))
    found = {
        memory: Shapes(replace(of, cluster=replace(of.cluster, memory_bytes=memory)), n_micro_batches).of(n_stages)
        for memory in (least - 1, least)
    }
    assert found[least - 1] is None and found[least] is not None


def test_memory_for_halves_is_what_layers_that_share_a_parameter_leave() -> None:
    own = {"parameter_bytes": 10, "optimizer_bytes": 20, "activation_bytes": 100}
    rows = [layer(str(i), **own) for i in range(4)]
    tied = profile(rows, 8, ties=((0, 1),), tie_bytes=(100,), memory_bytes=1000)
    alone = replace(rows[0], parameter_bytes=110, gradient_bytes=100, optimizer_bytes=220)
    shapes, other = Shapes(tied, 8), Shapes(profile([alone, *rows[1:]], 8, memory_bytes=1000), 8)
    assert shapes.halves.of(shapes.known(2)) == other.halves.of(other.known(2))
    assert shapes.halves.of(shapes.known(2)) != Shapes(profile(rows, 8), 8).halves.of(shapes.known(2))


def test_slack_is_spread_over_the_stages() -> None:
    shape = Shapes(profile(24, 8), 8).of(7)
    assert shape is not None
    assert sorted(b - a for a, b in shape.ranges) == [3, 3, 3, 3, 4, 4, 4]


# -- micro-batches to pipelines ----------------------------------------------------------------------------------------


@given(
    speeds=st.lists(st.tuples(st.floats(0.5, 3), st.integers(1, 6)), min_size=1, max_size=4),
    n_micro_batches=st.integers(1, 12),
)
def test_shares_make_the_slowest_pipeline_as_fast_as_can_be(speeds: list[tuple[float, int]], n_micro_batches: int) -> None:
    shapes = [Shape((), turn * n, turn) for turn, n in speeds]
    shares = distribute(shapes, n_micro_batches)
    if n_micro_batches < len(shapes):
        assert shares is None
        return
    assert shares is not None and sum(shares) == n_micro_batches and min(shares) >= 1
    slowest = max(shape.seconds(share) for shape, share in zip(shapes, shares, strict=True))
    best = min(
        max(shape.seconds(m) for shape, m in zip(shapes, split, strict=True))
        for split in product(range(1, n_micro_batches + 1), repeat=len(shapes))
        if sum(split) == n_micro_batches
    )
    assert slowest == pytest.approx(best)


def test_a_pipeline_that_takes_longer_than_all_others_together_gets_one() -> None:
    assert distribute([Shape((), 1e12, 1.0), Shape((), 1.0, 1.0)], 8) == [1, 7]


def test_a_turn_that_is_lost_in_rounding_ends_no_search() -> None:
    shape = Shape(((0, 1),), 8296.724779090593, 1.3682150212064019e-06)
    assert slowest_s({shape: 4}, 8) == pytest.approx(shape.fill_s)


@example([(2.0, 925235163.8521541), (946326482.6605952, 1.7795564353352054e-09)], 11)  # more turns fit by rounding than can be
@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), min_size=1, max_size=4), st.integers(1, 30))
def test_the_slowest_pipeline_is_known_in_closed_form_whatever_the_numbers(
    costs: list[tuple[float, float]], n_micro_batches: int
) -> None:
    shapes = [Shape(((0, i + 1),), fill + turn, turn) for i, (fill, turn) in enumerate(costs)]
    shares = distribute(shapes, n_micro_batches)
    if shares is None:
        return
    slowest = max(shape.seconds(share) for shape, share in zip(shapes, shares, strict=True))
    assert slowest_s(dict.fromkeys(shapes, 1), n_micro_batches) == pytest.approx(slowest)


# -- lengths -----------------------------------------------------------------------------------------------------------


def partitions(n: int, largest: int) -> list[tuple[int, ...]]:
    if n == 0:
        return [()]
    return [(k, *rest) for k in range(min(n, largest), 0, -1) for rest in partitions(n - k, k)]


def exhaustive_step_s(of: Profile, n_workers: int, n_micro_batches: int) -> float:
    """The best exact step time over every layout of at most so many workers."""
    shapes = Shapes(of, n_micro_batches)
    start = situation(of, None, range(n_workers))
    steps = []
    for n in range(1, n_workers + 1):
        for lengths in partitions(n, len(of.layers)):
            chosen = [shapes.of(k) for k in lengths]
            known = [shape for shape in chosen if shape is not None]
            if len(known) == len(lengths) <= n_micro_batches:
                proposal = realise(PlacementScore(start, shapes), "test", [(s.ranges, [None] * len(s.ranges)) for s in known])
                assert proposal.plan is not None
                steps.append(price(proposal.plan, of, seconds_to_change=1e9).step_s)
    return min(steps)


@settings(max_examples=examples(25))
@given(
    seconds=st.lists(st.floats(0.3, 3.0), min_size=3, max_size=7),
    n_workers=st.integers(2, 6),
    n_micro_batches=st.integers(2, 12),
)
def test_the_layout_that_is_found_is_within_two_percent_of_the_exhaustive_optimum(
    seconds: list[float], n_workers: int, n_micro_batches: int
) -> None:
    rows = [layer(str(i), s, s, s, gradient_bytes=10, output_bytes=1) for i, s in enumerate(seconds)]
    of = profile(rows, n_micro_batches, intra=Link(0.001, 1000.0))
    plan = first_plan(of, "1x2", n_workers)
    found = [c for c in search(situation(of, plan, range(n_workers)), "repartition") if c.estimate is not None]
    best = min(c.estimate.step_s for c in found if c.estimate is not None)
    assert best <= 1.02 * exhaustive_step_s(of, n_workers, n_micro_batches)


def test_lengths_never_need_more_workers_or_pipelines_than_there_are() -> None:
    for n_workers in (1, 3, 11, 64, 300):
        for n_micro_batches in (1, 4, 64):
            shapes = Shapes(profile(12, n_micro_batches), n_micro_batches)
            found = layouts(shapes, n_workers, 5)
            assert found
            for lengths in found:
                assert sum(lengths) <= n_workers and len(lengths) <= n_micro_batches and max(lengths) <= 12


def test_too_little_memory_for_any_split_gives_no_layout() -> None:
    rows = [layer(str(i), parameter_bytes=100) for i in range(4)]
    assert layouts(Shapes(profile(rows, 4, memory_bytes=99), 4), 8, 3) == []


# -- the first layout --------------------------------------------------------------------------------------------------


def test_the_automatic_first_layout_keeps_two_copies_of_every_layer() -> None:
    of = profile(4, 4, intra=Link(10.0, 1e9))
    chosen = initial_plan(situation(of, None, range(4)), "auto")[0]
    assert chosen.plan is not None and len(chosen.plan.pipelines) >= 2


def test_a_model_that_fits_only_once_gets_one_pipeline() -> None:
    rows = [layer(str(i), parameter_bytes=100) for i in range(4)]
    of = profile(rows, 4, memory_bytes=150)
    chosen = initial_plan(situation(of, None, range(5)), "auto")[0]
    assert chosen.plan is not None and layout_of(chosen.plan) == "1x4" and chosen.plan.idle == (4,)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("3x2", "needs 6 workers, there are 4"),
        ("1x4", "more stages than the model has layers"),
        ("4x1", "4 pipelines for 3 micro-batches"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_a_usage_error(layout: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        initial_plan(situation(profile(3, 3), None, range(4)), layout)


def test_a_layout_that_does_not_fit_the_memory_says_so() -> None:
    rows = [layer(str(i), parameter_bytes=10**9) for i in range(4)]
    table = initial_plan(situation(profile(rows, 4, memory_bytes=2 * 10**9 - 1), None, range(4)), "2x2")
    assert [c.plan for c in table] == [None]
    assert table[0].reason == "no split of 4 layers in 2 stages fits 2.0 GB each"


# -- who goes where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_single", [1, 200], ids=["by classes", "one by one"])
@given(data=st.data(), n_workers=st.integers(1, 5))
def test_survivors_go_where_the_fewest_bytes_move(most_single: int, data: st.DataObject, n_workers: int) -> None:
    n_layers = 4
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=n_layers, max_size=n_layers))
    ranges = st.tuples(st.integers(0, n_layers), st.integers(0, n_layers)).map(lambda ab: (min(ab), max(ab)))
    holds = data.draw(st.lists(ranges, min_size=n_workers, max_size=n_workers))
    wants = data.draw(st.lists(ranges.filter(lambda ab: ab[0] < ab[1]), min_size=1, max_size=n_workers))
    of = profile([layer(str(i), parameter_bytes=size) for i, size in enumerate(sizes)], 8)
    held = {w: frozenset(range(a, b)) for w, (a, b) in enumerate(holds)}
    before = first_plan(of, "1x1", n_workers)
    state = situation(of, before, range(n_workers), held=held)

    def lacking(workers: list[int]) -> int:
        return sum(sizes[x] for w, (a, b) in zip(workers, wants, strict=True) for x in range(a, b) if x not in held[w])

    def every(left: list[int], n: int) -> list[list[int]]:
        return [[w, *rest] for w in left for rest in every([x for x in left if x != w], n - 1)] if n else [[]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compose, "MANY_WORKERS", most_single)
        got = assign(state, [(a, b, None) for a, b in wants], list(range(n_workers)))
    assert len(set(got)) == len(wants)
    assert lacking(got) == min(lacking(workers) for workers in every(list(range(n_workers)), len(wants)))


def test_sources_share_the_load_and_the_same_host_is_preferred() -> None:
    rows = [layer(str(i), parameter_bytes=100) for i in range(4)]
    of = profile(rows, 8, ranks_per_node=2)
    plan = first_plan(of, "3x1", 4)
    state = situation(of, plan, [0, 1, 2, 3])
    of_new = dict.fromkeys((0, 1, 3), frozenset(range(4)))
    assert {move.source for move in moves(state, of_new)} == {2}
    apart = situation(profile(rows, 8), plan, [0, 1, 2, 3])
    sources = [move.source for move in moves(apart, of_new)]
    assert sorted(sources) in ([0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])


def test_a_worker_that_keeps_its_layers_is_not_moved() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2x2", 4)
    table = search(situation(of, plan, without(plan)), "repartition")
    same = [c.plan for c in table if c.plan is not None and layout_of(c.plan) == "2x2"]
    assert same and same[0].moves == () and same[0].pipelines == plan.pipelines


def test_more_layouts_that_are_asked_for_are_those_of_fewer_and_others() -> None:
    """Every other one is of the best in halves, so none is left out for another one of its lengths."""
    of = catalog.load_job("gpt3-3.35b@a100-32").profile
    shapes = Shapes(of, 72)
    few, many = (layouts(shapes, 22, n, rooms=(8, 7, 7)) for n in (3, 6))
    assert many[:3] == few and len(set(many)) == len(many) > 3
    assert min(many, key=lambda its: shapes.in_halves_s(shapes.count(its))) in few
