"""Hangs: no unit is final for longer than the profile explains, and a rank does not even say where it is.

Busy is not dead: a rank that answers is waited for, and the wait is told every few seconds. One that does not answer is
hung if it is stopped or uses no processor; one that computes without letting its link's thread in is given more time.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.loop import Loop, Timer
from odyssey.messages import Pong

PATIENCE_S = 1.0
STEPS_OF_PATIENCE = 4
ANSWER_S = 1.0
REPEAT_S = 5.0


class Progress:
    """Watches one wait at a time. `ping`: ask these ranks; `hung`: these are; `say`: for people; `pid_of`: of a rank."""

    def __init__(
        self,
        loop: Loop,
        ping: Callable[[int], frozenset[int]],
        hung: Callable[[int, str], None],
        suspect: Callable[[str], None],
        say: Callable[[str], None],
        pid_of: Callable[[int], int | None],
    ) -> None:
        self._loop = loop
        self._ping = ping
        self._hung = hung
        self._suspect = suspect
        self._say = say
        self._pid_of = pid_of
        self._timer: Timer | None = None
        self._since = 0.0
        self._patience_s = PATIENCE_S
        self._number = 0
        self._asked: dict[int, float | None] = {}
        self._answers: dict[int, Pong] = {}

    def expect(self, expected_s: float) -> None:
        """Something is expected within this time; starts the wait anew."""
        self.stop()
        self._patience_s = max(PATIENCE_S, STEPS_OF_PATIENCE * expected_s)
        self._since = self._loop.clock()
        self._timer = self._loop.later(self._patience_s, self._late)

    def made(self, took_s: float) -> None:
        """What was expected has come, and the next may take as long as this one did. Cheap: called at each step."""
        self._since = self._loop.clock()
        self._patience_s = max(self._patience_s, STEPS_OF_PATIENCE * took_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pong(self, rank: int, pong: Pong) -> None:
        if pong.number == self._number:
            self._answers[rank] = pong

    def _late(self) -> None:
        waited_s = self._loop.clock() - self._since
        if waited_s < self._patience_s:
            self._timer = self._loop.later(self._patience_s - waited_s, self._late)
            return
        self._suspect(f"nothing for {waited_s:.1f} s, expected within {self._patience_s:.1f} s; asking all ranks")
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        self._answers = {}
        asked = self._ping(self._number)
        self._asked = {rank: _processor_s(self._pid_of(rank)) for rank in asked}
        self._timer = self._loop.later(ANSWER_S, self._judge)

    def _judge(self) -> None:
        if self._loop.clock() - self._since < self._patience_s:
            self._late()
            return
        silent = [rank for rank in self._asked if rank not in self._answers]
        hung = []
        for rank in silent:
            pid, before = self._pid_of(rank), self._asked[rank]
            now = _processor_s(pid)
            if before is not None and now is not None and now > before and not _is_stopped(pid):
                self._say(
                    f"rank {rank} does not answer but computes ({now - before:.1f} s of processor time since it was asked)"
                )
            elif pid is not None:
                hung.append(rank)
        self._timer = self._loop.later(REPEAT_S, self._again)
        for rank in hung:
            self._hung(rank, f"did not answer for {ANSWER_S:.1f} s")
        if not hung:
            self._tell()

    def _again(self) -> None:
        if self._loop.clock() - self._since < self._patience_s:
            self._late()
        else:
            self._ask()

    def _tell(self) -> None:
        """Whom everybody waits for: those that do not wait themselves."""
        culprits = {rank: pong for rank, pong in sorted(self._answers.items()) if not pong.waiting}
        for rank, pong in culprits.items():
            self._say(f"waiting for rank {rank}: {pong.where} for {pong.since_s:.0f} s")
        if self._answers and not culprits:
            rank, pong = min(self._answers.items(), key=lambda item: -item[1].since_s)
            self._say(f"all ranks wait for each other, longest rank {rank}: {pong.where} for {pong.since_s:.0f} s")


def _fields(pid: int | None) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _processor_s(pid: int | None) -> float | None:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / 100 if fields else None


def _is_stopped(pid: int | None) -> bool:
    fields = _fields(pid)
    return fields is not None and fields[0] in "Tt"
