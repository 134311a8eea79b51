"""What a benchmark has measured so far, so that a run that was cut goes on where it stopped.

A line of `build/benchmarks/NAME.jsonl` for each case, written when it has been measured. Nothing is taken from another commit,
other arguments, or another machine, nor from before it was booted; with uncommitted changes nothing is kept at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from benchmarks import report
from benchmarks.report import Machine, Report, Row
from odyssey.codec import Json, Malformed, to_json

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"
T = TypeVar("T")


class Begun(msgspec.Struct, frozen=True):
    """The first line: for whom the others were measured."""

    machine: Machine
    boot: str
    arguments: tuple[str, ...]

    def is_for(self, other: Begun) -> bool:
        """Whether both measure the same, and where."""
        return self._timeless() == other._timeless()

    def _timeless(self) -> Begun:
        return replace(self, machine=replace(self.machine, date="", load_before=0.0))


class Kept:
    """`machine`: as it was when the first case was measured, but for the load, which is the highest before any part."""

    def __init__(
        self, name: str, *, machine: Machine | None = None, arguments: Sequence[str] | None = None, folder: Path = FOLDER
    ) -> None:
        self._name = name
        self._path = folder / f"{name}.jsonl"
        self._lines: dict[str, bytes] = {}
        arguments = sys.argv[1:] if arguments is None else arguments
        now = Begun(machine or report.this_machine(), _boot(), tuple(arguments))
        self._file: BinaryIO | None = None
        """It is this run's alone, whoever else begins anew meanwhile."""
        if now.machine.is_at_a_commit:
            now = self._go_on(now)
        self.machine = now.machine

    def once(self, key: str, kind: Any, measure: Callable[[], T]) -> T:
        """What `measure` answers, of type `kind`; what it has answered for this key if it has been asked before."""
        if key in self._lines:
            found: T = Json(kind).decode(self._lines[key])
            return found
        value = measure()
        if self._file is not None:
            self._file.write(_line(key, to_json(value)))
            self._file.flush()
        return value

    def publish(self, about: str, summary: dict[str, float], rows: list[Row], folder: Path = report.RESULTS) -> None:
        """All is measured: report.publish, and what was kept goes."""
        report.publish(Report(self._name, about, self.machine, summary, rows), folder)
        self._path.unlink(missing_ok=True)

    def _go_on(self, now: Begun) -> Begun:
        """With the lines that an earlier run has left, or without any."""
        before = self._read(now)
        if before is not None:
            load = max(before.machine.load_before, now.machine.load_before)
            now = replace(before, machine=replace(before.machine, load_before=load))
        if self._lines:
            print(f"{self._name}: goes on after {len(self._lines)} cases ({self._path})", file=sys.stderr, flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        self._file = temporary.open("wb")
        self._file.writelines(_line(key, its) for key, its in [("", to_json(now)), *self._lines.items()])
        self._file.flush()
        temporary.replace(self._path)
        return now

    def _read(self, now: Begun) -> Begun | None:
        """Up to the first line that is not whole: its writer was killed."""
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        before: Begun | None = None
        of_line = Json(tuple[str, msgspec.Raw])
        try:
            for line in lines:
                key, value = of_line.decode(line)
                if before is None:
                    before = Json(Begun).decode(bytes(value))
                    if not before.is_for(now):
                        return None
                elif line.endswith(b"\n"):
                    self._lines[key] = bytes(value)
        except Malformed:
            pass
        return before


def _line(key: str, value: bytes) -> bytes:
    return msgspec.json.encode((key, msgspec.Raw(value))) + b"\n"


def _boot() -> str:
    """Another one for each time that a machine is booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
