"""Whatever is stopped (SIGSTOP) while a job needs it: it is found by its state and lost, and the job ends exactly."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.health import life, waits
from launcher.joblog.events import Event, Note, PlanChosen, RankLost, RankStarted, StoreLost
from launcher.options import RunOptions
from odyssey.protocol.reports import Finished, Hello
from odyssey.protocol.units import Position
from tests.agent_runs import TRAIN, Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

N_STEPS = 12
STOPS_ITSELF = """
import atexit, os, runpy, signal, sys
from pathlib import Path

def stop():
    if os.environ["RANK"] in {ranks!r} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)

if {when!r} == "before it joins":
    stop()
if {when!r} == "after it has finished":
    atexit.register(stop)  # runs behind the Job's own
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
if {when!r} == "before it finishes":
    stop()
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits are shortened; test_waits.py has them as they are."""
    monkeypatch.setattr(waits, "LOOK_S", 0.25)
    monkeypatch.setattr(life, "STOPPED_S", 0.5)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in which nothing happens."""
    ran = Ran(RunOptions(TRAIN, arguments(), log_dir=tmp_path_factory.mktemp("undisturbed"), capture_output=True))
    assert ran.code == 0
    return losses_of(ran)


SLOWLY_S = 0.3
"""Between two steps, where a test looks at the sockets of all processes while the agent waits: up to a second."""


def arguments(pause_s: float = 0.05) -> tuple[str, ...]:
    """Between two steps there is time for what a test does at one."""
    return ("--steps", str(N_STEPS), "--dtype", "float64", "--pause", str(pause_s))


def losses_of(ran: Ran) -> list[float]:
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", ran.text())}
    return [found[step] for step in range(N_STEPS)]


def run(
    tmp_path: Path,
    on_event: Callable[[Event, Ran], None] | None = None,
    script: str = TRAIN,
    pause_s: float = 0.05,
    **rest: Any,
) -> Ran:
    ran = Ran(RunOptions(script, arguments(pause_s), log_dir=tmp_path / "logs", capture_output=True, **rest), on_event)
    ran.assert_replays()
    return ran


def assert_exact(ran: Ran, losses: list[float]) -> None:
    assert ran.code == 0, [note.text for note in ran.all(Note)]
    assert losses_of(ran) == pytest.approx(losses, abs=1e-10, rel=0)


def stops_itself(tmp_path: Path, when: str, ranks: str) -> str:
    script = tmp_path / "stops.py"
    script.write_text(STOPS_ITSELF.format(ranks=ranks, when=when, train=TRAIN))
    return str(script)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


class Once:
    """At the first event that `when` takes: `do`."""

    def __init__(self, when: Callable[[Any], bool], do: Callable[[Ran], None]) -> None:
        self._when = when
        self._do = do
        self.is_done = False

    def __call__(self, event: Event, ran: Ran) -> None:
        if not self.is_done and self._when(event.body):
            self.is_done = True
            self._do(ran)


def is_step(number: int) -> Callable[[Any], bool]:
    return lambda body: getattr(getattr(body, "result", None), "position", None) == Position(number, 0)


def helpers(ran: Ran) -> Iterator[psutil.Process]:
    """Processes of the agent that are no ranks."""
    ranks = {started.pid for started in ran.all(RankStarted)}
    return (child for child in psutil.Process().children() if child.pid not in ranks)


def store(ran: Ran) -> int:
    """It has the listening socket."""
    zygote_like = (process for process in helpers(ran) if runs_zygote(process))
    (pid,) = (p.pid for p in zygote_like if any(c.status == psutil.CONN_LISTEN for c in p.net_connections()))
    return pid


def zygotes(ran: Ran) -> list[int]:
    return [process.pid for process in helpers(ran) if runs_zygote(process) and process.pid != store(ran)]


def runs_zygote(process: psutil.Process) -> bool:
    return "zygote/server.py" in " ".join(process.cmdline())


def planner(ran: Ran) -> int:
    (pid,) = (
        process.pid for process in helpers(ran) if any("launcher.planning.precompute" in part for part in process.cmdline())
    )
    return pid


# -- ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_rank_that_is_stopped_before_it_joins_is_done_without(tmp_path: Path, losses: list[float]) -> None:
    ran = run(tmp_path, script=stops_itself(tmp_path, "before it joins", "1"), n_nodes=3)
    assert_exact(ran, losses)
    assert [(lost.rank, lost.cause.kind) for lost in ran.all(RankLost)] == [(1, "hang")]
    assert any("before the job began; it starts without" in note.text for note in ran.all(Note))


@pytest.mark.soak
def test_a_rank_that_is_stopped_before_it_joins_is_started_again_where_it_may(tmp_path: Path, losses: list[float]) -> None:
    ran = run(tmp_path, script=stops_itself(tmp_path, "before it joins", "1"), n_nodes=2, layout="2x1", max_restarts=1)
    assert_exact(ran, losses)
    assert [started.rank for started in ran.all(RankStarted)][2:] == [1]
    assert ran.all(PlanChosen)[0].plan.workers == (0, 1)


@pytest.mark.soak
def test_a_respawned_rank_that_is_stopped_before_it_joins_is_lost_again(tmp_path: Path, losses: list[float]) -> None:
    def stop_the_new_one(event: Event, ran: Ran) -> None:
        if isinstance(event.body, RankStarted) and len(ran.all(RankStarted)) == 3:
            stop(event.body.pid)

    ran = run(
        tmp_path, stop_the_new_one, n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1, drills=("step=4 kill=1",)
    )
    assert_exact(ran, losses)
    assert [lost.cause.kind for lost in ran.all(RankLost)] == ["drill", "hang"]


@pytest.mark.parametrize("ranks", ["1", pytest.param("01", marks=pytest.mark.soak)], ids=["one of two", "all"])
def test_a_rank_that_is_stopped_after_its_script_has_ended_costs_nothing(
    tmp_path: Path, losses: list[float], ranks: str
) -> None:
    ran = run(tmp_path, script=stops_itself(tmp_path, "after it has finished", ranks), n_nodes=2)
    assert_exact(ran, losses)
    assert len(ran.all(Finished)) == 2
    assert sorted(lost.rank for lost in ran.all(RankLost)) == sorted(map(int, ranks))


def test_a_rank_that_is_stopped_before_it_has_ended_its_script_is_lost(tmp_path: Path, losses: list[float]) -> None:
    ran = run(tmp_path, script=stops_itself(tmp_path, "before it finishes", "1"), n_nodes=2, layout="2x1")
    assert_exact(ran, losses)
    assert [finished.rank for finished in ran.all(Finished)] == [0]
    assert [(lost.rank, lost.cause.text) for lost in ran.all(RankLost)] == [(1, "was stopped by a signal")]


def test_of_a_script_whose_only_rank_is_stopped_it_is_said(tmp_path: Path, losses: list[float]) -> None:
    """Nobody knows whether it has a Job, so nobody may end it."""

    def go_on(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Note) and "kill -CONT" in event.body.text:
            os.kill(int(event.body.text.split()[-2].strip("`")), signal.SIGCONT)

    ran = run(tmp_path, go_on, script=stops_itself(tmp_path, "before it joins", "0"))
    assert_exact(ran, losses)
    assert ran.all(RankLost) == []


# -- helpers -------------------------------------------------------------------------------------------------------------


def test_a_job_needs_no_store(tmp_path: Path, losses: list[float]) -> None:
    """It is stopped before the first groups are built, and a rank is lost and replaced later."""
    stop_store = Once(lambda body: isinstance(body, Hello), lambda ran: stop(store(ran)))
    drills = ("step=5 kill=1",)
    ran = run(tmp_path, stop_store, n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1, drills=drills)
    assert stop_store.is_done
    assert_exact(ran, losses)
    assert [lost.rank for lost in ran.all(RankLost)] == [1] and ran.all(StoreLost) == []


@pytest.mark.soak
def test_a_stopped_zygote_is_replaced_when_a_rank_is_to_be_spawned(tmp_path: Path, losses: list[float]) -> None:
    def stop_zygotes(ran: Ran) -> None:
        for pid in zygotes(ran):
            stop(pid)

    stops = Once(is_step(3), stop_zygotes)
    rest = {"n_nodes": 2, "layout": "2x1", "strategy": "respawn", "max_restarts": 1, "drills": ("step=5 kill=1",)}
    ran = run(tmp_path, stops, pause_s=SLOWLY_S, **rest)
    assert stops.is_done
    assert_exact(ran, losses)
    assert len(ran.all(RankStarted)) == 3 and [lost.cause.kind for lost in ran.all(RankLost)] == ["drill"]
    assert any("forked from was stopped by a signal" in note.text for note in ran.all(Note))


@pytest.mark.soak
def test_a_stopped_zygote_store_and_rank_at_once_end_exactly(tmp_path: Path, losses: list[float]) -> None:
    def stop_all(ran: Ran) -> None:
        for pid in [*zygotes(ran), store(ran), next(s.pid for s in ran.all(RankStarted) if s.rank == 1)]:
            stop(pid)

    stops = Once(is_step(3), stop_all)
    ran = run(tmp_path, stops, pause_s=SLOWLY_S, n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1)
    assert stops.is_done
    assert_exact(ran, losses)
    assert [lost.cause.kind for lost in ran.all(RankLost)] == ["hang"] and len(ran.all(RankStarted)) == 3


def test_helpers_that_are_stopped_and_continued_are_not_lost(tmp_path: Path, losses: list[float]) -> None:
    """Nobody waits for them while ranks train: they may be stopped for as long as it pleases."""
    stopped: list[int] = []

    def stop_all(ran: Ran) -> None:
        stopped.extend([*zygotes(ran), store(ran)])
        for pid in stopped:
            stop(pid)

    def go_on(ran: Ran) -> None:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    stops, continues = Once(is_step(2), stop_all), Once(is_step(8), go_on)

    def both(event: Event, ran: Ran) -> None:
        stops(event, ran)
        continues(event, ran)

    drills = ("step=9 kill=1",)
    ran = run(tmp_path, both, pause_s=SLOWLY_S, n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1, drills=drills)
    assert stops.is_done and continues.is_done
    assert_exact(ran, losses)
    assert ran.all(StoreLost) == [] and not any("forked from was" in note.text for note in ran.all(Note))


@pytest.mark.soak
def test_a_stopped_planner_is_replaced(tmp_path: Path, losses: list[float]) -> None:
    planners: list[int] = []
    stops = Once(is_step(1), lambda ran: stop(planner(ran)))
    finds = [Once(is_step(step), lambda ran: planners.append(planner(ran))) for step in (1, 9)]

    def watch(event: Event, ran: Ran) -> None:
        for each in (stops, *finds):
            each(event, ran)

    drills = ("step=10 kill=1",)
    ran = Ran(
        RunOptions(TRAIN, arguments(0.5), log_dir=tmp_path, capture_output=True, n_nodes=3, layout="3x1", drills=drills), watch
    )
    assert_exact(ran, losses)
    first, second = planners
    assert first != second
