"""Where a job has one agent nobody talks to it over a network: notices come to a socket in the job's folder.

Its user may write to it, who may signal the agent as well. A datagram is one AskLeave, as JSON. There is no answer: what comes
of it is in the log.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from launcher.cluster.questions import MAX_QUESTION_BYTES, AskLeave
from launcher.host import proc
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import NoticeGiven
from odyssey.codec import Json, Malformed, to_json

NAME = "notices"
_ask = Json(AskLeave)


class NoticeSocket:
    """`folder`: the job's own; None for none, in which nobody finds anything either."""

    def __init__(self, loop: Loop, folder: Path | None, sink: EventSink) -> None:
        self._loop = loop
        self._folder = folder
        self._sink = sink
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Take notices from now on."""
        if self._folder is None:
            return
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        try:
            with _Short(self._folder) as path:
                ours.bind(path)
            (self._folder / NAME).chmod(0o600)
        except OSError as error:
            ours.close()
            self._sink.say(f"`odyssey leave` will not reach this job: {error}")
            return
        self._socket = ours
        self._loop.watch(ours.fileno(), lambda mask: self._take(ours))

    def _take(self, ours: socket.socket) -> None:
        try:
            asked: AskLeave = _ask.decode(ours.recv(MAX_QUESTION_BYTES))
        except OSError:
            return
        except Malformed as error:
            self._sink.say(f"what came to {NAME} in the job's folder is no notice: {error}")
            return
        self._sink.event(notice(asked))

    def close(self) -> None:
        """Nobody finds it any more."""
        if self._socket is not None and self._folder is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):  # the folder's disk may be gone, and the job is over all the same
                (self._folder / NAME).unlink(missing_ok=True)


def notice(ask: AskLeave) -> NoticeGiven:
    """What `odyssey leave` asks for, as the coordinator hears it."""
    return NoticeGiven(ask.ranks, "somebody has asked for it by `odyssey leave`", within_s=ask.within_s)


def give(folder: Path, ask: AskLeave) -> None:
    """To the one agent of the job with this folder. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, _Short(folder) as path:
        ours.sendto(to_json(ask), path)


class _Short:
    """The address of the socket in this folder: a path of 107 bytes at most, however long the folder's is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return proc.path_in(self._fd, NAME)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
