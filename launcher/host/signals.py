"""Signals to the launcher as events of its loop: what arrives while Python is anywhere wakes the loop, and nothing more."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

from launcher.host.kernel import set_subreaper
from launcher.host.loop import Loop
from launcher.options import RunOptions

IS_NOHUP = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
"""This process was started so."""


class Signals:
    """From `watch` to `close` the signals of a job come to whom they are given to.
    They are those that end it or are passed on, and SIGCHLD: none is lost between one and the next. Orphans below this
    process are its children.

    They come even if the launcher was started with them ignored, as what a script starts in the background has SIGINT, or
    blocked. Only SIGHUP, if it is ignored and not to be passed on, stays so, for its ranks as well: nohup asks for that.

    All is as before when it is closed; but where the process ends with the job, those that end a job do nothing any more, as
    its exit code is decided.
    """

    def __init__(self, options: RunOptions) -> None:
        self._ending = {signal.Signals[name] for name in options.ending_signals}
        self._others = {signal.SIGCHLD, *(signal.Signals[name] for name in options.forwarded_signals)}
        self._is_last = options.ends_process
        self._is_watching = False

    def watch(self) -> None:
        """From the main thread."""
        self._is_watching = True
        self._was_subreaper = set_subreaper(True)
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)
        if IS_NOHUP:
            self._ending.discard(signal.SIGHUP)
        numbers = self._ending | self._others
        self._old_wake = signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def give(self, loop: Loop, received: Callable[[bytes], None]) -> None:
        """Call `received` with the numbers of those that have come and that come, until `take_back`."""

        def on_wake(mask: int) -> None:
            try:
                numbers = self._wake.recv(4096)
            except BlockingIOError:
                return
            received(numbers)

        loop.watch(self._wake.fileno(), on_wake)

    def take_back(self, loop: Loop, unheard: bytes = b"") -> None:
        """What comes from now on is for the next, and before it what has come here and is `unheard`."""
        loop.unwatch(self._wake.fileno())
        if unheard:
            self._wake_end.send(unheard)

    def close(self) -> None:
        """No signal is heard any more."""
        if not self._is_watching:
            return
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if self._is_last and number in self._ending else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._wake.close()
        self._wake_end.close()
        set_subreaper(self._was_subreaper)
