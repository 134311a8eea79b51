"""What an agent asks of a zygote and is answered, and what both know of the ranks that are forked. Imports nothing heavy."""

from __future__ import annotations

import array
import os
import signal
import socket
from collections.abc import Sequence
from typing import Literal

import msgspec

from odyssey.codec import Pid

SERVER = os.path.join(os.path.dirname(__file__), "server.py")
"""Started by path, see there."""
PACKET_BYTES = 1 << 18
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS_FILE = "odyssey-stacks"
"""At this signal a rank writes the Python stacks of its threads to its memory file of this name, see entry.py."""
RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

Entry = Literal["script", "module", "path"]


def command(entry: Entry, script: str, arguments: Sequence[str]) -> list[str]:
    """What follows the interpreter on the command line that a fork stands for."""
    match entry:
        case "script":
            return ["-u", script, *arguments]
        case "module":
            return ["-u", "-m", script, *arguments]
        case "path":
            return ["-u", "-c", RUN_PATH, script, *arguments]


class ForkRank(msgspec.Struct, frozen=True, tag=True):
    """Run `script` in a fork. Descriptors: stdin, stdout, stderr, agent socket (its number and the rank's go to `fd_variable`).

    What the system hands from process to process is bytes, and need not be Unicode. `numa_binding`: how to bind it to
    processors, empty for not at all; `local_rank`: to those of which GPU.
    """

    number: int
    script: bytes
    arguments: tuple[bytes, ...]
    cwd: bytes
    environment: dict[bytes, bytes]
    fd_variable: str
    agent: int
    entry: Entry = "script"
    numa_binding: str = ""
    local_rank: int = 0


class ForkStore(msgspec.Struct, frozen=True, tag=True):
    """Serve a TCPStore. Descriptor: the listening socket, in whose queue early connections wait."""

    number: int
    host: str
    port: int
    agent: int


class ForkTimers(msgspec.Struct, frozen=True, tag=True):
    """End ranks whose timers (torch.distributed.elastic.timer) expire. `path`: of the pipe that they are told through."""

    number: int
    path: bytes
    run_id: str
    agent: int


class Import(msgspec.Struct, frozen=True, tag=True):
    """Import these as well, see preload.py, and answer Imported again. `variables`: those that differ between ranks."""

    modules: tuple[str, ...]
    variables: tuple[str, ...]


class ForkAhead(msgspec.Struct, frozen=True, tag=True):
    """Have so many forks wait to become ranks, and one the store: a fork takes some 20 ms, in which a start has not begun.
    `heap_bytes`: of free memory for each rank, see heap.py."""

    n_ranks: int
    agent: int
    heap_bytes: int


Fork = ForkRank | ForkStore | ForkTimers
Request = Fork | Import | ForkAhead


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The zygote can fork now; or it ends, because its forks would not be safe.

    `threads`: of its process, safe is one; `has_cuda`: CUDA is initialised; `error`: an import failed; `left_out`: after
    Import, modules that must not be asked for, and why; `shadow`: a file of the script's, which a process of its own would
    have imported instead of a module that is here already.
    """

    seconds: float
    threads: int
    has_cuda: bool = False
    error: str = ""
    left_out: dict[str, str] = {}
    shadow: str = ""

    @property
    def is_safe(self) -> bool:
        return self.threads == 1 and not (self.has_cuda or self.error or self.left_out or self.shadow)


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The answer to the request of this number."""

    number: int
    pid: Pid


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The system has no process for the request of this number: a limit is reached."""

    number: int


Answer = Imported | Forked | NotForked


def send(sock: socket.socket, request: bytes, descriptors: Sequence[int]) -> None:
    """The request, encoded, goes in a memory file: a packet has a limit, an environment hardly."""
    with open(os.memfd_create("odyssey-request", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(request)
        socket.send_fds(sock, [b"?"], [file.fileno(), *descriptors])


def receive(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """What `send` has sent; nothing at the end of file."""
    packet, ancillary, _flags, _address = sock.recvmsg(PACKET_BYTES, socket.CMSG_LEN(8 * array.array("i").itemsize), flags)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not packet:
        return b"", []
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return file.read(), list(descriptors[1:])
