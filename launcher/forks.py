"""Starts the processes of ranks and of the store: as forks of the zygote where that is faithful, else as plain spawns.

    start_rank, start_store ─► zygote (or a plain spawn) ─► `started(process, pid)`

What was asked for and is not there yet is remembered here with its descriptors, so that the loss of the zygote costs
time and nothing else: another one serves it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher import spawn
from launcher.loop import Loop
from launcher.options import RunOptions
from launcher.spawn import RankProcess, Zygote
from odyssey.services import ForkLookup
from odyssey.zygote import Forked, ForkRank, Imported, Request


class _Asked:
    """A process that is still to come. `process`: None for any but a rank's. Holds copies of its descriptors until then."""

    def __init__(self, request: Request, process: RankProcess | None, descriptors: list[int]) -> None:
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
        self._lookups: set[int] = set()
        """Pipes on which answers of stores are awaited."""
        self._number = 0
        self._is_ending = False
        self.are_safe = True

    def start(self) -> None:
        """Start the zygote."""
        if (reason := spawn.unfaithful(Path(self._options.script))) is not None:
            self.are_safe = False
            self._say(f"ranks are started without the zygote: {reason}")
        self._start_zygote()

    def start_rank(
        self, process: RankProcess, arguments: tuple[str, ...], variables: dict[str, str], descriptors: list[int]
    ) -> None:
        """`descriptors`: its stdin, stdout and stderr, and its socket to the agent; the caller may close them afterwards."""
        self._number += 1
        request = spawn.fork_rank(self._number, self._options.script, arguments, variables)
        self._ask(_Asked(request, process, descriptors))

    def start_store(self, host: str, port: int, listener: int, keys: dict[str, str]) -> None:
        """Have a fresh store that holds `keys` served on the listening socket."""
        self._number += 1
        self._ask(_Asked(spawn.fork_store(self._number, host, port, keys), None, [listener]))

    def look_up(self, host: str, port: int, key: str, found: Callable[[str], None]) -> None:
        """Ask the store at an address for a key; `found('')` if it does not answer in time."""
        self._number += 1
        read_end, write_end = os.pipe()

        def answered(mask: int) -> None:
            value = os.read(read_end, 1 << 12).decode()
            self._loop.unwatch(read_end)
            os.close(read_end)
            self._lookups.discard(read_end)
            found(value)

        self._lookups.add(read_end)
        self._loop.watch(read_end, answered)
        self._ask(_Asked(spawn.fork_lookup(self._number, host, port, key), None, [write_end]))
        os.close(write_end)

    def reaped(self, pid: int, status: int) -> None:
        """A child has ended that is no rank's and not the store: the zygote, or one whose start is still to be told."""
        if self._zygote is not None and pid == self._zygote.pid:
            self._zygote.reaped()
        elif self._asked:
            self._unclaimed[pid] = status

    @property
    def awaits_ranks(self) -> bool:
        """A rank that was asked for is not there yet."""
        return any(asked.process is not None for asked in self._asked.values())

    def end(self) -> None:
        """Nothing more will be asked for: a zygote that is lost from now on is not replaced."""
        self._is_ending = True

    def close(self) -> None:
        """End the zygote, and forget what was asked for."""
        for fd in self._lookups:
            self._loop.unwatch(fd)
            os.close(fd)
        self._lookups.clear()
        if self._zygote is not None:
            self._loop.unwatch(self._zygote.socket.fileno())
            self._zygote.close()
            self._zygote = None
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()

    def _start_zygote(self) -> None:
        modules = spawn.imports_for(Path(self._options.script)) if Path(self._options.script).is_file() else ["torch"]
        self._zygote = Zygote(modules, dict(os.environ), self._n_ranks)
        self._loop.watch(self._zygote.socket.fileno(), self._on_zygote)

    def _ask(self, asked: _Asked) -> None:
        request = asked.request
        self._asked[request.number] = asked
        if isinstance(request, ForkRank) and not (self.are_safe and self._zygote is not None):
            streams, agent_fd = asked.descriptors[:3], asked.descriptors[3]
            popen = spawn.plain_spawn(request.script, request.arguments, request.environment, streams, agent_fd)
            popen.returncode = 0  # the agent's loop waits for its children itself
            self._is_there(request.number, popen.pid)
        elif self._zygote is not None:
            try:
                self._zygote.request(request, asked.descriptors)
            except OSError:
                pass  # the zygote is gone: asked again when the next one is there

    def _on_zygote(self, mask: int) -> None:
        assert self._zygote is not None
        match self._zygote.answer():
            case None:
                self._zygote_is_gone()
            case Imported(threads=threads) if threads > 1:
                self.are_safe = False
                self._say(f"ranks are started without the zygote: importing torch has started {threads - 1} threads")
            case Forked(number=number, pid=pid):
                self._is_there(number, pid)

    def _is_there(self, number: int, pid: int) -> None:
        asked = self._asked.pop(number)
        asked.close()
        if not isinstance(asked.request, ForkLookup):
            self._started(asked.process, pid)
        if pid in self._unclaimed:
            self._gone(pid, self._unclaimed.pop(pid))
        if not self._asked:
            self._unclaimed.clear()

    def _zygote_is_gone(self) -> None:
        """Its forks live on. A new one takes its place, and what it was asked for last is asked for again."""
        self._loop.unwatch(self._require().socket.fileno())
        self._require().close()
        self._zygote = None
        if self._is_ending:
            for asked in self._asked.values():
                asked.close()
            self._asked.clear()
            return
        if self.are_safe:
            self._say("the zygote was lost; another one is started")
            self._start_zygote()
        for asked in list(self._asked.values()):
            self._ask(asked)

    def _require(self) -> Zygote:
        assert self._zygote is not None
        return self._zygote
