"""`--go-on=FILE`: a long run of tests that was cut off goes on where it stopped, with what has passed on the same code.

Each line of FILE names a test that has passed, behind a key of the code that it ran. FILE may be committed among the records of
benchmarks, which do not belong to the code: then another machine goes on.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

_BEFORE = "passed_before"
_CONFTEST = "tests/conftest.py"
PAGES = ("docs/status.md", "docs/internals", "benchmarks/results")


class GoingOn:
    """A plugin of pytest: it leaves out what has passed before, and writes down what passes.

    Processes of pytest-xdist have one each. The one that starts them writes, and tells them what it has read: a process that
    takes the place of one which died has to collect the same tests.
    """

    def __init__(self, file: Path, key_of: Callable[[str], str], workerinput: Mapping[str, Any] | None) -> None:
        """`key_of`: of the code that a file of tests runs; `workerinput`: of a process of pytest-xdist, what it was told."""
        self._file = file
        self._key_of = cache(lambda nodeid: key_of(nodeid.partition("::")[0]))
        self._writes = workerinput is None
        self._called: set[str] = set()
        if workerinput is not None:
            self._before = frozenset(workerinput[_BEFORE])
            return
        lines = file.read_text().splitlines() if file.exists() else []
        same = [line for line in lines if line == self._line(line.partition(" ")[2])]
        self._before = frozenset(line.partition(" ")[2] for line in same)
        if same != lines:
            file.write_text("".join(f"{line}\n" for line in same))

    def _line(self, nodeid: str) -> str:
        return f"{self._key_of(nodeid)} {nodeid}"

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
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"{self._line(report.nodeid)}\n")


class Code:
    """The state of all files, but for pages that no long test reads. Raises UsageError without git."""

    def __init__(self, root: Path = ROOT) -> None:
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
        command += [f":(exclude){page}" for page in PAGES]
        try:
            listed = subprocess.run(command, check=True, capture_output=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise pytest.UsageError(f"--go-on: git does not tell which code this is ({error}): leave it out") from None
        paths = sorted({name.decode() for name in listed.split(b"\0") if name})
        self._files = {path: (root / path).read_bytes() for path in paths if (root / path).is_file()}
        self._tests = [path for path in self._files if path.startswith("tests/") and path.endswith(".py")]

    def key_of(self, test: str) -> str:
        """Tell it from the code that this file of tests runs in any other state.

        All of the product counts. A Python file of the tests counts where the file of tests, conftest.py or another one that
        counts has its name for a word: whatever imports or runs it does.
        """
        counted: set[str] = set()
        found = {test, _CONFTEST} & self._files.keys()
        while found:
            counted |= found
            words = {word for path in found for word in re.findall(rb"\w+", self._files[path])}
            found = {path for path in self._tests if _name(path).encode() in words} - counted
        left_out = {*self._tests} - counted
        state = hashlib.sha256()
        for path in sorted(self._files.keys() - left_out):
            state.update(f"{path}\0{hashlib.sha256(self._files[path]).hexdigest()}\0".encode())
        return state.hexdigest()[:16]


def _name(path: str) -> str:
    """A package has its folder's."""
    file = Path(path)
    return file.parent.name if file.stem in ("__init__", "__main__") else file.stem
