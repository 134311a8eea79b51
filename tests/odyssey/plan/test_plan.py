"""Plans: what they derive, and that no wrong one passes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from odyssey.errors import PlanError
from odyssey.plan.form import layout_of
from odyssey.plan.moves import Keep, Move, keep_runs, move_runs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, Route, decode, encode
from odyssey.plan.proof import prove


def two_by_two() -> Plan:
    return Plan(
        generation=1,
        strategy="initial",
        step=0,
        global_batch=8,
        micro_batch=2,
        n_layers=4,
        blocks=blocks_of(
            (
                Pipeline((Stage(0, 0, 2), Stage(1, 2, 4)), 0, 2),
                Pipeline((Stage(2, 0, 2), Stage(3, 2, 4)), 2, 4),
            )
        ),
        reductions=(Reduction((0, 1), ()), Reduction((2, 3), ())),
    )


def change(plan: Plan, **fields: object) -> Plan:
    return msgspec.structs.replace(plan, **fields)  # type: ignore[arg-type]


def with_pipelines(plan: Plan, *pipelines: Pipeline) -> Plan:
    return change(plan, blocks=blocks_of(pipelines))


def with_stage(plan: Plan, pipeline: int, stage: int, value: Stage) -> Plan:
    pipelines = list(plan.pipelines)
    stages = list(pipelines[pipeline].stages)
    stages[stage] = value
    pipelines[pipeline] = msgspec.structs.replace(pipelines[pipeline], stages=tuple(stages))
    return with_pipelines(plan, *pipelines)


def test_a_plan_survives_json() -> None:
    plan = prove(two_by_two())
    assert decode(encode(plan)) == plan


def test_a_broken_document_is_a_plan_error_that_names_the_field() -> None:
    with pytest.raises(PlanError, match="global_batch"):
        decode(encode(two_by_two()).replace(b'"global_batch":8', b'"global_batch":"8"'))


def test_a_plan_says_who_holds_and_who_runs() -> None:
    plan = two_by_two()
    assert plan.workers == (0, 1, 2, 3)
    assert plan.holders[0] == (0, 2) and plan.holders[3] == (1, 3)
    assert [plan.runner(k, 1) for k in range(4)] == [1, 1, 3, 3]
    assert layout_of(plan) == "2x2"


def test_samples_of_the_last_micro_batch_are_what_is_left() -> None:
    plan = change(two_by_two(), global_batch=7)
    assert [plan.samples.n_of(k) for k in range(plan.n_micro_batches)] == [2, 2, 2, 1]


def test_tied_layers_are_reduced_by_the_union_of_their_holders() -> None:
    plan = change(two_by_two(), ties=((0, 3),), reductions=(*two_by_two().reductions, Reduction((), (0,))))
    assert prove(plan).tie_holders(0) == (0, 1, 2, 3)


def keeping(plan: Plan, *keeps: Keep) -> Plan:
    return change(plan, keep_runs=keep_runs(keeps))


def test_what_is_kept_is_held_and_reduced_with_those_who_run_it() -> None:
    plan = keeping(two_by_two(), Keep(0, 2, 4), Keep(3, 0, 1))
    assert plan.holds == {0: {0, 1, 2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {0, 2, 3}}
    assert plan.runs[0] == {0, 1} and plan.workers == (0, 1, 2, 3)
    assert [plan.holders[layer] for layer in range(4)] == [(0, 2, 3), (0, 2), (0, 1, 3), (0, 1, 3)]
    plan = change(plan, reductions=(Reduction((0,), ()), Reduction((1,), ()), Reduction((2, 3), ())))
    assert [group.workers for group in prove(plan).reduce] == [(0, 2, 3), (0, 2), (0, 1, 3)]
    prove(change(plan, routes=(Route(0, 1, 0),)))
    with pytest.raises(PlanError, match="worker 3 needs layer 0 and nobody sends it"):
        prove(plan, {0: {0, 1, 2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {2, 3}})
    prove(change(plan, move_runs=move_runs([Move(0, 0, 3)])), {0: {0, 1, 2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {2, 3}})


@dataclass
class Corruption:
    says: str
    plan: Plan


P = two_by_two()
CORRUPTIONS = [
    Corruption("at least one pipeline", with_pipelines(P)),
    Corruption("micro_batch must be at least 1", change(P, micro_batch=0)),
    Corruption("worker 0 is used twice", with_stage(P, 1, 0, Stage(0, 0, 2))),
    Corruption("pipeline 1 stage 1: layers", with_stage(P, 1, 1, Stage(3, 3, 4))),
    Corruption("pipeline 0 holds layers up to 3", with_stage(P, 0, 1, Stage(1, 2, 3))),
    Corruption("no worker and no route", with_stage(P, 1, 0, Stage(None, 0, 2))),
    Corruption(
        "pipeline 1: its micro-batches start at 3", with_pipelines(P, P.pipelines[0], Pipeline(P.pipelines[1].stages, 3, 4))
    ),
    Corruption("pipeline 1 has no micro-batch", with_pipelines(P, P.pipelines[0], Pipeline(P.pipelines[1].stages, 2, 2))),
    Corruption("the pipelines run 4 micro-batches, a step has 5", change(P, global_batch=9)),
    Corruption("worker 3 is idle and in pipeline 1 stage 1", change(P, idle=(3,))),
    Corruption("two routes", change(P, routes=(Route(0, 0, 2), Route(0, 0, 0)))),
    Corruption("no such micro-batch or stage", change(P, routes=(Route(0, 2, 2),))),
    Corruption("layers \\[2, 5\\) are kept, the model has 4", keeping(P, Keep(0, 2, 5))),
    Corruption("worker 7 keeps layers \\[0, 2\\) and has no stage", keeping(P, Keep(7, 0, 2))),
    Corruption("worker 1 keeps layer 3, which it runs", keeping(P, Keep(1, 3, 4))),
    Corruption("worker 0 keeps layer 2 twice", keeping(P, Keep(0, 2, 3), Keep(0, 2, 4))),
    Corruption("layer 3 is reduced by \\(1, 3\\), but held by \\(0, 1, 3\\)", keeping(P, Keep(0, 3, 4))),
    Corruption("worker 3 does not hold layer 0", change(P, routes=(Route(0, 0, 3),))),
    Corruption("layer 0 is in two reductions", change(P, reductions=(*P.reductions, Reduction((0,), ())))),
    Corruption("layer 2 is in no reduction", change(P, reductions=P.reductions[:1])),
    Corruption("layer 4 is reduced, but there are 4", change(P, reductions=(*P.reductions, Reduction((4,), ())))),
    Corruption(
        "layer 2 is reduced by \\(0, 2\\), but held by \\(1, 3\\)", change(P, reductions=(Reduction((0, 1, 2, 3), ()),))
    ),
    Corruption("tie 0 is in no reduction", change(P, ties=((0, 3),))),
    Corruption("tie 0 is of layer 4", change(P, ties=((0, 4),))),
    Corruption(
        "tie 0 is reduced by \\(0, 2\\), but held by \\(0, 1, 2, 3\\)",
        change(P, ties=((0, 3),), reductions=(Reduction((0, 1), (0,)), P.reductions[1])),
    ),
]


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.says)
def test_the_proof_names_what_is_wrong(corruption: Corruption) -> None:
    with pytest.raises(PlanError, match=corruption.says):
        prove(corruption.plan)


HELD = {0: {0, 1}, 1: {2, 3}, 2: {0, 1}}
MOVES = (Move(2, 1, 3), Move(3, 1, 3))


def test_moves_that_complete_what_workers_hold_are_valid() -> None:
    prove(change(P, move_runs=move_runs(MOVES)), HELD)


def test_what_has_been_received_may_be_passed_on() -> None:
    held = {0: {0, 1}, 1: set(), 2: {0, 1, 2, 3}}
    moves = (Move(2, 2, 1), Move(3, 2, 1), Move(2, 1, 3), Move(3, 1, 3))
    prove(change(P, move_runs=move_runs(moves)), held)
    with pytest.raises(PlanError, match="worker 1 does not hold it"):
        prove(change(P, move_runs=move_runs(moves[::-1])), held)


@pytest.mark.parametrize(
    ("moves", "says"),
    [
        ((), "worker 3 needs layer 2 and nobody sends it"),
        ((Move(2, 0, 3), MOVES[1]), "layer 2"),
        ((*MOVES, MOVES[0]), "layer 2 is moved to worker 3 twice"),
        ((*MOVES, Move(2, 1, 0)), "no use for it"),
    ],
)
def test_moves_must_start_at_holders_and_bring_what_is_needed_once(moves: tuple[Move, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        prove(change(P, move_runs=move_runs(moves)), HELD)
