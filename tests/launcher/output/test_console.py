"""The launcher's own output when nobody reads it any more: nothing waits for ever, and nothing stays open."""

from __future__ import annotations

import os
import time

import pytest

from launcher.host.loop import Loop
from launcher.output.console import Console
from odyssey import own_process
from tests.agent_runs import nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


def complain(text: str) -> None:
    raise AssertionError(text)


def test_the_end_of_a_console_that_was_abandoned_leaves_no_descriptor() -> None:
    """Nobody has been slow: it is idle when it is abandoned."""
    loop = Loop(time.monotonic)
    console = Console(loop, lambda: None, complain)
    console.start()
    console.abandon()
    console.close()
    loop.close()


def test_it_is_not_idle_before_it_has_told_that_its_reader_is_gone() -> None:
    """Else a job that ends just then would not say so."""
    loop = Loop(time.monotonic)
    reader, writer = os.pipe()
    os.close(reader)
    told: list[str] = []
    console = Console(loop, lambda: None, told.append)
    console.start()
    console.write(writer, b"a line\n")
    while console._backlog:
        assert not console.is_idle
    while not console.is_idle:
        loop.turn()
    assert told == ["standard error cannot be written to any more: broken pipe; ranks go on without it"]
    os.close(writer)
    console.close()
    loop.close()


def test_where_nobody_reads_the_end_does_not_wait_and_all_is_closed_when_somebody_does() -> None:
    loop = Loop(time.monotonic)
    reader, writer = os.pipe()
    console = Console(loop, lambda: None, complain)
    console.start()
    assert console._wake is not None
    wake = console._wake
    console.write(writer, bytes(1 << 20))
    while not os.read(reader, 1):
        pass  # it is in the middle of that
    console.abandon()
    console.close()
    n_read = 1
    while n_read < 1 << 20:
        n_read += len(os.read(reader, 1 << 16))
    while dict(own_process.descriptors()).get(wake, "").startswith("anon_inode"):
        time.sleep(0.001)
    for fd in (reader, writer):
        os.close(fd)
    loop.close()
