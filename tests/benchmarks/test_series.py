"""`python -m benchmarks` on a few small ones: it goes on after what fails, and leaves nothing, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks import report
from tests import ROOT

PATIENCE_S = 60.0
MACHINE = report.Machine("cpu", 2, 2**33, "Linux", "3.12", "2.13", "2026-01-01", "abc", 0.1)
SERIES = """
import json, os, pathlib
from benchmarks.__main__ import main
main(json.loads(os.environ["LIMITS_S"]), pathlib.Path.cwd(), "small")
"""
ALONE = """
import runpy
from benchmarks.run import run
run(lambda: runpy.run_module("small.endless"))
"""
SMALL = {
    "good": 'print("good ran", flush=True)',
    "other": 'print("other ran", flush=True)',
    "bad": "raise SystemExit(7)",
    "endless": """
import os, signal, subprocess, sys, tempfile
# An orphan in a session of its own, which hears no signal.
sleep = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); " \\
        "print(os.getpid(), flush=True); os.close(1); signal.pause()"
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]], start_new_session=True, env={})"
orphan = subprocess.run([sys.executable, "-S", "-c", middle, sleep], stdout=subprocess.PIPE, text=True, check=True).stdout
folders = [tempfile.mkdtemp(), tempfile.mkdtemp(dir=os.environ["ODYSSEY_BENCHMARKS_MEMORY"])]
print("endless", os.getpid(), orphan.strip(), *folders, flush=True)
signal.pause()
""",
    "summary": 'print("summary ran", flush=True)',
}


class Series:
    """`limits_s`: of all that there are, by name."""

    def __init__(self, folder: Path, limits_s: Mapping[str, float], *arguments: str, code: str = SERIES) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=folder, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LIMITS_S": json.dumps(limits_s)},
        )  # fmt: skip

    def until_endless(self) -> tuple[list[psutil.Process], list[Path]]:
        """It, with what it has started and made."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words and words[0] == "endless"
        return [psutil.Process(int(pid)) for pid in words[1:3]], [Path(folder) for folder in words[3:]]

    def end(self) -> tuple[int, list[str], str]:
        """Its exit code, the lines of what it has run, and what it has said."""
        out, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out.splitlines(), said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the package `small`, committed."""
    (tmp_path / "small").mkdir()
    for name, code in SMALL.items():
        (tmp_path / "small" / f"{name}.py").write_text(code)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[Series]]:
    all_of_them: list[Series] = []
    yield all_of_them
    for series in all_of_them:
        series.process.kill()
        series.process.communicate(timeout=PATIENCE_S)


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, timeout=PATIENCE_S)


def _are_gone(processes: list[psutil.Process], folders: list[Path]) -> bool:
    _, left = psutil.wait_procs(processes, PATIENCE_S)
    return not left and not any(path.exists() or path.parent.exists() for path in folders)


def test_it_goes_on_after_a_failure_and_a_limit_and_tells_of_them_at_the_end(folder: Path, started: list[Series]) -> None:
    limits_s = {"bad": PATIENCE_S, "endless": 4.0, "good": PATIENCE_S, "summary": PATIENCE_S}
    started.append(Series(folder, limits_s))

    endless = started[0].until_endless()
    code, ran, said = started[0].end()

    assert code == 1
    assert ran == ["good ran", "summary ran"]
    assert said.endswith("these did not come to their end:\n  bad: exit code 7\n  endless: not done after 4 s\n")
    assert _are_gone(*endless)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("code", [SERIES, ALONE], ids=["series", "alone"])
def test_what_ends_it_ends_all(folder: Path, started: list[Series], code: str, number: signal.Signals) -> None:
    started.append(Series(folder, {"endless": PATIENCE_S, "good": PATIENCE_S, "summary": PATIENCE_S}, code=code))
    endless = started[0].until_endless()

    started[0].process.send_signal(number)

    exit_code, ran, _ = started[0].end()
    assert exit_code == (-number if number == signal.SIGKILL else 128 + number)
    assert ran == []
    assert _are_gone(*endless)


def _write(folder: Path, name: str, commit: str, arguments: tuple[str, ...] = ()) -> None:
    machine = msgspec.structs.replace(MACHINE, commit=commit)
    report.write(report.Report(name, "About.", machine, {}, [], arguments), folder / "small" / "results")


def test_what_has_a_result_of_this_commit_is_left_out_and_made_again_if_that_is_asked_for(
    folder: Path, started: list[Series]
) -> None:
    limits_s = {"good": PATIENCE_S, "other": PATIENCE_S, "summary": PATIENCE_S}
    _write(folder, "good", report.commit_of(folder))
    _write(folder, "other", "0123abc")
    started += [Series(folder, limits_s), Series(folder, limits_s, "--again")]

    (code, ran, said), (_, ran_again, _) = started[0].end(), started[1].end()

    assert (code, ran) == (0, ["other ran", "summary ran"])
    assert "good: its result is of this commit" in said
    assert ran_again == ["good ran", "other ran", "summary ran"]


def test_a_result_with_arguments_or_of_changed_files_is_made_again(folder: Path, started: list[Series]) -> None:
    limits_s = {"good": PATIENCE_S, "other": PATIENCE_S, "summary": PATIENCE_S}
    (folder / "small" / "bad.py").write_text("changed")
    _write(folder, "good", report.commit_of(folder))
    _write(folder, "other", report.commit_of(folder).removesuffix("+"), ("--seeds", "1"))
    started.append(Series(folder, limits_s))

    assert started[0].end()[:2] == (0, ["good ran", "other ran", "summary ran"])


def test_a_name_that_is_none_is_refused(folder: Path, started: list[Series]) -> None:
    started.append(Series(folder, {"good": PATIENCE_S, "summary": PATIENCE_S}, "godo"))

    code, ran, said = started[0].end()

    assert (code, ran) == (2, [])
    assert "no such benchmark: godo; there are good" in said
