"""A script that does not compile is told of before anything starts; what ranks find first they tell in Python's own words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.options import Entry
from odyssey_cli.__main__ import main
from odyssey_cli.command_line import checks
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
        (("imports.py",), FORK),
        (("folder",), FORK),
        (("-m", "package.train"), FORK),
        (("-m", "package.train"), SPAWN),
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


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("broken.py", BROKEN.encode(), "broken.py:2: SyntaxError: "),
        ("tabs.py", FILES["tabs.py"].encode(), "tabs.py:3: TabError: "),
        ("outside.py", b"x = 1\nreturn x\n", "outside.py:2: SyntaxError: 'return' outside function"),
        ("latin.py", b"x = '\xe4'\n", "latin.py"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--run-path",)], ids=["script", "run_path"])
def test_a_script_that_does_not_compile_is_told_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, source: bytes, told: str, option: tuple[str, ...]
) -> None:
    script = tmp_path / name
    script.write_bytes(source)

    code = main(["run", "--log-dir", str(tmp_path / "logs"), *option, str(script)])

    said = capfd.readouterr().err
    assert code == 2 and said.startswith(f"error: {tmp_path}/{told}") and "no rank was started" in said
    assert subprocess.run([sys.executable, script], capture_output=True, check=False).returncode == 1, "Python refuses it too"
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "source",
    [
        b"# -*- coding: latin-1 -*-\nassert '\xe4' == chr(228)\n",
        b"\xef\xbb\xbfassert True\n",
        b"assert '\\d'\n",  # Python warns of it
    ],
    ids=["encoding", "mark", "warning"],
)
def test_what_python_runs_is_not_refused(tmp_path: Path, source: bytes) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(source)

    checks.entry(str(script), Entry.SCRIPT, "")

    assert subprocess.run([sys.executable, script], capture_output=True, check=False).returncode == 0


def test_a_script_of_another_interpreter_and_a_program_are_not_compiled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print 'of another Python'\n")
    script.chmod(0o755)

    checks.entry(str(script), Entry.SCRIPT, "/usr/bin/python2")
    checks.entry(str(script), Entry.PROGRAM, "")
