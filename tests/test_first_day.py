"""docs/first-day.md: every command on the page, in its order, as somebody types it on a first day."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_every_command_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    bin = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    commands = re.findall(r"^    ((?:odyssey|python) .*)$", (ROOT / "docs" / "first-day.md").read_text(), re.MULTILINE)
    said = {}
    has_transformers = importlib.util.find_spec("transformers") is not None  # `make soak` installs it
    for command in commands:
        if "fine_tune" in command and not has_transformers:
            continue
        arguments = shlex.split(command)
        ended = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        said[command] = ended.stdout
    scripts = ("ddp", "resilient", "images", "fine_tune")
    of = {script: [said[each] for each in said if script in each] for script in scripts}
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
    assert len(commands) == 12
