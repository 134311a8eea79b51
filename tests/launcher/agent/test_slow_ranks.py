"""Slow is not dead: whoever lives has its time, in the middle of a recovery too. Who shows no life at all is lost."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from pathlib import Path

import pytest

from launcher.joblog.events import Event, GenerationStarted, Note, Pausing, RankLost, RankStarted, Suspected
from launcher.options import RunOptions
from odyssey.protocol.reports import Committed, Paused
from tests.agent_runs import TRAIN, Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
N_STEPS = 4


class Slow(Ran):
    """A job of which `rank` is slow at step 1, until there have been `n` events of the type `until` after that. As soon as it
    is slow `victim` is killed, if there is one."""

    def __init__(
        self, folder: Path, layout: str, rank: int, how: str, victim: int | None, until: type = Note, n: int = 1
    ) -> None:
        self._victim, self._until, self._n_left = victim, until, n
        self.was_slow = False
        held = folder / "held"
        held.touch()
        arguments = ("--steps", str(N_STEPS), "--slow", str(held), str(rank), "1", "--slow-how", how)
        if how == "validation":
            arguments += ("--eval-every", "1")
        n_ranks = {"1x2": 2, "2x1": 2, "2x2": 4}[layout]
        with held.open("rb") as self._held:
            fcntl.flock(self._held, fcntl.LOCK_EX)
            super().__init__(
                RunOptions(TRAIN, arguments, log_dir=folder / "logs", capture_output=True, n_nodes=n_ranks, layout=layout)
            )

    def _watch(self, event: Event) -> None:
        super()._watch(event)
        self._n_left -= self.was_slow and isinstance(event.body, self._until)
        if not self._n_left:
            fcntl.flock(self._held, fcntl.LOCK_UN)

    def _take_output(self, rank: int, stream: str, data: bytes) -> None:
        super()._take_output(rank, stream, data)
        if not self.was_slow and "slow" in self.text():
            self.was_slow = True
            if self._victim is None:
                return
            (pid,) = (started.pid for started in self.all(RankStarted) if started.rank == self._victim)
            os.kill(pid, signal.SIGKILL)

    def losses(self) -> list[float]:
        """As they are final: a leader that is killed may not have printed its own."""
        return [unit.result.values[0] for unit in self.all(Committed) if unit.result.kind == "step"]

    def assert_exact(self, losses: list[float]) -> None:
        assert self.code == 0, self.events[-1].body
        assert self.losses() == pytest.approx(losses, abs=1e-10, rel=0)
        self.assert_replays()


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank to which nothing happens."""
    ran = Ran(RunOptions(TRAIN, ("--steps", str(N_STEPS)), log_dir=tmp_path_factory.mktemp("alone"), capture_output=True))
    assert ran.code == 0
    return [float(loss) for loss in re.findall(r"loss (\S+)", ran.text())]


def test_a_survivor_in_a_long_op_is_waited_for(tmp_path: Path, losses: list[float]) -> None:
    """It goes on as soon as people have been told of it: long after any other rank has paused."""
    ran = Slow(tmp_path, "2x2", 3, "lock", victim=0, until=Suspected)
    ran.assert_exact(losses)
    assert [lost.rank for lost in ran.all(RankLost)] == [0]
    assert re.search(r"no step finished for \d+ s; rank 3: \S*F\S* for \d+ s", ran.all(Suspected)[0].reason)


@pytest.mark.soak
def test_a_survivor_that_lets_no_other_thread_in_is_waited_for(tmp_path: Path, losses: list[float]) -> None:
    """As one that compiles: it answers nothing, and uses its processor."""
    ran = Slow(tmp_path, "2x2", 3, "busy", victim=0)
    ran.assert_exact(losses)
    assert [lost.rank for lost in ran.all(RankLost)] == [0]


@pytest.mark.soak
def test_a_survivor_that_shows_no_life_is_lost(tmp_path: Path, losses: list[float]) -> None:
    """It holds the interpreter's lock and waits for something that never comes; so nobody trains its layers."""
    ran = Slow(tmp_path, "2x1", 1, "deaf", victim=0, until=type(None))
    assert ran.code == 1
    assert [(lost.rank, lost.cause.kind) for lost in ran.all(RankLost)] == [(0, "signal"), (1, "hang")]
    assert "has used no processor for" in ran.all(RankLost)[1].cause.text


@pytest.mark.parametrize("which", ["data", "validation"])
def test_a_survivor_pauses_at_once_while_its_data_set_is_slow(which: str, tmp_path: Path, losses: list[float]) -> None:
    """The sample comes only when the next generation runs, which needs it: of a step, and of an evaluation."""
    ran = Slow(tmp_path, "2x1", 1, which, victim=0, until=GenerationStarted)
    ran.assert_exact(losses)
    assert [lost.rank for lost in ran.all(RankLost)] == [0]
    bodies = [type(event.body) for event in ran.events if isinstance(event.body, Pausing | Paused | GenerationStarted)]
    assert bodies == [GenerationStarted, Pausing, Paused, GenerationStarted]
    evaluations = [unit.generation for unit in ran.all(Committed) if unit.result.kind == "evaluate"]
    assert evaluations == ([2] * N_STEPS if which == "validation" else [])


@pytest.mark.soak
def test_a_rank_that_waits_for_long_without_any_loss_is_not_disturbed(tmp_path: Path, losses: list[float]) -> None:
    """For more than a minute, as people are told every ten seconds."""
    ran = Slow(tmp_path, "1x2", 0, "lock", victim=None, until=Suspected, n=7)
    ran.assert_exact(losses)
    assert len(ran.all(Suspected)) == 7 and ran.all(Pausing) == []


@pytest.mark.soak
def test_a_message_that_is_lost_on_its_way_is_found_by_what_all_ranks_do(tmp_path: Path, losses: list[float]) -> None:
    arguments = ("--steps", str(N_STEPS), "--lose-message", "0", "5")
    ran = Ran(RunOptions(TRAIN, arguments, log_dir=tmp_path / "logs", capture_output=True, n_nodes=2, layout="1x2"))
    assert ran.code == 0, ran.events[-1].body
    assert [float(loss) for loss in re.findall(r"loss (\S+)", ran.text())] == pytest.approx(losses, abs=1e-10, rel=0)
    (pausing,) = ran.all(Pausing)
    assert pausing.lost == () and "nothing has moved for" in pausing.reason
