"""Random lives of a job against the coordinator: ranks that commit, die, dawdle and answer late, in any order.

The ranks here are a second, dumb implementation of the protocol's other side. Safety after each event: one plan a
generation, no `prepare` without a holder of each layer, `go` only when all are ready, no unit lost or run twice. When the
faults end, the job runs or has ended with a reason; and its events replay to the same actions.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from launcher.coordinator.actions import Action, EndRanks, Kill, Propose, Record, SendOrder, Spawn
from launcher.coordinator.machine import step
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, PlainState, State, Status
from launcher.joblog.events import (
    AgentInfo,
    Cause,
    CauseKind,
    JobEnded,
    LeaderChanged,
    Note,
    NoticeExpired,
    NoticeGiven,
    PlanChosen,
    Profiled,
    Proposed,
    RankLost,
    Restarting,
    SlotsReturned,
    Tick,
    UnitFinal,
)
from launcher.joblog.exit_codes import ExitCode
from odyssey.plan.plan import Plan
from odyssey.protocol.orders import Connect, Drain, Finish, Follow, Go, Pause, Prepare
from odyssey.protocol.reports import Committed, Connected, Failed, Finished, Hello, Paused, Ready
from odyssey.protocol.units import FIRST, Position, Result, is_next, position_after
from strategies.situation import Candidate
from tests.examples import examples
from tests.launcher.coordinator.talk import N_LAYERS, N_MICRO_BATCHES, Talk, answer_to, lacks_layers, model, profile


def joined(state: State) -> set[int]:
    """Living ranks with a Job that has not ended."""
    return state.world.ranks.among(RankState.JOINED, RankState.MEMBER, RankState.FAILING)


@dataclass
class Rank:
    """What one process knows. `inbox`: orders it has not read; `outbox`: (generation, report) the agent has not read."""

    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[tuple[int | None, Any]] = field(default_factory=deque)
    position: Position = FIRST
    phase: str = "between"
    held: frozenset[int] = frozenset()
    plan: Plan | None = None
    running: int | None = None
    told: list[Committed] = field(default_factory=list)
    """What it has told of units that it has passed itself, for its agent to tell again."""
    passed: Result | None = None
    """The newest that it has the result of."""
    paused_for: int = 0
    drain: int | None = None
    finished: bool = False


class Job(RuleBasedStateMachine):
    """The world around the coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Talk()
        self.ranks: dict[int, Rank] = {}
        self.final: list[Result] = []
        """Units whose result a rank has, or who leads, or all agents: they must all stand, each once."""
        self.plans: dict[int, Plan] = {}
        self.newest: tuple[int | None, Result | None] = None, None
        """The unit that a rank has told last, and while which generation ran."""
        self.untold: Committed | None = None
        """A step that is no event yet."""
        self.news: deque[tuple[Any, int | None]] = deque()
        """What has been told and not been taken yet; the first is being taken."""
        self.drained_for: int | None = None
        """What the commit point of the newest unit said: the generation that those who pass it stop for."""
        self.answered: Propose | None = None
        """The newest that the search has answered."""
        self.refused: set[int] = set()
        """Ranks whose next groups, built beside the training, are in vain."""
        self.failing: set[int] = set()
        """Ranks whose script has raised, and whose process has not ended yet."""

    # -- the coordinator's side ----------------------------------------------------------------------------------------

    def feed(self, body: Any, generation: int | None = None) -> None:
        self.feed_all([(body, generation)])

    def feed_all(self, told: list[tuple[Any, int | None]]) -> None:
        """As in the agent: what an action causes is taken when all of its event's actions are done."""
        is_taking = bool(self.news)
        self.news += told
        while self.news and not is_taking:
            unit, self.untold = self.untold, None
            if unit is not None:
                self.take_news(UnitFinal(unit.result), unit.generation)
            self.take_news(*self.news[0])
            self.news.popleft()

    def take_news(self, body: Any, generation: int | None) -> None:
        state, world = self.talk.state, self.talk.state.world
        if isinstance(state, PlainState) and isinstance(body, RankLost) and body.cause.kind is CauseKind.AGENT:
            # The machine of a plain script hears of these by the loss of their agent, and there are no agents here.
            body = replace(body, cause=Cause(CauseKind.SIGNAL, "SIGKILL"))
        late = isinstance(body, UnitFinal) and state.status in (Status.PAUSING, Status.FINISHING, Status.DRAINING)
        is_stale = generation is not None and generation < world.generation and state.status is not Status.ENDED and not late
        before = copy.deepcopy(state) if is_stale else None
        actions = self.talk.feed(body, generation)
        if is_stale:
            assert self.talk.state == before and not actions, "a stale event changed something"
        for action in actions:
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case Spawn(rank=rank):
                assert rank not in self.ranks, f"rank {rank} is spawned while it lives"
                self.ranks[rank] = Rank(outbox=deque([(None, Hello(rank, model()))]))
            case SendOrder(rank=rank, order=order):
                assert not self.is_known_to_be_gone(rank), f"an order for rank {rank}, which is gone"
                if isinstance(order, Prepare):
                    self.check_prepare(order)
                if isinstance(order, Go):
                    members = [self.ranks[member] for member in self.talk.state.members if member in self.ranks]
                    assert all(r.plan is not None and r.plan.generation == order.generation for r in members)
                if rank in self.ranks:
                    self.ranks[rank].inbox.append(order)
            case Kill(rank=rank, cause=cause):
                assert not self.is_known_to_be_gone(rank), f"rank {rank} is killed, which is gone"
                if rank in self.ranks:
                    self.end(rank, cause)
                elif cause is not None:
                    self.feed(RankLost(rank, cause))  # told twice: it had just ended by itself
            case EndRanks(ranks=ranks):
                for rank in set(ranks) & set(self.ranks) - self.failing:
                    self.end(rank, Cause(CauseKind.ENDED, "ended with the others, SIGTERM", -15))
            case Record(body=Note(text=text)):
                assert "cannot go on exactly" not in text, text
            case Record(body=JobEnded() as ended):
                assert ended.code == ExitCode.TERMINATED or not self.could_go_on(), ended.reason
            case Record(body=Restarting()):
                self.final.clear()  # what the ranks had is gone
                self.newest, self.untold, self.drained_for = (None, None), None, None
            case Record(body=PlanChosen(plan=plan)):
                assert plan.generation not in self.plans, f"two plans in generation {plan.generation}"
                self.plans[plan.generation] = plan

    def could_go_on(self) -> bool:
        """Ranks live that have all layers, or that need none yet. A script that has failed is none of those: its ranks are gone
        when the job ends."""
        living = [me for rank, me in self.ranks.items() if rank not in self.failing and not me.finished]
        needs_layers = isinstance(self.talk.state, JobState) and self.talk.state.plan is not None
        held = {layer for me in living for layer in me.held}
        return bool(living) and (not needs_layers or held == set(range(N_LAYERS)))

    def is_known_to_be_gone(self, rank: int) -> bool:
        return rank not in self.ranks and not any(isinstance(body, RankLost) and body.rank == rank for body, _ in self.news)

    def check_prepare(self, order: Prepare) -> None:
        end = position_after(self.final[-1]) if self.final else FIRST
        assert order.plan.step == end[0], f"the plan starts at step {order.plan.step}, {end} is final"
        if not isinstance(self.talk.state, JobState) or self.talk.state.plan is None:
            return
        survivors = [rank for rank in self.talk.state.members if rank in self.ranks]
        kept = {layer for rank in survivors for layer in self.ranks[rank].held}
        assert kept == set(range(N_LAYERS)), "prepare although a layer has no holder"
        assert not order.results or order.results[-1] == self.final[-1], "the newest result is not passed on"

    def end(self, rank: int, cause: Cause | None, *, slot_lost: bool = False) -> None:
        """The process is gone: what it had sent is read first."""
        process = self.ranks[rank]
        while process.outbox:
            self.deliver(rank)
        del self.ranks[rank]
        self.failing.discard(rank)
        if cause is not None:
            self.feed(RankLost(rank, cause, slot_lost))

    def deliver(self, rank: int) -> None:
        generation, report = self.ranks[rank].outbox.popleft()
        if isinstance(report, Committed):
            self.hear_of(report)
        else:
            self.feed(report, generation)

    def hear_of(self, unit: Committed) -> None:
        """As the agent that leads: a step is no event until there is another one, or somebody waits for it."""
        state = self.talk.state
        plan, results = (state.plan, state.results) if isinstance(state, JobState) else (None, ())
        ran = None if plan is None else plan.generation
        newest = self.newest[1] if self.newest[0] == ran else None
        if not is_next(unit.result, newest or (results[-1] if results else None)):
            return
        self.newest = ran, unit.result
        for rank in plan.idle if plan is not None else ():
            if rank in self.ranks and state.world.ranks.is_member(rank):
                self.ranks[rank].inbox.append(Follow(state.world.generation, unit.result))
        if unit.result.kind == "step" and state.status is not Status.FINISHING:
            self.untold = unit
        else:
            self.feed(UnitFinal(unit.result), unit.generation)

    def forget_lost_units(self) -> None:
        """Nobody is left who knows of them: they are run again."""
        state = self.talk.state
        results = state.results if isinstance(state, JobState) else ()
        ends = [position_after(result) for result in results[-1:]] + [me.position for me in self.ranks.values()]
        if self.untold is not None:
            ends.append(position_after(self.untold.result))
        self.final = [result for result in self.final if result.position < max(ends, default=FIRST)]

    # -- a rank's side -------------------------------------------------------------------------------------------------

    def work(self, rank: int) -> None:
        """The process reads one order, unless its script has failed."""
        me = self.ranks[rank]
        order = me.inbox.popleft()
        if rank in self.failing:
            return
        match order:
            case Connect(generation=generation, number=number):
                if generation >= me.paused_for:
                    problem = "refused" if rank in self.refused else ""
                    self.refused.discard(rank)
                    me.outbox.append((generation, Connected(rank, generation, number, problem)))
            case Drain(generation=generation) if me.plan is not None and rank in me.plan.holds:
                if me.running is not None and generation > me.running:
                    me.drain = generation
            case Pause(generation=generation) | Drain(generation=generation):
                me.running, me.drain, me.paused_for = None, None, generation
                idle = me.plan is not None and rank not in me.plan.holds
                phase = "idle" if idle else me.phase
                paused = Paused(rank, generation, me.position, phase, tuple(sorted(me.held)), passed=me.passed)
                me.outbox.append((generation, paused))
            case Prepare(generation=generation, plan=plan, results=results) if generation >= me.paused_for:
                if me.plan is None and results:
                    me.position = position_after(results[-1])
                for result in results:
                    self.take(me, result)
                me.plan = plan
                me.held |= plan.holds.get(rank, frozenset())
                held = tuple((layer, f"after {me.position}") for layer in sorted(plan.holds.get(rank, ())))
                last = {pipeline.stages[-1].worker: pipeline for pipeline in plan.pipelines}
                samples = tuple((k, plan.samples.n_of(k)) for k in last[rank].micro_batches) if rank in last else ()
                contracts = tuple((g, "same") for g in plan.groups_of.get(rank, ()))
                ready = Ready(rank, generation, me.position, held, samples, plan.global_batch, 0.0, 0.0, 0, contracts, "same")
                me.outbox.append((generation, ready))
            case Go(generation=generation) if generation >= me.paused_for:
                assert me.plan is not None
                me.running, me.phase, self.drained_for = generation, "compute", None
                me.held = me.plan.holds.get(rank, frozenset())
            case Follow(result=result):
                me.phase = "contributed"
                self.take(me, result)
            case Finish(results=results):
                for result in results:
                    self.take(me, result)
                self.finish(rank)

    def take(self, me: Rank, result: Result) -> None:
        if result.position == me.position:
            assert me.phase in ("contributed", "between"), "a unit is taken over by a rank that had not contributed"
            me.position, me.phase, me.passed = position_after(result), "compute", result

    def finish(self, rank: int) -> None:
        me = self.ranks[rank]
        if not me.finished:
            me.finished = True
            me.outbox.append((None, Finished(rank, me.position)))

    # -- what happens --------------------------------------------------------------------------------------------------

    @initialize(
        n_ranks=st.integers(2, 5),
        restarts=st.sampled_from([0, 1, 4, 9]),
        data=st.data(),
        until=st.sampled_from([Status.RUNNING] * 5 + [Status.STARTING, Status.MEASURING, Status.PLANNING]),
    )
    def start(self, n_ranks: int, restarts: int, data: st.DataObject, until: Status) -> None:
        """All goes well `until` then. Most lives begin with a job that runs."""
        self.n_ranks = n_ranks
        for body in self.talk._bodies("start", [str(n_ranks)], {"restarts": str(restarts)}):
            self.feed(body)
        while self.talk.state.status is not until:
            if self.is_asked or self.talk.state.status is Status.MEASURING:
                self.the_search_answers(data)
            self.settle()

    def settle(self) -> None:
        """Everybody reads and is heard until there is nothing to say."""
        while busy := [rank for rank, me in sorted(self.ranks.items()) if me.inbox or me.outbox]:
            (self.work if self.ranks[busy[0]].inbox else self.deliver)(busy[0])

    @rule()
    def all_is_quiet(self) -> None:
        self.settle()

    @rule(data=st.data(), n=st.integers(1, 6))
    def all_goes_well_for_a_while(self, data: st.DataObject, n: int) -> None:
        """What is asked is answered, and who drains comes to the end of a unit."""
        for _ in range(n):
            self.settle()
            if self.is_asked or self.talk.state.status is Status.MEASURING:
                self.the_search_answers(data)
            elif self.talk.state.status is Status.DRAINING:
                self.a_unit_is_run(data)

    @rule(data=st.data())
    def a_rank_works_or_is_heard(self, data: st.DataObject) -> None:
        busy = [rank for rank, me in sorted(self.ranks.items()) if me.inbox or me.outbox]
        if not busy:
            return
        rank = data.draw(st.sampled_from(busy))
        me = self.ranks[rank]
        if me.inbox and (not me.outbox or data.draw(st.booleans())):
            self.work(rank)
        else:
            self.deliver(rank)

    @rule(data=st.data())
    @precondition(lambda self: self.talk.state.status in (Status.RUNNING, Status.DRAINING))
    def a_unit_is_run(self, data: st.DataObject) -> None:
        """All workers contribute; each that is drawn gets the result before it hears of anything else."""
        plan = self.talk.state.plan
        if plan is None or any(w not in self.ranks for w in plan.workers):
            return
        generation = plan.generation
        running = [w for w in plan.workers if self.ranks[w].running == generation]
        if self.drained_for is not None and running and self.final:
            behind = [w for w in running if self.ranks[w].position == self.final[-1].position]
            self.pass_commit_point(data.draw(st.lists(st.sampled_from(behind), unique=True)) if behind else [], self.final[-1])
            return
        if len(running) < len(plan.workers):
            return
        workers = [self.ranks[worker] for worker in plan.workers]
        position = max(me.position for me in workers)
        if any(me.position != position for me in workers):
            behind = [worker for worker in plan.workers if self.ranks[worker].position != position]
            self.pass_commit_point(data.draw(st.lists(st.sampled_from(behind), unique=True)), self.final[-1])
            return
        for me in workers:
            me.phase = "contributed"
        self.drained_for = next((me.drain for me in workers if me.drain is not None), None)
        kind = data.draw(st.sampled_from(["step", "step", "evaluate"]))
        result = Result(position, kind, (0.0, 0.0))
        passing = data.draw(
            st.lists(st.sampled_from(plan.workers), unique=True, min_size=data.draw(st.sampled_from([0, 1, 1])))
        )
        if not passing:
            self.drained_for = None
        if passing:
            assert not self.final or position == position_after(self.final[-1]), "a unit is run twice"
            self.final.append(result)
        self.pass_commit_point(passing, result)

    def pass_commit_point(self, workers: list[int], result: Result) -> None:
        """Each rank reports each unit, in order."""
        for worker in workers:
            me = self.ranks[worker]
            assert me.running is not None
            me.told.append(Committed(worker, me.running, result, 8, 0.1))
            me.outbox.append((me.running, me.told[-1]))
            self.take(me, result)
            if self.drained_for is not None:
                me.running, me.drain, me.paused_for = None, None, self.drained_for
                held = tuple(sorted(me.held))
                paused = Paused(worker, self.drained_for, me.position, "between", held, passed=me.passed)
                me.outbox.append((self.drained_for, paused))

    def all_pass_a_unit(self) -> None:
        """Whoever has not passed the newest one passes it; else the next one is run, and passed by all."""
        plan = self.talk.state.plan
        assert plan is not None
        running = [w for w in plan.workers if w in self.ranks and self.ranks[w].running == plan.generation]
        if self.drained_for is None:
            positions = {self.ranks[w].position for w in running}
            position = max(positions)
            if len(positions) > 1:
                behind = [w for w in running if self.ranks[w].position != position]
                self.pass_commit_point(behind, self.final[-1])
            for w in running:
                self.ranks[w].phase = "contributed"
            self.drained_for = next(self.ranks[w].drain for w in running if self.ranks[w].drain is not None)
            self.final.append(Result(position, "step", (0.0, 0.0)))
        self.pass_commit_point(running, self.final[-1])

    @rule(data=st.data(), slot=st.booleans())
    def units_are_run_and_a_rank_is_killed(self, data: st.DataObject, slot: bool) -> None:
        if self.talk.state.status is Status.RUNNING:
            self.settle()
            self.a_unit_is_run(data)
            self.a_unit_is_run(data)
        self.a_rank_is_killed(data, slot)

    @rule(data=st.data(), slot=st.booleans())
    def a_rank_is_killed(self, data: st.DataObject, slot: bool) -> None:
        if len(self.ranks) > 1 and joined(self.talk.state):
            rank = data.draw(st.sampled_from(sorted(self.ranks)))
            if rank in self.talk.state.world.alive and self.talk.state.status is not Status.ENDED:
                self.end(rank, Cause(CauseKind.SIGNAL, "SIGKILL"), slot_lost=slot)

    @rule(data=st.data(), is_certain=st.booleans(), within_s=st.sampled_from([None, 0.25, 4.0]))
    def a_rank_is_asked_to_leave(self, data: st.DataObject, is_certain: bool, within_s: float | None) -> None:
        if len(self.ranks) > 1 and joined(self.talk.state) and self.talk.state.status is not Status.ENDED:
            rank = data.draw(st.sampled_from(sorted(self.ranks)))
            self.feed(NoticeGiven((rank,), "it was asked to", is_certain, within_s))

    @rule(data=st.data(), is_certain=st.booleans(), slot=st.booleans())
    def a_rank_is_asked_to_leave_and_another_is_killed(self, data: st.DataObject, is_certain: bool, slot: bool) -> None:
        self.a_rank_is_asked_to_leave(data, is_certain, None)
        self.a_rank_is_killed(data, slot)
        self.all_goes_well_for_a_while(data, 2)

    @rule(data=st.data())
    def slots_are_there_again(self, data: st.DataObject) -> None:
        """Also of ranks that live: these do not start again."""
        if joined(self.talk.state) and self.talk.state.status is not Status.ENDED:
            ranks = data.draw(st.lists(st.sampled_from(range(self.n_ranks)), min_size=1, unique=True))
            self.feed(SlotsReturned(tuple(ranks), "they were mended"))

    @rule()
    @precondition(lambda self: isinstance(self.talk.state, JobState) and self.talk.state.due)
    def the_time_of_a_notice_is_over(self) -> None:
        self.talk.now += 4.0
        self.feed(NoticeExpired())

    @rule(data=st.data())
    def a_rank_is_not_to_connect(self, data: st.DataObject) -> None:
        if self.ranks:
            self.refused.add(data.draw(st.sampled_from(sorted(self.ranks))))

    @rule(data=st.data(), raises=st.booleans(), error=st.sampled_from(["RuntimeError: CUDA", "OSError: disk"]))
    def the_script_fails_on_a_rank(self, data: st.DataObject, raises: bool, error: str) -> None:
        living = sorted(set(self.ranks) & self.talk.state.world.alive - self.failing)
        if len(self.ranks) < 2 or not living or not joined(self.talk.state) or self.talk.state.status is Status.ENDED:
            return
        rank = data.draw(st.sampled_from(living))
        if raises:
            self.failing.add(rank)
            self.feed(Failed(rank, error, "", "Traceback"))
        else:
            self.end(rank, Cause(CauseKind.EXIT, "exit code 3", 3))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.failing))
    def a_failed_rank_ends(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.failing)))
        self.failing.discard(rank)
        if rank in self.ranks:
            self.end(rank, Cause(CauseKind.EXIT, "exit code 1", 1))

    @property
    def is_asked(self) -> bool:
        """Plans are asked for, and none has been answered."""
        ask, state = self.talk.asked, self.talk.state
        if ask is None or ask is self.answered or ask.generation != state.world.generation:
            return False
        return state.status is (Status.RUNNING if ask.is_running else Status.PLANNING)

    @rule(data=st.data())
    @precondition(lambda self: self.is_asked or self.talk.state.status is Status.MEASURING)
    def the_search_answers(self, data: st.DataObject) -> None:
        if self.talk.state.status is Status.MEASURING:
            self.feed(Profiled(profile(), 0.1))
        else:
            assert self.talk.asked is not None
            self.answered = ask = self.talk.asked
            if ask.plan is not None and not ask.untrained and lacks_layers(ask):
                self.feed(Proposed((), 1.0, "", 0.0, False, "every holder is lost", ""))
            elif ask.leaving and data.draw(st.booleans()):
                self.feed(Proposed((Candidate("drawn", None, None, "no room without them"),), 1.0, "", 0.0, False))
            else:
                self.feed(Proposed((Candidate("drawn", self.draw_plan(data, ask), None, "drawn"),), 1.0, "", 0.0, False))

    def draw_plan(self, data: st.DataObject, ask: Propose) -> Plan:
        spawned = tuple(rank for rank in ask.respawnable if data.draw(st.booleans()))
        free = data.draw(st.permutations([*ask.alive, *spawned]))
        pipelines = []
        while free and len(pipelines) < N_MICRO_BATCHES:
            length = data.draw(st.integers(1, min(N_LAYERS, len(free))))
            stages = [(free[s], N_LAYERS * s // length, N_LAYERS * (s + 1) // length) for s in range(length)]
            pipelines.append(stages)
            free = free[length:]
        used = {stage[0] for stages in pipelines for stage in stages}
        return answer_to(
            ask,
            pipelines,
            spawned=tuple(rank for rank in spawned if rank in used),
            idle=tuple(rank for rank in ask.alive if rank not in used),
        )

    @rule(patience=st.integers(0, 5))
    @precondition(lambda self: self.talk.state.status in (Status.PAUSING, Status.MOVING, Status.RUNNING))
    def a_deadline_passes(self, patience: int) -> None:
        if patience == 0:
            self.feed(Tick(self.talk.state.world.deadline))

    @rule(data=st.data())
    def an_old_report_arrives(self, data: st.DataObject) -> None:
        generation = self.talk.state.world.generation
        if generation:
            rank = data.draw(st.integers(0, self.n_ranks - 1))
            old = data.draw(st.integers(0, generation - 1))
            report = data.draw(st.sampled_from(["paused", "ready"]))
            body = (
                Paused(rank, old, Position(0, 0), "compute", ())
                if report == "paused"
                else Ready(rank, old, Position(9, 9), (), (), 0, 0, 0, 0)
            )
            self.feed(body, old)

    @rule(data=st.data())
    def another_agent_leads(self, data: st.DataObject) -> None:
        """Orders on their way may be lost, answers are, and so is what only the one before knew; with it some ranks. What holds
        for good is told again, by the agents of ranks that live."""
        if self.talk.state.status is Status.ENDED:
            return
        lost: list[int] = []
        if len(self.ranks) > 1 and joined(self.talk.state):
            lost = data.draw(st.lists(st.sampled_from(sorted(self.ranks)), unique=True, max_size=len(self.ranks) - 1))
        for rank in lost:
            del self.ranks[rank]
            self.failing.discard(rank)
        self.newest, self.untold = (None, None), None
        results = self.talk.state.results if isinstance(self.talk.state, JobState) else ()
        for me in self.ranks.values():
            if data.draw(st.booleans()):
                me.inbox.clear()
            holds = [told for told in me.outbox if isinstance(told[1], Hello | Finished)]
            units = [unit for unit in me.told if not results or unit.result.position > results[-1].position]
            me.outbox = deque([*((unit.generation, unit) for unit in units), *holds])
        self.forget_lost_units()
        agent = Cause(CauseKind.AGENT, "its agent was lost")
        leads = (LeaderChanged(AgentInfo(7, "far", 1, 1)), None)
        self.feed_all([leads, *((RankLost(rank, agent, slot_lost=True), None) for rank in lost)])
        for rank in sorted(set(self.ranks) & joined(self.talk.state)):
            self.feed(Hello(rank, model()))

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def running_ranks_stand_alike(self) -> None:
        state = self.talk.state
        if state.status is Status.ENDED:
            reason = next(a.body for a in self.talk.actions if isinstance(a, Record) and hasattr(a.body, "code"))
            assert "cannot go on exactly" not in reason.reason and "do not agree" not in reason.reason, reason
        if state.status is Status.RUNNING:
            assert isinstance(state, JobState) and state.plan is not None
            assert set(state.plan.workers) | set(state.plan.idle) <= state.world.alive

    def teardown(self) -> None:
        """The faults have ended: whatever is outstanding is answered, and the job must run, or have ended for a reason."""
        for _ in range(1000):
            for rank in sorted(self.failing & set(self.ranks)):
                self.end(rank, Cause(CauseKind.EXIT, "exit code 1", 1))
            self.settle()
            if self.talk.state.status is Status.MEASURING:
                self.feed(Profiled(profile(), 0.1))
            elif self.talk.state.status is Status.DRAINING:
                self.all_pass_a_unit()
            elif self.talk.state.status is Status.RESTARTING:
                self.feed(Tick(self.talk.state.world.deadline))  # a pause before it is over
            elif self.is_asked and self.talk.asked is not None:
                self.answered = ask = self.talk.asked
                if ask.plan is not None and not ask.untrained and lacks_layers(ask):
                    self.feed(Proposed((), 1.0, "", 0.0, False, "every holder is lost", ""))
                    continue
                plan = answer_to(ask, [[(ask.alive[0], 0, N_LAYERS)]], idle=ask.alive[1:])
                self.feed(Proposed((Candidate("last", plan, None, ""),), 1.0, "", 0.0, False))
            else:
                break
        assert self.talk.state.status in (Status.RUNNING, Status.ENDED), f"stuck in {self.talk.state.status}"
        state: State = PlainState()
        actions: list[Action] = []
        for event in self.talk.events:
            state, some = step(state, event)
            actions += some
        assert actions == self.talk.actions and state == self.talk.state


class ManyJobs(Job):
    """The same, and many more of them."""


_settings = settings(stateful_step_count=50, suppress_health_check=list(HealthCheck))
TestRandomLives = Job.TestCase
TestRandomLives.settings = settings(_settings, max_examples=examples(200))
TestManyRandomLives = pytest.mark.soak(ManyJobs.TestCase)
TestManyRandomLives.settings = settings(_settings, max_examples=examples(3000))
