"""The agent of a job on one host: spawns and watches ranks, feeds what happens to the coordinator, does what it decides.

    process ends, reports, signals, timers ─► events ─► coordinator.step ─► actions ─► orders, forks, kills, log lines

One thread, one loop. It sleeps until something happens: nothing is polled, and nothing on the path from a loss to the
orders that answer it waits for a disk or another thread.
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
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import odyssey
from launcher import coordinator, drill, environment, planning, spawn, store
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
    RankExited,
    RankFailed,
    RankFinished,
    RankJoined,
    RankLost,
    RankPaused,
    RankReady,
    RankStarted,
    StopRequested,
    StoreLost,
    Suspected,
    Tick,
    UnitCommitted,
    Went,
)
from launcher.logs import JobFolder
from launcher.loop import Loop, Timer
from launcher.options import RunOptions
from launcher.progress import Progress
from launcher.spawn import RankProcess, Zygote
from launcher.state import State, Status
from odyssey import messages
from odyssey.errors import OdysseyError, UsageError
from odyssey.messages import Measure, Measured, Ping, Prepare, frame, position_after
from odyssey.zygote import Forked, Imported
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
FAILED_GRACE_S = 5.0
"""For a rank whose script has failed, to print its traceback and end by itself."""
CONNECTION_GRACE_S = 1.0
"""A connection that ends is nearly always the first sign of a rank's end, which then explains it."""

Watch = Callable[[Event], None]
Output = Callable[[int, str, bytes], None]


def run(options: RunOptions, watch: Watch, output: Output) -> int:
    """Run a job to its end; answers an ExitCode. To be called from the main thread.

    `watch` sees every event of the log; `output(rank, 'stdout' or 'stderr', data)` what ranks write if it is captured.
    Both are called from the agent's loop, so they must not block. Raises UsageError before anything is started.
    """
    _check(options)
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


def _check(options: RunOptions) -> None:
    path = Path(options.script)
    if not path.exists():
        raise UsageError(f"no such script: {options.script}", "give the path of the training script")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{options.script} is a directory without __main__.py", "give the path of the training script")


class Agent:
    """One job. It owns every process below it, and leaves none."""

    def __init__(
        self, options: RunOptions, watch: Watch, output: Output, listener: socket.socket, drills: tuple[drill.Drill, ...]
    ) -> None:
        self._options = options
        self._watch = watch
        self._output = output
        self._listener = listener
        self._loop = Loop(time.monotonic)
        self._epoch = time.time() - time.monotonic()
        self._n_ranks = options.n_nodes * options.n_ranks_per_node
        self._node_of = {rank: rank // options.n_ranks_per_node for rank in range(self._n_ranks)}
        self._folder = JobFolder(options.log_dir, time.time(), os.getpid())
        self._state = State()
        self._queue: deque[tuple[Body, str, int | None]] = deque()
        self._is_feeding = False
        self._code: int | None = None
        self._ranks: dict[int, RankProcess] = {}
        """The current process of each rank."""
        self._processes: dict[int, RankProcess] = {}
        """By pid, all that are not reaped yet."""
        self._requests: dict[int, RankProcess | None] = {}
        """Forks asked for and not answered; None is the store."""
        self._unclaimed: dict[int, int] = {}
        """Wait statuses of processes that ended before the zygote's answer told who they were."""
        self._number = 0
        self._zygote: Zygote | None = None
        self._forks_are_safe = True
        self._store_pid: int | None = None
        self._deadline: Timer | None = None
        self._measuring: tuple[int, dict[int, Measured | None], float] = (0, {}, 0.0)
        self._order: tuple[Any, bytes] = (None, b"")
        self._planner = planning.Planner(options, self._node_of, self._loop)
        self._profile: Any = None
        self._n_losses = 0
        seed = os.environ.get("ODYSSEY_DRILL_SEED", "")
        self._drills = drill.Schedule(drills, int(seed) if seed.isdigit() else None)
        self._progress = Progress(
            self._loop, self._ping_all, self._rank_hangs, lambda text: self._feed(Suspected(text)), self._say, self._pid_of
        )
        self._shutdown_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        self._oom_kills = _oom_kills()

    # -- the life of a job ---------------------------------------------------------------------------------------------

    def run(self, profile: Any) -> int:
        self._was_subreaper = spawn.set_subreaper(True)
        self._wake, wake_end = socket.socketpair()
        self._wake.setblocking(False)
        wake_end.setblocking(False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (*_SIGNALS, signal.SIGCHLD)}
        self._old_wake = signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
        self._wake_end = wake_end
        self._loop.watch(self._wake.fileno(), self._on_signal)
        script = Path(self._options.script)
        if (reason := spawn.unfaithful(script)) is not None:
            self._forks_are_safe = False
            self._say(f"ranks are started without the zygote: {reason}")
        self._start_zygote()
        self._start_store()
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
            self._profile = profile
            self._feed(Profiled(profile, 0.0))
        if self._forks_are_safe and b"odyssey" in script.read_bytes():
            # While the zygote imports torch on another core: what planning needs, of which the first loss must not wait.
            threading.Thread(target=_import_planning, name="imports", daemon=True).start()
        for seconds, fault in self._drills.at_start():
            self._loop.later(seconds, partial(self._fire, fault))
        while self._code is None or self._processes or any(process is not None for process in self._requests.values()):
            self._loop.turn()
        return self._code

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor, no handler."""
        for process in self._processes.values():
            process.kill()
        if self._zygote is not None:
            self._loop.unwatch(self._zygote.socket.fileno())
            self._zygote.close()
        if self._store_pid is not None:
            _kill(self._store_pid)
        self._planner.close()
        self._end_descendants()
        for process in [*self._processes.values(), *self._ranks.values()]:
            self._drain_pipes(process)
            self._close_rank(process)
        if hasattr(self, "_handlers"):
            signal.set_wakeup_fd(self._old_wake)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._wake.close()
            self._wake_end.close()
            spawn.set_subreaper(self._was_subreaper)
        self._loop.close()
        self._folder.close()
        gc.enable()

    def _end_descendants(self) -> None:
        """What ranks have left behind came to us, the subreaper. Whatever they start while we look is found the next time."""
        import psutil

        while True:
            children = psutil.Process().children(recursive=True)
            for child in children:
                _kill(child.pid)
            try:
                while os.waitpid(-1, 0)[0]:
                    pass
            except ChildProcessError:
                return

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
                self._renew_store()
            case Spawn(rank=rank):
                self._spawn(rank)
            case _:
                return False
        return True

    def _do(self, action: Action) -> None:
        match action:
            case Kill(rank=rank, cause=cause):
                self._kill_rank(rank, cause)
            case EndRanks(ranks=ranks):
                self._terminate(ranks)
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
        from perfmodel import refine

        expected_s = plan.estimate.step_s if plan.estimate is not None else 1.0
        self._progress.expect(expected_s)
        self._arm_drills(plan.step, expected_s)
        if self._profile is not None and went.total_s is not None:
            self._profile = refine.calibrate(
                self._profile, plan, detect_s=None, pause_s=went.pause_s, groups_s=went.groups_s, moves_s=went.moves_s
            )
        can_respawn = self._state.n_restarts < self._state.max_restarts
        seconds = self._expected_change().seconds
        self._planner.plan_ahead(plan, self._state.members, can_respawn, self._profile, seconds)

    def _last_words(self, ended: JobEnded) -> None:
        for fault in self._drills.never_fired:
            self._say(f"drill {fault.text!r} never fired: the job ended before")
        if ended.code == ExitCode.FAILED:
            for rank in range(self._n_ranks):
                if f"rank {rank} " in ended.reason and (tail := self._folder.stderr_tail(rank)):
                    self._say(f"the last lines of rank {rank}:\n{tail}")
                    break

    def _end(self, code: int) -> None:
        self._code = code
        self._progress.stop()
        self._terminate(tuple(self._ranks))

    def _terminate(self, ranks: tuple[int, ...]) -> None:
        """SIGTERM, continued if stopped; SIGKILL to what is left after the time-out.

        A rank that reported its script's failure is about to end: it may still print its traceback.
        """
        processes = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        for process in processes:
            if process.killed_by is None:
                process.killed_by = "ended"
            if process.has_failed:
                self._loop.later(FAILED_GRACE_S, partial(self._signal_term, process))
            else:
                self._signal_term(process)
        self._loop.later(self._shutdown_s, lambda: self._kill_what_is_left(processes))

    def _signal_term(self, process: RankProcess) -> None:
        if process.pid in self._processes:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)

    def _kill_what_is_left(self, processes: list[RankProcess]) -> None:
        for process in processes:
            if process.pid in self._processes:
                process.kill()

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        modules = spawn.imports_for(Path(self._options.script)) if Path(self._options.script).is_file() else ["torch"]
        self._zygote = Zygote(modules, dict(os.environ), self._n_ranks)
        self._loop.watch(self._zygote.socket.fileno(), self._on_zygote)

    def _start_store(self) -> None:
        self._number += 1
        self._requests[self._number] = None
        if self._zygote is None:
            return
        request = spawn.fork_store(self._number, self._options.master_addr, self._port)
        try:
            self._zygote.request(request, [self._listener.fileno()])
        except OSError:
            pass  # asked again when the next zygote is there

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _renew_store(self) -> None:
        if self._store_pid is not None:
            pid, self._store_pid = self._store_pid, None
            _kill(pid)
        self._start_store()

    def _spawn(self, rank: int) -> None:
        self._number += 1
        old = self._ranks.get(rank)
        if old is not None:
            self._close_rank(old)
        self._ranks[rank] = process = RankProcess(rank, self._number)
        self._requests[process.number] = process
        self._start_process(process)

    def _start_process(self, process: RankProcess) -> None:
        variables = environment.for_rank(
            self._options,
            os.environ,
            process.rank,
            port=self._port,
            job_id=self._folder.job_id,
            job_dir=self._folder.path,
            n_restarts=self._state.n_restarts,
        )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process.socket = ours
        streams = spawn.Streams(self._options.capture_output)
        process.pipes = streams.read_ends
        arguments = tuple(a.replace("${local_rank}", variables["LOCAL_RANK"]) for a in self._options.arguments)
        descriptors = [*streams.descriptors, theirs.fileno()]
        if self._forks_are_safe and self._zygote is not None:
            request = spawn.fork_rank(process.number, self._options.script, arguments, variables)
            try:
                self._zygote.request(request, descriptors)
            except OSError:
                pass  # the zygote is gone: asked again when the next one is there
        else:
            popen = spawn.plain_spawn(self._options.script, arguments, variables, streams.descriptors, theirs.fileno())
            popen.returncode = 0  # this loop waits for its children itself
            del self._requests[process.number]
            self._is_there(process, popen.pid)
        theirs.close()
        streams.close_ours()
        self._loop.watch(ours.fileno(), lambda mask: self._on_rank(process, mask))
        for fd, name in process.pipes.items():
            self._loop.watch(fd, partial(self._on_pipe, process, fd, name))

    def _is_there(self, process: RankProcess, pid: int) -> None:
        process.pid = pid
        self._processes[pid] = process
        self._feed(RankStarted(process.rank, pid, self._node_of[process.rank]))
        if process.killed_by is not None or self._code is not None:
            process.kill()

    def _on_zygote(self, mask: int) -> None:
        assert self._zygote is not None
        match self._zygote.answer():
            case None:
                self._zygote_is_gone()
            case Imported(threads=threads) if threads > 1:
                self._forks_are_safe = False
                self._say(f"ranks are started without the zygote: importing torch has started {threads - 1} threads")
            case Forked(number=number, pid=pid):
                process = self._requests.pop(number, None)
                if process is not None:
                    self._is_there(process, pid)
                else:
                    self._store_pid = pid
                if pid in self._unclaimed:
                    self._gone(pid, self._unclaimed.pop(pid))
                if not self._requests:
                    self._unclaimed.clear()

    def _zygote_is_gone(self) -> None:
        """Ranks live on. A new one takes its place, and what it was asked for last is asked for again."""
        assert self._zygote is not None
        self._loop.unwatch(self._zygote.socket.fileno())
        self._zygote.close()
        self._zygote = None
        if self._code is not None:
            self._requests.clear()
            return
        if self._forks_are_safe:
            self._say("the zygote was lost; another one is started")
            self._start_zygote()
        asked = list(self._requests.items())
        for number, process in asked:
            if process is not None:
                self._close_rank(process)
                self._start_process(process)
            elif self._forks_are_safe:
                del self._requests[number]
                self._start_store()

    def _on_signal(self, mask: int) -> None:
        try:
            numbers = self._wake.recv(4096)
        except BlockingIOError:
            return
        self._reap()
        for number in numbers:
            if number in _SIGNALS:
                reason, code = _SIGNALS[signal.Signals(number)]
                if self._code is not None:
                    for process in self._processes.values():
                        process.kill()
                else:
                    self._feed(StopRequested(reason, code))

    def _reap(self) -> None:
        """Wait for all children that have ended. A rank is reported before its id is given back."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            status = -ended.si_status if ended.si_code != os.CLD_EXITED else ended.si_status
            self._gone(ended.si_pid, status)
            try:
                os.waitpid(ended.si_pid, 0)
            except ChildProcessError:
                pass

    def _gone(self, pid: int, status: int) -> None:
        """A child has ended: exit code, or minus the signal's number."""
        process = self._processes.pop(pid, None)
        if process is not None:
            self._rank_ended(process, status)
        elif pid == self._store_pid:
            self._store_pid = None
            self._start_store()
            self._feed(StoreLost(_how(status)))
        elif self._zygote is not None and pid == self._zygote.pid:
            self._zygote.reaped()
        elif self._requests:
            self._unclaimed[pid] = status

    def _rank_ended(self, process: RankProcess, status: int) -> None:
        self._read_reports(process)  # what it said last counts, above all a result
        is_current = self._ranks.get(process.rank) is process
        if process.killed_by == "unwanted" or not is_current:
            pass
        elif self._code is not None:
            pass  # its end was asked for; the log has ended
        elif status == 0:
            self._feed(RankExited(process.rank))
        elif process.killed_by in (None, "ended", "drill"):
            self._n_losses += status < 0 and process.killed_by != "ended"
            self._feed(RankLost(process.rank, self._cause(process, status), process.slot_lost))
        process.kill()  # what is left of its session
        self._drain_pipes(process)
        self._close_rank(process)

    def _cause(self, process: RankProcess, status: int) -> Cause:
        if process.killed_by == "drill":
            return Cause("drill", f"{_how(status)} by drill")
        if process.killed_by == "ended":
            return Cause("ended", f"ended with the others, {_how(status)}")
        if status > 0:
            return Cause("exit", _how(status))
        if status == -signal.SIGKILL and (now := _oom_kills()) > self._oom_kills:
            self._oom_kills = now
            return Cause("out-of-memory", "killed for want of memory")
        return Cause("signal", _how(status))

    def _kill_rank(self, rank: int, cause: Cause | None) -> None:
        process = self._ranks[rank]
        process.killed_by = cause.kind if cause is not None else "unwanted"
        process.kill()
        if cause is not None:
            self._n_losses += 1
            self._feed(RankLost(rank, cause, process.slot_lost))

    def _close_rank(self, process: RankProcess) -> None:
        if process.socket is not None:
            self._loop.unwatch(process.socket.fileno())
            process.socket.close()
            process.socket = None
        for fd in process.pipes:
            self._loop.unwatch(fd)
            os.close(fd)
        process.pipes = {}

    # -- what ranks write and say --------------------------------------------------------------------------------------

    def _on_pipe(self, process: RankProcess, fd: int, name: str, mask: int) -> None:
        self._on_output(process, fd, name)

    def _on_output(self, process: RankProcess, fd: int, name: str) -> bool:
        """Pass on what there is. False when there is no more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.unwatch(fd)
            os.close(fd)
            del process.pipes[fd]
            return False
        self._folder.output(process.rank, name, data)
        self._output(process.rank, name, data)
        return True

    def _drain_pipes(self, process: RankProcess) -> None:
        for fd, name in list(process.pipes.items()):
            while self._on_output(process, fd, name):
                pass

    def _on_rank(self, process: RankProcess, mask: int) -> None:
        process.flush(self._loop, lambda m: self._on_rank(process, m))
        self._read_reports(process)

    def _read_reports(self, process: RankProcess) -> None:
        """All that the rank has sent so far. Its end of file is no news: its exit is, and comes with the reason."""
        while process.socket is not None:
            try:
                data = process.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(process.socket.fileno())
                process.socket.close()
                process.socket = None
                return
            try:
                for report in process.deframer.feed(data):
                    self._report(process, report)
            except msgspec.MsgspecError as error:
                self._say(f"rank {process.rank} sent what is no report: {error}")
                process.kill()
                return

    def _report(self, process: RankProcess, report: Any) -> None:
        rank = process.rank
        if self._ranks.get(rank) is not process:
            return
        origin = f"rank {rank}"
        match report:
            case messages.Committed(generation=generation, result=result, n_samples=n_samples, unit_s=unit_s):
                results = self._state.results
                if not results or result.position == position_after(results[-1]):
                    self._feed(UnitCommitted(rank, result, n_samples, unit_s), origin, generation)
                    self._unit_is_final(result, unit_s)
            case messages.Paused(generation=generation, position=position, phase=phase, held=held):
                self._feed(RankPaused(rank, position, phase, held), origin, generation)
            case messages.Ready() as ready:
                fields = {name: getattr(ready, name) for name in RankReady.__struct_fields__ if name != "rank"}
                self._feed(RankReady(rank, **fields), origin, ready.generation)
            case messages.Pong() as pong:
                self._progress.pong(rank, pong)
            case messages.Broken(generation=generation, what=what):
                self._loop.later(CONNECTION_GRACE_S, lambda: self._still_broken(rank, what, generation))
            case messages.OpTimes() as times:
                self._refresh(times)
            case messages.Measured() as measured:
                self._measured(rank, measured)
            case messages.Hello(model=model):
                process.has_joined = True
                self._feed(RankJoined(rank, model), origin)
            case messages.Failed(error=error, help=help, traceback=traceback):
                process.has_failed = True
                self._feed(RankFailed(rank, error, help, traceback), origin)
            case messages.Finished():
                process.has_finished = True
                self._feed(RankFinished(rank), origin)
                self._progress.expect(FINISH_S)

    def _still_broken(self, rank: int, what: str, generation: int) -> None:
        if generation == self._state.generation:
            self._feed(ConnectionLost(rank, what), generation=generation)

    def _unit_is_final(self, result: messages.Result, unit_s: float) -> None:
        self._progress.made(unit_s)
        if result.kind == "step":
            plan = self._state.plan
            expected_s = plan.estimate.step_s if plan is not None and plan.estimate is not None else unit_s
            self._arm_drills(result.position[0] + 1, min(expected_s, unit_s))

    # -- orders --------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, order: messages.Order) -> None:
        if order is not self._order[0]:
            self._order = (order, frame(self._with_store(order)))
        process = self._ranks[rank]
        process.send(self._order[1], self._loop, lambda mask: self._on_rank(process, mask))

    def _with_store(self, order: messages.Order) -> messages.Order:
        if isinstance(order, Prepare | Measure):
            return replace(order, store=f"{self._options.master_addr}:{self._port}")
        return order

    def _ping_all(self, number: int) -> frozenset[int]:
        ranks = frozenset(
            rank
            for rank, process in self._ranks.items()
            if rank in self._state.joined and not process.has_finished and process.socket is not None
        )
        for rank in ranks:
            self._send(rank, Ping(number))
        return ranks

    def _pid_of(self, rank: int) -> int | None:
        process = self._ranks[rank]
        return process.pid if process.pid in self._processes else None

    def _rank_hangs(self, rank: int, text: str) -> None:
        self._kill_rank(rank, Cause("hang", text))

    # -- profile and plans ---------------------------------------------------------------------------------------------

    def _measure(self, action: StartMeasure) -> None:
        self._measuring = (
            action.generation,
            {stage.worker: None for stage in action.chain if stage.worker is not None},
            self._now(),
        )
        self._progress.expect(MEASURE_S)
        order = Measure(action.generation, action.chain, "")
        for rank in self._measuring[1]:
            self._send(rank, order)

    def _measured(self, rank: int, report: Measured) -> None:
        generation, reports, since = self._measuring
        if report.generation != generation or rank not in reports:
            return
        reports[rank] = report
        if self._state.status is not Status.MEASURING or any(report is None for report in reports.values()):
            return
        from perfmodel import profile as profiles
        from perfmodel.merge import merge

        model = self._state.models[min(self._state.models)]
        cores = len(os.sched_getaffinity(0)) if model.device == "cpu" else None
        try:
            self._profile = merge(
                model,
                [report for report in reports.values() if report is not None],
                ranks_per_node=self._options.n_ranks_per_node,
                nodes_per_host=self._options.n_nodes,
                cores=cores,
                model_name=Path(self._options.script).stem,
            )
            if self._options.write_profile is not None:
                profiles.write(self._profile, self._options.write_profile)
        except (OdysseyError, OSError) as error:
            self._fail(error)
            return
        self._feed(Profiled(self._profile, self._now() - since))

    def _refresh(self, times: messages.OpTimes) -> None:
        if self._profile is not None and times.generation == self._state.generation:
            from perfmodel.refine import refresh

            self._profile = refresh(self._profile, times.times)

    def _propose(self, ask: Propose) -> None:
        try:
            proposed = self._planner.propose(ask, self._profile, self._expected_change())
            self._feed(proposed, generation=ask.generation)
        except OdysseyError as error:
            self._fail(error)

    def _expected_change(self) -> ExpectedChange:
        observed_s = self._now() - self._state.started_at
        return seconds_to_change(self._n_losses, observed_s, mtbf_s=self._options.mtbf_s)

    def _fail(self, error: OdysseyError | OSError) -> None:
        what, help = (error.what, error.help) if isinstance(error, OdysseyError) else (str(error), "")
        self._feed(StopRequested(what, ExitCode.FAILED, help))

    # -- drills --------------------------------------------------------------------------------------------------------

    def _arm_drills(self, next_step: int, step_s: float) -> None:
        for seconds, fault in self._drills.on_step(next_step, step_s):
            self._loop.later(seconds, partial(self._fire, fault))

    def _fire(self, fault: drill.Drill) -> None:
        for rank in fault.ranks:
            pid = self._pid_of(rank) if rank in self._ranks else None
            if pid is None or self._code is not None:
                self._say(f"drill {fault.text!r}: rank {rank} is gone already")
                continue
            process = self._ranks[rank]
            if fault.action == "hang":
                os.kill(pid, signal.SIGSTOP)
            else:
                process.killed_by = "drill"
                process.slot_lost = fault.action == "lose"
                os.kill(pid, signal.SIGKILL)
            self._say(f"drill {fault.text!r}: {'SIGSTOP' if fault.action == 'hang' else 'SIGKILL'} to rank {rank}")


def _import_planning() -> None:
    from perfmodel import merge, refine
    from strategies import search

    assert merge and refine
    search.warm_up()


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _oom_kills() -> int:
    """How often the kernel has killed for want of memory in this control group; 0 where that is not to be read."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for line in Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
