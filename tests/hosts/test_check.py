"""`odyssey check` on hosts with a network of their own: a slow cable is found, and whose it is; so is a wall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.hosts.network import Hosts, Impossible

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    try:
        made = Hosts(3, tmp_path, 100 + os.getpid() % 100)
    except Impossible as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


def check(hosts: Hosts, folder: Path) -> tuple[list[int], str, list[tuple[str, int | None, str]]]:
    """Exit codes of the agents, what the first has printed, and what was found beside what a busy machine may be blamed for."""
    command = [sys.executable, "-m", "odyssey_cli", "check", "--nnodes=3", "--rdzv-backend=static", "--master-addr=h1"]
    agents = [
        subprocess.Popen(
            hosts.command(i, [*command, f"--node-rank={i - 1}", f"--json={folder / f'{i}.json'}"]),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in hosts.numbers
    ]
    outputs = [agent.communicate()[0] for agent in agents]
    text = "\n".join(outputs)
    assert (folder / "1.json").exists(), text
    findings = json.loads((folder / "1.json").read_text())["findings"]
    return [agent.returncode for agent in agents], text, [(its["level"], its["at"], its["what"]) for its in findings]


def test_a_slow_cable_is_found_and_whose_it_is(hosts: Hosts, tmp_path: Path) -> None:
    try:
        hosts.slow(3, "20mbit")
    except Impossible as error:
        pytest.skip(f"no cable can be slowed here: {error}")
    codes, text, findings = check(hosts, tmp_path)
    assert codes == [1, 1, 1], text
    narrow = {(at, what.partition(":")[0]) for level, at, what in findings if "bit/s" in what and level == "bad"}
    assert narrow == {(2, "its links to h1, h2"), (2, "all links to it")}, text
    assert not any(hosts.pids(i) for i in hosts.numbers)


def test_hosts_that_do_not_reach_each_other_are_named(hosts: Hosts, tmp_path: Path) -> None:
    """A route that leads nowhere: both reach the first host, and so the job begins."""
    subprocess.run(hosts.command(2, ["ip", "route", "add", "prohibit", f"{hosts.address(3)}/32"]), check=True)
    codes, text, findings = check(hosts, tmp_path)
    assert codes == [1, 1, 1], text
    walls = {(at, what) for level, at, what in findings if "does not reach" in what and level == "bad"}
    assert {(at, what.partition(":")[0]) for at, what in walls} >= {(1, "it does not reach h3")}, text
