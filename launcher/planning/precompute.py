"""Plans for every single loss, computed before it happens by a process of low priority, so that the usual case is a look-up.

The agent sends the situations after each Go and keeps the answers as bytes; it decodes one only when it comes true. A
process and not a thread: a search that holds the interpreter's lock would delay the very recovery that it prepares.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from launcher.host.send_buffer import SendBuffer
from odyssey.codec import Malformed, Packed
from odyssey.messages import Deframer, frame
from strategies.situation import Candidate, Situation

NICENESS = 10
_candidates = Packed(list[Candidate])


class Ask(msgspec.Struct, frozen=True):
    """Search these situations, one answer each, in this order. A newer Ask makes an older one void."""

    number: int
    only: str | None
    situations: tuple[Situation, ...]


class Answer(msgspec.Struct, frozen=True):
    """What the search gave for the situation at `index` of the Ask of this number. `candidates`: msgpack, decoded on demand."""

    number: int
    index: int
    candidates: msgspec.Raw


def decode_candidates(data: msgspec.Raw) -> list[Candidate]:
    """Raises Malformed."""
    candidates: list[Candidate] = _candidates.decode(data)
    return candidates


class Process:
    """The agent's end."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        path = [str(Path(__file__).parents[2]), *sys.path]  # `launcher` means ours, wherever we are run
        program = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from launcher.planning.precompute import main; main({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process.returncode = 0  # the agent waits for its children itself
        theirs.close()
        self.pid = self._process.pid
        self._unsent = SendBuffer()
        self._deframer = Deframer(Answer)

    def ask(self, ask: Ask) -> None:
        """Queue the request; `flush` sends it when the process reads."""
        self._unsent.add(frame(ask))

    def flush(self) -> bool:
        """Send what can be sent; True if there is more. Raises OSError if the process is gone."""
        return self._unsent.flush(self.socket)

    def answers(self) -> list[Answer]:
        """All that have come. Raises EOFError if the process is gone, or sends what is no answer."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise EOFError
        try:
            return list(self._deframer.feed(data))
        except Malformed:
            raise EOFError from None

    def close(self) -> None:
        self.socket.close()


def main(fd: int, agent: int) -> None:
    """Search what is asked until the agent is gone."""
    from launcher.host.kernel import die_with_parent
    from odyssey.errors import OdysseyError
    from strategies.search import answer as find

    die_with_parent(agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    link = socket.socket(fileno=fd)
    asks = Deframer(Ask)
    current: Ask | None = None
    index = 0
    while True:
        link.setblocking(current is None)
        try:
            data = link.recv(1 << 20)
        except BlockingIOError:
            data = None
        except OSError:
            return
        if data is not None:
            if not data:
                return
            for ask in asks.feed(data):
                current, index = ask, 0
            continue
        assert current is not None
        try:
            candidates = find(current.situations[index], current.only)
        except OdysseyError:
            candidates = []
        answer = Answer(current.number, index, msgspec.Raw(msgspec.msgpack.encode(candidates)))
        link.setblocking(True)
        try:
            link.sendall(frame(answer))
        except OSError:
            return
        index += 1
        if index == len(current.situations):
            current = None
