"""A collective that can be begun anew: in another generation, with fewer ranks.

Torch computes on copies. What the script gave stays as it was until the operation is final, whatever a cut operation still
writes somewhere; only then results are put where the script wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.futures import Future

from odyssey.plan.worker import Rank
from odyssey.protocol.units import FIRST, Position
from odyssey.runtime.cut import Cut


class Peers(Protocol):
    """Those who carry out an operation together, as this rank sees them. `ranks`: theirs, in the order of torch's group."""

    ranks: tuple[Rank, ...]
    begun: set[Operation]
    """What is under way. It is let go of while there is torch's group: with the last work of one that was cut, whoever
    lets go of it would wait for a thread that may never come back."""

    def start(self, operation: Callable[[Any], Any]) -> Any:
        """Begin `operation(group)` of torch's group of all of them, and give what to wait for. Raises Cut."""

    def wait(self, works: Sequence[Any]) -> None:
        """Until all are done. Raises Cut."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory that is theirs: what a cut operation of others may still write to is not."""

    def free(self, copies: Sequence[torch.Tensor]) -> None:
        """No operation uses these any more."""


Begin = Callable[[Peers], tuple[Any, Callable[[], None]]]
"""Starts it. Gives what to wait for, None if nothing, and what puts the results where they belong when that is done."""


class Operation:
    """`name`: as torch.distributed calls it. `begin`: see there; it may be called several times, for other peers each.
    `results`: tensors that are told when it is final."""

    def __init__(self, name: str, begin: Begin, results: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.behind = FIRST
        """The script has called it behind all units before this one."""
        self.is_read = False
        """It is read off its future before any other unit, and put in place only if somebody waits for its work."""
        self.future: Future[list[torch.Tensor]] = Future()
        self._begin = begin
        self.results = list(results)
        self._peers: Peers | None = None
        self._work: Any = None
        self._put: Callable[[], None] = nothing

    def start(self, peers: Peers) -> None:
        """Among these, unless it has been already. Raises Cut."""
        if self._peers is not peers:
            self.let_go()
            self._work, self._put = self._begin(peers)
            self._peers = peers
            peers.begun.add(self)

    def start_early(self, peers: Peers) -> None:
        """While the script computes on. If nobody communicates now, it is started later."""
        with suppress(Cut):
            self.start(peers)

    @property
    def works(self) -> list[Any]:
        """What to wait for."""
        return [] if self._work is None else [self._work]

    def put(self) -> None:
        """It is final: put its results where the script wants them."""
        with torch.no_grad():
            self._put()
        self.let_go()

    def let_go(self) -> None:
        """Forget what is under way, or done."""
        if self._peers is not None:
            self._peers.begun.discard(self)
        self._peers, self._work, self._put = None, None, nothing

    def waited(self) -> None:
        """Somebody has waited for its work."""

    def tell(self) -> None:
        """Let go on who waits for it, which may make others final."""
        del self._begin  # nobody begins it anew, and a Sum's is the Sum itself: its tensors would live until a collection
        self.future.set_result(self.results)


Add = Callable[[Any, list[torch.Tensor]], Any]
"""`(group, tensors)`: begin their sum in torch's group, in place."""


class Sum(Operation):
    """A sum in place, or what else all ranks have alike of what each gives: so who has it can hand it on to the others.

    `divided_by`: ranks by whose number the tensors have been divided; 0 where they are as the script has given them.
    """

    def __init__(self, name: str, tensors: list[torch.Tensor], add: Add, divided_by: int, *, is_read: bool = False) -> None:
        super().__init__(name, self._begin_sum, tensors)
        self._tensors = tensors
        self._add = add
        self._divided_by = divided_by
        self.is_read = is_read
        self.sums: list[torch.Tensor] = []
        """When it is final: as it was then, whatever the script makes of its own tensors since."""

    @property
    def needs_all(self) -> bool:
        """Whether nobody has it before all ranks have begun it."""
        return any(tensor.numel() for tensor in self._tensors)

    @property
    def can_be_handed_on(self) -> bool:
        """Whether it is of one size on all ranks."""
        return not any(tensor.is_sparse for tensor in self._tensors)

    def _begin_sum(self, peers: Peers) -> tuple[Any, Callable[[], None]]:
        # DDP's buckets come again in each step; what the script sums may have another shape each time.
        own = [peers.copy(tensor) for tensor in self._tensors] if self._divided_by else copies(self._tensors)
        factor = self._divided_by / len(peers.ranks) if self._divided_by else 1.0

        def put() -> None:
            for result in own:
                if factor != 1.0 and (result.is_floating_point() or result.is_complex()):
                    result.mul_(factor)
            self._have(own)

        return peers.start(lambda group: self._add(group, own)), put

    def take_over(self, receive: Callable[[torch.Tensor], None]) -> None:
        """Have what another rank has of it put where the script wants it. `receive(tensor)`: into this one. Raises Cut."""
        own = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in self._tensors]
        for each in own:
            receive(each)
        self._put = partial(self._have, own)

    def _have(self, own: list[torch.Tensor]) -> None:
        self.sums = own
        if self.is_read:
            self.results = own
        else:
            self._put_in_place()

    def _put_in_place(self) -> None:
        fill(self._tensors, self.sums)

    def waited(self) -> None:
        """Have it in place: somebody has waited for the work, and not for the future."""
        if self.is_read:
            self._put_in_place()
            self.is_read = False

    def free(self, peers: Peers) -> None:
        """Let go of it: all ranks have it."""
        if self._divided_by:
            peers.free(self.sums)
        self.sums = []


class Kept(NamedTuple):
    """Sums of the newest unit. `may_be_lacked`: by others, as it has no commit point."""

    sums: Sequence[Sum] = ()
    may_be_lacked: bool = False


def handed_on(operations: Sequence[Operation], position: Position) -> list[Sum]:
    """All of the unit at `position`, if it needs no commit point; else none.

    It consists of sums, and the last of them takes all ranks and was begun behind the unit before: so whoever has it knows that
    all have begun it, and have that one (I13).
    """
    sums = [each for each in operations if isinstance(each, Sum) and each.can_be_handed_on]
    is_proof = len(sums) == len(operations) and sums[-1].needs_all and sums[-1].behind == position
    return sums if is_proof else []


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous ones, but for what is sparse."""
    return [tensor.detach().clone() if tensor.is_sparse else tensor.detach().contiguous().clone() for tensor in tensors]


def fill(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Put `results` in these as torch's Gloo does: autograd does not hear of it, and inference mode need not be on."""
    for tensor, result in zip(tensors, results, strict=True):
        is_free = tensor.is_inference()
        with torch.no_grad(), torch.inference_mode() if is_free else _unsafe_preserve_version_counter(tensor):
            tensor.copy_(result)


def nothing() -> None:
    """Puts nothing: an operation only has to be final, or its results are another rank's."""
