"""Where the reading of a stream stood when a step began, as the data set tells it: who takes a split over reads on from there.

A data set with `state_dict` and `load_state_dict`, or one whose iterator has both, is asked before the first sample of every
fourth step. All ranks exchange what they were told within that step, so it outlives the ranks that have read. A rank that takes
a split over, comes back, or begins with a checkpoint reads four steps' samples anew at most.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from odyssey.errors import OdysseyError
from odyssey.runtime.groups import Groups

EVERY = 4
"""Steps. An exchange takes two small reductions."""
MAX_STATE_BYTES = 1 << 20
"""The most that the state of a split may have. What is larger, as it has samples in it, is not exchanged: ranks would spend
their time on it."""


class Snapshot(NamedTuple):
    """The state of a split, pickled, when `n_read` samples of it had been read in all; empty where it was too large.

    `epoch`: the one that was under way.
    """

    n_read: int
    epoch: int
    state: bytes


def is_due(step: int) -> bool:
    """Whether ranks exchange the snapshots of this step."""
    return step > 0 and step % EVERY == 0


def state_of(data: Any, samples: Iterator[Any]) -> bytes | None:
    """What the iterator or else the data set tells of its state; None where neither has one."""
    owner = next(filter(_has_state, (samples, data)), None)
    return None if owner is None else pickle.dumps(owner.state_dict())


def iterator_from(data: Any, state: bytes) -> Any:
    """Iterate over what comes behind that state."""
    samples = iter(data)
    if _has_state(samples):
        samples.load_state_dict(pickle.loads(state))
        return samples
    data.load_state_dict(pickle.loads(state))
    return iter(data)


def _has_state(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


class Snapshots:
    """Those of a stream: what this rank has been told, and what all have. Its own state belongs to that of the job."""

    def __init__(self, starts: Sequence[int]) -> None:
        """`starts`: where each split begins in the positions of a step."""
        self._starts = starts
        self._told: dict[tuple[int, int], Snapshot] = {}
        """By split and step. The reader adds to it, in a thread of its own."""
        self._exchanged: dict[int, Snapshot] = {}
        self.shared: dict[int, Snapshot] = {}
        """The newest of each split that all ranks have."""

    def state_dict(self) -> dict[str, Any]:
        """For ranks that come, and for checkpoints: states as the data set gave them, so that only torch unpickles what is in a
        file."""
        splits = {split: (its.n_read, its.epoch, pickle.loads(its.state)) for split, its in self.shared.items()}
        return {"n_splits": len(self._starts), "splits": splits}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """As another rank has it, or a checkpoint. That of data which were divided otherwise is of no use."""
        self.shared = {}
        if state["n_splits"] == len(self._starts):
            for split, (n_read, epoch, its_state) in state["splits"].items():
                self.shared[split] = Snapshot(n_read, epoch, pickle.dumps(its_state))

    def tell(self, split: int, step: int, snapshot: Snapshot) -> None:
        """It was taken here, at the beginning of this step."""
        self._told[split, step] = snapshot

    def forget_before(self, step: int) -> None:
        """What was told of earlier steps is told anew if they are read anew. Until then they may be done again from what was
        read, as behind a `load`."""
        for key in list(self._told):  # all at one moment: the reader may add others meanwhile
            if key[1] < step:
                del self._told[key]

    def exchange(self, step: int, mine: Sequence[range], groups: Groups) -> None:
        """Give the snapshots of the splits that begin at positions of `mine`, and get those of all. Raises Cut."""
        own = [split for split, start in enumerate(self._starts) if any(start in positions for positions in mine)]
        if len(groups.needs.members) == 1:
            self._exchanged = {split: self._of(split, step) for split in own}
            return
        given = {split: pickle.dumps(self._of(split, step)) for split in own}
        sizes = torch.zeros(len(self._starts), dtype=torch.int64)
        for split, packed in given.items():
            sizes[split] = len(packed)
        groups.waiter.wait(groups.all_reduce(sizes).wait)
        ends = sizes.cumsum(0)
        row = torch.zeros(int(ends[-1]), dtype=torch.uint8)
        for split, packed in given.items():
            row[ends[split] - len(packed) : ends[split]] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        groups.waiter.wait(groups.all_reduce(row).wait)
        parts = torch.split(row, sizes.tolist())
        self._exchanged = {split: pickle.loads(part.numpy().tobytes()) for split, part in enumerate(parts) if part.numel()}

    def _of(self, split: int, step: int) -> Snapshot:
        if (split, step) not in self._told:
            raise OdysseyError(f"split {split} has no snapshot of step {step}", "please report this bug")
        return self._told[split, step]

    def take(self) -> None:
        """The step of the exchange is final."""
        if self._exchanged:
            self.shared |= {split: snapshot for split, snapshot in self._exchanged.items() if snapshot.state}
            self._exchanged = {}
