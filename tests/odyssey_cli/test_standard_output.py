"""Commands whose standard output takes nothing: an exit code, and one line where it is not only that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

buffered = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
commands = pytest.mark.parametrize("command", [["ps"], ["run", "--help"], ["plan", "--help"]], ids=" ".join)


def run(command: list[str], out: IO[bytes] | int, unbuffered: str) -> tuple[int, str]:
    """Exit code and what comes to stderr."""
    argv = [sys.executable, "-m", "odyssey_cli", *command]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
    return done.returncode, done.stderr


@buffered
@commands
def test_a_full_disk_is_told_in_a_line(command: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        assert run(command, full, unbuffered) == (1, "error: cannot write to standard output: no space left on device\n")


@buffered
@commands
def test_a_reader_that_has_gone_is_told_nothing(command: list[str], unbuffered: str) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    try:
        assert run(command, ours, unbuffered) == (1, "")
    finally:
        os.close(ours)
