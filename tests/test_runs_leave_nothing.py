"""`make test`, pytest and benchmarks that are ended while they are at work leave no process, namespace, link or socket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher.host import proc
from tests import ROOT
from tests.descendants import Descendants, describe
from tests.supervised import base36

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
START_S = 300.0
GONE_S = 10.0
"""From the signal until nothing may be left: what this is about, and many times what it takes."""
AGENT = re.compile(r"\bodyssey_cli(\.\w+)? run\b|\bodyssey_cli\.torchrun\b|torch\.distributed\.run\b")
TESTS = "tests/launcher/cluster/test_agents.py"

Below = list[psutil.Process]


def agents(n: int) -> Callable[[Below], bool]:
    """So many launchers with ranks or other processes below them."""

    def are_there(below: Below) -> bool:
        return sum(bool(AGENT.search(_command(process)) and _has_children(process)) for process in below) >= n

    return are_there


def processes(n: int) -> Callable[[Below], bool]:
    return lambda below: len(below) >= n


PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
RUNS: dict[str, tuple[list[str], Callable[[Below], bool]]] = {
    "make test": (["make", "test", f"ARGS={TESTS}"], agents(2)),
    "pytest": ([*PYTEST, TESTS], agents(2)),
    "pytest of hosts": ([*PYTEST, "-n", "2", "tests/hosts/test_lost_hosts.py"], agents(3)),
    "all benchmarks": (["-m", "benchmarks", "--again", "launch"], agents(1)),
    "hosts": (["-m", "benchmarks.hosts"], agents(3)),
    "agents": (["-m", "benchmarks.agents", "--sizes", "4"], processes(6)),
    "rehearsal": (["-m", "benchmarks.rehearsal", "--no-real"], processes(10)),
    "search": (["-m", "benchmarks.search"], processes(3)),
    "launch": (["-m", "benchmarks.launch"], agents(1)),
    "job_wall": (["-m", "benchmarks.job_wall"], agents(1)),
    "restart": (["-m", "benchmarks.restart"], agents(1)),
    "recovery": (["-m", "benchmarks.recovery"], agents(1)),
    "grow": (["-m", "benchmarks.grow"], agents(1)),
}
"""Each with what shows that it is at work."""


def left_by(pids: set[int]) -> list[str]:
    """What these have left that is no process, by name (supervised.py): other runs may go on beside this test."""
    marks = {base36(pid) for pid in pids}
    found = [name for name in proc.unix_sockets() if name.startswith("/tmp/odyssey-")]
    for folder in ("/run/netns", "/sys/class/net", "/dev/shm", "/tmp"):
        if os.path.isdir(folder):
            found += [f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(("od", "torch_"))]
    return [name for name in found if any(mark in name for mark in marks)]


@pytest.fixture
def below() -> Iterator[Descendants]:
    its = Descendants()
    yield its
    its.end()
    its.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("name", RUNS)
def test_it_leaves_nothing(name: str, number: signal.Signals, below: Descendants, tmp_path: Path) -> None:
    command, is_at_work = RUNS[name]
    if command[0] == "-m":
        command = [sys.executable, *command]
        if "--again" not in command:
            command += ["--results", str(tmp_path)]
    pids: set[int] = set()
    said = tmp_path / "said"
    with said.open("wb") as file:
        front = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    while not is_at_work(living := below.living()):
        pids |= {process.pid for process in living}
        text = said.read_text(errors="replace")
        if front.poll() is not None and "namespaces cannot be made" in text:
            pytest.skip(text[-200:])
        assert front.poll() is None, text[-3000:]
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)

    front.send_signal(number)

    left = below.wait(GONE_S)
    assert not left, [*map(describe, left)]
    assert not left_by(pids)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.Error:
        return False
