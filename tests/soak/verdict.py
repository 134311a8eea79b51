"""What became of a case, from its log and its results alone: exact, rightly stopped, or a failure of the promise.

Where every holder of some layer was lost, and no restart was left, the job must have stopped and named just these layers;
which, is worked out here from what the survivors reported to hold.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

import odyssey
from launcher.joblog import reader
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    CauseKind,
    Draining,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    LeaderChanged,
    Pausing,
    PlanChosen,
    RankExited,
    RankLost,
    RankStarted,
    Restarting,
    UnitFinal,
)
from odyssey.plan.plan import Plan
from odyssey.protocol.reports import Committed, Hello, Paused, Ready
from odyssey.protocol.units import Result
from odyssey_cli.replay import recorded
from tests import reference
from tests.soak import recipe
from tests.soak.case import FORWARDED, Case
from tests.soak.start import Broken, Start

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}


def judge(case: Case, folder: Path, starts: list[Start]) -> str:
    """`exact` or `stopped`. Raises Broken for anything else."""
    for start in starts:
        _check_replay(start)
    has_stopped = [not start.is_killed and _has_stopped(start) for start in starts]
    logs = [start.log() for start in starts]
    _check_losses(case, [event for start in starts for log in start.logs(set(start.codes)) for event in reader.events(log)])
    _check_saves(logs)
    _check_checkpoint(case, logs, folder / "checkpoint")
    for start, log, stopped in zip(starts, logs, has_stopped, strict=True):
        lost = lost_unstruck(log, start)
        if stopped:
            _check_stop(log, start, lost)
            return "stopped"
        if lost:
            raise Broken("wrongly lost", f"nothing had struck {lost}, which were lost; struck were {start.struck}")
    known = {step for start in starts for log in start.logs(set(start.codes)) for step in _steps(log)}
    _check_end(case, logs, known | _saved_unseen(starts, logs), folder)
    return "exact"


def _has_stopped(start: Start) -> bool:
    """Or has come to its end. Of agents that nothing has struck, and that did not come after it, each says the same. So for
    a job before it: it has ended, or too few were left of it."""
    *before, last = start.jobs() or [set(start.codes)]
    for agents in before:
        if len({start.codes[i] == 0 for i in agents}) != 1:
            raise Broken("wrong", f"the agents ended with {start.codes}, and {sorted(agents)} were in an older job")
        _check_codes(start, agents)
        if start.codes[min(agents)] and _agents_suffice(start.longest_log(agents), start):
            raise Broken("wrongly stopped", f"enough agents were left; {[start.output(i)[-400:] for i in agents]}")
    codes = {i: start.codes[i] for i in last}
    if len(set(codes.values())) != 1:
        raise Broken("wrong", f"the agents ended with {codes}")
    _check_codes(start, last)
    between = [i for i in set(start.codes) - start.hit - last.union(*before) if start.has_begun(i)]
    if any(start.codes[i] not in {0, *codes.values()} for i in between):
        raise Broken("wrong", f"the agents ended with {start.codes}, and {between} had left a job for another one")
    everybody = start.logs(set(start.codes))  # an agent that is told of the end may not have the log to its end
    if not any(codes.values()) and not any(isinstance(e.body, JobEnded) for log in everybody for e in reader.events(log)):
        raise Broken("wrong", "exit code 0, and no log tells of the end")
    return any(codes.values())


def _check_codes(start: Start, agents: set[int]) -> None:
    """Each agent's exit code is what its log ends with."""
    for i in agents:
        for log in start.logs({i}):
            ended = [event.body for event in reader.events(log) if isinstance(event.body, JobEnded)]
            if ended and ended[-1].code != start.codes[i]:
                raise Broken("wrong", f"agent {i}: exit code {start.codes[i]}, and its log ends with {ended}")


def _check_replay(start: Start) -> None:
    for log in start.logs(set(start.codes)):
        _, difference = recorded.compare(log.parent)
        if difference is not None:
            raise Broken("wrong", f"{log} does not replay: {difference}")


# -- what was trained --------------------------------------------------------------------------------------------------


def _check_losses(case: Case, events: list[Event]) -> None:
    """Every result that the job made final is the oracle's, and there is one of each."""
    expected, tolerance = recipe.expected_of(case.recipe), TOLERANCE[case.recipe.dtype]
    final: dict[tuple[object, str], float] = {}
    for event in events:
        body = event.body
        if not isinstance(body, Committed) or body.result.kind not in ("step", "evaluate"):
            continue
        n_done, value = body.result.position[0], body.result.values[0]
        wanted = expected.losses[n_done] if body.result.kind == "step" else expected.evaluations[n_done]
        known = final.setdefault((body.result.position, body.result.kind), value)
        if abs(value - known) > tolerance or not abs(value - wanted) <= tolerance:
            raise Broken("wrong", f"{body.result.kind} {n_done} gave {value}, and before {known}: it should be {wanted}")
        told, twice = dict(body.result.metrics), {"twice": 2 * wanted} if recipe.has_metrics(case.recipe) else {}
        if told.keys() != twice.keys() or not all(abs(told[name] - twice[name]) <= 2 * tolerance for name in twice):
            raise Broken("wrong", f"{body.result.kind} {n_done} told {told}: it should be {twice}")


def _check_saves(logs: list[list[Event]]) -> None:
    """A job that is started again goes on from the newest checkpoint that was final, or a newer one."""
    saved = 0
    for log in logs:
        steps = [unit.position[0] for unit in _units(log, "step")]
        if steps and steps[0] < saved:
            raise Broken("wrong", f"a checkpoint of {saved} steps was final, and the job went on from {steps[0]}")
        saved = max([saved, *_saved(log)])


def _steps(log: Path) -> set[int]:
    """All that one agent knew to be final: lines are of those that its own ranks told, and where it led all."""
    results = [event.body.result for event in reader.events(log) if isinstance(event.body, Committed | UnitFinal)]
    return {result.position[0] for result in results if result.kind == "step"}


def _saved_unseen(starts: list[Start], logs: list[list[Event]]) -> set[int]:
    """Steps that ranks had passed and saved when the whole job was killed, before its agent had read of them."""
    found: set[int] = set()
    for start, log, after in zip(starts, logs, logs[1:], strict=False):
        if start.is_killed:
            first = max((unit.position[0] + 1 for unit in _units(log, "step")), default=0)
            found |= {step for unit in _units(after, "resume") for step in range(first, round(unit.values[0]))}
    return found


def _check_end(case: Case, logs: list[list[Event]], steps: set[int], folder: Path) -> None:
    """`steps`: that any agent knew to be final."""
    task = case.recipe
    if steps != set(range(task.steps)):
        raise Broken("wrong", f"exit code 0 with the steps {sorted(steps)} of {task.steps}")
    if task.once_every:
        # Its script saves first: where the whole job is killed between the two, it goes on behind both.
        resumed = {round(unit.values[0]) for log in logs for unit in _units(log, "resume")}
        due = [n for n in range(1, task.steps + 1) if n % task.once_every == 0 and n not in resumed]
        missing = [n for n in due if not (folder / f"once-{n}").exists()]
        if missing:
            raise Broken("wrong", f"exit code 0, and what was to be done once was not after the steps {missing}")
    if not (folder / "result.pt").exists():
        raise Broken("wrong", "exit code 0 without a result")
    state = torch.load(folder / "result.pt", weights_only=False)["state"]["model"]
    _compare("the parameters at the end", case, state, task.steps)
    _check_own(case, logs[-1], folder)
    if case.is_sequence:
        # The log of an agent among several has steps of its own ranks, and of all while it led; one that was lost with all who
        # knew of it is there twice.
        again = max((i + 1 for i, event in enumerate(logs[-1]) if isinstance(event.body, Restarting)), default=0)
        positions = [unit.position[0] for unit in _units(logs[-1][again:], "step")]
        first = positions[0] if again and positions else 0
        if positions != (sorted(positions) if case.agents is not None else [*range(first, task.steps)]):
            raise Broken("wrong", f"steps became final in the order {positions}")


def _check_own(case: Case, log: list[Event], folder: Path) -> None:
    """Each rank that came to its end has in its own modules what it should, of the layers that the last plan that ran gives it,
    and its script has seen the steps one by one."""
    last_go = max(i for i, event in enumerate(log) if isinstance(event.body, GenerationStarted))
    plan = next(event.body.plan for event in reversed(log[:last_go]) if isinstance(event.body, PlanChosen))
    ended = {event.body.rank for event in log if isinstance(event.body, RankExited) and not event.body.was_ended}
    for rank in sorted(ended):
        own = torch.load(folder / f"own-{rank}.pt")
        wanted = recipe.expected_of(case.recipe).states[case.recipe.steps]
        held = {name: wanted[name] for name in wanted if int(name.split(".")[1]) in plan.holds.get(rank, ())}
        worst = reference.largest_difference(held, own["model"])
        if not worst <= TOLERANCE[case.recipe.dtype]:
            raise Broken("wrong", f"the parameters of rank {rank} itself differ by {worst}")
        first = case.recipe.steps - len(own["steps"])
        if own["steps"] != [*range(first, case.recipe.steps)]:
            raise Broken("wrong", f"the script of rank {rank} has seen the steps {own['steps']}")


def _saved(log: list[Event]) -> list[int]:
    """Steps of the checkpoints that are final."""
    return [unit.position[0] for unit in _units(log, "save") if unit.values[0] == 0.0]


def _check_checkpoint(case: Case, logs: list[list[Event]], folder: Path) -> None:
    """The newest checkpoint is one of a step, whole, and training goes on from it exactly; in one process."""
    saved = [step for log in logs for step in _saved(log)]
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


def _units(log: list[Event], kind: str) -> list[Result]:
    """Give those of this kind, in the order in which they became final."""
    results = [event.body.result for event in log if isinstance(event.body, Committed)]
    return [result for result in results if result.kind == kind]


# -- why it stopped ----------------------------------------------------------------------------------------------------


def _check_stop(log: list[Event], start: Start, lost: set[str]) -> None:
    """The layers that the last survivors lack are exactly those named, and those who held them were struck; or too few agents
    are left to decide anything."""
    if not _agents_suffice(log, start):
        return
    ended = log[-1].body if log else None
    if not isinstance(ended, JobEnded):
        raise Broken("wrongly stopped", f"enough agents were left; {[start.output(i)[-400:] for i in start.codes]}")
    held: dict[int, set[int]] = {}
    n_layers = 0
    for event in log:
        body = event.body
        match body:
            case PlanChosen():
                n_layers = body.plan.n_layers
            case Pausing():
                held = {}
            case Paused():
                held[body.rank] = set(body.held)
            case RankLost():
                held.pop(body.rank, None)
    missing = set(range(n_layers)) - set().union(*held.values()) if held else set(range(n_layers))
    named = {int(number) for number in re.findall(r"(\d+) \(", ended.reason)}
    if not missing:
        raise Broken("wrongly stopped", f"{ended.reason}; ranks {sorted(held)} held all layers")
    if "every holder of layer" in ended.reason and missing != named:
        raise Broken("wrongly stopped", f"layers {missing} are lost, named are {named} in {ended.reason!r}")
    if lost:
        raise Broken("wrongly stopped", f"{ended.reason}; nothing had struck {lost}, which were lost")
    if not start.struck:
        raise Broken("wrongly stopped", f"{ended.reason}; nothing had struck the job")


def _agents_suffice(log: list[Event], start: Start) -> bool:
    """By the rule in docs/hosts.md, said once more: most members are left, or the half with the one that leads. Of one that has
    come, and of which no rank has begun, nobody knows whether it has a voice yet: they have to suffice with it and without."""
    members: dict[int, int] = {}
    coming: list[int] = []
    seats: dict[int, int] = {}
    leader = 0
    for event in log:
        match event.body:
            case JobStarted(agents=agents):
                members = {agent.number: agent.pid for agent in agents}
                seats = {node: agent.number for node, agent in enumerate(agents)}
            case AgentJoined(agent=agent) if not start.was_outside(agent.pid):
                members[agent.number] = agent.pid
                coming.append(agent.number)
            case RankStarted(node=node) if coming and seats.get(node) not in members:
                seats[node] = coming.pop(0)
            case AgentLost(agent=agent):
                members.pop(agent.number, None)
                coming = [number for number in coming if number != agent.number]
            case LeaderChanged(agent=agent):
                leader = agent.number
    if not members:  # of several agents: the job had not begun
        wanted = start.case.agents
        return wanted is None or len(start.codes) - len(start.hit) >= wanted.n_least
    left = {number for number, pid in members.items() if pid not in start.hit_pids}
    return all(
        2 * len(left & voters) > len(voters) or (2 * len(left & voters) == len(voters) and leader in left)
        for voters in (members.keys(), members.keys() - set(coming))
    )


def lost_unstruck(log: list[Event], start: Start) -> set[str]:
    """Ranks and agents that were taken for lost though nothing had struck them."""
    forwarded = {number.name for number in FORWARDED}  # they end a rank whose script has not begun to handle them
    expected = {CauseKind.ENDED, CauseKind.AGENT}
    losses = [event.body for event in log if isinstance(event.body, RankLost)]
    ranks = {loss.rank for loss in losses if loss.cause.kind not in expected and loss.cause.text not in forwarded}
    ranks -= {each["rank"] for each in start.struck if not each["innocent"]}
    joined: dict[int, int] = {}
    lost = []
    for event in log:
        match event.body:
            case AgentJoined(agent=agent):
                joined[agent.pid] = agent.number
            case AgentLost(agent=agent) if agent.pid not in start.hit_pids:
                # Else it has another number already, or had not come into the job when who led was lost.
                if joined.get(agent.pid, agent.number) == agent.number and not start.was_outside(agent.pid):
                    lost.append(f"agent {agent.number}")
    return {*(f"rank {rank}" for rank in ranks), *lost}


# -- what it went through ----------------------------------------------------------------------------------------------


def marks(log: list[Event]) -> set[str]:
    """The odd branches that a job went through."""
    found = _interrupted(log) | _of_growth(log)
    paused: dict[int, Paused] = {}
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
            case Paused():
                paused[body.rank] = body
            case PlanChosen() if in_recovery:
                found |= _how_it_went_on(paused, body)
                receiving, joined = {move.target for move in body.plan.moves}, joined & set(body.plan.spawned)
            case Hello() if in_recovery:
                joined.add(body.rank)
            case Ready():
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
            case Committed():
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
                if any(op.kind == "I" for order in running.schedule.orders for op in order.ops):
                    found.add("paused in halves of other pipelines")
                if running.is_cut:
                    found.add("paused with cut micro-batches")
                running = None
    return found


def _of_growth(log: list[Event]) -> set[str]:
    """What became of ranks that started beside the training, and of those that drained for them."""
    found: set[str] = set()
    newcomers: set[int] = set()
    plan: Plan | None = None
    wanted: set[int] | None = None
    """Whom all drain for, if they do."""
    for event in log:
        match event.body:
            case RankStarted(rank=rank) if plan is not None and rank not in plan.spawned:
                newcomers.add(rank)
            case Draining(joined=joined):
                wanted = set(joined)
            case Pausing() if wanted is not None:
                found.add("lost while draining")
                wanted = None
            case PlanChosen():
                plan = event.body.plan
            case GenerationStarted() if plan is not None:
                if wanted and not wanted.isdisjoint(plan.workers):
                    found.add("grew back")
                newcomers -= {*plan.workers, *plan.idle}
                wanted = None
            case RankLost(rank=rank, cause=cause) if rank in newcomers and cause.kind is not CauseKind.ENDED:
                found.add("newcomer lost")
                newcomers.discard(rank)
    return found


def _how_it_went_on(paused: dict[int, Paused], chosen: PlanChosen) -> set[str]:
    found = set()
    positions = {result.position for result in chosen.results}
    if {report.position for report in paused.values() if report.phase == "contributed"} & positions:
        found.add("rolled forward")
    elif any(report.phase in ("compute", "contributed") for report in paused.values()):
        found.add("redone")
    if any(report.phase == "between" for report in paused.values()):
        found.add("paused in the script's own code")
    return found
