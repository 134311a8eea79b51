"""Limits of the system: where no process can be had for a rank, a Job goes on without it; where none can be at the start, that
is one clear error.

The limit on a user's processes does not hold for root, so root's tests are those of a user that may read what root may.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import ROOT, exactness, reference
from tests.agent_runs import TRAIN
from tests.forks_ahead import AHEAD
from tests.launchers import ODYSSEY_RUN, OURS, Run, Scene, scene_in

pytestmark = pytest.mark.timeout(120)

N_STEPS = 6
PATIENCE_S = 600.0
"""For ranks that import torch for themselves on a busy machine: the limit of pytest strikes first, and the soak's is longer."""
_CAPABILITIES = "-all,+dac_override"
AT_FIRST = f"""
import contextlib, os, psutil, resource, signal, time
{AHEAD}
agent = psutil.Process(os.getppid())
"""
TAKES_THE_LAST_PROCESS = """
            while 'AHEAD' in os.environ and len(ahead()) < 3:  # one for the store
                time.sleep(0.01)
            if os.environ.get('AHEAD') == 'killed':
                for process in ahead():
                    process.kill()
            for _ in range(2):  # the second time those, too, that were forked while the first one went on
                for process in (agent, *zygotes()):
                    with contextlib.suppress(ProcessLookupError):
                        resource.prlimit(process.pid, resource.RLIMIT_NPROC, (1, 1))
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""Nothing that the agent or its zygote forks from now on is granted."""


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """In a folder that every user can get to."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="odyssey-tests-") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("TMPDIR", folder)
        with scene_in(Path(folder) / "scene") as scene:
            yield scene


@pytest.fixture
def as_user(scene: Scene) -> tuple[str, ...]:
    """Becomes a user who has no other processes, and for whom limits hold."""
    if os.geteuid() != 0:
        return ()
    user = 50_000 + os.getpid() % 10_000
    for folder in (scene.folder, *(path for path in scene.folder.rglob("*")), scene.tmp):
        os.chown(folder, user, user)
    capabilities = (f"--{which}={_CAPABILITIES}" for which in ("inh-caps", "ambient-caps", "bounding-set"))
    return ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capabilities)


def train(scene: Scene, through: tuple[str, ...], **environment: str) -> Run:
    """`AHEAD`: what becomes of the forks that wait for a restart."""
    inside = "        losses[step.index] = step.loss\n"
    text = Path(TRAIN).read_text().replace("Path(__file__).resolve().parents[2]", repr(str(ROOT)))
    assert inside in text
    loses = f"{inside}        if step.index == 2 and job.rank == 1:\n"
    text = text.replace(inside, loses + TAKES_THE_LAST_PROCESS).replace("import odyssey\n", f"import odyssey\n{AT_FIRST}", 1)
    script = scene.write("train.py", text)
    arguments = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
    job = ("--nodes=2", "--layout=2x1", "--max-restarts=2", "--strategy=respawn", script, *arguments)
    return scene.start(ODYSSEY_RUN, *job, "--out", str(scene.cwd / "out.pt"), env=environment, through=through)


@pytest.mark.parametrize(
    "environment", [{"AHEAD": "killed"}, pytest.param({"ODYSSEY_ZYGOTE": "0"}, marks=pytest.mark.soak)], ids=["fork", "spawn"]
)
def test_a_job_goes_on_without_a_rank_that_cannot_be_started_again(
    scene: Scene, as_user: tuple[str, ...], environment: dict[str, str]
) -> None:
    run = train(scene, as_user, **environment).succeed(PATIENCE_S)
    assert "rank 1 could not be started" in run.stderr
    _, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    assert reference.largest_difference(expected, torch.load(scene.cwd / "out.pt")["state"]["model"]) < exactness.TOLERANCE


def test_an_agent_needs_no_thread_that_may_not_be_granted(scene: Scene, as_user: tuple[str, ...]) -> None:
    """The rank, which was there already, does."""
    run = train(scene, as_user, AHEAD="left").fail(PATIENCE_S)
    assert "error: rank 1 failed: RuntimeError: can't start new thread" in run.stderr


@pytest.mark.parametrize("zygote", ["1", "0"], ids=["fork", "spawn"])
@pytest.mark.parametrize("limit", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_too_few_processes_at_the_start_are_one_error(scene: Scene, as_user: tuple[str, ...], zygote: str, limit: int) -> None:
    script = scene.write("script.py", "import signal; signal.pause()")
    through = (*as_user, "prlimit", f"--nproc={limit}")
    run = scene.start(OURS, "--nproc-per-node=8", script, env={"ODYSSEY_ZYGOTE": zygote}, through=through).fail()
    assert "ulimit -u" in run.stderr and "Traceback" not in run.stderr, run.stderr
