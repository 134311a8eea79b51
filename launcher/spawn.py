"""Processes for ranks: forks of the zygote, or plain spawns where a fork would not behave as `python -u script.py` does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from launcher.environment import AGENT_FD, for_all
from launcher.loop import Loop
from launcher.options import Seat
from launcher.streams import RankStreams
from odyssey import zygote
from odyssey.messages import Deframer, Report
from odyssey.services import ForkLookup, ForkStore
from odyssey.zygote import Forked, ForkRank, Imported

LOOKUP_S = 20.0
"""For a store to answer: its process may still be importing torch."""
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def set_subreaper(on: bool) -> bool:
    """Whether orphans below this process become its children. Answers what it was before."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    return bool(before.value)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent` ends; at once if it has already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class RankProcess:
    """One process of a rank, from the request for it until it is reaped. `pid` is None until it exists."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.rank = seat.rank
        self.pid: int | None = None
        self.socket: socket.socket | None = None
        self.deframer = Deframer(Report)
        self.streams: RankStreams | None = None
        self.has_finished = False
        self.has_failed = False
        self.killed_by: str | None = None
        """Kind of cause (`drill`, `hang`, …) if the agent itself ended it."""
        self.error_file = ""
        """TORCHELASTIC_ERROR_FILE of it; empty for none."""
        self.slot_lost = False
        self._unsent = bytearray()

    def send(self, data: bytes, loop: Loop, on_ready: Callable[[int], None]) -> None:
        """Send now, or, if the rank reads too slowly, when it does. A rank whose socket is gone is reported by its exit."""
        self._unsent += data
        self.flush(loop, on_ready)

    def flush(self, loop: Loop, on_ready: Callable[[int], None]) -> None:
        if self.socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        loop.watch(self.socket.fileno(), on_ready, write=bool(self._unsent))

    def kill(self) -> None:
        """SIGKILL to the whole session of the rank. Only while it is not reaped: its id may be another's afterwards."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self.pid is None:
            return
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass


def unfaithful(script: Path) -> str | None:
    """Why a fork of the zygote would not behave as `python -u script` does; None where it would."""
    if script.is_dir():
        return "a directory is run by its __main__.py, which Python's own start finds"
    with script.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            return "a zip file is run by its __main__.py, which Python's own start finds"
    if "coverage" in sys.modules or os.environ.get("COVERAGE_PROCESS_START"):
        return "coverage hooks into the start of the interpreter"
    return None


def imports_for(script: Path) -> list[str]:
    """What the zygote imports: what the script's ranks would all spend seconds on, each for itself."""
    modules = ["torch", "torch.distributed", "odyssey.link"]
    text = script.read_bytes()
    if b"odyssey" in text or b"optim" in text:
        modules.append("torch._dynamo")  # constructing an optimizer imports it
    if b"odyssey" in text:
        modules.append("odyssey.job")
    return modules


class Zygote:
    """The agent's end of one zygote process. Requests may be made at once; they are served when torch is imported."""

    def __init__(self, modules: list[str], environment: dict[str, str], n_ranks: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        variables = for_all(environment, n_ranks)
        variables["ODYSSEY_ZYGOTE_IMPORTS"] = " ".join(modules)
        if "OPENBLAS_NUM_THREADS" not in variables:
            variables["OPENBLAS_NUM_THREADS"] = "1"  # else importing numpy starts threads, and forks are not safe
            variables["ODYSSEY_ZYGOTE_VARIABLES"] = "OPENBLAS_NUM_THREADS"
        self._process = subprocess.Popen(
            [sys.executable, "-u", zygote.__file__, str(theirs.fileno())],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid
        self.socket = ours
        self._decoder = msgspec.msgpack.Decoder(zygote.Answer)

    def request(self, request: zygote.Request, descriptors: list[int]) -> None:
        """Raises OSError if the zygote is gone."""
        socket.send_fds(self.socket, [msgspec.msgpack.encode(request)], descriptors)

    def answer(self) -> Imported | Forked | None:
        """The next answer; None if the zygote is gone."""
        try:
            packet = self.socket.recv(zygote.PACKET_BYTES)
        except OSError:
            return None
        return self._decoder.decode(packet) if packet else None

    def close(self) -> None:
        """The end of file ends it; SIGKILL, in case that it still imports."""
        self.socket.close()
        if self._process.returncode is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.reaped()

    def reaped(self) -> None:
        """The agent waits for its children itself."""
        self._process.returncode = 0


def fork_rank(number: int, script: str, arguments: tuple[str, ...], environment: dict[str, str]) -> ForkRank:
    return ForkRank(number, script, arguments, os.getcwd(), environment, AGENT_FD, os.getpid())


def fork_store(number: int, host: str, port: int, keys: dict[str, str]) -> ForkStore:
    return ForkStore(number, host, port, os.getpid(), keys)


def fork_lookup(number: int, host: str, port: int, key: str) -> ForkLookup:
    return ForkLookup(number, host, port, os.getpid(), key, LOOKUP_S)


def plain_spawn(
    script: str, arguments: tuple[str, ...], environment: dict[str, str], streams: list[int], agent_fd: int
) -> subprocess.Popen[bytes]:
    """`python -u script …`, in a session of its own, ended with the agent."""
    return subprocess.Popen(
        [sys.executable, "-u", script, *arguments],
        env={**environment, AGENT_FD: str(agent_fd)},
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        pass_fds=[agent_fd],
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
