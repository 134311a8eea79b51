"""For how long members have been silent, as far as it counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.cluster.leading.silence import Silence
from launcher.host.own_clock import OwnClock
from tests.fake_loop import FakeLoop

DETECT_S, BEAT_S = 5.0, 1.0


class Members:
    """Two of them, and who leads: with one of them there are enough."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.clock = OwnClock(self.loop, 2 * BEAT_S)
        self.heard_at = {1: 0.0, 2: 0.0}
        self.silence = Silence(self.clock, DETECT_S, lambda: max(self.heard_at.values()))

    def pass_s(self, seconds: float, *beating: int) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.loop.pass_s(BEAT_S)
            self.heard_at |= dict.fromkeys(beating, self.clock.now())
            self.silence.look()

    def silent_s(self, number: int) -> float:
        return self.silence.since(self.heard_at[number])


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members()
    yield members
    members.loop.close()


def test_one_is_silent_as_long_as_enough_others_are_heard(members: Members) -> None:
    members.pass_s(3, 1, 2)
    members.pass_s(4, 1)
    assert (members.silent_s(1), members.silent_s(2)) == (0.0, 4.0)
    members.pass_s(1, 1)
    assert members.silent_s(2) == 5.0


def test_too_few_are_heard_for_long_and_then_all_silences_begin_anew(members: Members) -> None:
    members.pass_s(3, 1, 2)
    members.pass_s(60)
    assert members.silent_s(1) == members.silent_s(2) == 0.0
    members.pass_s(1, 1)
    assert members.silent_s(2) == 0.0
    members.pass_s(4, 1)
    assert members.silent_s(2) == 4.0
    members.pass_s(1, 1)
    assert members.silent_s(2) == 5.0


def test_who_is_silent_before_the_others_are_is_silent_no_longer_than_these_were_heard(members: Members) -> None:
    members.pass_s(3, 1, 2)
    members.pass_s(2, 1)
    members.pass_s(60)
    assert (members.silent_s(1), members.silent_s(2)) == (0.0, 2.0)


def test_time_in_which_this_agent_stands_still_is_none(members: Members) -> None:
    members.pass_s(3, 1, 2)
    members.loop.now += 60.0
    members.silence.look()
    assert members.silent_s(1) == members.silent_s(2) == 2 * BEAT_S


def test_what_is_called_later_waits_for_as_long_as_this_agent_runs(members: Members) -> None:
    called: list[float] = []
    members.clock.later(5.0, lambda: called.append(members.loop.now))
    members.loop.pass_s(2.0)
    members.loop.now += 60.0
    members.loop.pass_s(0.5)
    assert called == []
    members.loop.pass_s(4.0)
    assert len(called) == 1


def test_what_is_called_later_may_be_cancelled(members: Members) -> None:
    called: list[float] = []
    members.clock.later(5.0, lambda: called.append(members.loop.now)).cancel()
    members.loop.pass_s(10.0)
    assert called == []
