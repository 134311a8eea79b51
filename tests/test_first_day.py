"""docs/first-day.md: every command on the page, in its order, as somebody types it on a first day."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


WAITS = """
import fcntl, os
os.write(1, b"ready\\n")  # at once, as both write to one pipe
fcntl.flock(open("held"), fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively
"""


@contextmanager
def a_job_that_runs(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Its two ranks wait."""
    (folder / "waits.py").write_text(WAITS)
    (folder / "held").touch()
    with (folder / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = ["odyssey", "run", "--nproc-per-node", "2", "waits.py"]
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        try:
            assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            yield
        finally:
            held.close()
            job.communicate()
    assert job.returncode == 0


def test_every_command_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    page = (ROOT / "docs" / "first-day.md").read_text()
    commands = re.findall(r"^    (\S.*)$", page, re.MULTILINE)
    of_a_job_that_runs = [command for command in commands if command in ("odyssey status", "odyssey stacks")]
    said = {}
    has_transformers = importlib.util.find_spec("transformers") is not None  # `make soak` installs it

    def run(command: str) -> None:
        by_a_shell = ["bash", "-c", f"{command}; exit $?"]  # which stays its parent: it is asked for completion
        ended = subprocess.run(by_a_shell, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == command.startswith("diff "), (command, ended.stdout, ended.stderr)
        said[command] = ended.stdout

    for command in commands:
        if command not in of_a_job_that_runs and (has_transformers or "fine_tune" not in command):
            run(command)
    with a_job_that_runs(tmp_path, environment):
        for command in of_a_job_that_runs:
            run(command)
    scripts = ("ddp", "resilient", "images", "fine_tune")
    of = {script: [said[each] for each in said if script in each and not each.startswith("diff ")] for script in scripts}
    assert "by 2 ranks" in of["ddp"][0]
    assert "by 3 ranks" in of["ddp"][1]
    survived, alone = (re.findall(r"loss [\d.]+", text) for text in of["resilient"])
    assert survived == alone
    assert re.findall(r"step (\d+)", of["images"][0]) == ["19", "39", "59"]
    assert re.findall(r"step (\d+)", of["images"][1]) == ["79"]
    if has_transformers:
        whole, further = (re.findall(r"step (\d+): loss ([\d.]+)", text) for text in of["fine_tune"])
        assert (len(whole), len(further)) == (60, 10)
        assert float(further[0][1]) < float(whole[0][1]) - 1
    assert "> import odyssey" in said["diff examples/train_ddp.py examples/train_resilient.py"]
    assert "bash completion installed" in said["odyssey --install-completion"]
    assert "2 of 2 alive" in said["odyssey status"]
    assert "waits.py" in said["odyssey stacks"]
    assert len(commands) == 17
