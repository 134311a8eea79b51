"""The processes of one job on one host: asked for, watched until they end, ended, reaped; none is left behind.

    spawn(rank) ─► zygote forks (or a plain spawn) ─► RankStarted ─► reports, output ─► its end ─► RankExited or RankLost

The zygote and the store are processes here as well: when the zygote is lost another one serves what was asked last, when
the store is lost another one serves the same address.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.diagnostics import diagnostics, read_error_file
from launcher.failures.exit_status import Ends, KilledBy, has_ended, how
from launcher.health.waits import Waits
from launcher.host.loop import Loop
from launcher.host.orphans import VARIABLE, Reaper, end_descendants, end_orphans, kill
from launcher.joblog.events import Body, Cause, CauseKind, Diagnostics, RankExited, RankLost, RankStarted, StoreLost
from launcher.options import RunOptions
from launcher.output import torch_logs_specs
from launcher.output.log_files import JobFolder
from launcher.output.streams import Streams
from launcher.processes import environment
from launcher.processes.rank_process import RankProcess
from launcher.processes.spawner import Forks
from launcher.processes.store import StoreAddress, n_waiting
from odyssey.codec import Malformed

FAILED_GRACE_S, VICTIM_GRACE_S = 5.0, 0.1
"""For a rank whose script has failed, to print its traceback and end by itself; and where the reason is another rank's death,
which leaves nothing to learn from this one."""


ORPHANS_S = 1.0
"""From the end of a rank to the search for what it has left: a recovery comes first."""


class Processes:
    """Every process below the agent. `listener`: of the store, where this agent serves it. `feed`: what happened, to the
    coordinator; `say`: for people; `report(process, report)` and `output(rank, stream, data)`: what ranks say and write."""

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        folder: JobFolder,
        store: StoreAddress,
        listener: socket.socket | None,
        *,
        feed: Callable[[Body], None],
        say: Callable[[str], None],
        report: Callable[[RankProcess, Any], None],
        output: Callable[[int, str, bytes], None],
    ) -> None:
        self._options = options
        self._loop = loop
        self._folder = folder
        self.store = store
        self._listener = listener
        self.store_keys: dict[str, str] = {}
        """What a fresh store holds."""
        self.run_id = folder.run_id
        """TORCHELASTIC_RUN_ID."""
        self._feed = feed
        self._say = say
        self._report = report
        logs_of = torch_logs_specs.CustomLogs(options).logs_of if options.logs_specs else folder.logs_of
        self.streams = Streams(options, loop, logs_of, output, say)
        self.ranks: dict[int, RankProcess] = {}
        """The current process of each rank."""
        self._living: dict[int, RankProcess] = {}
        """By pid, all that are not reaped yet."""
        n_ranks = options.n_nodes * options.n_ranks_per_node
        self.forks = Forks(options, loop, n_ranks, say=say, started=self._started, gone=self._gone)
        self.waits = Waits(loop, say)
        """The watch over all that this agent waits for."""
        self.waits.watch(self.forks.awaited)
        self._reaper: Reaper | None = None
        self._gone_leaders: set[int] = set()
        """Ranks that are gone, and may have left something in the sessions that they led."""
        self._failed: list[RankProcess] = []
        """Ranks that are to end, and have failed by themselves: they may take their time."""
        self._timer_file = environment.timer_file(os.environ, folder.path)
        self.store_pid: int | None = None
        """None where another agent serves it, and before it is there."""
        self._store_why = ""
        """What was seen of the store, if it was ended for it."""
        self._is_ending = False
        self._ends = Ends()

    # -- the zygote and the store --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the zygote, and the store from it."""
        self._reaper = Reaper()
        self.forks.start()
        self._start_store()
        if self._timer_file:
            self.forks.start_timers(self._timer_file, self.run_id)

    def _start_store(self) -> None:
        if self._listener is not None:
            self.forks.start_store(self.store.host, self.store.port, self._listener.fileno(), self.store_keys)
            self.waits.look()

    def renew_store(self) -> None:
        """Another process with a fresh store, at the same address. What used the old one is gone, and what it started goes."""
        self._end_orphans()
        self._store_why = ""
        if self.store_pid is not None:
            pid, self.store_pid = self.store_pid, None
            kill(pid)
        self._start_store()

    def end_store(self, what: str) -> None:
        """It serves nobody: `what` was seen of it. StoreLost follows, and another one."""
        if self.store_pid is not None:
            self._store_why = what
            kill(self.store_pid)

    @property
    def store_is_asked(self) -> bool:
        """Connections to the store wait for it to take them."""
        return self._listener is not None and n_waiting(self._listener) > 0

    def look_up(self, key: str, found: Callable[[str], None]) -> None:
        """Ask the job's store, which another agent serves, for a key; `found('')` if it does not answer."""
        self.forks.look_up(self.store.host, self.store.port, key, found)
        self.waits.look()

    def _started(self, process: RankProcess | None, pid: int) -> None:
        if process is None:
            self.store_pid = pid
        else:
            self._is_there(process, pid)

    # -- ranks begin ---------------------------------------------------------------------------------------------------

    def spawn(self, assignment: RankAssignment) -> None:
        """Ask for a new process of a rank; RankStarted when it is there."""
        old = self.ranks.get(assignment.rank)
        if old is not None:
            self._close_rank(old)
        self.ranks[assignment.rank] = process = RankProcess(assignment)
        self._start_process(process)

    def _start_process(self, process: RankProcess) -> None:
        variables = environment.for_rank(
            self._options,
            os.environ,
            process.assignment,
            master_addr=self.store.host,
            master_port=self.store.port,
            run_id=self.run_id,
            job_dir=self._folder.path,
            timer_file=self._timer_file,
            error_file="",
        )
        assert self._reaper is not None
        variables[VARIABLE] = self._reaper.marker
        process.streams = streams = self.streams.open(process.assignment, variables)
        process.error_file = variables["TORCHELASTIC_ERROR_FILE"]
        if process.error_file:
            Path(process.error_file).unlink(missing_ok=True)  # of the rank's last process
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process.socket = ours
        descriptors = [*streams.descriptors, theirs.fileno()]
        self.forks.start_rank(process, variables, descriptors)
        self.waits.look()
        theirs.close()
        streams.close_theirs()
        self._loop.watch(ours.fileno(), lambda mask: self._on_rank(process, mask))

    def _is_there(self, process: RankProcess, pid: int) -> None:
        process.pid = pid
        self._living[pid] = process
        assert self._reaper is not None
        self._reaper.add(pid)
        self._ends.rank_starts()
        if not self._is_ending:
            assignment = process.assignment
            self._feed(RankStarted(assignment.rank, pid, assignment.node, assignment.local_rank, socket.gethostname()))
        if process.killed_by is not None or self._is_ending:
            process.kill()

    def pid_of(self, rank: int) -> int | None:
        """None before it is there and after its end."""
        process = self.ranks.get(rank)
        return process.pid if process is not None and process.pid in self._living else None

    def n_bytes_of(self, rank: int) -> int:
        """What the rank's process has written so far, where it comes through this agent."""
        process = self.ranks.get(rank)
        return process.streams.n_bytes if process is not None and process.streams is not None else 0

    # -- what ranks are told, write and say ----------------------------------------------------------------------------

    def send(self, rank: int, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads."""
        process = self.ranks[rank]
        process.send(data, self._loop, lambda mask: self._on_rank(process, mask))

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
                self._close_socket(process)
                return
            try:
                for report in process.deframer.feed(data):
                    if self.ranks.get(process.rank) is process:
                        self._report(process, report)
            except Malformed as error:
                self._close_socket(process)
                self._sent_no_report(process, str(error))

    def _sent_no_report(self, process: RankProcess, why: str) -> None:
        """It costs the rank, if that has not ended already, and nothing else."""
        text = f"sent what is no report: {why}"
        has_ended = process.pid is not None and process.pid not in self._living
        if has_ended or process.killed_by is not None or self.ranks.get(process.rank) is not process:
            self._say(f"rank {process.rank} {text}")
            process.kill()
        else:
            self.kill_rank(process.rank, Cause(CauseKind.MALFORMED, text))

    def _close_socket(self, process: RankProcess) -> None:
        if process.socket is not None:
            self._loop.unwatch(process.socket.fileno())
            process.socket.close()
            process.socket = None

    def _close_rank(self, process: RankProcess) -> None:
        self._close_socket(process)
        if process.streams is not None:
            process.streams.close()
            process.streams = None

    # -- ranks are ended -----------------------------------------------------------------------------------------------

    def kill_rank(self, rank: int, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        process = self.ranks[rank]
        process.killed_by = KilledBy.TOLD if cause is not None else KilledBy.UNWANTED
        process.kill()
        if cause is not None:
            self._feed(RankLost(rank, cause, process.slot_lost))

    def terminate(self, ranks: tuple[int, ...], number: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM (or another signal), continued if stopped; SIGKILL to what is left after the time-out.

        A rank that reported its script's failure is about to end: it may still print its traceback.
        """
        processes = [self.ranks[rank] for rank in ranks if rank in self.ranks]
        self._failed = [process for process in processes if process.has_failed]
        for process in processes:
            if process.has_failed:
                self._loop.later(FAILED_GRACE_S, partial(self._ask_to_end, process, number))
            else:
                self._ask_to_end(process, number)
        self._loop.later(self._options.shutdown_timeout_s, lambda: self._kill_what_is_left(processes))

    def _hurry(self) -> None:
        """A rank has died of a signal. Those that failed with it, and may end by themselves, are not waited for any longer.

        What their interpreters do at the end can take seconds, which a restart would begin with.
        """
        for process in self._failed:
            self._loop.later(VICTIM_GRACE_S, partial(self._ask_to_end, process, signal.SIGTERM))

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Terminate all: the log has ended, so nothing is fed any more."""
        self._is_ending = True
        self.forks.end()
        self.terminate(tuple(self.ranks), number)

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank itself: what a rank has started may not expect it, and would end."""
        for pid in self._living:
            kill(pid, number)

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come."""
        return not self._living and not self.forks.awaits_ranks

    def kill_all(self) -> None:
        """SIGKILL to every rank."""
        for process in self._living.values():
            process.kill()

    def _ask_to_end(self, process: RankProcess, number: signal.Signals) -> None:
        self._mark_ended(process)
        if process.pid in self._living:
            process.signal(number)
            process.signal(signal.SIGCONT)

    def _mark_ended(self, process: RankProcess) -> None:
        """A rank that has ended by itself, and is only not reaped yet, keeps its own cause."""
        if process.killed_by is None and (process.pid is None or (process.pid in self._living and not has_ended(process.pid))):
            process.killed_by = KilledBy.ENDED

    def _kill_what_is_left(self, processes: list[RankProcess]) -> None:
        for process in processes:
            self._mark_ended(process)
            if process.pid in self._living:
                process.kill()

    # -- processes have ended ------------------------------------------------------------------------------------------

    def reap(self) -> None:
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
        process = self._living.pop(pid, None)
        if process is not None:
            self._rank_ended(process, status)
        elif pid == self.store_pid:
            self.store_pid = None
            self._start_store()
            why, self._store_why = self._store_why or how(status), ""
            self._feed(StoreLost(why))
        else:
            self.forks.reaped(pid, status)

    def _rank_ended(self, process: RankProcess, status: int) -> None:
        assert process.pid is not None
        process.signal(signal.SIGTERM)  # to its process group, at once; what does not end of it is searched for
        self._gone_leaders.add(process.pid)
        self._loop.later(ORPHANS_S, self._end_orphans)
        if process.streams is not None:
            process.streams.drain()  # the log, the terminal and the last words come before the news
        self._read_reports(process)  # what it said last counts, above all a result
        is_current = self.ranks.get(process.rank) is process
        if process.killed_by is KilledBy.UNWANTED or not is_current:
            pass
        elif self._is_ending:
            pass  # its end was asked for; the log has ended
        elif status == 0:
            self._feed(RankExited(process.rank, process.killed_by is KilledBy.ENDED))
        elif process.killed_by is not KilledBy.TOLD:
            cause = self._ends.cause(status, process.killed_by)
            self._feed(RankLost(process.rank, cause, process.slot_lost, self._diagnostics(process, status)))
            if status < 0 and process.killed_by is None:
                self._hurry()
        if process.streams is not None:
            process.streams.drain()
        self._close_rank(process)

    def _end_orphans(self) -> None:
        """What the ranks that are gone have left."""
        assert self._reaper is not None
        if self._gone_leaders:
            # A process in another session may be that of any rank: as long as one lives it is left to it.
            end_orphans(self._gone_leaders, "" if self._living else self._reaper.marker)
            self._gone_leaders.clear()

    def _diagnostics(self, process: RankProcess, status: int) -> Diagnostics:
        """What a lost rank has left. Of an exception that it has told itself, and of SIGKILL, there is no more to learn."""
        log = Path(process.error_file).with_name("stderr.log") if process.error_file else None
        path = str(log) if log is not None and log.exists() else ""
        if process.has_failed or status in (-signal.SIGKILL, -signal.SIGTERM):
            recorded = process.error_file if process.has_failed and read_error_file(process.error_file) is not None else ""
            return Diagnostics(log=path, error_file=recorded)
        tail = self.streams.stderr_tail(process.rank)
        return diagnostics(tail, process.error_file, path, was_ended=process.killed_by is KilledBy.ENDED)

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor."""
        self.waits.close()
        self.kill_all()
        self.forks.close()
        if self.store_pid is not None:
            kill(self.store_pid)
        if self._reaper is not None:
            self._reaper.close()
        end_descendants()
        if self._timer_file:
            Path(self._timer_file).unlink(missing_ok=True)
        self.streams.close()
        for process in [*self._living.values(), *self.ranks.values()]:
            self._close_rank(process)
