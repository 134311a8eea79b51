"""A plan as it is written: what is alike once, read as it was, small for large jobs, and refused where it is malformed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey.codec import Json, Malformed, Packed
from odyssey.plan.moves import MAX_MOVES, Keep, Move, MoveRun, keep_runs, move_runs
from odyssey.plan.pipelines import MAX_STAGES, Block, Pipeline, Stage, blocks_of, pipelines_of
from odyssey.plan.plan import Plan, Reduction, decode, encode
from odyssey.plan.proof import prove
from odyssey.protocol.frames import Deframer, frame
from odyssey.protocol.orders import Command, Prepare
from strategies.building.compose import reductions
from strategies.search import search
from tests.planning import first_plan, profile, situation, without


@st.composite
def rows(draw: st.DrawFn) -> tuple[Pipeline, ...]:
    """Some regular pipelines, some of any kind, also such as no valid plan has."""
    found: list[Pipeline] = []
    for _ in range(draw(st.integers(0, 4))):
        first = found[-1].stop_micro_batch if found and draw(st.booleans()) else draw(st.integers(-3, 9))
        share, base, along, across = (draw(st.integers(-2, 9)) for _ in range(4))
        spans = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
        for i in range(draw(st.integers(1, 5))):
            workers: list[int | None] = [base + i * along + s * across for s in range(len(spans))]
            if workers and draw(st.integers(0, 3)) == 0:
                workers[draw(st.integers(0, len(workers) - 1))] = draw(st.none() | st.integers(0, 99))
            stages = tuple(Stage(worker, *span) for worker, span in zip(workers, spans, strict=True))
            found.append(Pipeline(stages, first + i * share, first + (i + 1) * share))
    return tuple(found)


@given(rows())
def test_blocks_are_the_pipelines_that_they_were_made_of(pipelines: tuple[Pipeline, ...]) -> None:
    blocks = blocks_of(pipelines)
    assert pipelines_of(blocks) == pipelines
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(blocks), type=tuple[Block, ...]) == blocks
    assert len(blocks) <= len(pipelines)


MOVES = st.lists(st.builds(Move, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=12)


@given(MOVES)
def test_runs_are_the_moves_that_they_were_made_of(moves: list[Move]) -> None:
    assert [move for run in move_runs(moves) for move in run.moves] == moves


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 2)), unique_by=lambda its: its[:2], max_size=12))
def test_runs_are_what_is_kept(spans: list[tuple[int, int, int]]) -> None:
    keeps = [Keep(worker, first, first + n) for worker, first, n in spans]
    runs = keep_runs(keeps)
    written = [Keep(worker, run.keep.first, run.keep.stop) for run in runs for worker in run.workers]
    assert Counter((its.worker, its.first, its.stop) for its in written) == Counter(
        (its.worker, its.first, its.stop) for its in keeps
    )


def test_what_every_pipeline_keeps_alike_is_written_once_for_each_stage() -> None:
    keeps = [Keep(8 * p + s, 2 * s + 2, 2 * s + 4) for p in range(2048) for s in range(7)]
    assert len(msgspec.json.encode(keep_runs(keeps))) < 300


def grid(n_pipelines: int, n_stages: int, worker: Any) -> tuple[Pipeline, ...]:
    return tuple(
        Pipeline(tuple(Stage(worker(p, s), 2 * s, 2 * s + 2) for s in range(n_stages)), 3 * p, 3 * p + 3)
        for p in range(n_pipelines)
    )


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(lambda p, s: p * 8 + s, id="one after the other"),
        pytest.param(lambda p, s: s * 2048 + p, id="every 2048th"),
        pytest.param(lambda p, s: 16383 - (p * 8 + s), id="descending"),
        pytest.param(lambda p, s: None if s == 5 else p * 8 + s, id="a stage without workers"),
    ],
)
def test_workers_that_follow_a_rule_are_written_once(worker: Any) -> None:
    pipelines = grid(2048, 8, worker)
    blocks = blocks_of(pipelines)
    assert len(blocks) == 1 and all(len(column.workers) == 1 for column in blocks[0].columns)
    assert pipelines_of(blocks) == pipelines
    assert len(msgspec.json.encode(blocks)) < 300


def test_a_worker_out_of_the_rule_costs_no_more_than_itself() -> None:
    plain, odd = grid(2048, 8, lambda p, s: p * 8 + s), grid(2048, 8, lambda p, s: 99999 if (p, s) == (700, 3) else p * 8 + s)
    assert len(msgspec.json.encode(blocks_of(odd))) < len(msgspec.json.encode(blocks_of(plain))) + 60


def test_a_layer_that_goes_to_the_same_stage_of_every_pipeline_is_one_run() -> None:
    moves = tuple(Move(layer, 8 * p, 8 * p + 1) for layer in (4, 7) for p in range(2000))
    runs = move_runs(moves)
    assert len(runs) == 2 and tuple(move for run in runs for move in run.moves) == moves


# -- whole plans -------------------------------------------------------------------------------------------------------


@st.composite
def valid_plans(draw: st.DrawFn) -> tuple[Plan, tuple[Pipeline, ...], tuple[Move, ...], dict[int, set[int]]]:
    """A plan with the pipelines and moves that it was made of, and who holds which layers before."""
    n_layers = draw(st.integers(2, 6))
    splits = draw(st.lists(st.sets(st.integers(1, n_layers - 1), max_size=3), min_size=1, max_size=3))
    numbers = iter(draw(st.permutations(range(99))) if draw(st.booleans()) else range(99))
    pipelines: list[Pipeline] = []
    for split in splits:
        cuts, share = [0, *sorted(split), n_layers], draw(st.integers(1, 3))
        for _ in range(draw(st.integers(1, 4))):
            first = pipelines[-1].stop_micro_batch if pipelines else 0
            stages = tuple(Stage(next(numbers), a, b) for a, b in pairwise(cuts))
            pipelines.append(Pipeline(stages, first, first + share))
    holds = {stage.worker: stage for pipeline in pipelines for stage in pipeline.stages if stage.worker is not None}
    ties = draw(st.sampled_from([(), ((0, n_layers - 1),)]))
    lacks = draw(st.sets(st.sampled_from([(w, layer) for w, stage in holds.items() for layer in stage.layers])))
    held = {w: {layer for layer in stage.layers if (w, layer) not in lacks} for w, stage in holds.items()}
    held[1000] = set(range(n_layers))
    moves = tuple(Move(layer, 1000, worker) for worker, layer in draw(st.permutations(sorted(lacks))))
    n_micro_batches = pipelines[-1].stop_micro_batch
    written = Plan(
        generation=3,
        strategy="test",
        step=7,
        global_batch=2 * n_micro_batches - 1,
        micro_batch=2,
        n_layers=n_layers,
        blocks=blocks_of(pipelines),
        reductions=reductions([frozenset(stage.layers) for stage in holds.values()], n_layers, ties),
        ties=ties,
        move_runs=move_runs(moves),
        idle=(1000,),
    )
    return written, tuple(pipelines), moves, held


def groups_by_hand(plan: Plan, pipelines: Sequence[Pipeline]) -> list[tuple[set[int | None], tuple[int, ...], tuple[int, ...]]]:
    """For each reduction, everybody who holds any of it."""
    of = [{*its.layers, *(layer for tie in its.ties for layer in plan.ties[tie])} for its in plan.reductions]
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    holders = [{stage.worker for stage in stages if layers & set(stage.layers)} for layers in of]
    return [(workers, its.layers, its.ties) for workers, its in zip(holders, plan.reductions, strict=True)]


def read(plan: Plan) -> list[Plan]:
    """As it comes out of the log, and of a message."""
    (order,) = Deframer(Command).feed(frame(Prepare(plan.generation, plan, (), ())))
    return [decode(encode(plan)), order.plan]


@given(valid_plans())
def test_a_worker_is_in_the_groups_that_sum_what_it_holds(
    made: tuple[Plan, tuple[Pipeline, ...], tuple[Move, ...], dict[int, set[int]]],
) -> None:
    plan, pipelines, _, _ = made
    groups = groups_by_hand(plan, pipelines)
    for worker in (*plan.workers, 1000):
        assert plan.groups_of.get(worker, ()) == tuple(g for g, (workers, _, _) in enumerate(groups) if worker in workers)


@given(valid_plans())
def test_a_plan_is_read_as_it_was_composed(
    made: tuple[Plan, tuple[Pipeline, ...], tuple[Move, ...], dict[int, set[int]]],
) -> None:
    written, pipelines, moves, held = made
    for plan in read(prove(written, held)):
        assert plan == written
        assert plan.pipelines == pipelines and plan.moves == moves
        assert [(set(group.workers), group.layers, group.ties) for group in plan.reduce] == groups_by_hand(plan, pipelines)
        prove(plan, held)


@pytest.mark.parametrize(("layout", "n_workers", "lost"), [("2x3", 6, (4,)), ("3+2+3", 9, (0, 5)), ("6x4", 24, (7, 8, 21))])
def test_every_plan_of_a_search_is_read_as_it_was_composed(layout: str, n_workers: int, lost: tuple[int, ...]) -> None:
    of = profile(12, 36, ties=((0, 11),), tie_bytes=(8,))
    before = first_plan(of, layout, n_workers)
    state = situation(of, before, without(before, *lost), respawnable=lost[:1])
    found = [candidate.plan for candidate in search(state) if candidate.plan is not None]
    assert {plan.strategy for plan in found} >= {"reroute", "repartition"}
    for written in (before, *found):
        for plan in read(written):
            assert plan == written
            assert blocks_of(plan.pipelines) == written.blocks and move_runs(plan.moves) == written.move_runs
            prove(plan, None if written is before else state.held)


def test_a_larger_job_of_the_same_layout_has_a_plan_of_the_same_size() -> None:
    sizes = []
    for n_pipelines in (8, 256):
        sizes.append(len(encode(first_plan(profile(8, 2 * n_pipelines), f"{n_pipelines}x4", 4 * n_pipelines))))
    assert sizes[1] < sizes[0] + 50


# -- what is refused ---------------------------------------------------------------------------------------------------

GOOD = Plan(
    generation=1,
    strategy="test",
    step=0,
    global_batch=4,
    micro_batch=1,
    n_layers=2,
    blocks=blocks_of(grid(2, 1, lambda p, s: p)),
    reductions=(Reduction((0, 1), ()),),
    move_runs=(MoveRun(Move(0, 0, 1), 1, (0, 0, 0)),),
)


def block(n: int, *columns: list[Any]) -> dict[str, Any]:
    return {"n": n, "first_micro_batch": 0, "n_micro_batches": 1, "columns": columns}


@pytest.mark.parametrize(
    ("field", "value", "says", "where"),
    [
        ("blocks", [block(0)], "Expected `int` >= 1", "blocks[0].n`"),
        ("blocks", [block(10**9)], "Expected `int` <= 1048576", "blocks[0].n`"),
        ("blocks", [block(2, [0, 2, [[0, 10**9, 1]]])], "Expected `int` <= 1048576", "blocks[0].columns[0][2][0][1]`"),
        (
            "blocks",
            [block(2, [0, 2, [[0, 2, 1]]], [2, 3, [[2, 1, 1]]])],
            "stage 1 has workers for 1 of 2 pipelines",
            "blocks[0]`",
        ),
        ("blocks", [block(2, [0, 2, [[0, 2]]])], "Expected `array` of at least length 3, got 2", "blocks[0].columns[0][2][0]`"),
        ("blocks", [block(MAX_STAGES)] * 2, "2097152 stages, where at most 1048576 are taken", ""),
        ("blocks", [block(MAX_STAGES, *[[0, 2, [[0, MAX_STAGES, 1]]]] * 2)], "2097152 stages", ""),
        ("move_runs", [[[0, 0, 1], 10**9, [0, 0, 0]]], "Expected `int` <= 4194304", "move_runs[0][1]`"),
        ("move_runs", [[[0, 0, 1], MAX_MOVES, [0, 0, 0]]] * 2, "8388608 moves, where at most 4194304 are taken", ""),
        ("keep_runs", [[[0, 0, 1], 10**9, 0]], "Expected `int` <= 1048576", "keep_runs[0][1]`"),
        ("keep_runs", [[[0, 0, 1], MAX_STAGES, 1]] * 2, "keeps 2097152 spans of layers, where at most 1048576 are taken", ""),
        ("reductions", [{"layers": [], "ties": [], "round": 0}], "a reduction of nothing", "reductions[0]`"),
    ],
)
def test_what_would_expand_without_end_or_contradicts_itself_is_malformed(
    field: str, value: Any, says: str, where: str
) -> None:
    body = {**msgspec.to_builtins(GOOD), field: value}
    order = {"type": "Prepare", "generation": 1, "plan": body, "store": "", "results": [], "boundaries": []}
    for decoder, data in (
        (Json(Plan), msgspec.json.encode(body)),
        (Packed(Plan), msgspec.msgpack.encode(body)),
        (Packed(Command), msgspec.msgpack.encode(order)),
    ):
        with pytest.raises(Malformed) as refused:
            decoder.decode(data)
        assert says in str(refused.value) and where in str(refused.value)


@given(valid_plans(), st.data())
def test_a_spoiled_plan_is_read_or_refused_and_never_expands_beyond_the_bounds(
    made: tuple[Plan, tuple[Pipeline, ...], tuple[Move, ...], dict[int, set[int]]], data: st.DataObject
) -> None:
    whole = msgspec.msgpack.encode(made[0])
    where = data.draw(st.integers(0, len(whole) - 1))
    put = data.draw(st.binary(min_size=1, max_size=5))
    try:
        plan = Packed(Plan).decode(whole[:where] + put + whole[where + len(put) :])
    except Malformed:
        return
    assert sum(len(pipeline.stages) for pipeline in plan.pipelines) <= MAX_STAGES
    assert len(plan.moves) <= MAX_MOVES
