"""`--go-on FILE`: a long run of tests that was cut off goes on where it stopped, as long as the code is the same.

The first line of FILE says which code it is of; each other one names a test that has passed.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

PAGES = ("docs/status.md", "docs/internals", "benchmarks/results")


class GoingOn:
    """A plugin of pytest: it leaves out what has passed before, and writes down what passes. Processes of pytest-xdist have one
    each; that of the process which started them writes."""

    def __init__(self, file: Path, code: str, *, writes: bool) -> None:
        lines = file.read_text().splitlines() if file.exists() else []
        is_same = lines[:1] == [code]
        self._before = frozenset(lines[1:] if is_same else ())
        self._file = file
        self._writes = writes
        self._called: set[str] = set()
        if writes and not is_same:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{code}\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self._before]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self._before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes or not report.passed:
            return
        if report.when == "call":
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self._called:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def code_of(root: Path = ROOT) -> str:
    """Tell one state of all files from another, but for pages that no long test reads. Raises UsageError without git."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments, "--", ".", *(f":(exclude){path}" for path in PAGES)]
        try:
            return subprocess.run(command, check=True, capture_output=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise pytest.UsageError(f"--go-on: git does not tell which code this is ({error}): leave it out") from None

    found = [git("ls-files", "--stage"), git("diff")]
    for name in git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0"):
        found += [name, (root / name.decode()).read_bytes()] if name else []
    return hashlib.sha256(b"\0".join(found)).hexdigest()
