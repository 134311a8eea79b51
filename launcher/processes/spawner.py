"""Starts the processes of ranks and of the store: forks of the zygote where that is faithful (fork_rules.py), or plain spawns.

    start_rank, start_store ─► zygote (or a plain spawn) ─► `started(process, handle)`

What was asked for and is not there yet is remembered here with its descriptors, so that the loss of the zygote costs
time and nothing else: another one serves it. One that is stopped or does not answer is as good as lost. Once ranks have told
what they import, a better one takes its place (warm_zygote.py), in which forks wait for the next start (zygote/ahead.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from launcher.health.waits import Wait
from launcher.host import limits
from launcher.host.handle import Handle
from launcher.host.loop import Loop, Timer
from launcher.options import RunOptions
from launcher.processes import environment, fork_rules, rank_process
from launcher.processes.fork_rules import Ruling, Rulings
from launcher.processes.rank_process import RankProcess, Zygote
from launcher.processes.services import TimerWatch
from launcher.processes.warm_zygote import IMPORT_IDLE_S, WORTH_LEARNING, WarmZygote
from odyssey.control_group import allowance
from odyssey.errors import OdysseyError
from odyssey.zygote.protocol import Fork, ForkAhead, Forked, ForkRank, ForkStore, ForkTimers, Imported, NotForked

FORK_IDLE_S = 10.0
"""A zygote that was asked for a process has nothing to wait for."""
AHEAD_PAUSE_S = 0.5
"""From the first rank's first step to the forks of the next start: the other ranks are still at theirs."""
HEAP_BYTES, HEAP_SPARE = 31 << 20, 4
"""A rank that waits has so much memory ready (odyssey/zygote/heap.py), if the control group has so many times as much free
for all that wait."""
SERVICE_PAUSE_S = 1.0
"""Before what watches timers is started again: it ends itself when it has ended a rank."""


class _Asked:
    """A process that is still to come. `process`: None for any but a rank's. Holds copies of its descriptors until then."""

    def __init__(self, request: Fork, process: RankProcess | None, descriptors: list[int]) -> None:
        self.request = request
        self.process = process
        self.descriptors = [os.dup(fd) for fd in descriptors]

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


class _Present:
    """The zygote that serves. `is_ready`: it has imported torch; `why_killed`: what was seen of it, if it was ended for it."""

    def __init__(self, zygote: Zygote, *, is_ready: bool) -> None:
        self.zygote = zygote
        self.is_ready = is_ready
        self.why_killed = ""


class _Pending:
    """What was asked for and is not there yet."""

    def __init__(self) -> None:
        self.asked: dict[int, _Asked] = {}
        """By number, in the order in which they were asked for."""
        self.unclaimed: dict[int, int] = {}
        """Wait statuses of processes that ended before the zygote's answer told who they were."""
        self._number = 0

    @property
    def has_ranks(self) -> bool:
        """Whether a rank is among it."""
        return any(asked.process is not None for asked in self.asked.values())

    def next_number(self) -> int:
        self._number += 1
        return self._number


class Spawner:
    """`started(process, handle)`: this one is there, None for the store; also called from within `start_rank`.

    `not_started(process, why)`: no process of a rank is to be had. `gone(pid, status)`: it had ended by the time its start was
    known. `say`: for people.
    """

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        n_ranks: int,
        *,
        say: Callable[[str], None],
        started: Callable[[RankProcess | None, Handle], None],
        not_started: Callable[[RankProcess, OdysseyError], None],
        gone: Callable[[int, int], None],
    ) -> None:
        self._options = options
        self._loop = loop
        self._n_ranks = n_ranks
        self._started = started
        self._not_started = not_started
        self._gone = gone
        self._rulings = Rulings(options.verbose, say)
        self.pending = _Pending()
        self._timers: TimerWatch | None = None
        self._ahead_timer: Timer | None = None
        self._present: _Present | None = None
        self._better: Zygote | None = None
        """It takes over when the present one has answered what it was asked."""
        self._n_early_ends = 0
        """Zygotes that have ended before they were ready."""
        self._is_ending = False
        self._warm = WarmZygote(
            loop,
            tuple(environment.of_ranks(options)),
            make=lambda: self._make_zygote(quiet=True),
            ready=self._take_over,
            explain=self._rulings.explain,
        )

    @property
    def are_safe(self) -> bool:
        """Ranks are forks, as far as is known."""
        return self._rulings.allow_forks

    def start(self) -> None:
        """Start the zygote."""
        ruling = fork_rules.ruling(self._options, os.environ)
        if ruling is not None:
            self._rulings.of_ranks(ruling)
        self._serve(self._make_zygote(), is_ready=False)

    def prepare(self, modules: tuple[str, ...]) -> None:
        """A rank has made its first step and imported these by then: have the next start ready. What was imported counts the
        first time."""
        if not self.are_safe or self._is_ending:
            return
        if len(modules) >= WORTH_LEARNING and not self._warm.modules:
            self._warm.begin(modules)
        elif not self._warm.is_busy and self._ahead_timer is None:
            self._ahead_timer = self._loop.later(AHEAD_PAUSE_S, self._fork_ahead)

    def _fork_ahead(self) -> None:
        """A rank for each that is here, and a store, of what the present zygote has imported."""
        self._forget_ahead()
        if self._present is not None and self._present.is_ready and not (self._is_ending or self._warm.is_busy):
            try:
                self._present.zygote.request(ForkAhead(self._n_ranks, os.getpid(), _heap_bytes(self._n_ranks)), [])
            except OSError:
                pass  # the zygote is gone: the next start forks as the first one did

    def _forget_ahead(self) -> None:
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
            self._ahead_timer = None

    def start_rank(self, process: RankProcess, variables: dict[str, str], descriptors: list[int]) -> None:
        """`descriptors`: its stdin, stdout and stderr, and its socket to the agent; the caller may close them afterwards."""
        self._forget_ahead()  # this start comes before it, and its ranks tell of their first steps in their turn
        arguments = rank_process.arguments_for(self._options, process.assignment)
        number = self.pending.next_number()
        request = rank_process.fork_rank(self._options, number, process.assignment, arguments, variables)
        self._ask(_Asked(request, process, descriptors))

    def start_store(self, host: str, port: int, listener: int) -> None:
        """Have a fresh store served on the listening socket."""
        number = self.pending.next_number()
        self._ask(_Asked(rank_process.fork_store(number, host, port), None, [listener]))

    def start_timers(self, path: str, run_id: str) -> None:
        """Have ranks ended whose timers expire, until the end."""
        self._timers = TimerWatch(path, run_id)
        number = self.pending.next_number()
        self._ask(_Asked(rank_process.fork_timers(number, path, run_id), None, []))

    def reaped(self, pid: int, status: int) -> None:
        """A child has ended that is no rank's and not the store: the zygote, or one whose start is still to be told."""
        if self._present is not None and pid == self._present.zygote.pid:
            pass  # its end of file is what counts
        elif self._timers is not None and pid == self._timers.pid:
            self._timers.handle = None
            self._loop.later(SERVICE_PAUSE_S, self._renew_timers)
        elif self.pending.asked:
            self.pending.unclaimed[pid] = status

    def _renew_timers(self) -> None:
        if self._timers is not None and not self._is_ending:
            self.start_timers(self._timers.path, self._timers.run_id)

    def awaited(self) -> Iterator[Wait]:
        """Processes that have still something to do, for the agent's watch."""
        if self._present is not None and self.pending.asked:
            is_ready, pid = self._present.is_ready, self._present.zygote.pid
            why, idle_s = ("starting processes", FORK_IDLE_S) if is_ready else ("importing torch", IMPORT_IDLE_S)
            yield Wait("the zygote", why, pid, self._zygote_is_late, idle_s)
        if self._timers is not None:
            yield from self._timers.awaited()
        yield from self._warm.awaited()

    def _zygote_is_late(self, what: str) -> None:
        """Its end of file comes with its end; if that does not come either, this is as good."""
        assert self._present is not None
        is_killed, self._present.why_killed = bool(self._present.why_killed), what
        self._present.zygote.kill()
        if is_killed:
            self._zygote_is_gone()

    def end(self) -> None:
        """Nothing more will be asked for, and what is not there yet is not to come."""
        self._is_ending = True
        self._warm.close()
        if self._present is not None and self.pending.asked:
            self._present.why_killed = "was ended"
            self._present.zygote.kill()

    def close(self) -> None:
        """End the zygote, and forget what was asked for."""
        self._warm.close()
        if self._better is not None:
            self._better.close()
            self._better = None
        self._close_zygote()
        for asked in self.pending.asked.values():
            asked.close()
        self.pending.asked.clear()

    def _make_zygote(self, *, quiet: bool = False) -> Zygote:
        script = rank_process.script_of(self._options) if self._rulings.ranks is None else ""
        return Zygote(rank_process.imports_for(self._options), dict(os.environ), self._n_ranks, script=script, quiet=quiet)

    def _serve(self, zygote: Zygote, *, is_ready: bool) -> None:
        self._present = _Present(zygote, is_ready=is_ready)
        self._loop.watch(zygote.socket.fileno(), self._on_zygote)

    def _close_zygote(self) -> None:
        if self._present is not None:
            self._loop.unwatch(self._present.zygote.socket.fileno())
            self._present.zygote.close()
            self._present = None

    def _take_over(self, better: Zygote) -> None:
        """`better` serves from now on, or when the present zygote has answered."""
        if self._is_ending or self.pending.asked:
            self._better = better
            return
        self._close_zygote()
        self._better = None
        self._serve(better, is_ready=True)
        self._fork_ahead()

    def _ask(self, asked: _Asked) -> None:
        request, obstacle = asked.request, self._rulings.zygote
        self.pending.asked[request.number] = asked
        match request:
            case ForkRank() if not self.are_safe:
                try:
                    pid = rank_process.plain_spawn(self._options, request, asked.descriptors)
                except OdysseyError as error:
                    self._cannot_be(request.number, error)
                else:
                    self._is_there(request.number, pid)
            case ForkStore() | ForkTimers() if obstacle is not None:
                if obstacle.name == "broken-import":  # it would end at once, and be asked for again
                    del self.pending.asked[request.number]
                    asked.close()
                else:
                    self._is_there(request.number, rank_process.plain_service(request, asked.descriptors))
            case _ if self._present is not None:
                try:
                    self._present.zygote.request(request, asked.descriptors)
                except OSError:
                    pass  # the zygote is gone: asked again when the next one is there

    def _on_zygote(self, mask: int) -> None:
        assert self._present is not None
        match self._present.zygote.answer():
            case None:
                self._zygote_is_gone()
            case Imported() as imported:
                self._present.is_ready = True
                self._has_imported(imported)
            case NotForked(number=number):
                self._cannot_be(number, OdysseyError("no more processes are granted", limits.HELP[errno.EAGAIN]))
            case Forked(number=number, pid=pid):
                self._is_there(number, pid)

    def _has_imported(self, imported: Imported) -> None:
        obstacle = fork_rules.ruling_on(imported)
        if obstacle is not None:
            self._rulings.of_zygote(obstacle)
            self._zygote_is_gone()
        elif self._warm.modules:
            self._warm.begin(self._warm.modules)  # the one that had learned them was lost
        elif self._rulings.ranks is None:
            self._rulings.explain(f"ranks are forks of a process that took {imported.seconds:.1f} s to import torch")

    def _is_there(self, number: int, pid: int) -> None:
        asked = self.pending.asked.pop(number, None)
        if asked is None:
            return  # nobody has asked for it
        asked.close()
        status = self.pending.unclaimed.pop(pid, None)
        process = Handle.of(pid) if status is None else Handle(pid, None)
        match asked.request:
            case ForkRank() | ForkStore():
                self._started(asked.process, process)
            case ForkTimers() if self._timers is not None:
                self._timers.handle = process
        if status is not None:
            self._gone(pid, status)
        if not self.pending.asked:
            self.pending.unclaimed.clear()
            if self._better is not None:
                self._take_over(self._better)

    def _cannot_be(self, number: int, why: OdysseyError) -> None:
        """A rank is lost by it; for all else the job cannot do without."""
        asked = self.pending.asked.pop(number, None)
        if asked is None:
            return
        asked.close()
        if asked.process is None:
            raise why
        self._not_started(asked.process, why)

    def _zygote_is_gone(self) -> None:
        """Its forks live on. Another one takes its place, and what it was asked for last is asked for again."""
        assert self._present is not None
        why, was_ready = self._present.why_killed or "was lost", self._present.is_ready
        self._close_zygote()
        asked = list(self.pending.asked.values())
        self.pending.asked.clear()
        if self._is_ending:
            for one in asked:
                one.close()
            return
        if not was_ready:
            self._n_early_ends += 1
            if self._n_early_ends > 1:
                self._rulings.of_zygote(fork_rules.DIES)
        if self._better is not None:
            self._take_over(self._better)
        elif self._rulings.zygote is None:
            self._rulings.say(f"the process that ranks are forked from {why}; another one is started")
            try:
                self._serve(self._make_zygote(), is_ready=False)
            except OdysseyError as error:  # what is to be started may still be, by itself
                self._rulings.of_zygote(Ruling("no-other", error.what, True))
        for one in asked:
            self._ask(one)


def _heap_bytes(n_ranks: int) -> int:
    """Ranks that wait take no memory that those which train may need."""
    free = allowance().free_bytes
    return HEAP_BYTES if free is None or free > HEAP_SPARE * n_ranks * HEAP_BYTES else 0
