"""`--go-on=FILE`: a long run of tests that was cut off goes on where it stopped, as long as the code is the same.

The first line of FILE says which code it is of; each other one names a test that has passed. FILE may be committed among the
records of benchmarks, which do not belong to the code: then another machine goes on.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

_BEFORE = "passed_before"
PAGES = ("docs/status.md", "docs/internals", "benchmarks/results")


class GoingOn:
    """A plugin of pytest: it leaves out what has passed before, and writes down what passes.

    Processes of pytest-xdist have one each. The one that starts them writes, and tells them what it has read: a process that
    takes the place of one which died has to collect the same tests.
    """

    def __init__(self, file: Path, code: str, workerinput: Mapping[str, Any] | None) -> None:
        """`workerinput`: of a process of pytest-xdist, what it was told."""
        self._file = file
        self._writes = workerinput is None
        self._called: set[str] = set()
        if workerinput is not None:
            self._before = frozenset(workerinput[_BEFORE])
            return
        lines = file.read_text().splitlines() if file.exists() else []
        is_same = lines[:1] == [code]
        self._before = frozenset(lines[1:] if is_same else ())
        if not is_same:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{code}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_BEFORE] = sorted(self._before)

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
