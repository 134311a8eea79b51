"""Hangs: no unit is final for longer than the profile explains, and a rank does not even say where it is.

Busy is not dead: a rank that answers is waited for. One that does not answer is hung if it is stopped or uses no processor;
one that computes without letting its link's thread in is given more time. Ranks are asked early and silently, so that a hang
is found soon; people are told only of waits that an evaluation, a checkpoint or a loaded machine do not explain.
Ranks that are in units which cannot meet are no hang: that is certain as soon as both have said so, however busy they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from launcher.host.loop import Loop, Timer
from launcher.host.proc import Vitals
from launcher.joblog.wording import ranks_text, seconds_text
from odyssey.calls import Unit, difference
from odyssey.messages import Pong

PATIENCE_S, STEPS_OF_PATIENCE = 1.0, 4
"""After the longer of these, ranks are asked where they are."""
ANSWER_S = 1.0
REPEAT_S = 4.0
"""And again so long after the answers."""
QUIET_S, QUIET_STEPS = 10.0, 10
"""After the longer of these, people are told; then again after as long as QUIET_S."""


class JobHangs:
    """Watches one wait at a time. `ping`: ask these ranks; `hung`: this rank is; `tell`: for people;
    `apart`: this rank is in a unit in which it cannot meet the others, as the text says; `vitals_of`: a rank, None where nobody
    knows."""

    def __init__(
        self,
        loop: Loop,
        ping: Callable[[int], frozenset[int]],
        hung: Callable[[int, str], None],
        tell: Callable[[str], None],
        apart: Callable[[int, str], None],
        vitals_of: Callable[[int], Vitals | None],
    ) -> None:
        self._loop = loop
        self._ping = ping
        self._hung = hung
        self._tell = tell
        self._apart = apart
        self._vitals_of = vitals_of
        self._timer: Timer | None = None
        self._since = 0.0
        self._told_at = 0.0
        self._expected_s = 0.0
        self._number = 0
        self._asked: dict[int, Vitals | None] = {}
        self._answers: dict[int, Pong] = {}

    def expect(self, expected_s: float) -> None:
        """Something is expected within this time; starts the wait anew."""
        self.stop()
        self._expected_s = expected_s
        self._since = self._loop.clock()
        self._timer = self._loop.later(self._patience_s, self._late)

    def made(self, took_s: float) -> None:
        """What was expected has come, and the next may take as long as this one did. Cheap: called at each step."""
        self._since = self._loop.clock()
        self._expected_s = max(self._expected_s, took_s)

    def stop(self) -> None:
        """Nothing is expected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pong(self, rank: int, pong: Pong) -> None:
        """A rank's answer."""
        if pong.number == self._number:
            self._answers[rank] = pong

    @property
    def _patience_s(self) -> float:
        return max(PATIENCE_S, STEPS_OF_PATIENCE * self._expected_s)

    @property
    def _waited_s(self) -> float:
        return self._loop.clock() - self._since

    def _late(self) -> None:
        if self._waited_s < self._patience_s:
            self._timer = self._loop.later(self._patience_s - self._waited_s, self._late)
        else:
            self._ask()

    def _ask(self) -> None:
        self._number += 1
        self._answers = {}
        asked = self._ping(self._number)
        self._asked = {rank: self._vitals_of(rank) for rank in asked}
        self._timer = self._loop.later(ANSWER_S, self._judge)

    def _judge(self) -> None:
        if self._waited_s < self._patience_s:
            self._late()
            return
        busy: dict[int, str] = {}
        hung: list[int] = []
        for rank, before in self._asked.items():
            if rank in self._answers:
                continue
            now = self._vitals_of(rank)
            used_s = now.processor_s - before.processor_s if now is not None and before is not None else 0.0
            if now is not None and used_s > 0 and not now.is_stopped:
                busy[rank] = f"rank {rank} does not answer but computes ({used_s:.1f} s since it was asked)"
            elif now is not None:
                hung.append(rank)
        self._timer = self._loop.later(REPEAT_S, self._late)
        for rank in hung:
            self._hung(rank, f"did not answer for {ANSWER_S:.1f} s")
        self._look_for_other_units()
        if not hung:
            self._tell_if_due(list(busy.values()))

    def _look_for_other_units(self) -> None:
        """No unit was final since they were asked, or `_judge` would not have come here: all positions are of one time."""
        units = {rank: Unit(pong.position, pong.kind) for rank, pong in self._answers.items() if pong.kind}
        if (text := difference(units)) is not None:
            counts = Counter(units.values())
            self._apart(min(units, key=lambda rank: (counts[units[rank]], rank)), text)

    def _tell_if_due(self, busy: list[str]) -> None:
        now = self._loop.clock()
        if self._waited_s < max(QUIET_S, QUIET_STEPS * self._expected_s) or now - max(self._told_at, self._since) < QUIET_S:
            return
        self._told_at = now
        self._tell("; ".join([f"nothing for {seconds_text(self._waited_s)}", *busy, *who_waits_for_whom(self._answers)]))


def who_waits_for_whom(answers: dict[int, Pong]) -> list[str]:
    """In words, those first that wait for nobody: `rank 1: in the script's own code for 12 s`, `rank 0 waits for rank 1`."""
    doing: dict[str, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    for rank, pong in sorted(answers.items()):
        peer = re.search(r"<(\d+)$", pong.where)  # a receive, as the schedule writes it
        what = f"for rank {peer[1]} ({pong.where})" if peer is not None else f"for the others ({pong.where})"
        (waiting if pong.waiting else doing).setdefault(what if pong.waiting else pong.where, []).append(rank)
    words = []
    for what, ranks in doing.items():
        longest_s = max(answers[rank].since_s for rank in ranks)
        words.append(f"{ranks_text(ranks)}: {what} for {seconds_text(longest_s)}")
    if waiting and not doing:
        words.append("all that answer wait for each other")
    for what, ranks in waiting.items():
        words.append(f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {what}")
    return words
