"""The rank's end of the socket to its agent: reports go out from any thread, one thread reads the orders.

The agent passes the socket as an inherited descriptor. End of file on it means that the agent is gone: the rank then ends
itself at once, so nothing is ever orphaned.

ODYSSEY_AGENT_FD is `FD:RANK`: the descriptor's number, and whose it is. What the rank starts inherits the variable, and at that
number may have anything or the socket itself; it is no rank, and must not speak for one. So only the process that the agent has
started takes it. Where that is a program (`--no-python`), the rank may be a Python below it, `bash -c 'python train.py'`: then
the value is `FD:RANK:AGENT`, with the agent's process id, and the first to take it keeps it from those that it starts.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable

from odyssey.codec import Malformed
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank
from odyssey.protocol.frames import Deframer, send
from odyssey.protocol.orders import Command, ReachedAt
from odyssey.protocol.reports import Failed, Report
from odyssey.text import as_unicode
from odyssey.tracebacks import users_frames, without_ours

AGENT_FD = "ODYSSEY_AGENT_FD"
MAX_TEXT = 1 << 20
"""Characters of an exception that are told."""


class AgentLink:
    """A connection to the agent, of this rank."""

    def __init__(self, sock: socket.socket, rank: Rank) -> None:
        self.rank = rank
        self._socket = sock
        self._lock = threading.Lock()
        self._handle: Callable[[Command], None] | None = None
        self.has_failed = False
        self.reached_at = ""
        """By which other hosts reach this one, where the agent has told it since this process began."""

    def report(self, message: Report) -> None:
        """Send a report, whole. If the agent is gone this process ends, see `listen`."""
        try:
            with self._lock:
                send(self._socket, message)
        except OSError:
            _end_self()

    def listen(self, handle: Callable[[Command], None]) -> None:
        """From now on a thread calls `handle` with every order but ReachedAt. Only that thread calls it."""
        before, self._handle = self._handle, handle
        if before is None:
            threading.Thread(target=self._read, name="odyssey-link", daemon=True).start()

    def _read(self) -> None:
        assert self._handle is not None
        deframer = Deframer(Command)
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                _end_self()
            try:
                for order in deframer.feed(data):
                    if isinstance(order, ReachedAt):
                        self.reached_at = order.address
                    else:
                        self._handle(order)
            except Malformed as error:
                print(f"odyssey: the agent sent what is no order: {error}", file=sys.stderr, flush=True)
                _end_self()
            except Exception:  # a rank that is deaf would hold up all others: it is lost instead, and they go on
                print("odyssey: this rank cannot go on, please report this bug:", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
                _end_self()


_link: AgentLink | None = None
_owner = 0
"""The process that has made it: forks of that one have inherited it."""


def connect() -> AgentLink | None:
    """The link of this process, made at the first call; None where this process is no rank that an agent has started."""
    global _link, _owner
    if _link is None and (link := _inherited()) is not None:
        _link, _owner = link, os.getpid()
    return _link if _owner == os.getpid() else None


def _inherited() -> AgentLink | None:
    """The connection to the agent, if that is what this process has at the number, and it is meant."""
    number, _, rest = os.environ.get(AGENT_FD, "").partition(":")
    rank, _, below = rest.partition(":")
    try:
        link = AgentLink(sock := socket.socket(fileno=int(number)), Rank(int(rank)))
    except (ValueError, OSError):
        return None
    # `maker` made the pair of sockets; it is 0 from within another namespace, into which only a program can have put us.
    is_unix = sock.family == socket.AF_UNIX
    maker, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)) if is_unix else (-1, 0, 0)
    if not below and maker == os.getppid():
        return link
    multiprocessing = sys.modules.get("multiprocessing")
    if below.isdigit() and maker in (int(below), 0) and (multiprocessing is None or multiprocessing.parent_process() is None):
        sock.set_inheritable(False)
        return link
    sock.detach()
    return None


def report_failure(error: BaseException) -> None:
    """Tell the agent, if there is one, that the script raised `error`. Only the first time counts."""
    link = connect()
    if link is not None and not link.has_failed:
        is_told = isinstance(error, OdysseyError)
        trace = without_ours(error.__traceback__) if is_told else users_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        help = error.help if isinstance(error, OdysseyError) else ""
        link.has_failed = True
        if (beat := sys.modules.get("odyssey.runtime.heartbeat")) is not None:
            beat.tell_last_step()
        link.report(Failed(link.rank, _told(_what(error)), _told(help), _told(text), is_told))


def _told(text: str) -> str:
    """As it can be sent: what the script has put into its exception may be of any length, and no Unicode."""
    cut = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
    return as_unicode(cut)


def _what(error: BaseException) -> str:
    if isinstance(error, OdysseyError):
        return error.what
    if isinstance(error, SyntaxError):  # Python takes four lines for it
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception_only(error)).strip()


def _end_self() -> None:
    """End this process now: threads in C++ waits and atexit handlers must not keep an orphan alive."""
    os.kill(os.getpid(), signal.SIGKILL)
