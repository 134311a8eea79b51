"""Starts the processes of ranks and of the store: forks of the zygote where that is faithful (fork_rules.py), or plain spawns.

    start_rank, start_store ─► zygote (or a plain spawn) ─► `started(process, pid)`

What was asked for and is not there yet is remembered here with its descriptors, so that the loss of the zygote costs
time and nothing else: another one serves it. One that is stopped or does not answer is as good as lost. Once ranks have told
what they import, a better one takes its place (warm_zygote.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from launcher.health.waits import Wait
from launcher.host.loop import Loop
from launcher.host.orphans import kill
from launcher.options import RunOptions
from launcher.processes import environment, fork_rules, rank_process
from launcher.processes.fork_rules import Ruling
from launcher.processes.rank_process import LOOKUP_S, RankProcess, Zygote
from launcher.processes.warm_zygote import IMPORT_IDLE_S, Learning
from odyssey.errors import OdysseyError
from odyssey.zygote.protocol import Fork, Forked, ForkLookup, ForkRank, ForkStore, ForkTimers, Imported, NotForked

FORK_IDLE_S = 10.0
"""A zygote that was asked for a process has nothing to wait for."""
LOOKUP_IDLE_S = LOOKUP_S + 5.0
"""The process that asks a store ends by itself before."""
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


class Forks:
    """`started(process, pid)`: this one is there, None for the store; also called from within `start_rank`.

    `gone(pid, status)`: it had ended by the time its start was known. `say`: for people.
    """

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        n_ranks: int,
        *,
        say: Callable[[str], None],
        started: Callable[[RankProcess | None, int], None],
        gone: Callable[[int, int], None],
    ) -> None:
        self._options = options
        self._loop = loop
        self._n_ranks = n_ranks
        self._say = say
        self._started = started
        self._gone = gone
        self._zygote: Zygote | None = None
        self._asked: dict[int, _Asked] = {}
        """By number, in the order in which they were asked for."""
        self._unclaimed: dict[int, int] = {}
        """Wait statuses of processes that ended before the zygote's answer told who they were."""
        self._lookups: dict[int, int] = {}
        """By number, pipes on which answers of stores are awaited."""
        self._askers: dict[int, int] = {}
        """By number, the processes that ask, once they are there."""
        self._timers: tuple[str, str] | None = None
        self._timers_pid: int | None = None
        self._number = 0
        self._is_ending = False
        self._ruling: Ruling | None = None
        """Why ranks are plain spawns."""
        self._obstacle: Ruling | None = None
        """Why no zygote can be forked from, which the store needs too."""
        self._is_ready = False
        self._n_early_ends = 0
        """Zygotes that have ended before they were ready."""
        self._why_killed = ""
        """What was seen of the present zygote, if it was ended for it."""
        self._learned: tuple[str, ...] = ()
        self._better: Zygote | None = None
        """It takes over when the present one has answered what it was asked."""
        variables = tuple(environment.of_ranks(options))
        self._learning = Learning(
            loop, variables, make=lambda: self._make_zygote(quiet=True), ready=self._take_over, explain=self._explain
        )

    @property
    def are_safe(self) -> bool:
        """Ranks are forks, as far as is known."""
        return self._ruling is None and self._obstacle is None

    def start(self) -> None:
        """Start the zygote."""
        self._ruling = fork_rules.ruling(self._options, os.environ)
        if self._ruling is not None:
            self._tell(self._ruling)
        self._start_zygote()

    def learn(self, modules: tuple[str, ...]) -> None:
        """Ranks have imported these by their first step: have them ready at the next start. Only the first call counts."""
        if self.are_safe and modules and not (self._learned or self._is_ending):
            self._learned = modules
            self._learning.begin(modules)

    def start_rank(self, process: RankProcess, variables: dict[str, str], descriptors: list[int]) -> None:
        """`descriptors`: its stdin, stdout and stderr, and its socket to the agent; the caller may close them afterwards."""
        self._number += 1
        arguments = rank_process.arguments_for(self._options, process.assignment)
        request = rank_process.fork_rank(self._options, self._number, process.assignment, arguments, variables)
        self._ask(_Asked(request, process, descriptors))

    def start_store(self, host: str, port: int, listener: int, keys: dict[str, str]) -> None:
        """Have a fresh store that holds `keys` served on the listening socket."""
        self._number += 1
        self._ask(_Asked(rank_process.fork_store(self._number, host, port, keys), None, [listener]))

    def start_timers(self, path: str, run_id: str) -> None:
        """Have ranks ended whose timers expire, until the end."""
        self._timers, self._timers_pid = (path, run_id), None
        self._number += 1
        self._ask(_Asked(rank_process.fork_timers(self._number, path, run_id), None, []))

    def look_up(self, host: str, port: int, key: str, found: Callable[[str], None]) -> None:
        """Ask the store at an address for a key; `found('')` if it does not answer in time."""
        self._number += 1
        number = self._number
        read_end, write_end = os.pipe()

        def answered(mask: int) -> None:
            value = os.read(read_end, 1 << 12).decode(errors="replace")  # whatever listens there may have written it
            self._loop.unwatch(read_end)
            os.close(read_end)
            del self._lookups[number]
            self._askers.pop(number, None)
            found(value)

        self._lookups[number] = read_end
        self._loop.watch(read_end, answered)
        self._ask(_Asked(rank_process.fork_lookup(number, host, port, key), None, [write_end]))
        os.close(write_end)

    def reaped(self, pid: int, status: int) -> None:
        """A child has ended that is no rank's and not the store: the zygote, or one whose start is still to be told."""
        if self._zygote is not None and pid == self._zygote.pid:
            self._zygote.reaped()
        elif pid == self._timers_pid:
            self._timers_pid = None
            self._loop.later(SERVICE_PAUSE_S, self._renew_timers)
        elif self._asked:
            self._unclaimed[pid] = status

    @property
    def awaits_ranks(self) -> bool:
        """A rank that was asked for is not there yet."""
        return any(asked.process is not None for asked in self._asked.values())

    def _renew_timers(self) -> None:
        if self._timers is not None and not self._is_ending:
            self.start_timers(*self._timers)

    @property
    def asks(self) -> bool:
        """A process of `look_up` is there, and waits for an answer."""
        return bool(self._askers)

    def awaited(self) -> Iterator[Wait]:
        """Processes that have still something to do, for the agent's watch."""
        if self._zygote is not None and self._asked:
            why, idle_s = ("it starts processes", FORK_IDLE_S) if self._is_ready else ("it imports torch", IMPORT_IDLE_S)
            yield Wait("the zygote", why, self._zygote.pid, self._zygote_is_late, idle_s)
        for pid in self._askers.values():  # its end is an empty answer, after which its owner asks again
            yield Wait("the store", "it is asked for a key", pid, partial(_end, pid), LOOKUP_IDLE_S, quiet=True)
        if self._timers_pid is not None:
            yield Wait("timers", "they are watched", self._timers_pid, partial(_end, self._timers_pid), quiet=True)
        yield from self._learning.awaited()

    def _zygote_is_late(self, what: str) -> None:
        """Its end of file comes with its end; if that does not come either, this is as good."""
        assert self._zygote is not None
        is_killed, self._why_killed = bool(self._why_killed), what
        self._zygote.kill()
        if is_killed:
            self._zygote_is_gone()

    def end(self) -> None:
        """Nothing more will be asked for, and what is not there yet is not to come."""
        self._is_ending = True
        self._learning.close()
        if self._zygote is not None and self._asked:
            self._why_killed = "was ended"
            self._zygote.kill()

    def close(self) -> None:
        """End the zygote, and forget what was asked for."""
        for fd in self._lookups.values():
            self._loop.unwatch(fd)
            os.close(fd)
        self._lookups.clear()
        self._askers.clear()
        self._learning.close()
        if self._better is not None:
            self._better.close()
            self._better = None
        self._close_zygote()
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()

    def _make_zygote(self, *, quiet: bool = False) -> Zygote:
        script = rank_process.script_of(self._options) if self._ruling is None else ""
        return Zygote(rank_process.imports_for(self._options), dict(os.environ), self._n_ranks, script=script, quiet=quiet)

    def _start_zygote(self) -> None:
        self._is_ready = False
        self._zygote = self._make_zygote()
        self._loop.watch(self._zygote.socket.fileno(), self._on_zygote)

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._loop.unwatch(self._zygote.socket.fileno())
            self._zygote.close()
            self._zygote = None

    def _take_over(self, better: Zygote) -> None:
        """`better` serves from now on, or when the present zygote has answered."""
        if self._is_ending or self._asked:
            self._better = better
            return
        self._close_zygote()
        self._better, self._zygote, self._is_ready = None, better, True
        self._loop.watch(better.socket.fileno(), self._on_zygote)

    def _ask(self, asked: _Asked) -> None:
        request = asked.request
        self._asked[request.number] = asked
        match request:
            case ForkRank() if not self.are_safe:
                self._is_there(request.number, rank_process.plain_spawn(self._options, request, asked.descriptors))
            case ForkStore() | ForkLookup() | ForkTimers() if self._obstacle is not None:
                if self._obstacle.name == "broken-import":  # it would end at once, and be asked for again
                    del self._asked[request.number]
                    asked.close()
                else:
                    self._is_there(request.number, rank_process.plain_service(request, asked.descriptors))
            case _ if self._zygote is not None:
                try:
                    self._zygote.request(request, asked.descriptors)
                except OSError:
                    pass  # the zygote is gone: asked again when the next one is there

    def _on_zygote(self, mask: int) -> None:
        assert self._zygote is not None
        match self._zygote.answer():
            case None:
                self._zygote_is_gone()
            case Imported() as imported:
                self._is_ready = True
                self._obstacle = fork_rules.ruling_on(imported)
                if self._obstacle is not None:
                    self._tell(self._obstacle)
                    self._zygote_is_gone()
                elif self._learned:
                    self._learning.begin(self._learned)  # the one that had learned them was lost
                elif self._ruling is None:
                    self._explain(f"ranks are forks of the zygote, which took {imported.seconds:.1f} s to import torch")
            case NotForked():
                raise OdysseyError(
                    "cannot start a process: a limit is reached",
                    "raise `ulimit -u`, or start fewer ranks",
                )
            case Forked(number=number, pid=pid):
                self._is_there(number, pid)

    def _is_there(self, number: int, pid: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is None:
            return  # nobody has asked for it
        asked.close()
        match asked.request:
            case ForkRank() | ForkStore():
                self._started(asked.process, pid)
            case ForkLookup() if number in self._lookups:
                self._askers[number] = pid
            case ForkTimers():
                self._timers_pid = pid
        if pid in self._unclaimed:
            self._gone(pid, self._unclaimed.pop(pid))
        if not self._asked:
            self._unclaimed.clear()
            if self._better is not None:
                self._take_over(self._better)

    def _zygote_is_gone(self) -> None:
        """Its forks live on. Another one takes its place, and what it was asked for last is asked for again."""
        why, self._why_killed = self._why_killed or "was lost", ""
        self._close_zygote()
        asked = list(self._asked.values())
        self._asked.clear()
        if self._is_ending:
            for one in asked:
                one.close()
            return
        if not self._is_ready:
            self._n_early_ends += 1
            if self._n_early_ends > 1:
                self._obstacle = fork_rules.DIES
                self._tell(self._obstacle)
        if self._better is not None:
            self._take_over(self._better)
        elif self._obstacle is None:
            self._say(f"the zygote {why}; another one is started")
            try:
                self._start_zygote()
            except OdysseyError as error:  # what is to be started may still be, by itself
                self._obstacle = Ruling("no-other", error.what, True)
                self._tell(self._obstacle)
        for one in asked:
            self._ask(one)

    def _tell(self, ruling: Ruling) -> None:
        text = f"ranks are started without the zygote: {ruling.reason}"
        if self._options.verbose:
            self._say(f"{text} (rule {ruling.name})")
        elif ruling.surprises and self._ruling in (None, ruling):
            self._say(text)

    def _explain(self, text: str) -> None:
        if self._options.verbose:
            self._say(text)


def _end(pid: int, what: str) -> None:
    kill(pid)
