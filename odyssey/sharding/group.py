"""The ranks that have one copy of a sharded model together, as torch's default group in each of them.

FSDP gathers parameters and scatters sums of gradients in it. Each generation may have others in it, and always as many. Where
communication ends within a pass through the model, the pass goes on to its end with values that are of no worth, so that torch
is left as after any pass; only then the cut is told.

Torch calls these methods from Python and from C++, so their names and arguments are torch's.
"""

# mypy: disable-error-code="override"
# Torch's stubs have each of these calls in several forms, of which the one with tensors is what torch.distributed makes.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odyssey.errors import JobError
from odyssey.plan.worker import Worker
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.script_group import ScriptGroup

BACKEND = "odyssey_shards"


class CopyGroup(ScriptGroup):
    """`shard`: this rank's place in it, out of `n`."""

    def __init__(self, shard: int, n: int) -> None:
        super().__init__(shard, n, BACKEND)
        self._shard = shard
        self._n = n
        self._groups: Groups | None = None
        self._members: tuple[Worker, ...] = ()
        """All in the copy, ascending: the order of the generation's group."""
        self._shards: list[int] = []
        """Their shards, in the same order."""
        self._is_open = False
        """A pass through the model is under way, in which all call alike."""
        self._cut: str | None = None
        """What it says, and not itself: the frames that an exception keeps hold a group, and to destroy one on the thread that
        owns the model may wait for ever."""

    def among(self, groups: Groups | None, workers: Sequence[Worker]) -> None:
        """The workers that have the shards now, in the order of these; none where this rank has no work."""
        self._groups = groups if workers else None
        self._members = tuple(sorted(workers))
        self._shards = [workers.index(worker) for worker in self._members]
        self._is_open, self._cut = False, None

    def begin(self) -> None:
        """A pass through the model begins."""
        self._is_open = self._groups is not None

    @property
    def is_cut(self) -> bool:
        """Whether communication has ended within the pass, and values are of no worth since then."""
        return self._cut is not None

    def settle(self) -> None:
        """It is over. Raises Cut if communication ended within it."""
        self._is_open = False
        if self._cut is not None:
            raise Cut(self._cut)

    # -- who --------------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """The number of shards."""
        return self._n

    def rank(self) -> int:
        """The number of this rank's shard."""
        return self._shard

    # -- what FSDP calls ---------------------------------------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        parts = output.view(self._n, -1)

        def begin(group: Any) -> Any:
            return group.allgather([[parts[shard] for shard in self._shards]], [input.reshape(-1)])

        if not self._run("all_gather_into_tensor", begin):
            parts.copy_(input.reshape(1, -1).expand_as(parts))
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Sums, whatever is asked for: FSDP is told to divide by 1."""
        parts = input.view(self._n, -1)
        if self._shards != sorted(self._shards):
            parts = parts[self._shards]

        def begin(group: Any) -> Any:
            return group._reduce_scatter_base(output, parts.reshape(-1), dist.ReduceScatterOptions())

        if not self._run("reduce_scatter_tensor", begin):
            output.copy_(parts[0].view_as(output))
        return _Done()

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _run(self, name: str, begin: Callable[[Any], Any]) -> bool:
        """Whether it has been done by all together. Raises JobError where nobody can come to meet it."""
        if not self._is_open or self._groups is None:
            raise JobError(f"{name}: the sharded model is used outside of a step", _IN_A_STEP)
        if self._cut is not None or self._n == 1:  # what is this rank's alone is the whole
            return False
        try:
            self._groups.finish(self._groups.over(self._members, begin))
        except Cut as cut:
            self._cut = str(cut)
            return False
        return True


def _refuse(name: str) -> None:
    help = "Odyssey carries what fully_shard calls there, and nothing else"
    raise JobError(f"{name} in the group of a sharded model", help)


_IN_A_STEP = "call it in loss(batch), or in a metric of run.evaluate: all ranks of a copy compute together there"
for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "broadcast", "allgather", "gather", "scatter", "barrier"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv"),
    *("recv_anysource", "monitored_barrier"),
):
    setattr(CopyGroup, _name, lambda *arguments, _called=_name, **named: _refuse(_called))


class _Done(dist.Work):
    """What is over already."""

    def wait(self, timeout: Any = None) -> bool:
        """It is."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True
