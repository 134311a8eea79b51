"""What the control groups of this process leave it of the host: those of containers, of SLURM, of systemd's services.

A group may be limited, and so may any of the groups that it is in: what counts is the least. In version 1 there is a tree for
each controller, of version 2 one for all; a host may have both. Processors that a group may not use at all are not looked for
here: the kernel takes them out of the affinity of its processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
"""As both versions call it."""
_INACTIVE = ("inactive_file", "total_inactive_file")
"""The rows of memory.stat, in version 2 and in version 1, for what the kernel takes back when it needs it."""


class Allowance(NamedTuple):
    """Bytes of memory, those that are not in use yet, and processors, `0.3` for 30 % of one; None for no limit."""

    memory_bytes: int | None = None
    free_bytes: int | None = None
    processors: float | None = None


def allowance(root: Path = Path("/")) -> Allowance:
    """Give that of this process. `root`: of the file system, with `proc` and the trees of groups."""
    limits, free, processors = [], [], []
    for group in _groups(root, "memory"):
        found = [limit for name in _LIMITS if (limit := _number(group / name)) is not None]
        if found:
            used = max(_number(group / name) or 0 for name in _USED)
            limits.append(min(found))
            free.append(max(0, min(found) - used + _inactive(group)))
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not period:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            processors.append(int(quota) / int(period))
    return Allowance(min(limits, default=None), min(free, default=None), min(processors, default=None))


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory of the host, or as much of it as this process may take with all others of its groups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = allowance(root).memory_bytes
    return physical if limit is None else min(physical, limit)


def n_processors(root: Path = Path("/")) -> int:
    """Whole ones that this process may keep busy, at least one."""
    usable, limit = len(os.sched_getaffinity(0)), allowance(root).processors
    return usable if limit is None else max(1, min(usable, int(limit)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our group and of those that it is in, as far as they are seen here; in each tree that may limit it."""
    mounts = [line.split(" - ") for line in _text(root / "proc/self/mountinfo").splitlines() if " - " in line]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _number_of_tree, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for fields, kind in mounts:
            words, (name, _, options) = fields.split(), kind.split(maxsplit=2)
            if name == ("cgroup" if controllers else "cgroup2") and (not controllers or controller in options.split(",")):
                yield from _upwards(root / words[4].lstrip("/"), words[3], path)


def _upwards(mount: Path, mounted: str, path: str) -> Iterator[Path]:
    """From the group at `path` to the one that is `mounted`, all that a container sees."""
    inside = path.removeprefix(mounted.rstrip("/")) if path.startswith(mounted) else ""
    group = mount / inside.strip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _inactive(group: Path) -> int:
    pairs = [line.split() for line in _text(group / "memory.stat").splitlines()]
    return max((int(words[1]) for words in pairs if len(words) == 2 and words[0] in _INACTIVE), default=0)


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """Empty where there is no such file, or it is not for us."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
