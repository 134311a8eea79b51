"""What a launcher inherits from whoever started it: signals that are ignored or blocked, folders, streams, file modes."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.joblog import registry
from launcher.joblog.events import Note
from launcher.options import RunOptions
from tests.agent_runs import Ran
from tests.launchers import ODYSSEY_RUN, OURS, Launcher, Scene, better_than_torchrun, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

WAITS = """
import os
with open(os.environ["READY"], "w") as ready:
    ready.write(os.environ["RANK"] + "\\n")
open("waits" + os.environ["RANK"]).close()
"""
"""Ends well when its pipe is opened."""
IGNORING = (
    "import os, signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGQUIT):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""As a shell script starts what it puts in the background."""
BLOCKING = (
    "import os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
GONE = "import os, sys\nos.rmdir(os.getcwd())\nos.execvp(sys.argv[1], sys.argv[1:])"
CLOSED = "import os, sys\nos.closerange(0, 3)\nos.execvp(sys.argv[1], sys.argv[1:])"


def let_end(scene: Scene) -> None:
    for path in scene.cwd.glob("waits*"):
        path.open("w").close()


def script(scene: Scene) -> str:
    for rank in (0, 1):
        os.mkfifo(scene.cwd / f"waits{rank}")
    return scene.write("train.py", WAITS)


@better_than_torchrun
@under_both
def test_a_job_under_nohup_outlives_its_terminal(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, "--nproc-per-node=2", script(scene), through=["nohup"])
    scene.hear(2)
    run.signal(signal.SIGHUP)
    if launcher.is_ours:
        let_end(scene)
        run.succeed()
    else:
        run.fail()


def test_a_hangup_that_is_to_be_passed_on_is_under_nohup_too(scene: Scene) -> None:
    heeds = WAITS.replace("import os\n", "import os, signal\nsignal.signal(signal.SIGHUP, lambda *_: os._exit(0))\n", 1)
    script(scene)
    options = ["--nproc-per-node=2", "--forward-signals=SIGHUP", scene.write("train.py", heeds)]
    run = scene.start(ODYSSEY_RUN, *options, through=["nohup"])
    scene.hear(2)
    run.signal(signal.SIGHUP)
    run.succeed()


@under_both
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGQUIT, marks=pytest.mark.soak)], ids=lambda number: number.name
)
def test_a_signal_that_a_shell_ignores_for_the_background_ends_the_job(
    scene: Scene, launcher: Launcher, number: signal.Signals
) -> None:
    run = scene.start(launcher, "--nproc-per-node=2", script(scene), through=[sys.executable, "-c", IGNORING])
    scene.hear(2)
    run.signal(number)
    assert run.end() == (128 + number if launcher.is_ours else 1)


def test_signals_that_are_blocked_arrive(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", script(scene), through=[sys.executable, "-c", BLOCKING])
    scene.hear(2)
    run.signal(signal.SIGTERM)
    assert run.end() == 143


def test_a_job_ends_though_all_signals_are_blocked(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", script(scene), through=[sys.executable, "-c", BLOCKING])
    scene.hear(2)
    let_end(scene)
    run.succeed()


JOINS = """
import os
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{total.item():g} {os.umask(0):o}\\n")
"""


@pytest.mark.parametrize("home", [pytest.param("no", marks=pytest.mark.soak), "missing"])
def test_odd_folders_and_no_streams_hinder_nobody(scene: Scene, home: str) -> None:
    """As in a container: any user, any folders."""
    odd = scene.folder / ("a folder's name " + "x" * 120)
    odd.mkdir()
    env = {"TMPDIR": str(odd), "HOME": "/nonexistent"}
    unset = ["XDG_STATE_HOME", "LANG", "USER"] + ["HOME"] * (home == "no")
    bare = f"import os\nos.umask(0o077)\nfor name in {unset}: del os.environ[name]\n{CLOSED}"
    run = scene.start(
        OURS, "--nproc-per-node=2", scene.write("a train.py", JOINS), env=env, through=[sys.executable, "-c", bare]
    )
    assert scene.hear(2) == ["2 77", "2 77"]
    run.succeed()


def test_a_user_without_a_home_runs_jobs_that_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run with any number as its user: nothing tells its home."""

    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME")
    (tmp_path / "train.py").write_text("")
    ran = Ran(RunOptions(script=str(tmp_path / "train.py"), log_dir=tmp_path / "logs"))
    assert ran.code == 0
    assert [note.text for note in ran.all(Note) if "odyssey ps" in note.text] == [
        "`odyssey ps` will not show this job: this user has no home; set HOME or XDG_STATE_HOME"
    ]
    assert registry.folders() == []


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "gone").mkdir()
    launch = [sys.executable, "-P", "-m", "odyssey_cli", "run", str(tmp_path / "train.py")]
    done = subprocess.run(
        [sys.executable, "-c", GONE, *launch], cwd=tmp_path / "gone", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the working directory was removed\nhelp: `cd` to one that exists, and start there\n"
