"""What became of a case, from its log and its results alone: exact, rightly stopped, or a failure of the promise.

Where every holder of some layer was lost, the job must have stopped and named just these layers; which, is worked out here
from what the survivors reported to hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

import odyssey
from launcher.joblog import reader
from launcher.joblog.events import (
    CauseKind,
    Event,
    GenerationStarted,
    JobEnded,
    Pausing,
    PlanChosen,
    RankJoined,
    RankLost,
    RankPaused,
    RankReady,
    UnitCommitted,
)
from odyssey.plan import Plan
from odyssey_cli.replay import recorded
from tests import reference
from tests.soak import recipe
from tests.soak.case import FORWARDED, Case

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}


class Broken(Exception):
    """The promise is: `verdict` says how, in a word or two."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(f"{verdict}: {why}")
        self.verdict, self.why = verdict, why


def judge(case: Case, folder: Path, code: int, struck: list[dict[str, Any]]) -> tuple[str, list[Event]]:
    """`exact` or `stopped`, and the log. Raises Broken for anything else."""
    (log_file,) = (folder / "log").glob("*/events.jsonl")
    log = list(reader.events(log_file))
    n_decisions, difference = recorded.compare(log_file.parent)
    if difference is not None or n_decisions == 0:
        raise Broken("wrong", f"the log does not replay: {difference}")
    ended = log[-1].body
    if not isinstance(ended, JobEnded) or ended.code != code:
        raise Broken("wrong", f"exit code {code}, and the log ends with {ended}")
    _check_losses(case, log)
    _check_checkpoint(case, log, folder / "checkpoint")
    if code != 0:
        _check_stop(log, ended, struck)
        return "stopped", log
    _check_end(case, log, folder / "result.pt")
    return "exact", log


# -- what was trained --------------------------------------------------------------------------------------------------


def _check_losses(case: Case, log: list[Event]) -> None:
    """Every result that the job made final is the oracle's, and there is one of each."""
    expected, tolerance = recipe.expected_of(case.recipe), TOLERANCE[case.recipe.dtype]
    final: dict[tuple[Any, str], float] = {}
    for event in log:
        body = event.body
        if not isinstance(body, UnitCommitted) or body.result.kind not in ("step", "evaluate"):
            continue
        n_done, value = body.result.position[0], body.result.values[0]
        wanted = expected.losses[n_done] if body.result.kind == "step" else expected.evaluations[n_done]
        known = final.setdefault((body.result.position, body.result.kind), value)
        if abs(value - known) > tolerance or not abs(value - wanted) <= tolerance:
            raise Broken("wrong", f"{body.result.kind} {n_done} gave {value}, and before {known}: it should be {wanted}")


def _check_end(case: Case, log: list[Event], result: Path) -> None:
    task = case.recipe
    steps = {event.body.result.position[0] for event in log if _is_unit(event, "step")}
    if steps != set(range(task.steps)):
        raise Broken("wrong", f"exit code 0 with the steps {sorted(steps)} of {task.steps}")
    if result.exists():
        state = torch.load(result, weights_only=False)["state"]["model"]
        _compare("the parameters at the end", case, state, task.steps)
    else:
        raise Broken("wrong", "exit code 0 without a result")


def _check_checkpoint(case: Case, log: list[Event], folder: Path) -> None:
    """The newest checkpoint is one of a step, whole, and training goes on from it exactly; in one process."""
    saved = [event.body.result.position[0] for event in log if _is_unit(event, "save")]
    if not saved:
        return
    task = case.recipe
    job = odyssey.Job(**recipe.parts(task))
    try:
        job.load(folder)
        if job.next_step < saved[-1]:
            raise Broken("wrong", f"the checkpoint after {saved[-1]} steps was final, but that after {job.next_step} is loaded")
        _compare(f"the checkpoint after {job.next_step} steps", case, job.state_dict()["model"], job.next_step)
        n_steps = task.steps + recipe.N_MORE
        for _ in job.steps(n_steps):
            pass
        _compare(
            f"the parameters after {n_steps} steps, the last from the checkpoint", case, job.state_dict()["model"], n_steps
        )
    except Broken:
        raise
    except (Exception, CheckpointException) as error:
        raise Broken(
            "wrong", f"the checkpoint after {saved[-1]} steps cannot be used: {type(error).__name__}: {error}"
        ) from error


def _compare(what: str, case: Case, state: dict[str, torch.Tensor], n_done: int) -> None:
    wanted = recipe.expected_of(case.recipe).states[n_done]
    if set(state) - set(wanted):
        raise Broken("wrong", f"{what}: unknown {sorted(set(state) - set(wanted))}")
    persistent = {name: tensor for name, tensor in wanted.items() if name in state or not name.endswith("mask")}
    worst = reference.largest_difference(persistent, state)
    if not worst <= TOLERANCE[case.recipe.dtype]:
        raise Broken("wrong", f"{what} differ by {worst}")


def _is_unit(event: Event, kind: str) -> bool:
    return isinstance(event.body, UnitCommitted) and event.body.result.kind == kind


# -- why it stopped ----------------------------------------------------------------------------------------------------


def _check_stop(log: list[Event], end: JobEnded, struck: list[dict[str, Any]]) -> None:
    """The layers that the last survivors lack are exactly those named, and those who held them were struck."""
    held: dict[int, set[int]] = {}
    n_layers = 0
    for event in log:
        body = event.body
        match body:
            case PlanChosen():
                n_layers = body.plan.n_layers
            case Pausing():
                held = {}
            case RankPaused():
                held[body.rank] = set(body.held)
            case RankLost():
                held.pop(body.rank, None)
    missing = set(range(n_layers)) - set().union(*held.values()) if held else set(range(n_layers))
    named = {int(number) for number in re.findall(r"(\d+) \(", end.reason)}
    if not missing:
        raise Broken("wrongly stopped", f"{end.reason}; ranks {sorted(held)} held all layers")
    if "every holder of layer" in end.reason and missing != named:
        raise Broken("wrongly stopped", f"layers {missing} are lost, named are {named} in {end.reason!r}")
    if innocent := lost_unstruck(log, struck):
        raise Broken("wrongly stopped", f"{end.reason}; nothing had struck ranks {sorted(innocent)}, which were lost")


def lost_unstruck(log: list[Event], struck: list[dict[str, Any]]) -> set[int]:
    """Ranks that the agent took for lost though nothing had struck them."""
    forwarded = {number.name for number in FORWARDED}  # they end a rank whose script has not begun to handle them
    losses = [event.body for event in log if isinstance(event.body, RankLost)]
    lost = {loss.rank for loss in losses if loss.cause.kind is not CauseKind.ENDED and loss.cause.text not in forwarded}
    return lost - {each["rank"] for each in struck if not each["innocent"]}


# -- what it went through ----------------------------------------------------------------------------------------------


def marks(log: list[Event]) -> set[str]:
    """The odd branches that a job went through."""
    found = _interrupted(log)
    paused: dict[int, RankPaused] = {}
    in_recovery = False
    receiving: set[int] = set()
    received: set[int] = set()
    joined: set[int] = set()
    for event in log:
        body = event.body
        match body:
            case Pausing():
                if in_recovery:
                    found.add("lost during recovery")
                if received:
                    found.add("paused after layers were received")
                paused, in_recovery, receiving, received = {}, True, set(), set()
            case RankPaused():
                paused[body.rank] = body
            case PlanChosen() if in_recovery:
                found |= _how_it_went_on(paused, body)
                receiving, joined = {move.target for move in body.plan.moves}, joined & set(body.plan.spawned)
            case RankJoined() if in_recovery:
                joined.add(body.rank)
            case RankReady():
                received |= receiving & {body.rank}
                receiving.discard(body.rank)
            case RankLost():
                if body.rank in receiving:
                    found.add("lost while receiving")
                if body.rank in joined:
                    found.add("lost just after joining")
                joined.discard(body.rank)
            case GenerationStarted():
                in_recovery, receiving, received = False, set(), set()
            case UnitCommitted():
                joined = set()
    return found


def _interrupted(log: list[Event]) -> set[str]:
    """What kinds of plans were running when a recovery began."""
    found: set[str] = set()
    chosen: Plan | None = None
    running: Plan | None = None
    for event in log:
        match event.body:
            case PlanChosen(plan=plan):
                chosen = plan
            case GenerationStarted():
                running = chosen
            case Pausing() if running is not None:
                if running.schedule.rule == "split":
                    found.add("paused in halves")
                if any("I" in op for order in running.schedule.orders for op in order.ops):
                    found.add("paused in halves of other pipelines")
                if running.is_cut:
                    found.add("paused with cut micro-batches")
                running = None
    return found


def _how_it_went_on(paused: dict[int, RankPaused], chosen: PlanChosen) -> set[str]:
    found = set()
    positions = {result.position for result in chosen.results}
    if {report.position for report in paused.values() if report.phase == "contributed"} & positions:
        found.add("rolled forward")
    elif any(report.phase in ("compute", "contributed") for report in paused.values()):
        found.add("redone")
    if any(report.phase == "between" for report in paused.values()):
        found.add("paused in the script's own code")
    return found
