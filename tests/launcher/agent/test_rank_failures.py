"""A Job's script that fails on one rank: a loss of that rank under `--max-restarts`, the job's end where it comes again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import Event, JobEnded, PlanChosen, RankLost, RankStarted
from launcher.options import RunOptions
from odyssey.protocol.reports import Failed
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

N_STEPS = 6
EXACT = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
ENDS = {
    "raises": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "exits": "sys.exit(3)",
    "_exits": "os._exit(3)",
    "_exits well": "os._exit(0)",
}
WORDS = {
    "raises": "rank 1 failed: RuntimeError: CUDA error: an illegal memory access was encountered",
    "exits": "rank 1 ended with exit code 3",
    "_exits": "rank 1 ended with exit code 3",
}


def script_of(tmp_path: Path, condition: str, end: str) -> str:
    """The training script of the process tests, which does `end` behind a step where `condition` holds."""
    inside = "        losses[step.index] = step.loss\n"
    text = Path(TRAIN).read_text().replace("Path(__file__).resolve().parents[2]", repr(str(Path(TRAIN).parents[2])))
    assert inside in text
    path = tmp_path / "fails.py"
    path.write_text(text.replace(inside, f"{inside}        if {condition}:\n            {end}\n"))
    return str(path)


def run(tmp_path: Path, condition: str, end: str, **more) -> Ran:
    arguments = (*EXACT, "--out", str(tmp_path / "out.pt"))
    script = script_of(tmp_path, condition, end)
    return Ran(RunOptions(script, arguments, n_nodes=2, layout="2x1", log_dir=tmp_path / "logs", capture_output=True, **more))


@pytest.mark.parametrize(
    ("end", "strategy"),
    [
        ("raises", "respawn"),
        ("exits", "reroute"),
        *(pytest.param(end, "respawn", marks=pytest.mark.soak) for end in ("_exits", "_exits well")),
    ],
)
def test_a_failure_on_one_rank_is_a_loss_of_that_rank(end, strategy, tmp_path):
    once = f"step.index == 2 and job.rank == 1 and not Path({str(tmp_path / 'mark')!r}).exists()"
    act = f"Path({str(tmp_path / 'mark')!r}).touch(); {ENDS[end]}"
    ran = run(tmp_path, once, act, max_restarts=1, strategy=strategy)
    assert ran.code == 0, ran.events[-1]
    assert [lost.rank for lost in ran.all(RankLost)] == ([] if end == "_exits well" else [1])
    assert ran.all(PlanChosen)[-1].plan.spawned == ((1,) if strategy == "respawn" else ())
    _, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    ran.assert_replays()


@pytest.mark.parametrize("end", ["exits", pytest.param("_exits", marks=pytest.mark.soak)])
def test_without_restarts_it_ends_the_job_and_is_told_as_that_ranks(end, tmp_path):
    ran = run(tmp_path, "step.index == 2 and job.rank == 1", ENDS[end])
    assert ran.code == 1
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded) and ended.reason == WORDS[end]
    assert not ran.all(Failed), "no survivor is blamed"
    ran.assert_replays()


def test_the_same_failure_at_the_same_step_is_the_scripts(tmp_path):
    """It comes again on the rank that takes the failed one's place: restarts are left, and would not help."""
    ran = run(tmp_path, "step.index == 2 and job.rank == 1", ENDS["raises"], max_restarts=5, strategy="respawn")
    assert ran.code == 1
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded)
    assert ended.reason.startswith(f"{WORDS['raises']}; the same failure came twice with no step in between")
    assert len(ran.all(RankLost)) <= 3
    ran.assert_replays()


def test_what_all_ranks_do_is_the_scripts(tmp_path):
    ran = run(tmp_path, "step.index == 2", "raise ValueError('mine')", max_restarts=5)
    assert ran.code == 1
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded) and "failed: ValueError: mine; the same failure came twice" in ended.reason
    ran.assert_replays()


@pytest.mark.parametrize("when", ["Hello", "Profiled"])
def test_a_rank_that_is_lost_before_the_first_step_is_started_again(when, tmp_path):
    """In the trial, and while the first plan is being built."""
    killed: list[int] = []

    def watch(event: Event, ran: Ran) -> None:
        if type(event.body).__name__ == when and len(ran.all(type(event.body))) == (2 if when == "Hello" else 1) and not killed:
            (pid,) = (started.pid for started in ran.all(RankStarted) if started.rank == 1)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    options = RunOptions(
        *(TRAIN, (*EXACT, "--out", str(tmp_path / "out.pt"))),
        n_nodes=2,
        layout="2x1",
        log_dir=tmp_path / "logs",
        capture_output=True,
        max_restarts=1,
    )
    ran = Ran(options, watch)
    assert ran.code == 0 and killed, ran.events[-1]
    assert [lost.rank for lost in ran.all(RankLost)] == [1]
    assert ran.all(PlanChosen)[-1].plan.workers == (0, 1)
    _, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    ran.assert_replays()
