"""SLURM's lists of hosts, written short: `n[1-3,07],login` is n1, n2, n3, n07 and login."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 1 << 16
"""More than SLURM's own limit of a range: what says more is no list of hosts."""
_WORD = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def hosts(text: str) -> tuple[str, ...]:
    """Every host by name, in SLURM's order, as `scontrol show hostnames` has it. Raises ValueError for what is no such list."""
    found: list[str] = []
    at = 0
    while word := _WORD.match(text, at):
        found += itertools.islice(_expanded(word[0]), MAX_HOSTS + 1)
        at = word.end() + 1
        if len(found) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        if text[word.end() : at] != ",":
            break
    if at <= len(text) or not found:
        raise ValueError(f"expected hosts as in n[1-3],login, got {text[:200]!r}")
    return tuple(found)


def _expanded(word: str) -> Iterator[str]:
    """`n[1-2]-ib[0,1]`: the last number counts fastest."""
    parts = [tuple(_numbers(ranges)) if not plain else (plain,) for ranges, plain in _PART.findall(word)]
    return map("".join, itertools.product(*parts))


def _numbers(ranges: str) -> Iterator[str]:
    for text in ranges.split(","):
        if (bounds := _RANGE.fullmatch(text)) is None:
            raise ValueError(f"expected numbers as in [1-3,07], got [{ranges[:200]}]")
        first, last = bounds[1], bounds[2] or bounds[1]
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise ValueError(f"expected a range of at most {MAX_HOSTS} numbers, got {text[:200]}")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
