"""A script that does not compile is the script's failure, told in Python's own words, whatever runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers import ODYSSEY_RUN, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(120)
BROKEN = "import os\ndef f(:\n    pass\n"
FILES = {
    "broken.py": BROKEN,
    "imports.py": "import os\nimport broken\n",
    "folder/__main__.py": BROKEN,
    "package/__init__.py": "",
    "package/train.py": BROKEN,
    "tabs.py": "if 1:\n\tx = 1\n        y = 2\n",
}
FORK, SPAWN = {}, {"ODYSSEY_ZYGOTE": "0"}


def block_of(stderr: str) -> str:
    """What is said at the end of a failed job, without the indent of the traceback."""
    return "\n".join(line.strip() for line in stderr[stderr.index("Root Cause") :].splitlines())


def python_says(scene: Scene, *entry: str) -> list[str]:
    """Its last words: from the file's line on."""
    done = subprocess.run([sys.executable, *entry], cwd=scene.cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [line.strip() for line in done.stderr.splitlines()]
    return lines[max(i for i, line in enumerate(lines) if line.startswith("File ")) :]


@pytest.mark.parametrize(
    ("entry", "env"),
    [
        (("broken.py",), FORK),
        (("broken.py",), SPAWN),
        (("imports.py",), FORK),
        (("folder",), FORK),
        (("-m", "package.train"), FORK),
        (("-m", "package.train"), SPAWN),
        (("tabs.py",), SPAWN),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "spawn" if value else "fork",
)
def test_a_syntax_error_is_told_in_pythons_words(scene: Scene, entry: tuple[str, ...], env: dict[str, str]) -> None:
    for name, text in FILES.items():
        scene.write(name, text)
    said = python_says(scene, *entry)
    assert "Error: " in said[-1]
    run = scene.start(ODYSSEY_RUN, "--standalone", "--nproc-per-node=1", *entry, env=env).fail()
    assert "\n".join(said) in block_of(run.stderr)
    assert f"cause     : {said[-1]}" in run.stderr


def test_a_source_that_cannot_be_decoded_is_told_as_well(scene: Scene) -> None:
    Path(scene.cwd, "latin.py").write_bytes(b"x = '\xe4'\n")
    run = scene.start(ODYSSEY_RUN, "--standalone", "--nproc-per-node=1", "latin.py", env=SPAWN).fail()
    assert "cause     : SyntaxError: " in run.stderr


def test_run_path_tells_it_as_well(scene: Scene) -> None:
    scene.write("broken.py", BROKEN)
    run = scene.start(ODYSSEY_RUN, "--standalone", "--nproc-per-node=1", "--run-path", "broken.py").fail()
    assert "\n".join(python_says(scene, "broken.py")[1:]) in block_of(run.stderr)
