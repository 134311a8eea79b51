"""What a process is to be, told to one that becomes it: as `subprocess.Popen` would have the kernel make it."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

IMPORTS = (
    ("torch", "torch.distributed", "odyssey.protocol.link", "odyssey.zygote.entry"),
    ("torch._dynamo",),
    ("odyssey.job",),
)
"""What each template has imported beside what the one before it has."""
PROGRAMS = (
    "odyssey_cli.run",
    "odyssey_cli.display.render",
    "launcher.agent.agent",
    "launcher.planning.precompute",
    "strategies.search",
    "tests.warm.programs",
)
"""What agents and planners import."""
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_N_DESCRIPTORS = 64
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Start:
    """`parent`: whose child it is to be. `host`: whose namespaces it has. `has_template`: for what it will start. `targets`:
    the number of each descriptor that goes with this."""

    parent: int
    host: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    new_session: bool
    has_template: bool
    targets: Sequence[int]
    umask: int
    limits: Sequence[tuple[int, tuple[int, int]]]
    ignored: Sequence[int]
    mask: Sequence[int]
    processors: Sequence[int]


def here(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    *,
    new_session: bool,
    has_template: bool,
    targets: Sequence[int],
    host: int = 0,
) -> Start:
    """A start as a child of this process, which inherits what children do, but for the namespaces where `host` is given."""
    umask = os.umask(0o077)
    os.umask(umask)
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    return Start(
        os.getpid(),
        host or os.getpid(),
        argv,
        dict(environment),
        cwd,
        new_session,
        has_template,
        targets,
        umask,
        [(limit, resource.getrlimit(limit)) for limit in LIMITS],
        sorted(map(int, ignored - _IGNORED_BY_PYTHON)),
        sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        sorted(os.sched_getaffinity(0)),
    )


def become(start: Start, descriptors: Sequence[int]) -> None:
    """Take all that is a process's own, but for its program and its session, which it has by the time that its pid is told.
    Descriptors that did not come with `start` are closed."""
    for name in ("uts", "net", "mnt"):
        _join(name, start.host)
    os.chdir(start.cwd)
    os.umask(start.umask)
    os.sched_setaffinity(0, start.processors)
    above = max([*start.targets, *descriptors]) + 1
    for i, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + i)
    os.closerange(0, above)
    for i, target in enumerate(start.targets):
        os.dup2(above + i, target)
    kept = sorted(start.targets)
    for low, high in pairwise([-1, *kept, os.sysconf("SC_OPEN_MAX")]):
        if low + 1 < high:  # Python takes an empty range from 0 on for all that there are
            os.closerange(low + 1, high)
    for limit, values in start.limits:
        resource.setrlimit(limit, values)
    for number in start.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(start.environment)
    time.tzset()
    _take_log_level()
    signal.pthread_sigmask(signal.SIG_SETMASK, start.mask)


def _take_log_level() -> None:
    """Have torch read TORCH_CPP_LOG_LEVEL, as its import did: zygotes of a Job have another one than those of other scripts."""
    import torch

    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()  # c10::initLogging()


def _join(name: str, host: int) -> None:
    """The namespace of that process."""
    its = os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(its).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and _libc.setns(its, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join the {name} namespace of process {host}")
    finally:
        os.close(its)


def send(sock: socket.socket, start: Start, descriptors: Sequence[int], limit_s: float = 60.0) -> int:
    """Answers the pid. Raises EOFError, BrokenPipeError if the template is gone, TimeoutError if it does not answer."""
    data = pickle.dumps(start)
    sock.settimeout(limit_s)
    socket.send_fds(sock, [len(data).to_bytes(8, "little")], list(descriptors))
    sock.sendall(data)
    return int.from_bytes(_exactly(sock, 8), "little")


def receive(sock: socket.socket) -> tuple[Start, list[int]] | None:
    """None at the end."""
    head, descriptors, _, _ = socket.recv_fds(sock, 8, _N_DESCRIPTORS)
    if not head:
        return None
    start: Start = pickle.loads(_exactly(sock, int.from_bytes(head, "little")))
    return start, descriptors


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := sock.recv(size - len(data))):
            raise EOFError("the template is gone")
        data += piece
    return data
