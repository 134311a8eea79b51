"""A process that has imported torch and done nothing with it: ranks and the store are forks of it, milliseconds old.

The agent starts it as `python -u zygote.py FD` and asks for forks over the socket FD, one request a packet, with the new
process's streams and its socket to the agent attached. A fork is made twice, so that the middle process's end hands the
new one to the agent (a child subreaper): the agent waits for it, and the loss of the zygote harms nobody. What is
forked runs the script as `python -u script.py` does, see `_run_rank`. End of file on the socket ends the zygote.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path, so that `-m` and `-P` leave no trace in the ranks: our own folder must not be importable from.
    if not sys.flags.safe_path:
        del sys.path[0]
    import odyssey.zygote as zygote

    sys.exit(zygote.main(int(sys.argv[1])))

import array
import builtins
import ctypes
import gc
import importlib
import importlib.machinery
import io
import os
import signal
import socket
import time
import types

import msgspec

from odyssey.services import ForkLookup, ForkStore, run_lookup, run_store

PACKET_BYTES = 1 << 20
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS_FILE = "odyssey-stacks"
"""At this signal a rank writes the Python stacks of its threads to its memory file of this name, see `_tell_stacks`."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ForkRank(msgspec.Struct, frozen=True, tag=True):
    """Run `script` in a fork. Descriptors: stdin, stdout, stderr, agent socket (its number goes to `fd_variable`)."""

    number: int
    script: str
    arguments: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    fd_variable: str
    agent: int


Request = ForkRank | ForkStore | ForkLookup


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The zygote can fork now. `threads`: of its process; more than one means that forks of it are not safe."""

    seconds: float
    threads: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The answer to the request of this number."""

    number: int
    pid: int


Answer = Imported | Forked

_requests = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


def main(fd: int) -> int:
    """Import, then serve until the agent is gone. A fork returns from `_serve` into the script and its exit code."""
    _die_with_parent()
    modules = os.environ.pop("ODYSSEY_ZYGOTE_IMPORTS", "torch torch.distributed").split()
    our_variables = os.environ.pop("ODYSSEY_ZYGOTE_VARIABLES", "").split()
    started = time.monotonic()
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # the script will fail on it, or not need it
    for name in our_variables:
        os.environ.pop(name, None)
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    threads = len(os.listdir("/proc/self/task"))
    try:
        control.send(_encoder.encode(Imported(time.monotonic() - started, threads)))
    except OSError:
        return 0
    if threads > 1:
        return 1  # the agent starts ranks in another way
    gc.collect()
    gc.freeze()  # forks share these pages until they write to them; no collection of theirs looks at them
    request, descriptors = _serve(control)
    if request is None:
        return 0
    if isinstance(request, ForkStore):
        run_store(request, descriptors)
    if isinstance(request, ForkLookup):
        run_lookup(request, descriptors)
    return _run_rank(request, descriptors)


def _serve(control: socket.socket) -> tuple[Request | None, list[int]]:
    """Fork for each request. Returns in the forks with their request, in the zygote with None when the agent is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the middle processes
    while True:
        try:
            packet, descriptors = _receive(control)
        except OSError:
            packet = b""
        if not packet:
            return None, []
        request = _requests.decode(packet)
        if _fork_twice(control, request):
            control.close()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    packet, ancillary, _flags, _address = control.recvmsg(PACKET_BYTES, socket.CMSG_LEN(8 * descriptors.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return packet, list(descriptors)


def _fork_twice(control: socket.socket, request: Request) -> bool:
    """True in the new process, False in the zygote. The middle process answers the agent and is gone."""
    if os.fork() != 0:
        return False
    # A new process that ends before the middle one does must stay a zombie for the agent, who waits for its status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    middle = os.getpid()
    pid = os.fork()
    if pid != 0:
        try:
            control.send(_encoder.encode(Forked(request.number, pid)))
        finally:
            os._exit(0)
    os.setsid()
    while os.getppid() == middle:  # until the kernel has torn the middle process down, some 20 ms; it cannot hang
        time.sleep(0.0005)
    _die_with_parent()
    if os.getppid() != request.agent:
        os._exit(1)  # the agent went before it could become the parent: nobody would end us
    return True


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# -- a rank ------------------------------------------------------------------------------------------------------------


def _run_rank(request: ForkRank, descriptors: list[int]) -> int:
    """Run the script as `python -u script.py` would, and return the exit code for `sys.exit`.

    The interpreter's own end follows (threads, atexit, flush), as it would there.
    """
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)  # inheritable, as these three have to be
        os.close(descriptor)
    if len(descriptors) > 3:
        os.environ[request.fd_variable] = str(descriptors[3])
    _own_randomness()
    _tell_stacks()
    _name_process(request)
    sys.argv[:] = [request.script, *request.arguments]
    sys.orig_argv[:] = [sys.executable, "-u", *sys.argv]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(request.script)))
    main_module = _fresh_main(request.script)
    for name in ("zygote", "services"):
        sys.modules.pop(f"odyssey.{name}", None)
        vars(sys.modules.get("odyssey", sys)).pop(name, None)
    return _execute(main_module, request.script)


def _fresh_main(script: str) -> types.ModuleType:
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __spec__=None,
        __cached__=None,
        __annotations__={},
    )
    sys.modules["__main__"] = module
    return module


def _execute(module: types.ModuleType, script: str) -> int:
    path = str(module.__file__)
    try:
        with io.open_code(path) as file:
            source = file.read()
        code = compile(source, path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:
        error.__traceback__ = _of_user(error, path)
        _report(error)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as stop:
            return _exit_code(stop)
        return 1
    return 0


def _of_user(error: BaseException, path: str) -> types.TracebackType | None:
    """The traceback from the script's own first frame on; none for a script that does not compile."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _report(error: BaseException) -> None:
    """Tell the agent what happened, in full: it prints the first failure's traceback even where streams are mixed."""
    from odyssey.link import report_failure

    try:
        report_failure(error)
    except Exception as why:
        print(f"odyssey: could not report the failure: {why}", file=sys.stderr)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _own_randomness() -> None:
    """Generators that a process seeds at random must not be the zygote's: ranks would draw the same numbers."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 0:
            torch.set_num_threads(int(threads))  # OMP reads the variable only once, at import


def _tell_stacks() -> None:
    """Be ready to tell where this rank is, even while it hangs in C, to whom ptrace is forbidden (launcher/stacks.py).

    A realtime signal that nobody else uses, and a file that has no name and goes with the process: all that a script
    could see of it is a descriptor, and the signal's disposition. Both end with exec.
    """
    import faulthandler

    file = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def _name_process(request: ForkRank) -> None:
    """`ps` and `pkill -f` show the script, where setproctitle is installed; `top` shows its name in any case."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        _libc.prctl(15, os.path.basename(request.script).encode()[:15], 0, 0, 0)
    else:
        setproctitle(" ".join((sys.executable, "-u", request.script, *request.arguments)))
