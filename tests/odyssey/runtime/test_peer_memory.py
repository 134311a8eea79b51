"""Whose memory is read, what of it, and what becomes of it when it is not there any more: real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from odyssey.runtime import peer_memory
from odyssey.runtime.peer_memory import MemoryPart
from tests import ROOT

pytestmark = pytest.mark.timeout(60)
SIZE_BYTES = 3 << 20
TARGET = """
import ctypes, sys
from odyssey.runtime import peer_memory
data = ctypes.create_string_buffer(bytes(i % 251 for i in range({size})), {size})
print(peer_memory.memory_handle().hex(), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""
NO_READER = """
import sys
from odyssey.runtime import peer_memory
from tests.jobs.train import become_unreadable
become_unreadable()
print(peer_memory.reach(bytes.fromhex(sys.argv[1])))
"""
CONTENT = bytes(i % 251 for i in range(SIZE_BYTES))


class Target:
    """A process that has something to read, until it is told to end."""

    def __init__(self, before: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + TARGET.format(size=SIZE_BYTES)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        handle, address = self.process.stdout.readline().split()
        self.handle, self.address = bytes.fromhex(handle), int(address)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def target_of() -> Iterator[Callable[..., Target]]:
    with ExitStack() as stack:

        def make(before: str = "") -> Target:
            target = Target(before)
            stack.callback(peer_memory.forget, target.handle)
            stack.callback(target.process.communicate)
            return target

        yield make


def memory_of(target: Target) -> peer_memory.PeerMemory:
    memory = peer_memory.reach(target.handle)
    assert memory is not None
    return memory


def no_check() -> None:
    pass


@pytest.mark.parametrize("at_once_bytes", [1 << 30, SIZE_BYTES // 3 + 1])
def test_all_parts_are_copied_to_their_places(
    target_of: Callable[..., Target], at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one call takes, by number and by size."""
    monkeypatch.setattr(peer_memory, "AT_ONCE_BYTES", at_once_bytes)
    target = target_of()
    found = ctypes.create_string_buffer(SIZE_BYTES)
    cuts = [0, *range(100, 2_000), 1 << 20, SIZE_BYTES]
    parts = [MemoryPart(target.address + a, ctypes.addressof(found) + a, b - a) for a, b in pairwise(cuts)]
    memory_of(target).read(reversed(parts), no_check)
    assert found.raw == CONTENT


def test_what_is_not_there_is_an_error_and_no_shorter_read(target_of: Callable[..., Target]) -> None:
    target = target_of()
    found = ctypes.create_string_buffer(SIZE_BYTES)
    parts = [MemoryPart(target.address, ctypes.addressof(found), 64), MemoryPart(0, ctypes.addressof(found), 64)]
    with pytest.raises(OSError, match="64 of 128 bytes"):
        memory_of(target).read(parts, no_check)


def test_another_process_is_not_taken_for_the_one_that_is_meant(target_of: Callable[..., Target]) -> None:
    """As where the number means another one there, or has been given away again."""
    one, other = target_of(), target_of()
    place, secret, _, address = peer_memory._HANDLE.unpack(one.handle)
    swapped = peer_memory._HANDLE.pack(place, secret, other.process.pid, address)
    assert peer_memory.reach(swapped) is None and peer_memory.reach(one.handle) is not None


def test_a_handle_of_another_place_is_not_tried(target_of: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers mean nothing here."""
    target = target_of()
    monkeypatch.setattr(peer_memory, "PeerMemory", None)  # which would raise
    place, *rest = peer_memory._HANDLE.unpack(target.handle)
    assert peer_memory.reach(peer_memory._HANDLE.pack(bytes(len(place)), *rest)) is None
    assert peer_memory.reach(peer_memory.NOBODY) is None


def test_a_fork_has_a_handle_of_its_own() -> None:
    mine = peer_memory.memory_handle()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, peer_memory.memory_handle())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read_end, peer_memory.HANDLE_BYTES)
    os.close(read_end)
    os.close(write_end)
    assert peer_memory._HANDLE.unpack(theirs)[2] == child and peer_memory._HANDLE.unpack(mine)[2] == os.getpid()
    assert theirs != mine == peer_memory.memory_handle()


def test_a_process_that_is_killed_while_it_is_read_is_no_source(
    target_of: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "AT_ONCE_BYTES", SIZE_BYTES // 2)
    target = target_of()
    found = ctypes.create_string_buffer(SIZE_BYTES)
    n_checks = 0

    def kill_between() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks == 2:
            target.kill()

    with pytest.raises(ProcessLookupError):
        memory_of(target).read([MemoryPart(target.address, ctypes.addressof(found), SIZE_BYTES)], kill_between)
    assert n_checks == 2 and found.raw[: SIZE_BYTES // 2] == CONTENT[: SIZE_BYTES // 2]


def test_what_was_read_of_a_process_that_has_ended_meanwhile_does_not_count(target_of: Callable[..., Target]) -> None:
    """Its number may be another's by then."""
    target = target_of()
    memory = memory_of(target)
    os.kill(target.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, target.process.pid, os.WEXITED | os.WNOWAIT)
    assert memory.has_ended
    with pytest.raises(ProcessLookupError):
        memory.read([], no_check)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be without a privilege of root's")
def test_where_the_kernel_does_not_allow_it_nothing_is_read(target_of: Callable[..., Target], tmp_path: Path) -> None:
    target = target_of("import ctypes; ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE\n")
    told = subprocess.run([sys.executable, "-c", NO_READER, target.handle.hex()], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.strip() == "None", told.stderr
    assert peer_memory.reach(target.handle) is not None, "who has the privilege reads it all the same"
