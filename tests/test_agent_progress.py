"""Waits: hung ranks are found early and in silence, people are told late, and of whom everybody waits for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.health import job_hangs
from launcher.health.job_hangs import JobHangs
from launcher.host.proc import Vitals
from odyssey.messages import Pong
from tests.fake_loop import FakeLoop

BUSY = Pong(0, (3, 0), "", "in the script's own code", False, 12.0)
WAITS = Pong(0, (3, 0), "step", "1F3<0", True, 11.0)
COMMITS = Pong(0, (3, 0), "step", "commit", True, 3.0)


class Scene:
    """A Progress whose ranks answer what `answers` says, and use no processor."""

    def __init__(self, answers: dict[int, Pong], silent: int = 0) -> None:
        self.loop = FakeLoop()
        self.answers = answers
        self.silent = silent
        self.n_asked = 0
        self.told: list[tuple[float, str]] = []
        self.hung: list[int] = []
        self.apart: list[tuple[int, str]] = []
        self.progress = JobHangs(self.loop, self._ping, self._hang, self._tell, self._part, lambda rank: Vitals("S", 1.0))

    def _ping(self, number: int) -> frozenset[int]:
        self.n_asked += 1
        for rank, pong in self.answers.items():
            answer = replace(pong, number=number)
            self.loop.later(0.0, lambda rank=rank, answer=answer: self.progress.pong(rank, answer))
        return frozenset(range(len(self.answers) + self.silent))

    def _hang(self, rank: int, text: str) -> None:
        self.hung.append(rank)

    def _part(self, rank: int, text: str) -> None:
        self.apart.append((rank, text))

    def _tell(self, text: str) -> None:
        self.told.append((self.loop.now - 100.0, text))


def test_ranks_are_asked_early_and_people_told_every_ten_seconds_from_the_tenth_on() -> None:
    scene = Scene({0: BUSY, 1: WAITS})
    scene.progress.expect(0.05)
    scene.loop.pass_s(9.9)
    assert scene.n_asked >= 2 and scene.told == []
    scene.loop.pass_s(25.0)
    first, second, third = (at for at, _ in scene.told)
    assert 10 <= first <= 15 and 10 <= second - first <= 15 and 10 <= third - second <= 15
    assert scene.told[0][1].endswith("rank 0: in the script's own code for 12 s; rank 1 waits for rank 0 (1F3<0)")
    assert scene.hung == []


def test_long_steps_give_more_time() -> None:
    scene = Scene({0: BUSY})
    scene.progress.expect(0.05)
    scene.progress.made(3.0)
    scene.loop.pass_s(29.0)
    assert scene.told == []
    scene.loop.pass_s(8.0)
    assert len(scene.told) == 1


def test_progress_starts_the_silence_anew() -> None:
    scene = Scene({0: BUSY})
    scene.progress.expect(0.05)
    for _ in range(8):
        scene.loop.pass_s(6.0)
        scene.progress.made(0.05)
    assert scene.told == []


def test_a_silent_rank_without_a_processor_is_hung_within_seconds() -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.progress.expect(0.05)
    scene.loop.pass_s(2.5)
    assert scene.hung == [1] and scene.told == []


def test_when_all_wait_that_is_said() -> None:
    said = job_hangs.who_waits_for_whom({0: COMMITS, 1: WAITS, 2: COMMITS})
    assert said == [
        "all that answer wait for each other",
        "ranks 0 and 2 wait for the others (commit)",
        "rank 1 waits for rank 0 (1F3<0)",
    ]


def test_ranks_in_units_that_cannot_meet_are_told_apart_however_busy_they_are() -> None:
    saves = Pong(0, (3, 0), "save", "save()", False, 1.0)
    scene = Scene({0: WAITS, 1: saves, 2: WAITS, 3: BUSY})
    scene.progress.expect(0.05)
    scene.loop.pass_s(2.5)
    assert scene.apart == [(1, "ranks 0, 2 called steps(), rank 1 save(): all ranks must call it")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(BUSY, id="in the script's own code"),
        pytest.param(Pong(0, (3, 1), "save", "save()", False, 1.0), id="one unit on, which the first one has not heard of yet"),
        pytest.param(Pong(0, (3, 0), "step", "0F1", False, 30.0), id="slow in the same unit"),
    ],
)
def test_ranks_that_are_behind_are_left_alone(other: Pong) -> None:
    scene = Scene({0: WAITS, 1: other})
    scene.progress.expect(0.05)
    scene.loop.pass_s(60.0)
    assert scene.apart == []


def test_answers_of_different_times_are_not_compared() -> None:
    """A unit is final between two answers to one question: the position may come again after a load."""
    scene = Scene({0: WAITS, 1: Pong(0, (3, 0), "save", "save()", False, 1.0)})
    scene.progress.expect(0.05)
    for _ in range(20):
        scene.loop.pass_s(1.5)
        scene.progress.made(0.05)
    assert scene.n_asked and scene.apart == []
