"""A collective that can be begun anew: in another generation, with fewer ranks.

Torch computes on copies. What the script gave stays as it was until the operation is final, whatever a cut operation still
writes somewhere; only then results are put where the script wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.futures import Future

from odyssey.plan.worker import Rank
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
        self.future: Future[list[torch.Tensor]] = Future()
        self._begin = begin
        self._results = list(results)
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

    def tell(self) -> None:
        """Let go on who waits for it, which may make others final."""
        self.future.set_result(self._results)


def nothing() -> None:
    """Puts nothing: an operation only has to be final, or its results are another rank's."""
