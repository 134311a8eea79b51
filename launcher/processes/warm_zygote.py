"""The zygote of the next start: made ready in the background with what the script has imported by its first step.

begin(modules) ─► a zygote imports them ─► safe: `ready(zygote)`
       ▲                                 └► some must be left out ─┐
       └──────────── another one, without those ◄──────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launcher.health.waits import Wait
from launcher.host.loop import Loop
from launcher.processes.rank_process import Zygote
from odyssey.errors import OdysseyError
from odyssey.zygote import preload
from odyssey.zygote.protocol import Imported

WORTH_LEARNING = 10
"""Fewer modules than this are imported sooner than another zygote is made ready."""
MAX_ATTEMPTS = 8
"""Each leaves out more; an import chain that needs more is not worth it."""
IMPORT_IDLE_S = 60.0
"""A zygote that imports may wait for a slow disk, but not so long for a single page of a file."""


class WarmZygote:
    """At most one zygote at a time. `make`: start one that imports what the first one did; `explain`: with --verbose."""

    def __init__(
        self,
        loop: Loop,
        variables: tuple[str, ...],
        *,
        make: Callable[[], Zygote],
        ready: Callable[[Zygote], None],
        explain: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._variables = variables
        self._make = make
        self._ready = ready
        self._explain = explain
        self._zygote: Zygote | None = None
        self.modules: tuple[str, ...] = ()
        """What is to be ready; empty for nothing yet."""
        self._left_out: dict[str, str] = {}
        self._n_attempts = 0
        self._has_asked = False

    def begin(self, modules: tuple[str, ...]) -> None:
        """Have these ready, as far as that is right."""
        self.close()
        self.modules = modules
        self._attempt()

    def close(self) -> None:
        """End the zygote that is being made."""
        if self._zygote is not None:
            self._loop.unwatch(self._zygote.socket.fileno())
            self._zygote.close()
            self._zygote = None

    @property
    def is_busy(self) -> bool:
        """A zygote is being made."""
        return self._zygote is not None

    def awaited(self) -> Iterator[Wait]:
        """The zygote that is being made. Nobody needs it yet, and where it stops there are other attempts."""
        if self._zygote is not None:
            yield Wait("the next zygote", "importing modules", self._zygote.pid, self._is_late, IMPORT_IDLE_S, quiet=True)

    def _is_late(self, what: str) -> None:
        self.close()
        self._explain(f"the process that prepares the next start {what}")
        if self._n_attempts < MAX_ATTEMPTS:
            self._attempt()

    def _attempt(self) -> None:
        self._has_asked = False
        self._n_attempts += 1
        try:
            self._zygote = self._make()
        except OdysseyError as error:
            self._explain(f"the next start has no further modules ready: {error.what}")
            return
        self._loop.watch(self._zygote.socket.fileno(), self._on_answer)

    def _on_answer(self, mask: int) -> None:
        assert self._zygote is not None
        match self._zygote.answer():
            case Imported(is_safe=True) if not self._has_asked:
                self._has_asked = True
                try:
                    self._zygote.prepare(self._wanted(), self._variables)
                except OSError:
                    self.close()  # it is gone: the next start is as fast as the last
            case Imported(is_safe=True):
                zygote, self._zygote = self._zygote, None
                self._loop.unwatch(zygote.socket.fileno())
                self._explain(self._summary())
                self._ready(zygote)
            case Imported(left_out=left_out) if left_out and self._n_attempts < MAX_ATTEMPTS:
                self.close()
                self._left_out |= left_out
                self._attempt()
            case _:
                self.close()
                self._explain("the next start has no further modules ready: what the script imports cannot be imported ahead")

    def _wanted(self) -> tuple[str, ...]:
        return tuple(name for name in self.modules if not preload.is_left_out(name, self._left_out))

    def _summary(self) -> str:
        text = f"the next start has {len(self._wanted())} modules ready"
        tops = [name for name in self._left_out if not preload.is_left_out(name.rpartition(".")[0], self._left_out)]
        if tops:
            text += ", left out: " + ", ".join(f"{name} ({self._left_out[name]})" for name in tops)
        return text
