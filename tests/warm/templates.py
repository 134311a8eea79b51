"""Processes that have imported what a job's do, and become them: `python -u -c COMMAND ROOT FD FD FD`, a socket for each.

The first imports torch; each further one is a fork of it that has imported more (`IMPORTS`), and all know the programs of
agents and planners as well, which what becomes a zygote forgets. A fork that is asked for is made twice, so that the middle
one's end hands it to who asked, a child subreaper. What is to be an agent has first a fork of its own, a template for its
zygotes and planner.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import setproctitle

from launcher.host.kernel import die_with_parent
from odyssey.text import as_unicode
from odyssey.zygote import server
from odyssey.zygote.protocol import SERVER
from tests.warm import ending
from tests.warm.start import IMPORTS, PROGRAMS, Start, become, receive


def run(numbers: list[int], at_start: Collection[str]) -> None:
    """The whole process; in what it becomes a fork of, to the end of that."""
    gc.disable()  # what imports leave is not worth the many looks at it
    setproctitle.getproctitle()
    server.hold_signals()
    ending.ends_at_once()
    for modules, number in zip(IMPORTS, numbers, strict=True):
        _import(modules)
        if number == numbers[-1] or os.fork() != 0:
            break
    for other in set(numbers) - {number}:
        os.close(other)
    ours, finders = frozenset(sys.modules), list(sys.meta_path)
    _import(PROGRAMS)
    importlib.import_module("strategies.search").warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()
    sock = socket.socket(fileno=number)
    sock.sendall(b"!")
    argv = _fork(sock, numbers.index(number))
    if argv is None:
        os._exit(0)
    if SERVER not in argv:
        ending.run(lambda: _programs().run(argv))
        return
    _forget([name for name in sys.modules if name.partition(".")[0] == "tests" or (name not in ours and _is_ours(name))])
    sys.meta_path[:] = finders
    setproctitle.setproctitle(as_unicode(" ".join(argv)))
    ending.run(lambda: server.main(int(argv[-1]), at_start, server.hold_signals()))


def _programs() -> Any:
    """They are among `PROGRAMS`."""
    return sys.modules["tests.warm.programs"]


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        importlib.import_module(name)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("launcher", "odyssey", "odyssey_cli", "perfmodel", "strategies")


def _forget(modules: Iterable[str]) -> None:
    for name in modules:
        package, _, its = name.rpartition(".")
        module = sys.modules.pop(name)
        if vars(sys.modules.get(package, sys)).get(its) is module:
            delattr(sys.modules[package], its)


def _fork(sock: socket.socket, index: int) -> Sequence[str] | None:
    """In what has been asked for: its command line. None in a template that nobody is left to ask. `index`: of `IMPORTS`."""
    while (asked := receive(sock)) is not None:
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            return _born(sock, index, middle, *asked)
        os.waitpid(middle, 0)
        for descriptor in asked[1]:
            os.close(descriptor)
    return None


def _born(sock: socket.socket, index: int, middle: int, start: Start, descriptors: list[int]) -> Sequence[str] | None:
    """The asker is told as soon as this process is its child, with which it ends. As `_fork`."""
    while os.getppid() == middle:  # until the kernel has torn the middle process down; it cannot hang
        time.sleep(0.0005)
    die_with_parent(start.parent)  # at once if that one has ended meanwhile: nobody would end this process
    if start.new_session:
        os.setsid()
    if not start.has_template:
        _tell(sock)
        sock.detach()  # `become` closes it
        become(start, descriptors)
        return start.argv
    ours, theirs = socket.socketpair()
    agent, template = os.getpid(), os.fork()
    if template == 0:
        ours.close()
        sock.close()
        for descriptor in descriptors:
            os.close(descriptor)
        die_with_parent(agent)
        return _fork(theirs, index)
    theirs.close()
    _tell(sock)
    sock.detach()
    target = max(start.targets) + 1
    become(replace(start, targets=(*start.targets, target)), [*descriptors, ours.detach()])
    _programs().has_template(index, socket.socket(fileno=target), template)
    return start.argv


def _tell(sock: socket.socket) -> None:
    sock.sendall(os.getpid().to_bytes(8, "little"))
