"""Collectives of a thread of the script's beside the one that trains, as those of a checkpoint that is written meanwhile.

They come between the others at another place on each rank, and so cannot be units. Torch's own group carries them, and a loss
is a restart then.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from odyssey.replicas.backward import NOT_IN_BACKWARD, graph
from odyssey.replicas.replica import Replica

_NUMBERS = itertools.count()
"""Ranks make the same groups in the same order; one that is made again must not find the addresses of the one before."""


class SecondThread:
    """Torch's group beside one of ours.
    `thread`: the script's own, in which it made its first group; `store`, `timeout`: what torch gave for a group."""

    def __init__(self, replica: Replica, thread: int, store: Any, timeout: timedelta) -> None:
        self._replica = replica
        self._thread = thread
        self._store = store
        self._timeout = timeout
        self._number = next(_NUMBERS)
        self._making = threading.Lock()
        self._group: dist.ProcessGroup | None = None

    @property
    def is_asked(self) -> bool:
        """Whether this thread is such a one. Autograd may run parts of a backward in its own."""
        return threading.get_ident() != self._thread and graph() == NOT_IN_BACKWARD

    def group(self) -> dist.ProcessGroup:
        """Made when it is first asked for, by all ranks alike."""
        with self._making:
            if self._group is None:
                self._replica.not_carried = "a thread beside the one that trains has collectives of its own"
                self._group = self._made()
            return self._group

    def _made(self) -> dist.ProcessGroup:
        seen, kind = self._replica.seen, dist.ProcessGroup.BackendType.GLOO
        rank, size = seen.index(self._replica.session.rank), len(seen)
        store = torch._C._distributed_c10d.PrefixStore(f"odyssey-beside-{self._number}-{size}", self._store)
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, self._timeout))
        return group


def in_its_thread(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of one of our groups; from another thread, that of torch's beside it."""

    @functools.wraps(call)
    def called(group: Any, *arguments: Any, **named: Any) -> Any:
        if group.second_thread.is_asked:
            return getattr(group.second_thread.group(), name)(*arguments, **named)
        return call(group, *arguments, **named)

    return called
