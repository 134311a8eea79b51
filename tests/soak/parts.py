"""A long soak comes in parts, each a test: one that is cut off goes on where it stopped, and the last part tells of all."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks import report
from tests.going_on import Code
from tests.soak.soak import Total

FOLDER = report.RESULTS / "soak-parts"
"""Among the records of benchmarks, so that another machine goes on."""
TEST = "tests/test_soak.py"
"""Its parts they are."""


class _Parts(msgspec.Struct):
    """What the parts have come to on one state of the code; one that was run twice counts twice."""

    code: str
    came: list[tuple[int, Total]]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process does this with the folder meanwhile."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def together(name: str, part: int, n_parts: int, total: Total, folder: Path = FOLDER) -> Total | None:
    """Write down what a part has come to. Answers what all have, once each of them has come on this code."""
    folder.mkdir(parents=True, exist_ok=True)
    file, code = folder / f"{name}.json", Code().key_of(TEST)
    with _alone(folder):
        data = file.read_bytes() if file.exists() else b""
        parts = msgspec.json.decode(data, type=_Parts, dec_hook=lambda _, found: Counter(found)) if data else _Parts(code, [])
        if parts.code != code:
            parts = _Parts(code, [])
        parts.came.append((part, total))
        half = file.with_suffix(".half")
        half.write_bytes(msgspec.json.encode(parts))
        half.replace(file)  # whole or not at all
    if {number for number, _ in parts.came} != {*range(n_parts)}:
        return None
    whole = Total(min(each.first_seed for _, each in parts.came))
    for _, each in parts.came:
        whole.include(each)
    return whole
