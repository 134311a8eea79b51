"""What has been measured is kept while the same is measured, and nothing else is taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks import job_wall, report
from benchmarks.apart import Unfinished, apart
from benchmarks.kept import Kept
from tests import ROOT

PATIENCE_S = 60.0
MACHINE = report.Machine("cpu", 2, 2**33, "Linux", "3.12", "2.13", "2026-01-01", "abc", 0.1)
LATER = msgspec.structs.replace(MACHINE, date="2026-01-02", load_before=3.0)


class Sample(msgspec.Struct, frozen=True):
    name: str
    seconds: float | None


class Measuring:
    """A benchmark of cases that are numbers, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measured: list[str] = []

    def begin(self, machine: report.Machine = MACHINE, arguments: tuple[str, ...] = ()) -> Kept:
        return Kept("cases", machine=machine, arguments=arguments, folder=self.folder)

    def once(self, kept: Kept, key: str) -> list[Sample]:
        def measure() -> list[Sample]:
            self.measured.append(key)
            return [Sample(key, float("nan") if key == "none" else 1.0), Sample(key, None)]

        return kept.once(key, list[Sample], measure)


@pytest.fixture
def measuring(tmp_path: Path) -> Measuring:
    return Measuring(tmp_path)


def test_a_run_goes_on_behind_what_was_measured(measuring: Measuring) -> None:
    before = measuring.begin()
    of_a = measuring.once(before, "a")

    kept = measuring.begin(LATER)

    assert measuring.once(kept, "a") == of_a
    measuring.once(kept, "b")
    assert measuring.measured == ["a", "b"]
    assert (kept.machine.date, kept.machine.load_before) == ("2026-01-01", 3.0), "begun then, and at the higher load"


@pytest.mark.parametrize(
    "begin",
    [
        lambda its: its.begin(msgspec.structs.replace(MACHINE, commit="def")),
        lambda its: its.begin(msgspec.structs.replace(MACHINE, cpu="another")),
        lambda its: its.begin(arguments=("--seeds", "2")),
    ],
    ids=["commit", "machine", "arguments"],
)
def test_nothing_is_taken_from_another(measuring: Measuring, begin: Callable[[Measuring], Kept]) -> None:
    measuring.once(measuring.begin(), "a")

    measuring.once(begin(measuring), "a")

    assert measuring.measured == ["a", "a"]


def test_with_changed_files_nothing_is_kept(measuring: Measuring) -> None:
    changed = msgspec.structs.replace(MACHINE, commit="abc+")

    for _ in range(2):
        measuring.once(measuring.begin(changed), "a")

    assert measuring.measured == ["a", "a"]
    assert list(measuring.folder.iterdir()) == []


def test_a_line_that_was_cut_is_measured_again(measuring: Measuring) -> None:
    kept = measuring.begin()
    for key in ("a", "b"):
        measuring.once(kept, key)
    (path,) = measuring.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])

    for _ in range(2):
        kept = measuring.begin()
        for key in ("a", "b"):
            measuring.once(kept, key)

    assert measuring.measured == ["a", "b", "b"]


def test_what_was_kept_goes_when_the_report_is_written(measuring: Measuring, tmp_path: Path) -> None:
    kept = measuring.begin()
    measuring.once(kept, "a")

    kept.publish("About.", {"figure": 1.0}, [{"case": "a"}], tmp_path / "results")

    assert report.read(tmp_path / "results" / "cases.json").machine == MACHINE
    measuring.once(measuring.begin(), "a")
    assert measuring.measured == ["a", "a"]


def test_a_process_that_is_killed_has_kept_what_it_has_measured(tmp_path: Path) -> None:
    code = """
import signal, sys
from pathlib import Path
from benchmarks.kept import Kept
from tests.benchmarks.test_kept import MACHINE
kept = Kept("cases", machine=MACHINE, arguments=(), folder=Path.cwd())
def measure(key):
    print(key, flush=True)
    if key == sys.argv[1]:
        signal.pause()
    return key
print(*(kept.once(key, str, lambda: measure(key)) for key in ("a", "b", "c")))
"""

    def start(pauses_in: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, pauses_in], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    with start("b") as first:
        assert first.stdout is not None
        try:
            assert [first.stdout.readline() for _ in range(2)] == ["a\n", "b\n"]
        finally:
            first.kill()
    with start("") as second:
        out, _ = second.communicate(timeout=PATIENCE_S)

    assert out == "b\nc\na b c\n"


def test_a_measurement_apart_answers_and_its_end_is_told_however_it_ends() -> None:
    assert apart(lambda: Sample("a", 1.0), PATIENCE_S) == Sample("a", 1.0)
    with pytest.raises(Unfinished, match="ended with -9"):
        apart(lambda: os.kill(os.getpid(), signal.SIGKILL), PATIENCE_S)
    before = set(psutil.Process().children())
    with pytest.raises(Unfinished, match=r"not done after 0\.5 s"):
        apart(signal.pause, 0.5)
    assert set(psutil.Process().children()) <= before


def test_a_launcher_that_is_given_up_is_counted_and_in_no_ratio() -> None:
    def row(case: str, over_plain: float | None) -> dict[str, report.Cell]:
        return {"case": case, "wall s": over_plain, "over plain": over_plain, "redone": 3}

    rows = [row("plain", 1.0), row("odyssey", 1.5), row("torchrun", None), row("torchrun", 3.0), row("torchft", None)]

    assert job_wall.summarise(rows) == {
        "job_wall_ratio": 1.5,
        "lost_progress": 3,
        "job_wall_given_up_torchrun": 1,
        "job_wall_ratio_torchrun": 3.0,
        "lost_progress_torchrun": 3,
        "job_wall_given_up_torchft": 1,
    }
