"""Waits: hung ranks are found early and in silence, people are told late, and of whom everybody waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from launcher.health import job_hangs
from launcher.health.job_hangs import JobHangs
from launcher.health.life import IDLE_S, STOPPED_S
from launcher.health.stalls import Sample
from odyssey.protocol.reports import Pong
from odyssey.protocol.units import Position
from tests.fake_loop import FakeLoop

BUSY = Pong(0, Position(3, 0), "", "in the script's own code", False, 12.0)
WAITS = Pong(0, Position(3, 0), "step", "1F3<0", True, 11.0)
COMMITS = Pong(0, Position(3, 0), "step", "commit", True, 3.0)


class Scene:
    """A JobHangs whose ranks answer what `answers` says, and use what `uses` says."""

    def __init__(self, answers: dict[int, Pong], silent: int = 0) -> None:
        self.loop = FakeLoop()
        self.answers = answers
        self.silent = silent
        self.n_asked = 0
        self.told: list[tuple[float, str]] = []
        self.hung: list[int] = []
        self.apart: list[tuple[int, str]] = []
        self.uses: Callable[[int], Sample] = lambda rank: Sample(1.0, 0)
        self.sampling_s = 0.0
        self.stuck: list[str] = []
        self.progress = JobHangs(
            self.loop,
            self._ping,
            self._sample,
            self._hang,
            self._tell,
            self._part,
            lambda rank, position, what: self.stuck.append(what),
        )

    def _ping(self, number: int) -> frozenset[int]:
        self.n_asked += 1
        for rank, pong in self.answers.items():
            answer = replace(pong, number=number)
            self.loop.later(0.0, lambda rank=rank, answer=answer: self.progress.pong(rank, answer))
        return frozenset(range(len(self.answers) + self.silent))

    def _sample(self, ranks: Iterable[int], done: Callable[[dict[int, Sample]], None]) -> None:
        found = {rank: self.uses(rank) for rank in ranks}
        if self.sampling_s:
            self.loop.later(self.sampling_s, lambda: done(found))
        else:
            done(found)

    def _hang(self, rank: int, text: str) -> None:
        self.hung.append(rank)

    def _part(self, rank: int, text: str) -> None:
        self.apart.append((rank, text))

    def _tell(self, text: str) -> None:
        self.told.append((self.loop.now - 100.0, text))


def test_ranks_are_asked_early_and_people_told_every_ten_seconds_from_the_tenth_on() -> None:
    scene = Scene({0: BUSY, 1: WAITS})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(9.9)
    assert scene.n_asked >= 2 and scene.told == []
    scene.loop.pass_s(25.0)
    first, second, third = (at for at, _ in scene.told)
    assert 10 <= first <= 15 and 10 <= second - first <= 15 and 10 <= third - second <= 15
    assert scene.told[0][1].endswith("rank 0: in the script's own code for 12 s; rank 1 waits for rank 0 (1F3<0)")
    assert scene.hung == []


def test_long_steps_give_more_time() -> None:
    scene = Scene({0: BUSY})
    scene.progress.expect(0.05, together=True)
    scene.progress.made(3.0)
    scene.loop.pass_s(29.0)
    assert scene.told == []
    scene.loop.pass_s(8.0)
    assert len(scene.told) == 1


def test_progress_starts_the_silence_anew() -> None:
    scene = Scene({0: BUSY})
    scene.progress.expect(0.05, together=True)
    for _ in range(8):
        scene.loop.pass_s(6.0)
        scene.progress.made(0.05)
    assert scene.told == []


def test_a_silent_rank_that_shows_no_life_is_hung_in_the_end() -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(IDLE_S)
    assert scene.hung == []
    scene.loop.pass_s(5.0)
    assert scene.hung == [1]


def test_a_silent_rank_that_is_stopped_is_hung_within_seconds() -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.uses = lambda rank: Sample(1.0, 0, is_stopped=rank == 1)
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(STOPPED_S + 3.5)
    assert scene.hung == [1] and scene.told == []


@pytest.mark.parametrize("sign", ["computes", "waits for a disk"])
def test_a_silent_rank_that_lives_is_waited_for_however_long_it_takes(sign: str) -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.uses = lambda rank: Sample(scene.loop.now if sign == "computes" else 1.0, 0, is_held_up=sign != "computes")
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(10_000.0)
    assert scene.hung == [] and scene.stuck == []
    assert "rank 1 lives but does not answer" in scene.told[-1][1]


def test_a_silent_rank_of_which_nothing_is_known_is_not_hung() -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.progress._sample = lambda ranks, done: done({})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(1000.0)
    assert scene.hung == []


def test_an_agent_that_was_away_itself_gives_the_others_their_time_again() -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(IDLE_S)
    scene.loop.now += 1000.0
    scene.loop.pass_s(IDLE_S - 1.0)
    assert scene.hung == []
    scene.loop.pass_s(3.0)
    assert scene.hung == [1]


@pytest.mark.parametrize("lives", [False, True])
def test_hung_ranks_are_found_by_samples_that_take_long(lives: bool) -> None:
    scene = Scene({0: WAITS}, silent=1)
    scene.sampling_s = 4.0
    if lives:
        scene.uses = lambda rank: Sample(scene.loop.now, 0)
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(IDLE_S + 1.0)
    assert scene.hung == []
    scene.loop.pass_s(20.0)
    assert set(scene.hung) == (set() if lives else {1})


def test_the_time_that_a_sample_took_is_not_held_against_ranks() -> None:
    """The agent itself may have been stopped meanwhile."""
    scene = Scene({0: WAITS}, silent=1)
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(3.5)
    scene.sampling_s = 1000.0
    scene.loop.pass_s(1001.0)
    assert scene.hung == []
    scene.sampling_s = 0.0
    scene.loop.pass_s(2.0)
    assert scene.hung == [1]


def test_ranks_that_all_wait_for_each_other_wait_in_vain() -> None:
    scene = Scene({0: WAITS, 1: WAITS})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(IDLE_S)
    assert scene.stuck == []
    scene.loop.pass_s(8.0)
    assert len(scene.stuck) == 1 and "all that answer wait for each other" in scene.stuck[0]


def test_where_nobody_is_left_to_be_asked_nobody_waits_in_vain() -> None:
    scene = Scene({})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(100.0)
    assert scene.n_asked and scene.stuck == []


@pytest.mark.parametrize("what", ["one computes", "data is on its way", "they pause", "the price is longer", "one goes on"])
def test_ranks_that_wait_for_something_do_not_wait_in_vain(what: str) -> None:
    scene = Scene({0: WAITS, 1: BUSY if what == "one computes" else WAITS})
    scene.uses = lambda rank: Sample(scene.loop.now if what == "data is on its way" else 1.0, 0)
    scene.progress.expect(100.0 if what == "the price is longer" else 0.05, together=what != "they pause")
    for n in range(40):
        scene.loop.pass_s(10.0)
        if what == "one goes on":
            scene.answers[1] = replace(WAITS, where=f"1F{n}<0")
    assert scene.stuck == []


def test_when_all_wait_that_is_said() -> None:
    said = job_hangs.who_waits_for_whom({0: COMMITS, 1: WAITS, 2: COMMITS})
    assert said == [
        "all that answer wait for each other",
        "ranks 0 and 2 wait for the others (commit)",
        "rank 1 waits for rank 0 (1F3<0)",
    ]


def test_ranks_in_units_that_cannot_meet_are_told_apart_however_busy_they_are() -> None:
    saves = Pong(0, Position(3, 0), "save", "save()", False, 1.0)
    scene = Scene({0: WAITS, 1: saves, 2: WAITS, 3: BUSY})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(2.5)
    assert scene.apart == [(1, "ranks 0, 2 called steps(), rank 1 save(): all ranks must call it")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(BUSY, id="in the script's own code"),
        pytest.param(
            Pong(0, Position(3, 1), "save", "save()", False, 1.0), id="one unit on, which the first one has not heard of yet"
        ),
        pytest.param(Pong(0, Position(3, 0), "step", "0F1", False, 30.0), id="slow in the same unit"),
    ],
)
def test_ranks_that_are_behind_are_left_alone(other: Pong) -> None:
    scene = Scene({0: WAITS, 1: other})
    scene.progress.expect(0.05, together=True)
    scene.loop.pass_s(60.0)
    assert scene.apart == []


def test_answers_of_different_times_are_not_compared() -> None:
    """A unit is final between two answers to one question."""
    scene = Scene({0: WAITS, 1: Pong(0, Position(3, 0), "save", "save()", False, 1.0)})
    scene.progress.expect(0.05, together=True)
    for _ in range(20):
        scene.loop.pass_s(1.5)
        scene.progress.made(0.05)
    assert scene.n_asked and scene.apart == []
