"""Processes that have imported what zygotes import, and become them: `python -u -c COMMAND ROOT FD FD FD`, a socket for each.

The first imports torch; each further one is a fork of it that has imported more (`IMPORTS`). A fork that is asked for is made
twice, so that the middle one's end hands it to who asked, a child subreaper. What is to be an agent has first a fork of its
own, a template for its zygotes, and then executes its program.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import replace

import setproctitle

from odyssey.zygote import server
from odyssey.zygote.protocol import SERVER
from tests.warm.start import GIVEN, IMPORTS, Start, become, receive


def run(numbers: list[int], at_start: Collection[str]) -> None:
    """The whole process; in a zygote, and in the ranks that are forks of it, to their end."""
    start = _serve(numbers)
    if start is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        setproctitle.setproctitle(" ".join(start.argv))
        server.main(int(start.argv[-1]), at_start, server.hold_signals())


def _serve(numbers: list[int]) -> Start | None:
    """In what becomes a zygote: what it is. None in a template that is not needed any more."""
    setproctitle.getproctitle()
    server.hold_signals()
    for modules, number in zip(IMPORTS, numbers, strict=True):
        for name in modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        if number == numbers[-1] or os.fork() != 0:
            break
    for other in set(numbers) - {number}:
        os.close(other)
    sock = socket.socket(fileno=number)
    sock.sendall(b"!")
    return _fork(sock)


def _fork(sock: socket.socket) -> Start | None:
    """What is asked for, until nobody is left who could ask. As `_serve`."""
    while (asked := receive(sock)) is not None:
        middle = os.fork()
        if middle == 0:
            if os.fork() != 0:
                os._exit(0)
            return _born(sock, *asked)
        os.waitpid(middle, 0)
        for descriptor in asked[1]:
            os.close(descriptor)
    return None


def _born(sock: socket.socket, start: Start, descriptors: list[int]) -> Start | None:
    """Who asked is told as soon as this process is its child."""
    while os.getppid() != start.parent:
        time.sleep(0.0005)
    if start.new_session:
        os.setsid()
    if SERVER in start.argv:
        _tell(sock)
        become(start, descriptors)
        return start
    ours, theirs = socket.socketpair()
    agent, template = os.getpid(), os.fork()
    if template == 0:
        ours.close()
        sock.close()
        for descriptor in descriptors:
            os.close(descriptor)
        server._die_with_parent()
        return _fork(theirs) if os.getppid() == agent else None
    theirs.close()
    _tell(sock)
    target = max(start.targets) + 1
    become(replace(start, targets=(*start.targets, target)), [*descriptors, ours.fileno()])
    return os.execvpe(start.argv[0], start.argv, {**start.environment, GIVEN: f"{target} {template}"})


def _tell(sock: socket.socket) -> None:
    sock.sendall(os.getpid().to_bytes(8, "little"))
