"""Real jobs of tests/jobs/resumed.py: killed as a whole, in part, at any moment of a save, and around what one rank does."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import Event, JobEnded, PlanChosen, RankLost, RankStarted
from launcher.options import RunOptions
from odyssey.protocol.reports import Committed
from tests import ROOT, exactness, reference
from tests.agent_runs import Ran, nothing_left
from tests.jobs.resumed import make_job

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]

SCRIPT = str(ROOT / "tests/jobs/resumed.py")
BACK = str(ROOT / "tests/jobs/goes_back.py")
N_STEPS = 8


def options(tmp_path: Path, *arguments: str, **rest: object) -> RunOptions:
    given = (str(tmp_path / "saved"), str(N_STEPS), str(tmp_path / "out.pt"), *arguments)
    return RunOptions(SCRIPT, given, n_nodes=2, log_dir=tmp_path / "logs", capture_output=True, **rest)


def assert_exact(tmp_path: Path, first: int = 0) -> None:
    """The result is that of one undisturbed process, and its losses from step `first` on are there."""
    losses, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    result = torch.load(tmp_path / "out.pt")
    assert result["state"]["step"] == N_STEPS
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert sorted(result["losses"]) == list(range(first, N_STEPS))
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


class Kill:
    """SIGKILL to a rank, so long after the commit of a step: while it saves, or a little before or after."""

    def __init__(self, rank: int, step: int, delay_s: float, kind: str = "step") -> None:
        self.rank, self.step, self.delay_s, self.kind = rank, step, delay_s, kind
        self.pids: dict[int, int] = {}

    def __call__(self, event: Event, ran: Ran) -> None:
        body = event.body
        if isinstance(body, RankStarted):
            self.pids[body.rank] = body.pid
        elif isinstance(body, Committed) and body.result.kind == self.kind and body.result.position[0] == self.step:
            self.step = -1
            threading.Timer(self.delay_s, os.kill, (self.pids[self.rank], signal.SIGKILL)).start()


SAVES = [(0, 1, 0.0), (1, 0, 0.004), (0, 0, 0.012), (1, 1, 0.03), (0, 1, 0.05), (1, 0, 0.07), (1, 1, 0.0), (0, 0, 0.02)]


@pytest.mark.parametrize(
    ("rank", "max_restarts", "delay_s"),
    [pytest.param(*save, marks=() if i < 1 else pytest.mark.soak) for i, save in enumerate(SAVES)],
)
def test_a_rank_lost_in_a_save_costs_neither_job_nor_checkpoint(
    rank: int, max_restarts: int, delay_s: float, tmp_path: Path
) -> None:
    """A respawned rank finds checkpoints that were not there when the job began: it goes where the others are all the same."""
    strategy = "respawn" if max_restarts else "auto"
    wanted = options(tmp_path, layout="2x1", max_restarts=max_restarts, strategy=strategy)
    ran = Ran(wanted, Kill(rank, 3, delay_s))
    assert ran.code == 0, ran.events[-1].body
    assert [lost.rank for lost in ran.all(RankLost)] == [rank]
    if max_restarts:
        assert ran.all(PlanChosen)[-1].plan.spawned == (rank,)
        lines = [line for line in ran.text().splitlines() if "goes on from" in line]
        assert lines == [f"rank {r} goes on from step 0" for r in sorted((0, 1, rank))], "as the others saw it there"
    assert_exact(tmp_path)
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-000007", "step-000008"]
    for step in (7, 8):
        state = make_job(tmp_path / "saved" / f"step-00000{step}").state_dict()
        expected = exactness.expected_of("gpt", step, 15, 2)[1]
        assert state["step"] == step
        assert reference.largest_difference(expected, state["model"]) < exactness.TOLERANCE
    ran.assert_replays()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_a_job_that_is_killed_as_a_whole_goes_on_from_its_newest_save(seed: int, tmp_path: Path) -> None:
    """The agent's SIGKILL is that of all its ranks."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "odyssey_cli", "run", "--no-display", "--nodes", "2", "--layout", "1x2"]
    command += ["--log-dir", str(tmp_path / "logs"), SCRIPT, str(tmp_path / "saved"), str(N_STEPS), str(tmp_path / "out.pt")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    starts = [0]
    for step in sorted(rng.sample(range(1, N_STEPS - 1), 2)):
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
            timer = threading.Timer(rng.uniform(0, 0.08), job.kill)
            assert job.stdout is not None
            for line in job.stdout:
                told = re.search(rb"step (\d+) loss", line)
                if told and int(told[1]) >= step and timer.ident is None:  # the kill before may have come late
                    timer.start()
                if b"goes on from step" in line:
                    starts.append(int(line.split()[-1]))
            if timer.ident is not None:  # else the job had ended before it was told of
                timer.join()
        starts.append(step)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    first = next(int(line.split()[-1]) for line in done.stdout.splitlines() if "goes on from step" in line)
    assert first >= starts[-1], "the save before the kill is whole"
    assert "; going on from" not in done.stderr, "and it was the first that was tried"
    assert_exact(tmp_path, first)


def test_loading_whatever_is_there_is_refused_with_the_help_to_resume(tmp_path: Path) -> None:
    wanted = options(tmp_path, "--plain", layout="2x1", max_restarts=1, strategy="respawn")
    ran = Ran(wanted, Kill(1, 3, 0.01))
    assert ran.code == 1
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded)
    assert "after rejoining, the script calls load() where the other ranks called steps()" in ended.reason
    assert "odyssey.Job(..., resume=folder)" in ended.help


@pytest.mark.parametrize(
    ("moment", "acts"),
    [
        ("end", ["0", "1"]),  # nobody knew that it was done: done again
        pytest.param("another", ["0"], marks=pytest.mark.soak),  # the unit was redone, the action was not
    ],
)
@pytest.mark.parametrize("max_restarts", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_an_action_is_repeated_only_if_its_rank_is_lost(
    moment: str, acts: list[str], max_restarts: int, tmp_path: Path
) -> None:
    strategy = "respawn" if max_restarts else "auto"
    ran = Ran(options(tmp_path, "--act", moment, layout="2x1", max_restarts=max_restarts, strategy=strategy))
    assert ran.code == 0, ran.events[-1].body
    assert len(ran.all(RankLost)) == 1
    assert (tmp_path / "out.acts").read_text().split() == acts
    assert ran.steps() == sorted(set(ran.steps())), "no step is told of twice"
    assert_exact(tmp_path)


@pytest.mark.parametrize("delay_s", [0.0, *(pytest.param(0.004 * n, marks=pytest.mark.soak) for n in range(1, 12))])
@pytest.mark.parametrize("max_restarts", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_the_result_is_written_whenever_the_leader_is_lost(delay_s: float, max_restarts: int, tmp_path: Path) -> None:
    """After the last step come only the last save and the action that writes the result."""
    strategy = "respawn" if max_restarts else "auto"
    ran = Ran(options(tmp_path, layout="2x1", max_restarts=max_restarts, strategy=strategy), Kill(0, N_STEPS - 1, delay_s))
    assert ran.code == 0, ran.events[-1].body
    assert_exact(tmp_path)


def test_a_save_that_fails_on_one_rank_fails_alike_on_all_and_training_goes_on(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "--full", layout="1x2"))
    assert ran.code == 0, ran.events[-1].body
    what = f"{tmp_path}/saved: the checkpoint cannot be written: File too large"
    assert [f"rank {rank}: {what}" in ran.output[rank, "stdout"].decode() for rank in (0, 1)] == [True, True]
    assert_exact(tmp_path)
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-000007", "step-000008"]


@pytest.mark.parametrize("layout", ["3x1", "2x1"], ids=["all have work", "one is idle"])
def test_a_rank_is_lost_when_some_have_gone_back_and_another_does_not_know(layout: str, tmp_path: Path) -> None:
    """What follows a load that goes back is at an earlier step than the load."""
    given = (str(tmp_path / "saved"), str(N_STEPS), str(tmp_path / "out.pt"), "1")
    wanted = RunOptions(BACK, given, n_nodes=3, layout=layout, log_dir=tmp_path / "logs", capture_output=True)
    ran = Ran(wanted, Kill(2 if layout == "3x1" else 0, 7, 0.0, "load"))
    assert ran.code == 0, ran.text("stderr")
    assert [lost.rank for lost in ran.all(RankLost)] == [2 if layout == "3x1" else 0]
    assert_exact(tmp_path)
    ran.assert_replays()
