"""Plans for losses that have not happened, found by a process of low priority, so that the usual case is a look-up.

The agent sends the plan in force after each Go and keeps the answers as bytes; it decodes one only when it comes true. Which
losses there are, and which of them are alike, the process finds itself: with thousands of ranks that takes seconds. A
process and not a thread: a search that holds the interpreter's lock would delay the very recovery that it prepares.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from launcher.host.handle import Handle
from launcher.host.send_buffer import SendBuffer
from odyssey.codec import Malformed, Packed
from odyssey.plan.worker import Worker
from odyssey.protocol.frames import Deframer, frame
from strategies.situation import Candidate, Situation
from strategies.situation.faults import attempt

if TYPE_CHECKING:
    from strategies.search.planned_losses import Loss

NICENESS = 10
_candidates = Packed(list[Candidate])


class Ask(msgspec.Struct, frozen=True):
    """Search what may be lost next, one answer for each class of losses. A newer Ask makes an older one void.

    `whole`: the situation without any loss; its `held` is left out, everyone holds what the plan says.
    """

    number: int
    only: str | None
    may_respawn: bool
    whole: Situation


class Answer(msgspec.Struct, frozen=True):
    """What the search gave for the loss of `lost`, which stands for all with this `key` (strategies/search/planned_losses.py).

    `n_left`: answers to this Ask that are still to come; `n_classes`: all. `candidates`: msgpack, decoded on demand.
    """

    number: int
    key: bytes
    lost: tuple[Worker, ...]
    n_left: int
    n_classes: int
    candidates: msgspec.Raw
    problem: str = ""
    """Why there are none at all for this Ask."""


def decode_candidates(data: msgspec.Raw) -> list[Candidate]:
    """Raises Malformed."""
    candidates: list[Candidate] = _candidates.decode(data)
    return candidates


class Process:
    """The agent's end."""

    def __init__(self) -> None:
        """Raises OSError where no process, or no descriptor, is granted."""
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        path = [str(Path(__file__).parents[2]), *sys.path]  # `launcher` means ours, wherever we are run
        program = (
            "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "  # they are the agent's
            f"sys.path[:] = {path!r}; "
            f"from launcher.planning.precompute import main; main({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise
        process.returncode = 0  # the agent waits for its children itself
        self.pid = process.pid
        self._handle = Handle.of(process.pid)
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

    def kill(self) -> None:
        self._handle.kill()

    def close(self) -> None:
        self.socket.close()


class Work:
    """An Ask, and which of its answers are to come: those first that there were none for at older costs, and pairs once only.

    At other costs a pair's answer is still a good plan; where micro-batches have to stay whole since, it may be none."""

    def __init__(self, ask: Ask, before: Work | None = None) -> None:
        from strategies.search.planned_losses import LossKind, losses, symmetries

        whole = ask.whole
        plan = whole.plan
        assert plan is not None
        self._ask = ask
        self._held = {worker: plan.holds.get(worker, frozenset()) for worker in whole.alive}
        self._subject = plan, whole.alive, ask.may_respawn, whole.slow, whole.profile.uncut
        if before is not None and before._subject == self._subject:
            self._losses: dict[bytes, Loss] = before._losses
            self._done: set[bytes] = before._done
        else:
            self._losses, self._done = losses(symmetries(whole), ask.may_respawn), set()
        pairs = {key for key, loss in self._losses.items() if loss.kind is LossKind.PAIR}
        to_do = [key for key in self._losses if key not in pairs & self._done]
        self._to_do = deque(sorted(to_do, key=lambda key: (key in pairs, key in self._done)))

    def __bool__(self) -> bool:
        return bool(self._to_do)

    def next(self) -> Answer:
        """Search for the next class."""
        from odyssey.errors import OdysseyError
        from strategies.search import answer as find

        key = self._to_do.popleft()
        loss, whole = self._losses[key], self._ask.whole
        gone = set(loss.lost)
        situation = replace(
            whole,
            generation=whole.generation + 1,
            alive=tuple(worker for worker in whole.alive if worker not in gone),
            lost=loss.lost,
            respawnable=loss.lost if loss.may_return else (),
            arriving=loss.lost if loss.may_return else (),
            arrive_s=whole.profile.recovery.spawn_s,
            held={worker: layers for worker, layers in self._held.items() if worker not in gone},
            n_spares=max(0, whole.n_spares - len(gone)),
        )
        try:
            candidates = find(situation, self._ask.only)
        except OdysseyError:
            candidates = []
        self._done.add(key)
        return Answer(self._ask.number, key, loss.lost, len(self._to_do), len(self._losses), _encoded(candidates))


def _encoded(candidates: list[Candidate]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(candidates))


def main(fd: int, agent: int) -> None:
    """Search what is asked until the agent is gone."""
    from launcher.host.kernel import die_with_parent

    die_with_parent(agent)
    os.nice(NICENESS)
    link = socket.socket(fileno=fd)
    asks = Deframer(Ask)
    work: Work | None = None
    while True:
        link.setblocking(not work)
        try:
            data = link.recv(1 << 20)
        except BlockingIOError:
            data = None
        except OSError:
            return
        if data is not None:
            if not data:
                return
            answer = None
            for newest in list(asks.feed(data))[-1:]:
                begun = attempt("planner", partial(Work, newest, work))
                work = begun if isinstance(begun, Work) else None
                if isinstance(begun, Candidate):
                    answer = Answer(newest.number, b"", (), 0, 0, _encoded([]), begun.reason)
        else:
            assert work is not None
            answer = work.next()
        link.setblocking(True)
        try:
            link.sendall(frame(answer) if answer is not None else b"")
        except OSError:
            return
