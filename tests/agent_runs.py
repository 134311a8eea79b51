"""Real jobs of the agent for tests: what it logged, what ranks wrote, and a check that nothing is left behind."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from launcher.agent.start import run
from launcher.coordinator.decided_again import replay
from launcher.joblog.events import Event
from launcher.options import RunOptions
from odyssey import own_process
from odyssey.runtime import peer_memory
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile
from tests import ROOT

TRAIN = str(ROOT / "tests" / "jobs" / "train.py")


class Ran:
    """One job that has ended."""

    def __init__(self, options: RunOptions, on_event: Callable[[Event, Ran], None] | None = None) -> None:
        self.events: list[Event] = []
        self.output: dict[tuple[int, str], bytes] = {}
        self._on_event = on_event
        self.code = run(options, self._watch, self._take_output)
        self.folder = next(options.log_dir.iterdir())

    def _watch(self, event: Event) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event, self)

    def _take_output(self, rank: int, stream: str, data: bytes) -> None:
        self.output[rank, stream] = self.output.get((rank, stream), b"") + data

    def all(self, kind: type) -> list[Any]:
        return [event.body for event in self.events if isinstance(event.body, kind)]

    def text(self, stream: str = "stdout") -> str:
        """What ranks wrote, one behind the other, without what the Gloo of torch 2.9 says whenever it has connected."""
        said = b"".join(data for (_, name), data in sorted(self.output.items()) if name == stream).decode()
        return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))

    def steps(self) -> list[int]:
        """Indices of the steps that leaders printed, in order of the index."""
        return sorted(int(line.split()[1]) for line in self.text().splitlines() if line.startswith("step "))

    def assert_replays(self) -> None:
        """The log alone leads to the same decisions."""
        pairs = replay(self.folder / "events.jsonl")
        assert pairs
        for logged, taken in pairs:
            assert logged == taken


@functools.cache
def profile_of_own_processors() -> Profile:
    """Measure TRAIN here, but as if each rank had a processor of its own: whoever comes back is worth taking in, whatever else
    this machine does."""
    arguments = ("--dropout", "0.1", "--clip", "0.5", "--schedule", "--global-batch", "15")
    with tempfile.TemporaryDirectory() as folder:
        path, logs = Path(folder) / "profile.json", Path(folder) / "logs"
        ran = Ran(RunOptions(TRAIN, arguments, n_nodes=4, log_dir=logs, capture_output=True, write_profile=path))
        assert ran.code == 0
        measured = profiles.read(path)
    return replace(measured, cluster=replace(measured.cluster, cores=None))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No child and no descriptor remains that was not there before."""
    children = set(psutil.Process().children(recursive=True))
    peer_memory.reach(peer_memory.memory_handle())  # what ranks that are threads here read each other by stays
    before = descriptors()
    yield
    left = set(psutil.Process().children(recursive=True)) - children
    assert not left, left
    more = {number: name for number, name in descriptors().items() if number not in before}
    assert not more, more


def descriptors() -> dict[int, str]:
    """What this process has open, but for listings of that: another thread of it may be at one."""
    return {number: name for number, name in own_process.descriptors() if not name.endswith("/fd")}
