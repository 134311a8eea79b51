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
from pathlib import Path

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.diagnostics import diagnostics, read_error_file
from launcher.failures.exit_status import Ends, KilledBy, how
from launcher.health.waits import Waits
from launcher.host import limits
from launcher.host.handle import Handle
from launcher.host.loop import Loop
from launcher.host.orphans import VARIABLE, end_descendants
from launcher.host.proc import Vitals, vitals
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import Cause, CauseKind, Diagnostics, RankExited, RankLost, RankStarted, StoreLost
from launcher.options import RunOptions
from launcher.output import torch_logs_specs
from launcher.output.log_files import JobFolder
from launcher.output.streams import Streams
from launcher.processes.environment import Environments
from launcher.processes.orphans_of_ranks import OrphansOfRanks
from launcher.processes.rank_process import RankProcess, imports_odyssey
from launcher.processes.rank_reports import RankReports
from launcher.processes.shutdown import Shutdown
from launcher.processes.spawner import Spawner
from launcher.processes.stillness import Stillness
from launcher.processes.store import StoreAddress
from launcher.processes.store_process import StoreProcess
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank
from odyssey.runtime import nccl


class Processes:
    """Every process below the agent.
    `listener`: of the store, where this agent serves it; `output(rank, stream, data)`: what ranks write; what happens and
    what they report goes to `sink`."""

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        folder: JobFolder,
        listener: socket.socket | None,
        sink: EventSink,
        output: Callable[[Rank, str, bytes], bool | None],
    ) -> None:
        self._loop = loop
        self._sink = sink
        self.waits = Waits(loop, sink.say)
        """The watch over all that this agent waits for."""
        n_ranks = options.n_nodes * options.n_ranks_per_node
        self.spawner = Spawner(
            options, loop, n_ranks, say=sink.say, started=self._is_there, not_started=self._not_started, gone=self._gone
        )
        self.waits.watch(self.spawner.awaited)
        port = options.master_port if listener is None else int(listener.getsockname()[1])
        self.store = StoreProcess(StoreAddress(options.master_addr, port), listener, self.spawner, self.waits)
        defaults = nccl.BESIDE_KERNELS if imports_odyssey(options) else {}
        self.environments = Environments(options, folder, self.store.address, defaults)
        logs_of = torch_logs_specs.CustomLogs(options).logs_of if options.logs_specs else folder.logs_of
        self.streams = Streams(options, loop, logs_of, output, sink.say)
        self.ranks: dict[Rank, RankProcess] = {}
        """The current process of each rank that this agent has."""
        self._living: dict[int, RankProcess] = {}
        """By pid, all that are not reaped yet."""
        self.shutdown = Shutdown(loop, options.shutdown_timeout_s, self._living)
        self.orphans = OrphansOfRanks(loop, lambda: bool(self._living))
        self.stillness = Stillness(
            folder.mark_held, lambda: [rank.handle for rank in self._living.values() if rank.handle is not None]
        )
        self._is_ending = False
        self._ends = Ends()
        self._reports = RankReports(loop, sink, self._is_current, self._sent_no_report)

    def start(self) -> None:
        """Start the zygote, and the store from it."""
        self.orphans.start()
        self.spawner.start()
        self.store.start()
        if self.environments.timer_file:
            self.spawner.start_timers(self.environments.timer_file, self.environments.run_id)

    # -- ranks begin ---------------------------------------------------------------------------------------------------

    def spawn(self, assignment: RankAssignment, number: int) -> None:
        """Ask for a new process of a rank, of this number; RankStarted when it is there, RankLost if it cannot be."""
        old = self.ranks.get(assignment.rank)
        if old is not None:
            old.close(self._loop)
        self.ranks[assignment.rank] = process = RankProcess(assignment, number)
        try:
            variables = self.environments.of(process.assignment)
            variables[VARIABLE] = self.orphans.marker
            process.streams = streams = self.streams.open(process.assignment, variables)
            process.error_file = variables["TORCHELASTIC_ERROR_FILE"]
            if process.error_file:
                Path(process.error_file).unlink(missing_ok=True)  # of the rank's last process
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            process.socket = ours
            descriptors = [*streams.descriptors, theirs.fileno()]
            self._ends.rank_starts()
            self.spawner.start_rank(process, variables, descriptors)
            self.waits.look()
            theirs.close()
            streams.close_theirs()
        except OSError as error:
            self._not_started(process, limits.error_of("cannot start a process", error))
        except OdysseyError as error:
            self._not_started(process, error)

    def _not_started(self, process: RankProcess, why: OdysseyError) -> None:
        """No process, log file or descriptor is to be had: the rank is lost, and others may go on without it."""
        process.close(self._loop)
        process.slot_lost = True
        if not self._is_ending and self._is_current(process):
            text = f"{why.what} ({why.help})" if why.help else why.what
            self._sink.event(RankLost(process.rank, Cause(CauseKind.NOT_STARTED, text), True))

    def _is_there(self, process: RankProcess | None, handle: Handle) -> None:
        if process is None:
            self.store.is_there(handle)
            return
        process.handle, pid = handle, handle.pid
        self._living[pid] = process
        self.orphans.add(handle)
        if not self._is_ending and self._is_current(process):
            assignment = process.assignment
            self._sink.event(RankStarted(assignment.rank, pid, assignment.node, assignment.local_rank, socket.gethostname()))
        self._reports.watch(process)  # what a rank says at once waits until its start is an event
        if process.killed_by is not None or self._is_ending:
            process.kill()
        self.stillness.has_come()

    def forget(self, rank: Rank) -> None:
        """Another agent has it from now on."""
        process = self.ranks.pop(rank, None)
        if process is not None:
            process.close(self._loop)

    def has(self, rank: Rank) -> bool:
        """It was asked for a process of it."""
        return rank in self.ranks

    def _is_current(self, process: RankProcess) -> bool:
        """Its rank has no other one by now."""
        return self.ranks.get(process.rank) is process

    def process(self, rank: Rank) -> RankProcess:
        """The current process of a rank."""
        return self.ranks[rank]

    def pid_here(self, rank: Rank) -> int | None:
        """None before it is there and after its end."""
        process = self.ranks.get(rank)
        return process.pid if process is not None and process.pid in self._living else None

    def is_there(self, rank: Rank) -> bool:
        return self.pid_here(rank) is not None

    def seen(self, rank: Rank) -> tuple[int, Vitals | None] | None:
        """The id and the vitals of a rank's process; None before it is there and after its end. That it stands still by our
        doing says nothing of it: it is not late, and nobody is to continue it."""
        pid = self.pid_here(rank)
        return None if pid is None else (pid, None if self.ranks[rank].handle in self.stillness else vitals(pid))

    # -- what ranks are told, write and say ----------------------------------------------------------------------------

    def send(self, rank: Rank, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads."""
        self._reports.send(self.ranks[rank], data)

    def _sent_no_report(self, process: RankProcess, why: str) -> None:
        """It costs the rank, if that has not ended already, and nothing else."""
        text = f"sent what is no report: {why}"
        has_ended = process.pid is not None and process.pid not in self._living
        if has_ended or process.killed_by is not None or not self._is_current(process):
            self._sink.say(f"rank {process.rank} {text}")
            process.kill()
        else:
            self.kill_rank(process.rank, Cause(CauseKind.MALFORMED, text))

    # -- ranks are ended -----------------------------------------------------------------------------------------------

    def kill_rank(self, rank: Rank, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        process = self.ranks[rank]
        process.killed_by = KilledBy.TOLD if cause is not None else KilledBy.UNWANTED
        process.kill()
        if cause is not None:
            self._sink.event(RankLost(rank, cause, process.slot_lost))

    def drill(self, rank: Rank, number: int) -> None:
        """Kill or stop a rank on purpose: what follows is as if it had happened by itself."""
        process = self.ranks.get(rank)
        if process is not None and process.handle is not None and process.pid in self._living:
            if number == signal.SIGKILL:
                process.killed_by = KilledBy.DRILL
            process.handle.kill(number)

    def terminate(self, ranks: tuple[Rank, ...], number: int = signal.SIGTERM) -> None:
        """SIGTERM (or another signal), and SIGKILL to what is left after the time-out."""
        self.shutdown.begin([self.ranks[rank] for rank in ranks if rank in self.ranks], number)

    def end(self, number: int = signal.SIGTERM, in_s: float = 0.0) -> None:
        """Terminate all, at once or by and by: the log has ended, so nothing is fed any more."""
        self._is_ending = True
        self.spawner.end()
        if in_s:
            self._loop.later(in_s, lambda: self.terminate(tuple(self.ranks), number))
        else:
            self.terminate(tuple(self.ranks), number)

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank itself: what a rank has started may not expect it, and would end."""
        for process in self._living.values():
            if process.handle is not None:
                process.handle.kill(number)

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come."""
        return not self._living and not self.spawner.pending.has_ranks

    def kill_all(self) -> None:
        """SIGKILL to every rank."""
        for process in self._living.values():
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
        elif pid == self.store.pid:
            self._sink.event(StoreLost(self.store.ended() or how(status)))
        else:
            self.spawner.reaped(pid, status)

    def _rank_ended(self, process: RankProcess, status: int) -> None:
        assert process.handle is not None
        process.signal(signal.SIGTERM)  # to its process group, at once; what does not end of it is searched for
        self.orphans.of(process.handle)
        if process.streams is not None:
            process.streams.drain()  # the log, the terminal and the last words come before the news
        self._reports.read(process)  # what it said last counts, above all a result
        if process.killed_by is KilledBy.UNWANTED or not self._is_current(process):
            pass
        elif self._is_ending:
            pass  # its end was asked for; the log has ended
        elif status == 0:
            self._sink.event(RankExited(process.rank, process.killed_by is KilledBy.ENDED))
        elif process.killed_by is not KilledBy.TOLD:
            cause = self._ends.cause(status, process.killed_by)
            self._sink.event(RankLost(process.rank, cause, process.slot_lost, _diagnostics(self.streams, process, status)))
            if status < 0 and process.killed_by is None:
                self.shutdown.hurry()
        if process.streams is not None:
            process.streams.drain()
        process.close(self._loop)

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor."""
        self.waits.close()
        self.kill_all()
        self.spawner.close()
        self.store.close()
        self.orphans.close()
        end_descendants()
        self.environments.close()
        self.stillness.close()
        self.streams.close()
        for process in [*self._living.values(), *self.ranks.values()]:
            process.close(self._loop)


def _diagnostics(streams: Streams, process: RankProcess, status: int) -> Diagnostics:
    """What a lost rank has left. There is no more to learn of an exception that it has told itself, and of SIGKILL."""
    path = streams.stderr_log(process.rank)
    if process.has_failed or status in (-signal.SIGKILL, -signal.SIGTERM):
        recorded = process.error_file if process.has_failed and read_error_file(process.error_file) is not None else ""
        return Diagnostics(log=path, error_file=recorded)
    tail = streams.stderr_tail(process.rank)
    return diagnostics(tail, process.error_file, path, was_ended=process.killed_by is KilledBy.ENDED)
