"""The watch over what an agent waits for: people are told, who is stopped or idle is late, who is busy is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launcher.health import waits
from launcher.health.life import STOPPED_S, Life
from launcher.health.waits import TELL_S, Wait, Waits
from launcher.host.proc import Vitals, vitals
from tests.fake_loop import FakeLoop


class Scene:
    """A Waits of what a test says, on a clock that it moves."""

    def __init__(self, *awaited: Wait) -> None:
        self.loop = FakeLoop()
        self.awaited = list(awaited)
        self.said: list[str] = []
        self.waits = Waits(self.loop, self.said.append)
        self.waits.watch(lambda: self.awaited)
        self.waits.look()

    @property
    def n_timers(self) -> int:
        return sum(timer.call is not None for _, _, timer in self.loop._timers)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The pid of a process that waits for the end of its input."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.communicate()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED)


def test_a_stopped_process_is_late_within_seconds(sleeper: int) -> None:
    late: list[str] = []
    stop(sleeper)
    scene = Scene(Wait(1, "it is to join", sleeper, late.append, quiet=True))
    scene.loop.pass_s(STOPPED_S - 0.1)
    assert late == []
    scene.loop.pass_s(2.0)
    assert late == ["was stopped by a signal"] and scene.said == []


def test_a_process_that_is_continued_in_time_is_not_late(sleeper: int) -> None:
    late: list[str] = []
    scene = Scene(Wait(1, "it is to join", sleeper, late.append))
    for _ in range(3):
        stop(sleeper)
        scene.loop.pass_s(STOPPED_S - 1.0)
        go_on(sleeper)
        scene.loop.pass_s(STOPPED_S)
    assert late == []


def test_who_only_sleeps_is_waited_for_and_told_of(sleeper: int) -> None:
    late: list[str] = []
    scene = Scene(*(Wait(rank, "no Job is built there yet", sleeper, late.append) for rank in (1, 3)))
    scene.loop.pass_s(TELL_S + 0.5)
    assert scene.said == ["waiting for ranks 1 and 3 for 10 s: no Job is built there yet"]
    scene.loop.pass_s(100 * TELL_S)
    assert late == [] and len(scene.said) == 101


def test_who_has_only_to_answer_is_late_when_it_uses_no_processor(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[str] = []
    used_s = 0.0
    monkeypatch.setattr(waits, "vitals", lambda pid: Vitals("S", used_s))
    scene = Scene(Wait("the zygote", "importing torch", sleeper, late.append, idle_s=20.0))
    for _ in range(3):
        scene.loop.pass_s(19.0)
        used_s += 0.3
    assert late == []
    scene.loop.pass_s(21.0)
    assert late == ["has used no processor for 20 s"]


def test_who_computes_lives_although_one_that_it_had_started_has_ended() -> None:
    """With that one go the seconds that it had used."""
    life = Life(0.0)
    for now in range(30):
        life.take(Vitals("S", 500.0 + now if now < 5 else float(now)), float(now))
        assert life.verdict(float(now), 10.0) == ""


def test_who_is_held_up_by_a_disk_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[str] = []
    monkeypatch.setattr(waits, "vitals", lambda pid: Vitals("D", 1.0))
    scene = Scene(Wait("the zygote", "importing torch", 1, late.append, idle_s=20.0))
    scene.loop.pass_s(300.0)
    assert late == [] and len(scene.said) == 30 and scene.said[0] == "importing torch (10 s)"


def test_where_there_is_no_way_out_it_is_said_how_to_go_on(sleeper: int) -> None:
    stop(sleeper)
    scene = Scene(Wait(0, "no Job is built there yet", sleeper, None, quiet=True))
    scene.loop.pass_s(STOPPED_S + 0.5)
    (said,) = scene.said
    assert said.endswith(f"no Job is built there yet; stopped by a signal, `kill -CONT {sleeper}` continues")


def test_nothing_is_looked_at_while_nothing_is_waited_for(sleeper: int) -> None:
    scene = Scene(Wait(0, "quiet", sleeper, None, quiet=True))
    scene.loop.pass_s(5.0)
    assert scene.n_timers == 0
    stop(sleeper)
    scene.waits.look()  # as the signal of its stop makes the agent do
    scene.loop.pass_s(TELL_S)
    assert len(scene.said) == 1
    scene.awaited.clear()
    scene.loop.pass_s(5.0)
    assert scene.n_timers == 0


def test_an_agent_that_was_stopped_itself_gives_the_others_their_time_again(sleeper: int) -> None:
    late: list[str] = []
    stop(sleeper)
    scene = Scene(Wait(1, "it is to join", sleeper, late.append))
    scene.loop.pass_s(1.0)
    scene.loop.now += 60.0  # no look in between
    scene.loop.pass_s(STOPPED_S - 0.5)
    assert late == []
    scene.loop.pass_s(2.0)
    assert late == ["was stopped by a signal"]


def test_vitals_are_those_of_the_process(sleeper: int) -> None:
    mine = vitals(os.getpid())
    assert mine is not None and mine.state == "R" and mine.processor_s > 0
    stop(sleeper)
    stopped = vitals(sleeper)
    assert stopped is not None and stopped.is_stopped
    os.kill(sleeper, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper, os.WEXITED | os.WNOWAIT)
    assert vitals(sleeper) is None and vitals(None) is None
