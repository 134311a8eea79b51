"""A benchmark's result: what it found, on which machine, and every row behind it; as a table and as a JSON file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from odyssey.codec import Json, to_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Cell = str | int | float | None
Row = dict[str, Cell]
UNKNOWN = "unknown"
GIT_S = 60.0
"""For git to answer."""


class Machine(msgspec.Struct, frozen=True):
    """Where and when it was measured. `commit`: of this repository, with `+` if files differed from it, other
    than records and documents.

    `load_before`: processes that wanted a core in the minute before; anything above a few tenths spoils the numbers.
    """

    cpu: str
    n_cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    date: str
    commit: str
    load_before: float

    @property
    def is_at_a_commit(self) -> bool:
        """Whether the same can be measured again."""
        return self.commit != UNKNOWN and not self.commit.endswith("+")


class Report(msgspec.Struct, frozen=True):
    """`about`: a paragraph for the reader of the numbers. `rows` have the same columns each. `arguments`: of the command line
    that measured it."""

    name: str
    about: str
    machine: Machine
    summary: dict[str, float]
    rows: list[dict[str, Cell]]
    arguments: tuple[str, ...] = ()


def this_machine() -> Machine:
    """Facts of the machine that this process runs on, before a benchmark puts load on it."""
    return Machine(
        cpu=_cpu_model(),
        n_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=commit_of(ROOT),
        load_before=round(os.getloadavg()[0], 2),
    )


def publish(report: Report, folder: Path = RESULTS) -> Path:
    """Print the report and write `folder/NAME.json`, whole or not at all."""
    console = Console()
    rows = table(report.rows, report.name)
    # A row is read as a row: better cut by the terminal's edge than folded into columns of two letters.
    console.width = max(console.width, Console(width=1000).measure(rows).maximum)
    console.print(rows)
    for metric, value in report.summary.items():
        console.print(f"{metric} = {number(value)}")
    path = write(msgspec.structs.replace(report, arguments=tuple(sys.argv[1:])), folder)
    console.print(f"written to {path}", style="dim")
    return path


def write(report: Report, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.name}.json"
    temporary = folder / f".{report.name}.tmp"
    temporary.write_bytes(msgspec.json.format(to_json(report), indent=1) + b"\n")
    temporary.replace(path)
    return path


def read(path: Path) -> Report:
    """Read what `write` wrote. Raises Malformed for anything else."""
    report: Report = Json(Report).decode(path.read_bytes())
    return report


def table(rows: list[dict[str, Cell]], title: str) -> Table:
    """The rows as a rich table, numbers to the right."""
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in rows[0] if rows else []:
        is_number = any(isinstance(row[column], int | float) for row in rows)
        result.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        result.add_row(*(number(cell) for cell in row.values()))
    return result


def number(cell: Cell) -> str:
    """Three significant digits of a float, `-` for nothing, anything else as it is."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit_of(root: Path) -> str:
    """The one that the repository in this folder is at, as `Machine` has it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=GIT_S)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return (git("rev-parse", "--short", "HEAD") or UNKNOWN) + ("+" if changed else "")
