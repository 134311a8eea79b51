"""A group in which all only ever sum together: the next generation can take it on where no sum of it was cut.

Nothing else passes its connections, and a rank has a sum only when every other has given its part. So if no member has one
under way, nothing is left in any connection, and all have begun the same number of them. Members tell this when they have
paused, and the agent says which groups all their members have told of (`Paused.whole`, `Prepare.kept`).

The listening socket and the connections are the group's own: a cut ends those of groups in which somebody may wait, and no
others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from odyssey.plan.needs import SumOver
from odyssey.runtime import nccl
from odyssey.runtime.connections import Connections
from odyssey.runtime.works import Works


class SumGroup:
    """The part of one rank in it.
    `name`: unlike any other's of the job; `is_on_device`: by NCCL. Something is under way from its making until it is
    `connected`."""

    def __init__(self, name: str, over: SumOver, *, is_on_device: bool) -> None:
        self.name = name
        self.over = over
        self.connections = Connections()
        self.group: Any = None
        """Torch's."""
        self.store: Store | None = None
        """Torch's, which asks it as long as there is the group, and does not keep what of it is Python."""
        self.is_on_device = is_on_device
        self.works = Works()
        self._n_under_way = 1
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is under way and nothing has been ended."""
        return not (self._is_over or self._n_under_way)

    @property
    def is_connected(self) -> bool:
        """Whether all members were here."""
        return self.connections.are_kept

    # -- the generation that it serves, one thread at a time ------------------------------------------------------------

    def connected(self) -> None:
        """All members are here and have proved who they are. One lock of the caller's is around this and `cut`."""
        self.connections.keep()
        with self._lock:
            self._n_under_way -= 1

    def begin(self) -> None:
        """A sum begins."""
        with self._lock:
            self._n_under_way += 1

    def end(self) -> None:
        """It is here, and so has every member given its part."""
        with self._lock:
            self._n_under_way -= 1

    # -- any thread -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End every wait in it, if there may be any."""
        with self._lock:
            if self._n_under_way:
                self._end()

    def close(self) -> None:
        """Nobody has any use for it."""
        with self._lock:
            self._end()

    def destroy(self) -> None:
        """Destroy torch's group on this thread, whoever else keeps this one. It may never end."""
        self.group = None
        self.works.forget()  # now C++ has let go of them

    def _end(self) -> None:
        self._is_over = True
        self.connections.shut()
        if self.is_on_device and self.group is not None:
            nccl.abort(self.group)


class Sum:
    """One sum under way, as a Work of torch: `work`, in all of `groups`. `works`: of Gloo's groups in which it is."""

    def __init__(self, groups: Sequence[SumGroup], work: Any, works: Sequence[Works]) -> None:
        self._groups = groups
        self._work = work
        self._works = works
        for its in works:
            its.begun(work)

    def wait(self) -> None:
        """Until it is here: on a device only queued, unless it has been completed. Raises RuntimeError when connections end, or
        when what has been completed has failed."""
        is_done = self.is_completed()
        self._work.wait()
        if is_done:
            for group in self._groups:
                group.end()
            for its in self._works:
                its.ended(self._work)
            self._groups = self._works = ()

    def is_completed(self) -> bool:
        """Whether a wait ends with the sum being here."""
        return not any(group.is_on_device for group in self._groups) or bool(self._work.is_completed())
