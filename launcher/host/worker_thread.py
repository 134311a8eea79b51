"""Work that may take its time, in a thread beside the loop, which gets what comes of it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from launcher.host.loop import Loop

Found = TypeVar("Found")


class WorkerThread(Generic[Found]):
    """`work()`, in a thread; then `done(what it answered)`, by the loop. What it raises is raised there, too.

    `cancel()`, from the loop's thread, has it end soon: then it is waited for. What waits for a disk cannot be cancelled.
    Raises OSError where no thread or descriptor is left for it.
    """

    def __init__(
        self,
        loop: Loop,
        work: Callable[[], Found],
        done: Callable[[Found], None],
        *,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._done = done
        self._cancel = cancel
        self._found: list[Found] = []
        self._error: BaseException | None = None
        self._end, their_end = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(work, their_end), name="beside the loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._end)
            os.close(their_end)
            raise OSError(errno.EAGAIN, str(error)) from None
        loop.watch(self._end, self._ready)

    def _run(self, work: Callable[[], Found], their_end: int) -> None:
        try:
            self._found.append(work())
        except BaseException as error:  # handed on to the loop
            self._error = error
        finally:
            os.close(their_end)

    def _ready(self, mask: int) -> None:
        self.close()
        if self._error is not None:
            raise self._error
        self._done(self._found[0])

    def close(self) -> None:
        """Without `done`."""
        if self._end < 0:
            return
        self._loop.unwatch(self._end)
        os.close(self._end)
        self._end = -1
        if self._cancel is not None:
            self._cancel()
            self._thread.join()
