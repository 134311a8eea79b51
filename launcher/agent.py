"""The agent of a job on one host: spawns and watches ranks, feeds what happens to the coordinator, does what it decides.

    process ends, reports, signals, timers ─► events ─► coordinator.step ─► actions ─► orders, forks, kills, log lines

One thread, one loop. It sleeps until something happens: nothing is polled, and nothing on the path from a loss to the
orders that answer it waits for a disk or another thread. Around this file: processes.py has the ranks, profiling.py what
they measured, planning.py the plans, progress.py the hangs, faults.py the drills.
"""

from __future__ import annotations

import enum
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
from launcher import coordinator, drill, planning, store
from launcher.actions import (
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
from launcher.events import (
    Body,
    Cause,
    ConnectionLost,
    Event,
    JobEnded,
    JobStarted,
    Note,
    Profiled,
    RankFailed,
    StopRequested,
    Suspected,
    Tick,
    Went,
)
from launcher.faults import Faults
from launcher.logs import JobFolder
from launcher.loop import Loop, Timer
from launcher.options import RunOptions, Seat
from launcher.processes import Processes
from launcher.profiling import Profiling
from launcher.progress import Progress
from launcher.reports import event_of
from launcher.signals import Signals
from launcher.spawn import RankProcess
from launcher.state import State, Status
from odyssey import messages
from odyssey.errors import OdysseyError
from odyssey.messages import Measure, Measured, Ping, Prepare, frame, position_after
from perfmodel.profile import Profile
from perfmodel.reliability import ExpectedChange, seconds_to_change


class ExitCode(enum.IntEnum):
    """What `run` returns."""

    OK = 0
    """All ranks ended their scripts, or the profile is written."""
    FAILED = 1
    """The script failed, or state was lost for which there is no other holder."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM or SIGHUP to the launcher."""


_SIGNALS = {
    signal.SIGINT: ("interrupted by Ctrl-C", ExitCode.INTERRUPTED),
    signal.SIGTERM: ("terminated by SIGTERM", ExitCode.TERMINATED),
    signal.SIGHUP: ("terminated by SIGHUP", ExitCode.TERMINATED),
}

MOVE_S, MEASURE_S, FINISH_S = 1.0, 2.0, 5.0
"""What these phases are expected to take: four times as long, and the ranks are asked where they are."""
FIRST_LOOK_S, LAST_LOOK_S = 1.0, 60.0
"""After a Go, plans for the next loss are made anew at the costs that real steps have shown: soon, then ever more rarely."""
CONNECTION_GRACE_S = 1.0
"""A connection that ends is nearly always the first sign of a rank's end, which then explains it."""

Watch = Callable[[Event], None]
Output = Callable[[int, str, bytes], None]


def run(options: RunOptions, watch: Watch, output: Output) -> int:
    """Run a job to its end; answers an ExitCode. To be called from the main thread.

    `watch` sees every event of the log; `output(rank, 'stdout' or 'stderr', data)` what ranks write if it is captured.
    Both are called from the agent's loop, so they must not block. Raises UsageError before anything is started.
    """
    options.check_script()
    drills = tuple(
        part
        for text in options.drills
        for part in drill.parse(text, n_nodes=options.n_nodes, n_ranks_per_node=options.n_ranks_per_node)
    )
    profile = None
    if options.profile is not None:
        from perfmodel.profile import read

        profile = read(options.profile)
    listener = store.listen(options.master_addr, options.master_port)
    try:
        agent = Agent(options, watch, output, listener, drills)
        try:
            return agent.run(profile)
        finally:
            agent.close()
    finally:
        listener.close()


class Agent:
    """One job. It owns every process below it, and leaves none."""

    def __init__(
        self, options: RunOptions, watch: Watch, output: Output, listener: socket.socket, drills: tuple[drill.Drill, ...]
    ) -> None:
        self._options = options
        self._watch = watch
        self._loop = Loop(time.monotonic)
        self._epoch = time.time() - time.monotonic()
        self._signals = Signals(self._loop, tuple(_SIGNALS), self._on_signals)
        node_of = {rank: rank // options.n_ranks_per_node for rank in range(options.n_nodes * options.n_ranks_per_node)}
        self._folder = JobFolder(options.log_dir, time.time(), os.getpid())
        self._state = State()
        self._queue: deque[tuple[Body, str, int | None]] = deque()
        self._is_feeding = False
        self._code: int | None = None
        self._deadline: Timer | None = None
        self._order: tuple[Any, bytes] = (None, b"")
        self._processes = Processes(
            options,
            self._loop,
            self._folder,
            listener,
            node_of,
            feed=self._feed,
            say=self._say,
            report=self._report,
            output=output,
        )
        self._profiling = Profiling(options)
        self._node_of = node_of
        self._planner = planning.Planner(options, node_of, self._loop)
        self._faults = Faults(drills, self._loop, self._processes, self._say)
        self._progress = Progress(
            self._loop,
            self._ping_all,
            self._rank_hangs,
            lambda text: self._feed(Suspected(text)),
            lambda rank, text: self._feed(RankFailed(rank, text, "let all ranks make the same calls in the same order", "")),
            self._processes.pid_of,
        )

    # -- the life of a job ---------------------------------------------------------------------------------------------

    def run(self, profile: Profile | None) -> int:
        """Until every rank has ended."""
        self._signals.watch()
        self._processes.start()
        options = self._options
        self._feed(
            JobStarted(
                options.script,
                options.arguments,
                options.n_nodes,
                options.n_ranks_per_node,
                options.max_restarts,
                options.layout,
                options.strategy,
                options.mtbf_s,
                odyssey.__version__,
                os.getpid(),
                options.write_profile is not None,
            )
        )
        if profile is not None:
            self._profiling.profile = profile
            self._feed(Profiled(profile, 0.0))
        if self._processes.forks.are_safe and b"odyssey" in Path(options.script).read_bytes():
            # While the zygote imports torch on another core: what planning needs, of which the first loss must not wait.
            threading.Thread(target=planning.import_all, name="imports", daemon=True).start()
        self._faults.at_start()
        while self._code is None or not self._processes.have_ended:
            self._loop.turn()
        return self._code

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor, no handler."""
        self._planner.close()
        self._processes.close()
        self._signals.close()
        self._loop.close()
        self._folder.close()
        gc.enable()

    def _on_signals(self, numbers: bytes) -> None:
        self._processes.reap()
        for number in numbers:
            if number in _SIGNALS:
                reason, code = _SIGNALS[signal.Signals(number)]
                if self._code is not None:
                    self._processes.kill_all()
                else:
                    self._feed(StopRequested(reason, code))

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
                stamp = self._state.generation if generation is None else generation
                self._take(Event(self._now(), stamp, origin, body))
        finally:
            self._is_feeding = False

    def _take(self, event: Event) -> None:
        if self._code is not None:
            return  # the log has ended
        self._profiling.watch(event)
        self._state, actions = coordinator.step(self._state, event)
        rest = [action for action in actions if not self._do_at_once(action)]
        self._log(event)
        for action in rest:
            self._do(action)

    def _log(self, event: Event) -> None:
        self._folder.append(event)
        self._watch(event)

    def _say(self, text: str) -> None:
        self._log(Event(self._now(), self._state.generation, "agent", Note(text)))

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
                self._processes.spawn(self._seat(rank))
            case _:
                return False
        return True

    def _seat(self, rank: int) -> Seat:
        options = self._options
        node, local_rank = divmod(rank, options.n_ranks_per_node)
        n_ranks = options.n_nodes * options.n_ranks_per_node
        return Seat(
            rank, local_rank, node, n_ranks, options.n_ranks_per_node, options.n_nodes, rank, n_ranks, self._state.n_restarts
        )

    def _do(self, action: Action) -> None:
        match action:
            case Kill(rank=rank, cause=cause):
                self._processes.kill_rank(rank, cause)
            case EndRanks(ranks=ranks):
                self._processes.terminate(ranks)
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
        self._log(Event(self._now(), self._state.generation, "coordinator", body))
        if isinstance(body, Went):
            self._after_go(body)

    def _after_go(self, went: Went) -> None:
        gc.enable()
        plan = self._state.plan
        assert plan is not None
        expected_s = plan.estimate.step_s if plan.estimate is not None else 1.0
        self._progress.expect(expected_s)
        self._faults.on_step(plan.step, expected_s)
        self._profiling.calibrate(plan, went)
        self._plan_ahead(FIRST_LOOK_S)

    def _plan_ahead(self, look_again_s: float) -> None:
        """Have plans for the next loss at today's costs; and again when real steps have shown more of these."""
        plan = self._state.plan
        if plan is None or self._state.status is not Status.RUNNING:
            return
        generation = self._state.generation
        self._profiling.rescale(plan, self._node_of)
        can_respawn = self._state.n_restarts < self._state.max_restarts
        seconds = self._expected_change().seconds
        assert self._profiling.profile is not None
        self._planner.plan_ahead(plan, self._state.members, can_respawn, self._profiling.profile, seconds)

        def look() -> None:
            if self._state.generation == generation:
                self._plan_ahead(min(3 * look_again_s, LAST_LOOK_S))

        self._loop.later(look_again_s, look)

    def _last_words(self, ended: JobEnded) -> None:
        self._faults.tell_never_fired()
        if ended.code == ExitCode.FAILED:
            for rank in range(self._state.n_ranks):
                if f"rank {rank} " in ended.reason and (tail := self._folder.stderr_tail(rank)):
                    self._say(f"the last lines of rank {rank}:\n{tail}")
                    break

    def _end(self, code: int) -> None:
        self._code = code
        self._progress.stop()
        self._faults.end()
        self._processes.end()

    # -- reports and orders --------------------------------------------------------------------------------------------

    def _report(self, process: RankProcess, report: Any) -> None:
        """Make events of what the current process of a rank says."""
        rank = process.rank
        match report:
            case messages.Committed(result=result, unit_s=unit_s):
                results = self._state.results
                if not results or result.position == position_after(results[-1]):
                    self._feed_report(rank, report)
                    self._unit_is_final(result, unit_s)
            case messages.Pong() as pong:
                self._progress.pong(rank, pong)
            case messages.Broken(generation=generation, what=what):
                self._loop.later(CONNECTION_GRACE_S, lambda: self._still_broken(rank, what, generation))
            case messages.OpTimes(generation=generation) as times:
                if generation == self._state.generation:
                    self._profiling.refresh(times)
            case messages.Measured() as measured:
                self._measured(rank, measured)
            case messages.Finished():
                process.has_finished = True
                self._feed_report(rank, report)
                self._progress.expect(FINISH_S)
            case messages.Failed():
                process.has_failed = True
                self._feed_report(rank, report)
            case _:
                self._feed_report(rank, report)

    def _feed_report(self, rank: int, report: Any) -> None:
        body = event_of(rank, report)
        assert body is not None
        self._feed(body, f"rank {rank}", getattr(report, "generation", None))

    def _still_broken(self, rank: int, what: str, generation: int) -> None:
        if generation == self._state.generation:
            self._feed(ConnectionLost(rank, what), generation=generation)

    def _unit_is_final(self, result: messages.Result, unit_s: float) -> None:
        self._progress.made(unit_s)
        if result.kind == "step":
            plan = self._state.plan
            expected_s = plan.estimate.step_s if plan is not None and plan.estimate is not None else unit_s
            self._faults.on_step(result.position[0] + 1, min(expected_s, unit_s))

    def _send(self, rank: int, order: messages.Order) -> None:
        if order is not self._order[0]:
            addressed = replace(order, store=self._processes.store_address) if isinstance(order, Prepare | Measure) else order
            self._order = (order, frame(addressed))
        self._processes.send(rank, self._order[1])

    def _ping_all(self, number: int) -> frozenset[int]:
        ranks = frozenset(
            rank
            for rank, process in self._processes.ranks.items()
            if rank in self._state.joined and not process.has_finished and process.socket is not None
        )
        for rank in ranks:
            self._send(rank, Ping(number))
        return ranks

    def _rank_hangs(self, rank: int, text: str) -> None:
        self._processes.kill_rank(rank, Cause("hang", text))

    # -- profile and plans ---------------------------------------------------------------------------------------------

    def _measure(self, action: StartMeasure) -> None:
        ranks = self._profiling.begin(action, self._now())
        self._progress.expect(MEASURE_S)
        order = Measure(action.generation, action.chain, "")
        for rank in ranks:
            self._send(rank, order)

    def _measured(self, rank: int, report: Measured) -> None:
        if not self._profiling.take(rank, report) or self._state.status is not Status.MEASURING:
            return
        try:
            profile = self._profiling.merge(self._state.models[min(self._state.models)])
        except (OdysseyError, OSError) as error:
            self._fail(error)
            return
        self._feed(Profiled(profile, self._now() - self._profiling.since))

    def _propose(self, ask: Propose) -> None:
        profile = self._profiling.profile
        assert profile is not None
        try:
            proposed = self._planner.propose(ask, profile, self._expected_change())
            self._feed(proposed, generation=ask.generation)
        except OdysseyError as error:
            self._fail(error)

    def _expected_change(self) -> ExpectedChange:
        observed_s = self._now() - self._state.started_at
        return seconds_to_change(self._processes.n_losses, observed_s, mtbf_s=self._options.mtbf_s)

    def _fail(self, error: OdysseyError | OSError) -> None:
        what, help = (error.what, error.help) if isinstance(error, OdysseyError) else (str(error), "")
        self._feed(StopRequested(what, ExitCode.FAILED, help))
