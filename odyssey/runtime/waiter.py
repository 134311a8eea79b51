"""A thread that waits in C++ for a generation, so that the one that owns the model never does: it waits for "done or cut"."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from odyssey.runtime.cut import Cut


class Waiter:
    """One owner thread calls `wait`, `beside` and `result`; any thread calls the others. `ended`: what this one does last."""

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self.reason: str | None = None
        """Why the generation was cut, if it was."""
        self.waits_for_others = False
        """The owner does nothing now but wait for what other ranks do."""
        self._ended = ended
        self._requests: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def wait(self, blocking: Callable[[], Any]) -> Any:
        """Run `blocking` on this thread and return its result. Raises Cut as soon as `cut` is called.

        Connection errors of the transport are raised as Cut too: a peer is gone, or has been cut before us.
        """
        self.waits_for_others = True
        try:
            return self.beside(blocking)
        finally:
            self.waits_for_others = False

    def beside(self, blocking: Callable[[], Any]) -> Any:
        """The same for something of this rank's own that may last: a file, a sample."""
        self.check()
        self.begin(blocking)
        return self._outcome()

    def begin(self, blocking: Callable[[], Any]) -> None:
        """Run it while the owner does something else; `result` waits for it."""
        self._requests.put(blocking)

    def result(self) -> Any:
        """What was begun has ended with this. Raises Cut, as `wait` does."""
        self.waits_for_others = True
        try:
            return self._outcome()
        finally:
            self.waits_for_others = False

    def check(self) -> None:
        """Raise Cut if the generation has been cut: between two computations nobody else would notice."""
        if self.reason is not None:
            raise Cut(self.reason)

    def cut(self, reason: str) -> bool:
        """End the owner's wait now, and every later one. False if that was done before."""
        if self.reason is not None:
            return False
        self.reason = reason
        self._outcomes.put(("cut", reason))
        return True

    def end(self) -> None:
        """The thread ends behind what it waits for."""
        self._requests.put(None)

    def _outcome(self) -> Any:
        kind, value = self._outcomes.get()  # ended by `_serve` when done, by `cut` at any time
        if kind == "done":
            return value
        if kind != "raised":
            raise Cut(str(value))
        if not isinstance(value, RuntimeError):
            raise value
        raise Cut(str(value)) from value.with_traceback(None)  # whose frames hold the groups

    def _serve(self) -> None:
        while (blocking := self._requests.get()) is not None:
            try:
                outcome = ("done", blocking())
            except BaseException as error:  # handed to the owner, whole, who would wait for ever otherwise
                outcome = ("raised", error)
            self._outcomes.put(outcome)
            del blocking, outcome
        self._ended()
        del self._ended  # it holds the groups, and what they have lent
        self._outcomes = SimpleQueue()  # what a cut build has raised still has what it had built, down to its device
