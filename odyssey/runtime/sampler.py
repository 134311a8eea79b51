"""Which samples a step uses: those at its positions in the orders of all epochs, one behind the other.

An order depends on the seed and the epoch only, so any rank can tell it for any step, whoever is lost or comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

import torch
from torch.utils.data import DistributedSampler

from odyssey.errors import JobError
from odyssey.model import draws


class Sampler:
    """`n_samples`: of each epoch, in an order that is drawn."""

    is_scripts = False
    """Its orders are the script's, and told on the script's thread only: what they draw by may be used by others there."""

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self.seed = seed
        self._orders: dict[int, torch.Tensor] = {}

    def ids(self, start: int, stop: int) -> list[int]:
        """The sample ids at positions `[start, stop)`, counted from the first sample of the first epoch."""
        result = []
        for position in range(start, stop):
            epoch, place = divmod(position, self.n_samples)
            if (order := self._orders.get(epoch)) is None:
                order = self.order(epoch)
                self._orders[epoch] = order
            result.append(int(order[place]))
        return result

    def forget_before(self, position: int) -> None:
        """Nobody asks for what comes before, but for the epoch before."""
        self._orders = {e: its for e, its in self._orders.items() if e >= position // self.n_samples - 1}

    def order(self, epoch: int) -> torch.Tensor:
        """The sample ids of an epoch, as integers."""
        return torch.randperm(self.n_samples, generator=torch.Generator().manual_seed(self._seed(epoch)))

    def _seed(self, epoch: int) -> int:
        return self.seed * 1_000_003 + epoch


class GivenSampler(Sampler):
    """The script's own: what it gives when it is iterated over, for each epoch anew."""

    is_scripts = True

    def __init__(self, given: Iterable[int], seed: int) -> None:
        """Raises JobError for one whose order cannot be told again."""
        if isinstance(given, DistributedSampler):
            what = "sampler is a DistributedSampler, which gives each rank a part"
            raise JobError(what, "give the order of all samples: Odyssey divides them among ranks")
        if not isinstance(given, Iterable):
            raise JobError(f"sampler is a {type(given).__name__}", "give sample ids that can be iterated over for each epoch")
        self._given = given
        super().__init__(0, seed)
        first = self.order(0)
        self.n_samples = len(first)
        self.order(1)
        if not torch.equal(self.order(0), first):
            what = f"sampler is a {type(given).__name__} that gives another order the second time for the same epoch"
            help = "let it depend on set_epoch(epoch), and on torch's, numpy's and random's own generators only"
            raise JobError(what, help)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample ids of an epoch, as integers. Raises JobError for what are none, or not as many as before."""
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)
        with draws.apart() as generators:
            generators.seed(self._seed(epoch))
            if isinstance(own := getattr(self._given, "generator", None), torch.Generator):
                own.manual_seed(self._seed(epoch))
            order = [self._id(each) for each in self._given]
        if len(order) != (self.n_samples or len(order)) or not order:
            before = f", and {self.n_samples} before" if epoch else ""
            raise JobError(
                f"sampler gives {len(order)} sample ids in epoch {epoch}{before}", "let each have as many, at least one"
            )
        return torch.tensor(order)

    def _id(self, given: object) -> int:
        try:
            return index(given)  # type: ignore[arg-type]
        except TypeError:
            kind = type(given).__name__
            raise JobError(f"sampler gives a {kind}", "let it give sample ids, one by one: integers, and no batches") from None
