"""What is shut when a generation ends are the sockets of its groups, and none of the script's own."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import GenerationStarted
from launcher.options import RunOptions
from odyssey.plan.needs import Needs
from odyssey.protocol.orders import Known
from odyssey.protocol.reports import Broken, Offered
from odyssey.runtime.connections import Connections, Endpoint
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.transport import ADDRESS
from tests import ROOT
from tests.agent_runs import Ran, descriptors, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
CPU = torch.device("cpu")


def test_a_script_keeps_its_own_connections_through_recoveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_SOCKETS", str(tmp_path))
    wanted = RunOptions(
        str(ROOT / "tests" / "jobs" / "own_sockets.py"),
        ("--steps", "14", "--pause", "0.05"),
        n_nodes=3,
        layout="3x1",
        strategy="respawn",
        max_restarts=3,
        drills=("step=3 kill=2", "step=6 kill=2", "step=9 kill=2"),
        log_dir=tmp_path / "logs",
        capture_output=True,
    )
    ran = Ran(wanted)
    assert ran.code == 0, ran.text("stderr")
    assert ran.steps() == list(range(14)) and ran.all(Broken) == []
    n_generations = len(ran.all(GenerationStarted))
    assert 2 <= n_generations <= 4, "a rank that is killed before it is back is one loss"
    # Of each build two, that for measuring included, and the first.
    assert [int((tmp_path / str(rank)).read_text()) for rank in range(2)] == [1 + 2 * (1 + n_generations)] * 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_own_are_those_at_the_port_and_those_that_lead_to_the_others(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        ours, theirs, foreign = (stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(3))
        opened = {
            listener: stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
            for listener in (ours, theirs, foreign)
        }
        accepted = {listener: stack.enter_context(listener.accept()[0]) for listener in opened}
        connections = Connections()
        connections.listens_at(Endpoint(*ours.getsockname()[:2]))
        connections.reaches(Endpoint(*theirs.getsockname()[:2]))
        connections.shut()
        for connection in (opened[theirs], accepted[ours]):
            assert connection.recv(1) == b"", "it was not shut"
        for end in (opened[foreign], opened[ours], accepted[foreign], accepted[theirs]):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(1)
        with socket.create_connection(ours.getsockname()[:2]):
            pass  # it listens as before


def test_a_connection_that_is_still_being_made_is_ended_too() -> None:
    """To a host that does not answer, it would be for a minute."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        stack.enter_context(socket.create_connection(full.getsockname()))  # there is room for one
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.connect(full.getsockname())
        connections = Connections()
        connections.reaches(Endpoint(*full.getsockname()))
        connections.shut()
        waiting.setblocking(True)
        with pytest.raises(ConnectionError):
            waiting.sendall(b"x")


def test_many_generations_leave_no_descriptor_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a listening socket of its own, every other one is cut while it is built."""
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    build_two(0, cut=False)  # opens what torch opens once
    n_threads, before = len(os.listdir("/proc/self/task")), descriptors()
    for generation in range(1, 31):
        build_two(generation, cut=generation % 2 == 0)
    assert len(descriptors()) <= len(before), (before, descriptors())
    while len(os.listdir("/proc/self/task")) > n_threads:
        pass  # the kernel takes down the last one; the test's time limit ends what stays


def build_two(generation: int, *, cut: bool) -> None:
    """Two ranks of this process."""
    offers: dict[int, Offered] = {}
    have_come = threading.Barrier(2)

    def run(rank: int) -> None:
        def offer(offered: Offered) -> None:
            offers[rank] = offered
            have_come.wait()
            if cut:
                groups.cut("a newer generation")
            groups.introductions.learn(Known(generation, offered.name, {each: offers[each].value for each in offers}))

        groups = Groups(offer, generation, Needs((0, 1)), rank, CPU)
        try:
            groups.build()
            groups.waiter.wait(groups.all_reduce(torch.ones(1)).wait)
            assert not cut
        except Cut:
            assert cut
        have_come.wait()
        groups.release()
        groups.waiter.thread.join()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
