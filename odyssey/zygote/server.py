"""A process that has imported torch and done nothing with it: ranks and the store are forks of it, milliseconds old.

The agent starts it as `python -u server.py FD` and asks for forks over the socket FD, one request a packet, with the new
process's streams and its socket to the agent attached. A fork is made twice, so that the middle process's end hands the
new one to the agent (a child subreaper): the agent waits for it, and the loss of the zygote harms nobody. Whatever has
been asked for by then shares one middle process, for it costs as much as a rank. Forks ahead (ahead.py) are there already
when they are asked for. What is forked runs the script as `python -u script.py` does, see entry.py. End of file on the socket
ends the zygote.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path, so that `-m` and `-P` leave no trace in the ranks: our own folder must not be importable from.
    if not sys.flags.safe_path:
        del sys.path[0]
    at_start = frozenset(sys.modules)
    import os

    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    __import__("odyssey")  # this one, whatever PYTHONPATH has
    del sys.path[0]
    from odyssey.zygote import server

    mask = server.hold_signals()
    if sys.argv[2:] == ["once"]:
        server.serve_once(int(sys.argv[1]))
    server.main(int(sys.argv[1]), at_start, mask)
    sys.exit()

import ctypes
import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from typing import NoReturn

import msgspec

from odyssey import own_process
from odyssey.zygote import heap, preload
from odyssey.zygote.ahead import Ahead, Wait, wait
from odyssey.zygote.protocol import (
    Answer,
    Fork,
    ForkAhead,
    Forked,
    ForkRank,
    ForkStore,
    ForkTimers,
    Import,
    Imported,
    NotForked,
    Request,
    receive,
)
from odyssey.zygote.services import run_store, run_timers
from odyssey.zygote.shadowing_modules import find_shadow

MAX_BATCH = 32
"""Requests that are served by one middle process: it holds their descriptors, of which it may have 1024."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_requests = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()
Mask = Collection[int]
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


def hold_signals() -> Mask:
    """What is sent to all processes of a job does not concern those beside its ranks. Answers what was blocked before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS - {signal.SIGCHLD})


def main(fd: int, at_start: Collection[str], mask: Mask) -> None:
    """Import, then serve until the agent is gone. In a fork this returns, or raises, when the script has.

    `at_start`: modules that any interpreter has before it looks at the script. `mask`: signals that ranks are to block.
    """
    _die_with_parent()
    import setproctitle

    setproctitle.getproctitle()  # it finds the place of the command line by that of the environment, which will move
    modules = os.environ.pop("ODYSSEY_ZYGOTE_IMPORTS", "torch torch.distributed").split()
    our_variables = os.environ.pop("ODYSSEY_ZYGOTE_VARIABLES", "").split()
    entry, _, script = os.environ.pop("ODYSSEY_ZYGOTE_SCRIPT", "").partition(" ")

    def shadow() -> str:
        return find_shadow(entry, script, at_start) if script else ""

    request, descriptors = _serve(socket.socket(fileno=fd), modules, our_variables, shadow, mask)
    if isinstance(request, ForkRank):
        _run_rank(request, descriptors, mask)
    elif request is not None:
        _run_service(request, descriptors)


def serve_once(fd: int) -> NoReturn:
    """Do what the one request asks in this process."""
    packet, descriptors = receive(socket.socket(fileno=fd))
    _run_service(_requests.decode(packet), descriptors)


def _run_service(request: Request, descriptors: list[int]) -> NoReturn:
    match request:
        case ForkStore():
            run_store(request, descriptors)
        case ForkTimers():
            run_timers(request)
        case _:
            raise TypeError(request)


def _serve(
    control: socket.socket, modules: list[str], our_variables: list[str], shadow: Callable[[], str], mask: Mask
) -> tuple[Fork | None, list[int]]:
    """Fork for each request. Returns in the forks with their request, in the zygote with None when the agent is gone."""
    control.set_inheritable(False)
    started = time.monotonic()
    error = _import(modules)
    for name in our_variables:
        os.environ.pop(name, None)
    if not _is_ready(control, started, error, {}, shadow()):
        return None, []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the middle processes
    ahead = {ForkRank: Ahead(), ForkStore: Ahead()}
    while batch := _receive_batch(control):
        forks: list[tuple[Fork | Wait, list[int]]] = []
        for request, descriptors in batch:
            match request:
                case Import():
                    for waiting in ahead.values():
                        waiting.close()
                    started = time.monotonic()
                    left_out = _import_more(request, mask)
                    if not _is_ready(control, started, "", left_out, shadow()):
                        return None, []
                case ForkAhead():
                    forks += ahead[ForkRank].more(min(request.n_ranks, MAX_BATCH), request.agent, request.heap_bytes)
                    forks += ahead[ForkStore].more(1, request.agent, 0)
                case ForkRank() | ForkStore() if pid := ahead[type(request)].take(_encoder.encode(request), descriptors):
                    _tell(control, Forked(request.number, pid))
                case _:
                    forks.append((request, descriptors))
        mine = _fork_twice(control, forks)
        for descriptor in {fd for _, its in (*batch, *forks) for fd in its}.difference(mine[1] if mine else ()):
            os.close(descriptor)
        if mine is not None:
            control.close()
            for waiting in ahead.values():
                waiting.close()
            return _wait(mine[0], mine[1][0]) if isinstance(mine[0], Wait) else (mine[0], mine[1])
    return None, []


def _wait(waiting: Wait, fd: int) -> tuple[Fork, list[int]]:
    """In a fork ahead: what it is now."""
    heap.touch(waiting.heap_bytes)
    packet, descriptors = wait(fd)
    request = _requests.decode(packet)
    assert isinstance(request, ForkRank | ForkStore)
    return request, descriptors


def _import_more(request: Import, mask: Mask) -> dict[str, str]:
    """What must be left out, and why."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # modules may start processes and wait for them
    held = signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # which may be ended as any other
    left_out = preload.import_all(request.modules, request.variables)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return left_out


def _receive_batch(control: socket.socket) -> list[tuple[Request, list[int]]]:
    """All that has been asked for by now, at least one; none when the agent is gone."""
    batch: list[tuple[Request, list[int]]] = []
    while len(batch) < MAX_BATCH:
        try:
            packet, descriptors = receive(control, socket.MSG_DONTWAIT if batch else 0)
        except OSError:
            break
        if not packet:
            break
        batch.append((_requests.decode(packet), descriptors))
    return batch


def _import(modules: list[str]) -> str:
    """What went wrong; empty if nothing did."""
    gc.disable()  # to look again and again for the little that imports leave to collect takes a sixth of their time
    try:
        for name in [*modules, "odyssey.zygote.entry"]:
            importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return ""


def _is_ready(control: socket.socket, started: float, error: str, left_out: dict[str, str], shadow: str) -> bool:
    """Tell the agent. False if there is nothing to be forked from this process."""
    seconds = time.monotonic() - started
    imported = Imported(seconds, own_process.n_threads(), preload.has_cuda(), error, left_out, shadow)
    try:
        control.send(_encoder.encode(imported))
        if not imported.is_safe:
            while control.recv(1):
                pass  # with a request unread, our end would have the kernel drop the answer: the agent ends this
            return False
    except OSError:
        return False
    gc.collect()
    gc.freeze()  # forks share these pages until they write to them; no collection of theirs looks at them
    return True


def _fork_twice(control: socket.socket, batch: list[tuple[Fork | Wait, list[int]]]) -> tuple[Fork | Wait, list[int]] | None:
    """In a new process its own entry of the batch, in the zygote None. The middle process answers the agent and is gone."""
    if not batch or _fork(control, [fork for fork, _ in batch]) != 0:
        return None
    # A new process that ends before the middle one does must stay a zombie for the agent, who waits for its status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    middle = os.getpid()
    for mine in batch:
        pid = _fork(control, [mine[0]])
        if pid == 0:
            break
        if pid is not None and not isinstance(mine[0], Wait):
            _tell(control, Forked(mine[0].number, pid))
    else:
        os._exit(0)
    os.setsid()
    while os.getppid() == middle:  # until the kernel has torn the middle process down, some 20 ms; it cannot hang
        time.sleep(0.0005)
    _die_with_parent()
    if os.getppid() != mine[0].agent:
        os._exit(1)  # the agent went before it could become the parent: nobody would end us
    return mine


def _fork(control: socket.socket, forks: list[Fork | Wait]) -> int | None:
    """os.fork, or None if it cannot be, which the agent is told if it has asked for any of them."""
    try:
        return os.fork()
    except OSError:
        for fork in forks:
            if not isinstance(fork, Wait):
                _tell(control, NotForked(fork.number))
        return None


def _tell(control: socket.socket, answer: Answer) -> None:
    try:
        control.send(_encoder.encode(answer))
    except OSError:
        pass  # the agent is gone: the end of file follows


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _run_rank(request: ForkRank, descriptors: list[int], mask: Mask) -> None:
    from odyssey.zygote import entry

    if request.numa_binding:
        from odyssey.zygote import numa

        numa.bind(request.numa_binding, request.local_rank)
    environment = request.environment
    variables = {**environment, os.fsencode(request.fd_variable): b"%d:%s" % (descriptors[3], environment[b"RANK"])}
    entry.become(request.cwd, variables, descriptors[:3])
    preload.repair()
    for name in vars(sys.modules.pop("odyssey.zygote")):
        sys.modules.pop(f"odyssey.zygote.{name}", None)
    sys.modules.pop("odyssey.text", None)
    for name in ("zygote", "text"):
        vars(sys.modules["odyssey"]).pop(name, None)
    preload.tell_at_first_step()
    entry.run(request.entry, os.fsdecode(request.script), [os.fsdecode(argument) for argument in request.arguments], mask)
