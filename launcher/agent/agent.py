"""The agent of a job on one host: spawns and watches ranks, feeds what happens to the coordinator, does what it decides.

    process ends, reports, signals, timers ─► events ─► coordinator.step ─► actions ─► orders, forks, kills, log lines

One thread, one loop. It sleeps until something happens: nothing is polled, and nothing on the path from a loss to the
orders that answer it waits for a disk or another thread. Around this file: ../processes has the ranks, ../planning what they
measured and the plans, ../health the watch over what is waited for and the hangs, ../cluster the other agents.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import odyssey
from launcher.agent.awaited import Awaited
from launcher.agent.drills import Drill, Faults
from launcher.agent.report_router import ReportRouter
from launcher.cluster import endpoint
from launcher.cluster.leader import Leader
from launcher.cluster.nodes import RankProcesses
from launcher.cluster.quorum import Quorum
from launcher.cluster.roster import Roster
from launcher.coordinator import machine
from launcher.coordinator.actions import (
    Action,
    End,
    EndRanks,
    Kill,
    Propose,
    Record,
    RenewStore,
    SendOrder,
    SetDeadline,
    Spawn,
    StartMeasure,
)
from launcher.coordinator.rank_assignment import RankAssignment, assignments, assignments_on_one_host
from launcher.coordinator.state import JobState, PlainState, State, Status
from launcher.failures.diagnostics import hand_on
from launcher.failures.history import FailureHistory, after, retold
from launcher.failures.root_cause import root
from launcher.health.job_hangs import Progress
from launcher.health.stalls import StallWatch
from launcher.host.loop import Loop, Timer
from launcher.host.signals import Signals
from launcher.joblog import registry
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    Note,
    RankFailed,
    RankLost,
    RankStarted,
    StopRequested,
    Suspected,
    Tick,
    UnitCommitted,
)
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.planning import situations
from launcher.planning.planner import Pricing
from launcher.processes import rank_process
from launcher.processes.ranks import Processes
from launcher.processes.store import StoreAddress
from odyssey import messages
from odyssey.errors import OdysseyError
from odyssey.messages import Measure, Measured, Ping, Prepare, frame
from odyssey.text import as_unicode
from perfmodel.profile import Profile

MOVE_S, MEASURE_S = 1.0, 2.0
"""What these phases are expected to take: four times as long, and the ranks are asked where they are."""
MEMBERS_S = 5.0
"""For other agents, beyond the shutdown time-out of their ranks, to be gone."""

Watch = Callable[[Event], None]
Output = Callable[[int, str, bytes], None]


class Agent:
    """One job. It owns every process below it, and leaves none."""

    def __init__(
        self, options: RunOptions, watch: Watch, output: Output, listener: socket.socket, drills: tuple[Drill, ...]
    ) -> None:
        self._options = options
        self._watch = watch
        self._loop = Loop(time.monotonic)
        self._epoch = time.time() - time.monotonic()
        self._signals = Signals(self._loop, options, self._on_signals)
        self._folder = JobFolder(options, time.time(), self._say)
        self._state: State = PlainState()
        self._queue: deque[tuple[Body, str, int | None]] = deque()
        self._is_feeding = False
        self._code: int | None = None
        self._is_hurried = False
        """Told to end for the second time: nothing is waited for any more."""
        self._history = FailureHistory()
        self._why = ("", "")
        """Reason and help at the end."""
        self._ending_signal = signal.SIGTERM
        """What ranks are ended with: the signal that ends the job."""
        self._deadline: Timer | None = None
        self._order: tuple[Any, bytes] = (None, b"")
        self._processes = Processes(
            options,
            self._loop,
            self._folder,
            StoreAddress(options.master_addr, int(listener.getsockname()[1])),
            listener,
            feed=self._feed,
            say=self._say,
            report=lambda process, report: self._router.heard(process, report),
            output=output,
        )
        self._roster: Roster | None = None
        self._leader: Leader | None = None
        self._quorum: Quorum | None = None
        if options.max_agents > 1:
            role = as_unicode(options.role)  # as the other agents' arrive here
            leader = AgentInfo(0, socket.gethostname(), os.getpid(), options.n_ranks_per_node, role, options.node_rank)
            self._roster = Roster(options, leader, options.run_id, self._loop.clock())
            self._leader = Leader(
                self._loop,
                self._roster,
                self._processes.run_id,
                joined=lambda agent: self._require().joined(agent),
                lost=lambda agent, why: self._require().lost(agent, why),
                feed=self._feed,
                say=self._say,
                report=lambda process, report: self._router.heard(process, report),
                stopped=self._processes.waits.look,
            )
            self._quorum = Quorum(
                self._roster,
                self._loop,
                str(self._processes.store),
                say=self._say,
                begin=self._begin,
                give_up=lambda what, help: self._feed(StopRequested(what, ExitCode.FAILED, help)),
                joined=lambda agent: self._feed(AgentJoined(agent)),
                lost=self._agent_lost,
            )
            self._processes.store_keys[endpoint.LEADER_KEY] = self._leader.listen(listener)
        self._nodes = RankProcesses(self._processes, self._leader)
        self._node_of: dict[int, int] = {}
        self._pricing = Pricing(
            options,
            self._node_of,
            self._loop,
            state=lambda: self._state,
            now=self._now,
            feed=self._feed,
        )
        self._faults = Faults(drills, self._loop, self._nodes, self._say)
        self._progress = Progress(
            self._loop,
            self._ping_all,
            self._rank_hangs,
            lambda text: self._feed(Suspected(text)),
            lambda rank, text: self._feed(
                RankFailed(rank, text, "let all ranks make the same calls in the same order", "", True)
            ),
            self._nodes.vitals_of,
        )
        self._stalls = StallWatch(
            self._loop,
            options.stall_timeout_s,
            options.ends_stalled,
            ranks=self._plain_ranks,
            written=self._processes.n_bytes_of,
            feed=self._feed,
            kill=self._nodes.kill_rank,
        )
        self._waits = self._processes.waits
        self._waits.watch(self._pricing.awaited)
        self._waits.watch(
            Awaited(
                self._processes,
                self._nodes,
                state=lambda: self._state,
                assembles=lambda: self._quorum is not None and self._quorum.is_waiting,
            )
        )
        self._router = ReportRouter(
            self._loop,
            self._processes.forks,
            self._progress,
            self._pricing.profiling,
            self._stalls,
            self._faults,
            state=lambda: self._state,
            feed=self._feed,
            measured=self._measured,
        )

    # -- the life of a job ---------------------------------------------------------------------------------------------

    def run(self, profile: Profile | None) -> int:
        """Until every rank has ended."""
        self._signals.watch()
        self._processes.start()
        self._profile = profile
        if self._quorum is None:
            self._begin(())
        else:
            self._quorum.start()
        while not self._is_over:
            self._loop.turn()
        assert self._code is not None
        return self._code

    @property
    def _is_over(self) -> bool:
        if self._code is None:
            return False
        return self._is_hurried or (self._nodes.have_ended and self._processes.streams.are_shown)

    def _begin(self, agents: tuple[AgentInfo, ...]) -> None:
        """All agents that are waited for are here; none where there is only this one."""
        options = self._options
        sat = assignments(agents, 0, 0) if agents else assignments_on_one_host(options.n_nodes, options.n_ranks_per_node, 0, 0)
        self._node_of |= {rank: assignment.node for rank, assignment in sat.items()}
        self._feed(
            JobStarted(
                options.script,
                options.arguments,
                len(agents) or options.n_nodes,
                options.n_ranks_per_node,
                options.max_restarts,
                options.layout,
                options.strategy,
                options.mtbf_s,
                odyssey.__version__,
                os.getpid(),
                options.write_profile is not None,
                agents=agents,
                min_agents=options.min_agents,
                join_timeout_s=options.join_timeout_s,
                never_retry=options.never_retry,
                restart_limit=options.restart_limit,
                restart_backoff_s=options.restart_backoff_s,
                retries_same_failure=options.retries_same_failure,
                pid_started=registry.started_at(os.getpid()) or 0.0,
                host=socket.gethostname(),
                folder=str(self._folder.path or ""),
                run_id=self._processes.run_id,
            )
        )
        if self._profile is not None:
            self._feed(self._pricing.read(self._profile))
        if self._processes.forks.are_safe and rank_process.imports_odyssey(options):
            # While the zygote imports torch on another core: what planning needs, of which the first loss must not wait.
            threading.Thread(target=situations.import_all, name="imports", daemon=True).start()
        self._faults.at_start()
        self._stalls.start()
        if self._folder.path is not None:
            try:
                registry.enter(self._folder.path)
            except OSError as error:
                self._say(f"`odyssey ps` will not show this job: {error}")

    # -- several agents ------------------------------------------------------------------------------------------------

    def _require(self) -> Quorum:
        assert self._quorum is not None
        return self._quorum

    def _agent_lost(self, agent: AgentInfo, why: str) -> None:
        ranks = [rank for rank, home in self._state.world.homes.items() if home == agent.number]
        attempt = self._state.world.attempt
        self._feed(AgentLost(agent, why))
        if self._state.world.attempt != attempt:
            return  # a script without a Job has started again already, and these ranks live elsewhere
        for rank in ranks:  # a script without a Job has lost them with the agent
            self._feed(RankLost(rank, Cause(CauseKind.AGENT, f"agent {agent.number} was lost: {why}"), True))

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor, no handler."""
        self._stalls.close()
        self._pricing.close()
        if self._leader is not None:
            self._leader.close()
        self._processes.close()
        self._signals.close()
        self._loop.close()
        self._folder.close()
        gc.enable()

    def _on_signals(self, numbers: bytes) -> None:
        self._processes.reap()
        self._waits.look()
        for number in numbers:
            name = signal.Signals(number).name
            if name in self._options.forwarded_signals:
                self._nodes.pass_on(number)
            elif name in self._options.ending_signals and self._code is not None:
                self._is_hurried = True  # what is left is killed by `close`
                self._nodes.kill_all()
                self._processes.streams.abandon()
            elif name in self._options.ending_signals:
                self._ending_signal = signal.Signals(number)
                self._feed(StopRequested(*ending(number)))

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._epoch + self._loop.clock()

    def _feed(self, body: Body, origin: str = "agent", generation: int | None = None) -> None:
        """Hand an event to the coordinator. What its actions cause in turn comes behind it."""
        self._queue.append((body, origin, generation))
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._queue:
                body, origin, generation = self._queue.popleft()
                stamp = self._state.world.generation if generation is None else generation
                self._take(Event(self._now(), stamp, origin, body))
        finally:
            self._is_feeding = False

    def _take(self, event: Event) -> None:
        if self._code is not None:
            return  # the log has ended
        self._pricing.profiling.watch(event)
        if isinstance(event.body, RankStarted):
            self._router.began(event.body.rank)
        elif isinstance(event.body, RankLost | RankFailed):
            for at in self._stalls.untold(event.body.rank):
                self._log(Event(event.time, event.generation, "agent", at))
        self._state, actions = machine.step(self._state, event)
        rest = [action for action in actions if not self._do_at_once(action)]
        self._log(event)
        for action in rest:
            self._do(action)
        if not isinstance(event.body, UnitCommitted):
            self._waits.look()

    def _log(self, event: Event) -> None:
        self._history = after(self._history, event)
        self._folder.append(event)
        self._watch(event)

    def _say(self, text: str) -> None:
        self._log(Event(self._now(), self._state.world.generation, "agent", Note(text)))

    def _do_at_once(self, action: Action) -> bool:
        """Orders and forks go out before the log is written: ranks wait for them, and readers of the log do not."""
        match action:
            case SendOrder(rank=rank, order=order):
                if isinstance(order, messages.Pause):
                    gc.disable()  # until Go: a collection takes as long as a recovery
                    self._progress.stop()  # the coordinator's deadline holds
                elif isinstance(order, Prepare):
                    self._progress.expect(MOVE_S)
                self._send(rank, order)
            case RenewStore():
                self._processes.renew_store()
            case Spawn(rank=rank):
                try:
                    self._nodes.spawn(self._seat(rank), self._state.world.homes)
                except (OdysseyError, OSError) as error:  # no log file, no descriptor left
                    self._fail(error)
            case _:
                return False
        return True

    def _seat(self, rank: int) -> RankAssignment:
        world, options = self._state.world, self._options
        n_restarts, attempt = world.restarts.n, world.attempt
        if world.agents:
            assignment = assignments(world.agents, n_restarts, attempt)[rank]
        else:
            assignment = assignments_on_one_host(options.n_nodes, options.n_ranks_per_node, n_restarts, attempt)[rank]
        return replace(assignment, max_restarts=options.max_restarts, last_failure=world.last_failure)

    def _do(self, action: Action) -> None:
        match action:
            case Kill(rank=rank, cause=cause):
                self._nodes.kill_rank(rank, cause)
            case EndRanks(ranks=ranks):
                self._progress.stop()
                self._nodes.terminate(ranks)
            case StartMeasure() as measure:
                self._measure(measure)
            case Propose() as ask:
                self._propose(ask)
            case SetDeadline(seconds=seconds):
                if self._deadline is not None:
                    self._deadline.cancel()
                self._deadline = None if seconds is None else self._loop.later(seconds, lambda: self._feed(Tick()))
            case Record(body=body):
                self._record(body)
            case End(code=code):
                self._end(code)

    def _record(self, body: Body) -> None:
        if isinstance(body, JobEnded):
            self._last_words(body)
        self._log(Event(self._now(), self._state.world.generation, "coordinator", body))
        if isinstance(body, GenerationStarted):
            self._after_go(body)

    def _after_go(self, went: GenerationStarted) -> None:
        gc.enable()
        assert isinstance(self._state, JobState) and self._state.plan is not None
        plan = self._state.plan
        expected_s = plan.estimate.step_s if plan.estimate is not None else 1.0
        self._progress.expect(expected_s)
        self._faults.on_step(plan.step, expected_s)
        self._pricing.went(went)

    def _last_words(self, ended: JobEnded) -> None:
        self._why = (ended.reason, ended.help)
        self._faults.tell_never_fired()
        cause = root(self._state.world.ends)
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if ended.code == ExitCode.FAILED and cause is not None and path:
            try:
                hand_on(cause, Path(path))
            except OSError as error:
                self._say(f"the failure could not be written to TORCHELASTIC_ERROR_FILE: {error}")

    def _end(self, code: int) -> None:
        self._code = code
        if self._quorum is not None:
            self._quorum.end()
        self._progress.stop()
        self._stalls.close()
        self._faults.end()
        self._nodes.end(self._ending_signal, code, *self._why, retold(self._history))
        self._loop.later(self._options.shutdown_timeout_s + MEMBERS_S, self._nodes.leave_members)

    # -- orders --------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, order: messages.Command) -> None:
        if order is not self._order[0]:
            addressed = replace(order, store=str(self._processes.store)) if isinstance(order, Prepare | Measure) else order
            self._order = (order, frame(addressed))
        self._nodes.send(rank, self._order[1])

    def _ping_all(self, number: int) -> frozenset[int]:
        ranks = frozenset(
            rank
            for process in self._nodes.processes()
            if (rank := process.rank) in self._state.joined and not process.has_finished and self._nodes.is_there(rank)
        )
        for rank in ranks:
            self._send(rank, Ping(number))
        return ranks

    def _plain_ranks(self) -> dict[int, int]:
        """The living ranks without a Job on this host, and their pids."""
        if self._state.status is Status.RESTARTING or self._code is not None:
            return {}
        pids = {}
        for rank in sorted(self._state.world.alive - self._state.joined):
            home = self._roster.agents.get(self._state.world.homes.get(rank, 0)) if self._roster is not None else None
            is_beside = home is not None and home.number != 0 and home.host == socket.gethostname()
            pid = self._nodes.process(rank).pid if is_beside else self._nodes.pid_of(rank)
            if pid is not None:
                pids[rank] = pid
        return pids

    def _rank_hangs(self, rank: int, text: str) -> None:
        self._nodes.kill_rank(rank, Cause(CauseKind.HANG, text))

    # -- profile and plans ---------------------------------------------------------------------------------------------

    def _measure(self, action: StartMeasure) -> None:
        self._progress.expect(MEASURE_S)
        order = Measure(action.generation, action.chain, "")
        for rank in self._pricing.measure(action):
            self._send(rank, order)

    def _measured(self, rank: int, report: Measured) -> None:
        try:
            profiled = self._pricing.measured(rank, report)
        except (OdysseyError, OSError) as error:
            self._fail(error)
            return
        if profiled is not None:
            self._feed(profiled)

    def _propose(self, ask: Propose) -> None:
        try:
            self._feed(self._pricing.propose(ask), generation=ask.generation)
        except OdysseyError as error:
            self._fail(error)

    def _fail(self, error: OdysseyError | OSError) -> None:
        what, help = (error.what, error.help) if isinstance(error, OdysseyError) else (str(error), "")
        self._feed(StopRequested(what, ExitCode.FAILED, help))
