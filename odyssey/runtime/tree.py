"""A sum over all workers through a tree of small groups: up to its root, and the result down again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class TreeSum:
    """It sums `tensor` in place, as a Work of torch does. Several are waited for in the order in which they were begun.

    `groups`: of the branches that this rank is in, from the leaves; it is the first member of all but the last. `has_leaf`: the
    first one is a leaf, in which a sum is begun before another is waited for, and in no other. `has_root`: the last one is the
    root. `limit`: of each operation.
    """

    def __init__(self, groups: Sequence[Any], tensor: torch.Tensor, limit: timedelta, has_leaf: bool, has_root: bool) -> None:
        self._groups = groups
        self._tensor = tensor
        self._limit = limit
        self._has_root = has_root
        self._begun = [self._sum(group) for group in groups[:has_leaf]]

    def wait(self) -> None:
        """Until the sum is here. A rank has it only if all have begun it. Raises RuntimeError when connections end."""
        for work in self._begun:
            work.wait()
        for group in self._groups[len(self._begun) :]:
            self._wait(self._sum(group))
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._limit
        below_root = self._groups[:-1] if self._has_root else self._groups
        for group in reversed(below_root):
            self._wait(group.broadcast([self._tensor], options))

    def _wait(self, work: Any) -> None:
        self._begun.append(work)  # see works.py
        work.wait()

    def _sum(self, group: Any) -> Any:
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        return group.allreduce([self._tensor], options)
