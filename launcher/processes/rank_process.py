"""Processes for ranks: forks of the zygote, or plain spawns where a fork would not behave as `python -u script.py` does."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from string import Template

import msgspec

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.exit_status import KilledBy
from launcher.host import limits
from launcher.host.handle import Handle
from launcher.host.kernel import die_with_parent
from launcher.host.loop import Loop
from launcher.host.orphans import end_orphans
from launcher.host.send_buffer import SendBuffer
from launcher.options import Entry, RunOptions
from launcher.output.streams import RankStreams
from launcher.processes.environment import AGENT_FD, for_zygote
from odyssey.codec import Malformed, Packed
from odyssey.errors import UsageError
from odyssey.protocol.frames import Deframer
from odyssey.protocol.reports import Report
from odyssey.zygote import protocol
from odyssey.zygote.protocol import ForkRank, ForkStore, ForkTimers


class RankProcess:
    """One process of a rank, from the request for it until it is reaped.
    `handle` is None until it exists; `number`: among all processes of the job."""

    def __init__(self, assignment: RankAssignment, number: int) -> None:
        self.assignment = assignment
        self.rank = assignment.rank
        self.number = number
        self.handle: Handle | None = None
        self.socket: socket.socket | None = None
        self.deframer = Deframer(Report)
        self.streams: RankStreams | None = None
        self.has_finished = False
        self.has_failed = False
        self.killed_by: KilledBy | None = None
        """If the agent itself ended it."""
        self.error_file = ""
        """TORCHELASTIC_ERROR_FILE of it; empty for none."""
        self.slot_lost = False
        self._unsent = SendBuffer()

    @property
    def pid(self) -> int | None:
        return self.handle.pid if self.handle is not None else None

    def send(self, data: bytes, loop: Loop, on_ready: Callable[[int], None]) -> None:
        """Send now, or, if the rank reads too slowly, when it does. A rank whose socket is gone is reported by its exit."""
        self._unsent.add(data)
        self.flush(loop, on_ready)

    def flush(self, loop: Loop, on_ready: Callable[[int], None]) -> None:
        if self.socket is not None:
            self._unsent.flush_and_watch(self.socket, loop, on_ready)

    @property
    def n_bytes(self) -> int:
        """What it has written so far, where it comes through this agent."""
        return self.streams.n_bytes if self.streams is not None else 0

    def hang_up(self, loop: Loop) -> None:
        """Nothing more is heard of it, nor told."""
        if self.socket is not None:
            loop.unwatch(self.socket.fileno())
            self.socket.close()
            self.socket = None

    def close(self, loop: Loop) -> None:
        """Leave none of its descriptors."""
        self.hang_up(loop)
        if self.streams is not None:
            self.streams.close()
            self.streams = None

    def kill(self) -> None:
        """SIGKILL to the rank. What it leaves: orphans.py."""
        if self.handle is not None:
            self.handle.kill()

    def signal(self, number: int) -> None:
        """To the rank and what it has started in its process group."""
        if self.handle is not None:
            self.handle.kill_group(number)


def check(options: RunOptions) -> None:
    """Raises UsageError if what ranks are to be cannot be started here."""
    if options.entry is Entry.PROGRAM:
        _check_program(options.script, "give the path of a program, or the name of one on PATH")
    elif options.interpreter:
        _check_program(options.interpreter, "set PYTHON_EXEC to a Python interpreter")
    if options.numa_binding and not any(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")):
        raise UsageError(f"--numa-binding={options.numa_binding}: this host has no GPU", "leave --numa-binding out")


def _check_program(name: str, help: str) -> None:
    if shutil.which(name) is not None:
        return
    if not os.path.exists(name):
        raise UsageError(f"no such program: {name}", help)
    if os.path.isdir(name):
        raise UsageError(f"{name} is a directory", help)
    raise UsageError(f"{name} is not executable", f"run `chmod +x {name}`, or leave --no-python out if it is a Python script")


JOBS = "odyssey.job"
"""What is imported ahead for scripts that mean us."""


def imports_odyssey(options: RunOptions) -> bool:
    """Whether what is run first has an `import odyssey` or `from odyssey import …` anywhere in it.

    That tells whether a script means us before it runs, not whether it will make a Job: a module that it imports may. So
    nothing but what is only sooner or later follows from it (what is imported ahead; when a loss is judged that comes before it
    is known), what is for people to overrule (the display, how a GPU loads kernels), and how much torch's C++ says of a loss.
    What a job is, its ranks say.
    """
    return _imports(entry_text(options), "odyssey")


@lru_cache(maxsize=1)  # three ask, of the same one
def _imports(source: bytes, package: str) -> bool:
    if package.encode() not in source:  # nearly all scripts; parsing takes a millisecond for a hundred lines
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are the ranks' to tell
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the ranks tell that as well
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.append(node.module)
    return any(name.partition(".")[0] == package for name in names)


def entry_text(options: RunOptions) -> bytes:
    """The source of what is run first, as far as it is found without importing anything; empty otherwise."""
    if options.entry is Entry.PROGRAM:
        return b""
    candidates = [options.script, f"{options.script}/__main__.py"]
    if options.entry is Entry.MODULE:
        paths = [f"{folder or '.'}/{options.script.replace('.', '/')}" for folder in ("", *sys.path)]
        candidates = [f"{path}{end}" for path in paths for end in (".py", "/__main__.py")]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return Path(candidate).read_bytes()
    return b""


def imports_for(options: RunOptions) -> list[str]:
    """What the zygote imports: what the script's ranks would all spend seconds on, each for itself. What is left out here by
    mistake they import themselves."""
    modules = ["torch", "torch.distributed", "odyssey.protocol.link"]
    is_ours = imports_odyssey(options)
    if is_ours or b"optim" in entry_text(options):
        modules.append("torch._dynamo")  # constructing an optimizer imports it
    if is_ours:
        modules.append(JOBS)
    return modules


def arguments_for(options: RunOptions, assignment: RankAssignment) -> tuple[str, ...]:
    """Give the script's arguments, with what differs between ranks put in: `${local_rank}`, as torchrun does it (`$$` is a
    dollar sign), and `--local-rank` if it is to be passed."""
    given = options.arguments
    if options.passes_local_rank:
        given = ("--local-rank=${local_rank}", *given)
    return tuple(Template(argument).safe_substitute(local_rank=assignment.local_rank) for argument in given)


class Zygote:
    """The agent's end of one zygote process. Requests may be made at once; they are served when torch is imported."""

    def __init__(
        self, modules: list[str], environment: dict[str, str], n_ranks: int, *, script: str = "", quiet: bool = False
    ) -> None:
        """`script`: what ranks run, see `script_of`. `quiet`: what its imports complain of has been said by the ranks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        variables = for_zygote(environment, n_ranks, for_jobs=JOBS in modules)
        variables["ODYSSEY_ZYGOTE_IMPORTS"] = " ".join(modules)
        variables["ODYSSEY_ZYGOTE_SCRIPT"] = script
        if "OPENBLAS_NUM_THREADS" not in variables:
            variables["OPENBLAS_NUM_THREADS"] = "1"  # else importing numpy starts threads, and forks are not safe
            variables["ODYSSEY_ZYGOTE_VARIABLES"] = "OPENBLAS_NUM_THREADS"
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", protocol.SERVER, str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise limits.error_of(f"cannot start {sys.executable}", error) from None
        finally:
            theirs.close()
        process.returncode = 0  # the agent waits for its children itself
        self.pid = process.pid
        self._handle = Handle.of(process.pid)
        self.socket = ours
        self._decoder = Packed(protocol.Answer)

    def request(self, request: protocol.Request, descriptors: list[int]) -> None:
        """Raises OSError if the zygote is gone."""
        protocol.send(self.socket, msgspec.msgpack.encode(request), descriptors)

    def prepare(self, modules: tuple[str, ...], variables: tuple[str, ...]) -> None:
        """Have it import these as well; `variables`: those that differ between ranks. Raises OSError if it is gone."""
        self.request(protocol.Import(modules, variables), [])

    def answer(self) -> protocol.Answer | None:
        """The next answer; None if the zygote is gone, or answers what is none."""
        try:
            packet = self.socket.recv(protocol.PACKET_BYTES)
            answer: protocol.Answer | None = self._decoder.decode(packet) if packet else None
        except (OSError, Malformed):
            return None
        return answer

    def kill(self) -> None:
        """SIGKILL to it and to the middle processes of its forks, which are in its group. Its end of file follows."""
        if self._handle.is_there:
            self._handle.kill_group()
        else:
            end_orphans({self._handle})

    def close(self) -> None:
        """The end of file ends it; SIGKILL, in case that it still imports."""
        self.socket.close()
        self._handle.kill()


def script_of(options: RunOptions) -> str:
    """For a zygote: how a script is run, and its name."""
    return f"{_entry(options)} {options.script}"


def _entry(options: RunOptions) -> protocol.Entry:
    return "module" if options.entry is Entry.MODULE else "path" if options.entry is Entry.PATH else "script"


def fork_rank(
    options: RunOptions, number: int, assignment: RankAssignment, arguments: tuple[str, ...], environment: dict[str, str]
) -> ForkRank:
    return ForkRank(
        number,
        os.fsencode(options.script),
        tuple(map(os.fsencode, arguments)),
        _working_directory(),
        {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        AGENT_FD,
        os.getpid(),
        _entry(options),
        options.numa_binding,
        assignment.local_rank,
    )


def _working_directory() -> bytes:
    """Empty if it is gone: ranks are in it all the same, as everything below the agent."""
    try:
        return os.getcwdb()
    except OSError:
        return b""


def fork_store(number: int, host: str, port: int) -> ForkStore:
    return ForkStore(number, host, port, os.getpid())


def fork_timers(number: int, path: str, run_id: str) -> ForkTimers:
    return ForkTimers(number, os.fsencode(path), run_id, os.getpid())


def plain_spawn(options: RunOptions, request: ForkRank, descriptors: list[int]) -> int:
    """A process of its own, in a session of its own, ended with the agent. Answers its pid. Raises OdysseyError."""
    streams, agent_fd = descriptors[:3], descriptors[3]
    script, arguments = os.fsdecode(request.script), [os.fsdecode(argument) for argument in request.arguments]
    if options.entry is Entry.PROGRAM:
        command = [script, *arguments]
    else:
        command = [options.interpreter or sys.executable, *protocol.command(request.entry, script, arguments)]
    if options.numa_binding:
        gpu = 0 if options.virtual_local_rank else request.local_rank
        command = [sys.executable, "-P", "-m", "odyssey.zygote.numa", options.numa_binding, str(gpu), *command]
    # Below a program, or what somebody calls an interpreter, the rank may be a process that it starts.
    is_program = options.entry is Entry.PROGRAM or options.interpreter not in ("", sys.executable)
    link = b"%d:%s" % (agent_fd, request.environment[b"RANK"]) + (b":%d" % os.getpid() if is_program else b"")
    variables = {**request.environment, os.fsencode(AGENT_FD): link}
    return _popen(command, variables, streams, agent_fd).pid


def plain_service(request: ForkStore | ForkTimers, descriptors: list[int]) -> int:
    """A process of its own that serves this request and no other. Answers its pid. Raises OdysseyError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull, "r+b") as quiet:
        protocol.send(ours, msgspec.msgpack.encode(request), descriptors)
        command = [sys.executable, "-u", protocol.SERVER, str(theirs.fileno()), "once"]
        return _popen(command, os.environb, [quiet.fileno()] * 3, theirs.fileno()).pid


def _popen(command: list[str], environment: Mapping[bytes, bytes], streams: list[int], fd: int) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=[fd],
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise limits.error_of(f"cannot start {command[0]}", error) from None
    process.returncode = 0  # the agent's loop waits for its children itself
    return process
