"""Hangs: nothing comes of a Job's ranks for longer than the profile explains. They are asked where they are, and answer or not.

    expected ─late─► asked ─► answers, and samples of what each uses ─┬─► who shows no life at all is hung (life.py)
                       ▲                                              ├─► all only wait for each other: nothing will come of it
                       └──────────── again ◄── who lives has time ◄───┘

Busy is not dead: a rank that answers is waited for however long it takes, and so is one that computes without letting its
link's thread in, or waits for a disk. Ranks are asked early and silently, so that a hang is found soon; people are told only of
waits that an evaluation, a checkpoint or a loaded machine do not explain. Ranks in units that cannot meet are no hang: that is
certain as soon as both have said so, however busy they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from launcher.health.life import IDLE_S, Life
from launcher.health.stalls import Sample
from launcher.health.standstill import Standstill, is_for_good
from launcher.host.loop import Loop, Timer
from launcher.joblog.wording import ranks_text, seconds_text
from odyssey.plan.worker import Rank
from odyssey.protocol.calls import Unit, difference
from odyssey.protocol.reports import Pong
from odyssey.protocol.units import Position

PATIENCE_S, STEPS_OF_PATIENCE = 1.0, 4
"""After the longer of these, ranks are asked where they are."""
ANSWER_S = 1.0
"""Between a question and a look at who has answered, and between such looks while somebody has not."""
REPEAT_S = 4.0
"""All are asked again so long after all have answered."""
QUIET_S, QUIET_STEPS = 10.0, 10
"""After the longer of these, people are told; then again after as long as QUIET_S."""

Samples = Callable[[Iterable[Rank], Callable[[dict[Rank, Sample]], None]], None]


@dataclass
class _Question:
    """Where are you? `ranks`: who was asked; `looked_at`: at who has answered, or when it was asked."""

    number: int
    ranks: frozenset[Rank]
    looked_at: float
    answers: dict[Rank, Pong] = field(default_factory=dict)


@dataclass
class _Seen:
    """What was seen of the ranks since something has come, or something else is expected."""

    lives: dict[Rank, Life] = field(default_factory=dict)
    standstill: Standstill = field(default_factory=Standstill)


class JobHangs:
    """Watches one wait at a time.
    `ping`: ask these ranks; `sample(ranks, done)`: what they use; `hung`: this rank is; `tell`: for people; `apart`: this
    rank is in a unit in which it cannot meet the others, as the text says; `stuck(rank, position, what)`: all wait for each
    other, this one among them, where they communicate, and nothing moves."""

    def __init__(
        self,
        loop: Loop,
        ping: Callable[[int], frozenset[Rank]],
        sample: Samples,
        hung: Callable[[Rank, str], None],
        tell: Callable[[str], None],
        apart: Callable[[Rank, str], None],
        stuck: Callable[[Rank, Position, str], None],
    ) -> None:
        self._loop = loop
        self._ping = ping
        self._sample = sample
        self._hung = hung
        self._tell = tell
        self._apart = apart
        self._stuck = stuck
        self._timer: Timer | None = None
        self._since = 0.0
        self._told_at = 0.0
        self._expected_s = 0.0
        self._are_together = False
        self._question = _Question(0, frozenset(), 0.0)
        self._seen = _Seen()

    def expect(self, expected_s: float, *, together: bool) -> None:
        """Something is expected within this time; starts the wait anew. `together`: by ranks that communicate for it."""
        self.stop()
        self._seen = _Seen()
        self._expected_s = expected_s
        self._are_together = together
        self._since = self._loop.clock()
        self._timer = self._loop.later(self._patience_s, self._late)

    def made(self, took_s: float) -> None:
        """What was expected has come, and the next may take as long as this one did. Cheap: called at each step."""
        self._since = self._loop.clock()
        if self._seen.lives:
            self._seen = _Seen()
        self._expected_s = max(self._expected_s, took_s)

    def stop(self) -> None:
        """Nothing is expected."""
        self._question = _Question(self._question.number + 1, frozenset(), 0.0)  # what still comes to the last is of no use
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pong(self, rank: Rank, pong: Pong) -> None:
        """A rank's answer."""
        if pong.number == self._question.number:
            self._question.answers[rank] = pong

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
            number = self._question.number + 1
            self._question = _Question(number, self._ping(number), self._loop.clock())
            self._timer = self._loop.later(ANSWER_S, self._look)

    def _look(self) -> None:
        """At who was asked, as far as it is still of interest."""
        self._timer = None
        if self._waited_s < self._patience_s:
            self._late()
            return
        now, question = self._loop.clock(), self._question
        if now - question.looked_at > 3 * ANSWER_S:  # nobody looked: this process itself was stopped, or very busy
            self._seen = _Seen()
        question.looked_at = now
        self._sample(question.ranks, lambda found: self._judge(question, found))

    def _judge(self, question: _Question, found: Mapping[Rank, Sample]) -> None:
        if question is not self._question:
            return
        if self._waited_s < self._patience_s:
            self._late()
            return
        now, asked_at, lives = self._loop.clock(), question.looked_at, self._seen.lives
        question.looked_at = now  # that another agent is slow to answer does not say that nobody looked
        late: dict[Rank, str] = {}
        for rank in sorted(question.ranks):
            life = lives.setdefault(rank, Life(now))
            if rank in question.answers:
                life.answered(now)
                continue
            life.take(found[rank].vitals if rank in found else None, now)
            if what := life.verdict(asked_at, IDLE_S):  # how long the answer took is not the rank's
                late[rank] = f"does not answer, and {what}"
        silent = question.ranks - question.answers.keys()
        self._timer = self._loop.later(*((ANSWER_S, self._look) if silent else (REPEAT_S, self._late)))
        for rank, what in late.items():
            del lives[rank]
            self._hung(rank, what)
        self._look_for_other_units(question)
        if not late:
            self._tell_if_due(silent)
            self._look_whether_all_wait(found)

    def _look_whether_all_wait(self, found: Mapping[Rank, Sample]) -> None:
        if not self._are_together:
            return
        question, standstill = self._question, self._seen.standstill
        lasts_s = standstill.lasts_s(question.ranks, question.answers, found, self._loop.clock())
        if is_for_good(lasts_s, self._patience_s):
            standstill.forget()
            words = [f"nothing has moved for {seconds_text(lasts_s)}", *who_waits_for_whom(question.answers)]
            rank = min(question.ranks)
            self._stuck(rank, question.answers[rank].position, "; ".join(words))

    def _look_for_other_units(self, question: _Question) -> None:
        """No unit was final since they were asked, or `_judge` would not have come here: all positions are of one time."""
        units = {rank: Unit(pong.position, pong.kind) for rank, pong in question.answers.items() if pong.kind}
        if (text := difference(units)) is not None:
            counts = Counter(units.values())
            self._apart(min(units, key=lambda rank: (counts[units[rank]], rank)), text)

    def _tell_if_due(self, silent: Iterable[Rank]) -> None:
        now = self._loop.clock()
        if self._waited_s < max(QUIET_S, QUIET_STEPS * self._expected_s) or now - max(self._told_at, self._since) < QUIET_S:
            return
        self._told_at = now
        busy = [f"rank {rank} lives but does not answer" for rank in sorted(silent)]
        lasts = f"no step finished for {seconds_text(self._waited_s)}"
        self._tell("; ".join([lasts, *busy, *who_waits_for_whom(self._question.answers)]))


def who_waits_for_whom(answers: dict[Rank, Pong]) -> list[str]:
    """In words, those first that wait for nobody: `rank 1: in the script's own code for 12 s`, `rank 0 waits for rank 1`."""
    doing: dict[str, list[Rank]] = {}
    waiting: dict[str, list[Rank]] = {}
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
