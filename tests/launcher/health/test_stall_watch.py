"""When ranks of plain scripts are told of as stalled, and ended: by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from launcher.health.stacks import Stack
from launcher.health.stall_watch import StallWatch
from launcher.health.stalls import Sample
from launcher.joblog.events import Body, Cause, Stalled
from odyssey.protocol.reports import Beat
from tests.fake_loop import FakeLoop

TIMEOUT_S = 60.0


class Scene:
    """Two ranks, of which `samples` tells what they have done. They beat, if at all, when a test has them."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.samples = {rank: Sample(0.0, 0) for rank in range(2)}
        self.told: list[Body] = []
        self.killed: list[int] = []
        self.before_stacks: Callable[[], None] = lambda: None
        self.watch = StallWatch(self.loop, TIMEOUT_S, True, inspection=self, feed=self.told.append, kill=self._kill)
        self.watch.start()

    def processes(self) -> Mapping[int, object]:
        return dict.fromkeys(self.samples, self)

    def hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def sample(self, ranks: Iterable[int], done: Callable[[dict[int, Sample]], None]) -> None:
        done(dict(self.samples))

    def read_stacks(self, ranks: Iterable[int], done: Callable[[dict[int, Stack]], None]) -> None:
        self.before_stacks()
        done({})

    def close(self) -> None:
        pass

    def _kill(self, rank: int, cause: Cause) -> None:
        self.killed.append(rank)

    def beat(self) -> None:
        for rank in self.samples:
            self.watch.beat(rank, Beat(None))

    def stand_still(self, seconds: float) -> None:
        """Nothing on this host runs, the agent neither: its clock goes on."""
        self.loop.now += seconds


def test_ranks_that_do_nothing_for_the_time_are_told_of_and_ended() -> None:
    scene = Scene()
    scene.loop.pass_s(TIMEOUT_S + 10)
    assert [type(body) for body in scene.told] == [Stalled] and scene.killed == [0, 1]


@pytest.mark.parametrize("beats", [True, False])
def test_a_host_that_was_suspended_gives_its_ranks_their_time_again(beats: bool) -> None:
    scene = Scene()
    scene.loop.pass_s(20)
    if beats:
        scene.beat()
    scene.stand_still(3600)
    scene.loop.pass_s(TIMEOUT_S - 10)
    assert scene.told == [] and scene.killed == []
    scene.loop.pass_s(20)
    assert scene.killed == [0, 1], "they did nothing behind it either"


def test_a_rank_that_beats_while_stacks_are_read_is_not_ended() -> None:
    scene = Scene()
    scene.beat()
    scene.before_stacks = scene.beat
    scene.loop.pass_s(TIMEOUT_S + 10)
    assert scene.told == [] and scene.killed == []
