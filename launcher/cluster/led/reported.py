"""What a member has told of its ranks, as far as who leads after another one may have to be told it again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec
from msgspec.structs import replace

from launcher.cluster.wire import FromRank, Happened, Stopped
from launcher.joblog.events import Diagnostics, RankExited, RankLost, RankStarted
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Committed, Failed, Finished, Hello
from odyssey.protocol.units import Position

MAX_OLD = 256
"""Units in the agents' log that are told again: idle ranks may not have heard of them."""
MAX_TEXT = 4096
"""Characters of each thing that a rank has left behind: its tail."""


class _Process:
    """The current process of a rank. `said`: the newest of each kind of report that holds for good."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_stopped = False
        self.happened: list[RankStarted | RankExited | RankLost] = []
        self.said: dict[type, FromRank] = {}

    @property
    def ends(self) -> list[RankExited | RankLost]:
        """What it has come to, if it has."""
        return [event for event in self.happened if not isinstance(event, RankStarted)]

    def told(self) -> Iterator[FromRank | Happened | Stopped]:
        """That it has begun, what it said before its end, its end."""
        words = [message.report for message in self.said.values()] if self.ends else []
        happened = [Happened(self.number, event) for event in self.happened]
        yield from happened[:1]
        yield from (FromRank(self.number, _cut(report)) for report in words if isinstance(report, Finished | Failed))
        yield from happened[1:]
        if self.is_stopped:
            yield Stopped(self.number, True)


def _cut(report: Finished | Failed) -> Finished | Failed:
    """To as much as the first words of a link may hold for all ranks of a host."""
    if isinstance(report, Finished):
        return report
    error, help, traceback = (text[-MAX_TEXT:] for text in (report.error, report.help, report.traceback))
    return replace(report, error=error, help=help, traceback=traceback)


class Reported:
    """It keeps this of the ranks that this agent has had started."""

    def __init__(self) -> None:
        self._processes: dict[Rank, _Process] = {}
        self._results: dict[Position, tuple[FromRank, Committed]] = {}
        """Words of units that are not in the agents' log yet, as far as it is known here, in their order."""
        self._old: dict[Position, tuple[FromRank, Committed]] = {}
        """Words of the newest units that are in it, since a generation has begun."""

    @property
    def ranks(self) -> list[Rank]:
        return list(self._processes)

    def number(self, rank: Rank) -> int:
        """The number of the rank's current process."""
        return self._processes[rank].number

    def starts(self, number: int) -> list[RankStarted]:
        """That the process of this number has begun, if it has."""
        happened = [event for process in self._processes.values() if process.number == number for event in process.happened]
        return [event for event in happened if isinstance(event, RankStarted)]

    def ends(self, number: int) -> list[RankExited | RankLost]:
        """What the process of this number has come to, if it has."""
        return [event for process in self._processes.values() if process.number == number for event in process.ends]

    def spawned(self, rank: Rank, number: int) -> None:
        """A new process is started."""
        self._processes[rank] = _Process(number)

    def stopped(self, rank: Rank, is_stopped: bool) -> bool:
        """Whether that is news."""
        process = self._processes[rank]
        was, process.is_stopped = process.is_stopped, is_stopped
        return was != is_stopped

    def happened(self, event: RankStarted | RankExited | RankLost) -> None:
        if isinstance(event, RankLost):  # as much as the first words of a link may hold for all ranks of a host
            told = event.diagnostics
            short = {name: text[-MAX_TEXT:] for name, text in msgspec.structs.asdict(told).items()}
            event = replace(event, diagnostics=msgspec.convert(short, Diagnostics))
        self._processes[event.rank].happened.append(event)

    def reported(self, rank: Rank, message: FromRank) -> None:
        """Answers to orders are left out: who leads anew asks anew."""
        report = message.report
        if isinstance(report, Committed):
            if report.result.position not in self._old:
                self._results[report.result.position] = message, report
        elif isinstance(report, Hello | Finished | Failed):
            said = self._processes[rank].said
            if isinstance(report, Hello):
                said.clear()  # what it had finished is the script's Job before
            said[type(report)] = message

    def is_final(self, position: Position) -> None:
        """All units up to this one are in the agents' log: where no rank here has told of it, all that were told of."""
        for at, (message, unit) in list(self._results.items()):
            del self._results[at]
            self._old[at] = message, unit
            if at == position:
                break
        for at in list(self._old)[:-MAX_OLD]:
            del self._old[at]

    def began(self, generation: int) -> None:
        """It runs: what units of those before are not in the log were known to nobody who was asked, and are run again."""
        for at in [at for at, (_, unit) in self._results.items() if unit.generation < generation]:
            del self._results[at]
        self._old.clear()

    def told(self) -> tuple[FromRank | Happened | Stopped, ...]:
        """What the current process of each rank has come to, as far as the first words of a link may hold it."""
        return tuple(chain.from_iterable(process.told() for process in self._processes.values()))

    def said(self) -> Iterator[FromRank]:
        """To be said again."""
        rank, speaker = 0, 0
        for number, process in self._processes.items():
            yield from process.said.values()
            if not process.ends:
                rank, speaker = number, process.number  # of those that are heard, whoever says that a unit is final
        for message, unit in (*self._old.values(), *self._results.values()) if speaker else ():
            yield replace(message, process=speaker, report=replace(unit, rank=rank))
