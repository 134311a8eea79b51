"""`odyssey check`: what is said of hosts and their links, and a check of two agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch.distributed import TCPStore

from launcher.host.fitness import child
from launcher.host.fitness.findings import Device, HostReport, Versions
from launcher.host.fitness.judgement import Finding, Level, bad_hosts
from launcher.host.fitness.judgement import judge as judge_hosts
from odyssey_cli.check import links, probe
from odyssey_cli.check.judgement import judge
from odyssey_cli.check.links import Asks
from odyssey_cli.check.report import Clock, Link, Seen
from tests import ROOT
from tests.launcher.cluster.test_agents import MEETS, Agent, start
from tests.launchers import free_port

__all__ = ["start"]
GIB = 1 << 30
GPU = Device("cuda:0", "H100", 1, 80 * GIB, 79 * GIB, 50e12, "aa")


def host(name: str, *devices: Device, **rest: object) -> HostReport:
    good = {
        "machine": name,
        "n_processors": 8,
        "memory_bytes": 64 * GIB,
        "available_bytes": 60 * GIB,
        "disk_bytes": 100 * GIB,
        "own_addresses": ("10.0.0.1",),
        "open_files": 65536,
        "shared_bytes": 32 * GIB,
        "versions": Versions("3.12", "2.13", "13.0"),
    }
    return HostReport(name, 1, devices=devices or (GPU,), **{**good, **rest})  # type: ignore[arg-type]


def bad(*reports: HostReport) -> dict[int, str]:
    return bad_hosts(judge_hosts(reports))


def levels(findings: list[Finding]) -> list[tuple[str, int | None]]:
    return [(str(finding.level), finding.at) for finding in findings]


def test_good_hosts_are_good() -> None:
    assert judge_hosts([host("a"), host("b"), host("c")]) == []
    assert judge_hosts([host("a")]) == []


# -- what they compute -------------------------------------------------------------------------------------------------


def test_who_computes_other_bits_than_most_equal_devices_is_bad() -> None:
    wrong = replace(GPU, digest="bb")
    assert "computes other bits than 2 equal devices of 3" in bad(host("a"), host("b", wrong), host("c"))[1]
    assert list(bad(host("a", GPU, GPU, wrong, GPU), host("b", GPU, GPU, GPU, GPU))) == [0]


def test_of_two_that_differ_none_is_believed() -> None:
    found = judge_hosts([host("a"), host("b", replace(GPU, digest="bb"))])
    assert levels(found) == [("bad", None)] and "a, b: equal devices compute different bits" in found[0].what
    assert bad_hosts(found) == {}
    tie = [host(name, replace(GPU, digest=digest)) for name, digest in ("aa", "ba", "cb", "db")]
    assert levels(judge_hosts(tie)) == [("bad", None)]


@pytest.mark.parametrize("other", [host("b", replace(GPU, model="A100", digest="bb")), host("b", replace(GPU, digest="bb"))])
def test_devices_or_versions_that_differ_are_not_compared(other: HostReport) -> None:
    if other.devices[0].model == GPU.model:
        other = replace(other, versions=Versions("3.12", "2.12", "13.0"))
    found = judge_hosts([host("a"), other])
    assert bad_hosts(found) == {}
    assert any(finding.level is Level.NOTE and "cannot be compared bit for bit" in finding.what for finding in found)


def test_a_device_that_contradicts_itself_is_bad() -> None:
    assert "processor 3" in bad(host("a", replace(GPU, odd="processor 3")))[0]
    assert "out of memory" in bad(host("a", replace(GPU, problem="out of memory", digest="", flops=0.0)), host("b"))[0]


# -- how fast ----------------------------------------------------------------------------------------------------------


def test_who_is_much_slower_than_the_median_is_bad() -> None:
    def speeds(*flops: float) -> list[int]:
        return list(bad(*(host(str(i), replace(GPU, flops=its)) for i, its in enumerate(flops))))

    assert speeds(50e12, 34e12, 51e12) == [1]
    assert speeds(50e12, 36e12, 51e12) == []
    assert speeds(50e12, 20e12) == [1]
    assert speeds(50e12, float("nan"), 51e12) == []


def test_agents_that_share_a_machine_are_not_compared_in_speed() -> None:
    slow = host("a", replace(GPU, flops=1e12))
    assert bad(slow, replace(slow, devices=(GPU,))) == {}


# -- what they have ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lacks", "level", "what"),
    [
        ({"available_bytes": GIB // 2}, Level.BAD, "0.5 GiB of memory free, at least 1.0 GiB needed"),
        ({"n_ranks": 2}, Level.BAD, "2 ranks, and 1 GPUs"),
        ({"disk_bytes": GIB // 2}, Level.BAD, "0.5 GiB of disk free"),
        ({"disk_problem": "/logs: Read-only file system"}, Level.BAD, "no logs can be written to /logs"),
        ({"problem": "torch cannot be imported"}, Level.BAD, "could not be measured: torch cannot be imported"),
        ({"open_files": 256}, Level.WARNING, "only 256 open files"),
        ({"shared_bytes": 64 << 20}, Level.WARNING, "/dev/shm has 0.1 GiB"),
        ({"own_addresses": ("127.0.1.1",)}, Level.WARNING, "its own name stands for 127.0.1.1"),
        ({"own_addresses": ()}, Level.WARNING, "its own name stands for no address"),
        ({"memory_bytes": 48 * GIB}, Level.WARNING, "48 GiB of memory, where equal hosts have 64 GiB"),
        ({"versions": Versions("3.11", "2.13", "13.0")}, Level.WARNING, "python 3.11, where most hosts have 3.12"),
        ({"devices": (replace(GPU, free_bytes=40 * GIB),)}, Level.WARNING, "40 GiB of cuda:0's 80 GiB are in use"),
        ({"complaints": ("bound to one processor",)}, Level.WARNING, "bound to one processor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_host_lacks_is_said(lacks: dict[str, object], level: Level, what: str) -> None:
    (found,) = judge_hosts([host("a"), replace(host("b"), **lacks), host("c")])
    assert (found.level, found.at) == (level, 1) and what in found.what


# -- what is between them ----------------------------------------------------------------------------------------------


def seen(n: int, **of: tuple[float, float]) -> list[Seen]:
    """All links of so many hosts, with 10 Gbit/s and 50 µs; `l02`: another one's (bandwidth, round trip)."""
    return [
        Seen(
            host(f"h{i}"),
            tuple(
                Link(i, j, round_trip_s=of.get(f"l{i}{j}", (0, 5e-5))[1], bandwidth=of.get(f"l{i}{j}", (1.25e9, 0))[0])
                for j in range(n)
                if j != i
            ),
            Clock(0.001, 0.0001) if i else None,
        )
        for i in range(n)
    ]


def test_good_links_are_good() -> None:
    assert judge(seen(4)) == []
    assert judge(seen(2)) == []


def test_a_host_whose_links_are_all_slow_is_blamed_for_them() -> None:
    slow = (2e6, 5e-5)
    found = judge(seen(3, l02=slow, l12=slow, l20=slow, l21=slow))
    assert levels(found) == [("bad", 2), ("bad", 2)]
    assert {finding.what for finding in found} == {
        "its links to h0, h1: 16 Mbit/s, where hosts reach 10 Gbit/s",
        "all links to it: 16 Mbit/s, where hosts reach 10 Gbit/s",
    }


def test_one_direction_of_one_cable_is_blamed_on_who_sends() -> None:
    (found,) = judge(seen(4, l13=(1e8, 5e-5)))
    assert (found.at, found.what) == (1, "its link to h3: 800 Mbit/s, where hosts reach 10 Gbit/s")
    assert [finding.at for finding in judge(seen(2, l10=(1e8, 5e-5)))] == [1]


@pytest.mark.parametrize(("rate", "blamed"), [(3e8, []), (1e8, [1])])
def test_between_agents_of_one_machine_only_what_no_busy_processor_explains_is_blamed(rate: float, blamed: list[int]) -> None:
    hosts = seen(3, l12=(rate, 5e-5))
    hosts = [replace(each, host=replace(each.host, machine="m")) if i else each for i, each in enumerate(hosts)]
    assert [finding.at for finding in judge(hosts) if finding.level is Level.BAD] == blamed


def test_a_host_that_is_far_away_is_blamed_for_it() -> None:
    far = (1.25e9, 0.01)
    (found,) = judge(seen(4, l03=far, l13=far, l23=far))
    assert (found.at, found.what) == (3, "all links to it: 10 ms for a round trip, where hosts reach 50 µs")


@pytest.mark.parametrize("held_up", [{6}, {6, 7}, {0, 5}])
def test_a_transfer_that_is_held_up_is_not_taken_for_the_cable(held_up: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host is busy for a second in the midst of some transfers. 10 Gbit/s, without a round trip."""
    now_s, sizes = 0.0, list[int]()

    class Cable(Asks):
        def __init__(self) -> None: ...

        def _send(self, n_bytes: int) -> float:
            nonlocal now_s
            now_s += n_bytes / 1.25e9 + (len(sizes) in held_up)
            sizes.append(n_bytes)
            return now_s

    monkeypatch.setattr(links.time, "perf_counter", lambda: now_s)
    assert Cable().bandwidth(0.0) == pytest.approx(1.25e9)
    assert held_up < set(range(len(sizes)))


def test_a_network_that_is_slow_everywhere_is_a_warning() -> None:
    everywhere = {f"l{i}{j}": (1e6, 5e-5) for i in range(3) for j in range(3)}
    assert levels(judge(seen(3, **everywhere))) == [("warning", None)]


def test_links_within_a_host_are_no_measure_for_others() -> None:
    hosts = seen(2)
    local = tuple(replace(link, bandwidth=1e6, is_local=True) for link in hosts[0].links)
    assert judge([replace(hosts[0], links=local), hosts[1]]) == []


def test_who_is_not_reached_is_told_by_who_tried() -> None:
    hosts = seen(2)
    hosts[0] = replace(hosts[0], links=(Link(0, 1, problem="timed out"),))
    (found,) = judge(hosts)
    assert (found.level, found.at) == (Level.BAD, 0) and "does not reach h1: timed out" in found.what


def test_a_clock_is_wrong_only_beyond_what_is_certain() -> None:
    hosts = seen(3)
    hosts[1] = replace(hosts[1], clock=Clock(-3.0, 0.01))
    hosts[2] = replace(hosts[2], clock=Clock(0.3, 0.25))
    (found,) = judge(hosts)
    assert (found.level, found.at, found.what) == (Level.WARNING, 1, "its clock is 3.00 s behind")


def test_a_group_that_cannot_be_built_is_bad() -> None:
    hosts = seen(2)
    hosts[1] = replace(hosts[1], group_problem="connection refused")
    assert levels(judge(hosts)) == [("bad", 1)]


# -- how an agent has its host measured --------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_in_time_is_bad(tmp_path: Path) -> None:
    found = child.report(2, tmp_path, os.environ, 0.01)
    assert (found.n_ranks, found.problem) == (2, "no answer within 0.01 s")
    assert list(bad(found)) == [0]


def test_why_a_host_could_not_be_measured_is_in_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psutil.py").write_text("raise ImportError('not for this Python')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = child.report(1, tmp_path, os.environ, 100.0)
    assert found.problem == "exit code 1: ImportError: not for this Python"


def test_a_host_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", 1), ("WORLD_SIZE", 3), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", server.port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(probe, "MEET_S", 0.5)
    first = probe.Meeting()
    first.store.set("measured 0", "")
    first.store.add("measured n", 1)
    with pytest.raises(SystemExit, match=r"not all hosts were measured within 0\.5 s: rank 2 hangs"):
        first.all("measured")


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_two_agents_check_each_other(tmp_path: Path) -> None:
    """The digests of one machine agree; its speeds are not compared, so it may be busy."""
    command = [sys.executable, "-m", "odyssey_cli", "check", "--nnodes=2", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{free_port()}", f"--log-dir={tmp_path / 'logs'}"]
    agents = [
        subprocess.Popen(
            [*command, f"--json={tmp_path / f'{i}.json'}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    outputs = [agent.communicate() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    (answer,) = tmp_path.glob("*.json")
    leader = int(answer.stem)
    assert "2 hosts: all good" in outputs[leader][0] and outputs[1 - leader][0] == ""
    checked = json.loads(answer.read_text())
    assert checked["is_good"]
    for i, its in enumerate(checked["hosts"]):
        assert its["host"]["devices"][0]["flops"] > 0 and not its["group_problem"]
        ((link),) = its["links"]
        assert (link["source"], link["target"], link["is_local"], link["problem"]) == (i, 1 - i, True, "")
        assert link["bandwidth"] > 0 and link["round_trip_s"] > 0
    assert abs(checked["hosts"][1]["clock"]["ahead_s"]) <= checked["hosts"][1]["clock"]["uncertainty_s"]
    assert not (tmp_path / "logs").exists()


BROKEN = """
import sys
if any("fitness.child" in word for word in sys.orig_argv):
    import torch
    right = torch.matmul
    torch.matmul = lambda a, b: right(a, b) * 1.0001
"""
"""A sitecustomize.py for the process that checks a host: it computes, only not quite."""


LEFT_OUT = "waits for a place: its host is left out: cpu computes other bits than"


@pytest.mark.soak
def test_a_host_that_comes_late_is_compared_also_when_another_agent_leads(start: Callable[..., Agent], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(BROKEN)
    given = {"nnodes": "2:9", "max_restarts": 9, "detect": "2s", "check": None, "rdzv_conf": "last_call_timeout=1"}
    first = start("--wait", "9", **given)
    first.until(lambda line: "leading at" in line)
    others = [start("--wait", "9", **given) for _ in range(2)]
    for agent in (first, *others):
        agent.until(lambda line: line.startswith("SEAT") and line.split()[3] == "3")
    broken = start("--wait", "9", **given, on=lambda command: ["env", f"PYTHONPATH={tmp_path / 'broken'}", *command])
    broken.until(lambda line: "its host is left out: cpu computes other bits than 3 equal devices of 4" in line)
    first.until(lambda line: LEFT_OUT in line)
    first.process.kill()
    broken.until(lambda line: "its host is left out: cpu computes other bits than 2 equal devices of 3" in line)
    for agent in others:
        agent.until(lambda line: line.startswith("SEAT") and line.split()[3] == "2")


def test_a_run_leaves_out_a_host_that_computes_other_bits(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(BROKEN)
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    options = ["--nnodes=2", "--check", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    options += ["--rdzv-conf=last_call_timeout=300", f"--log-dir={tmp_path / 'logs'}", str(script)]
    agents = [Agent(*options)]
    try:
        agents[0].until(lambda line: "1 of 2 agents here" in line)
        agents.append(Agent(*options, on=lambda command: ["env", f"PYTHONPATH={tmp_path / 'broken'}", *command]))
        agents[0].until(lambda line: "waits for a place: all hosts are compared first" in line)
        agents.append(Agent(*options))
        codes = [agent.end() for agent in agents]
    finally:
        for agent in agents:
            agent.process.kill()
            agent.end()
    leader, broken, spare = agents
    said = "\n".join("".join(agent.lines) for agent in agents)
    assert codes == [0, 0, 0], said
    assert leader.assignments() | spare.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}, said
    assert broken.assignments() == set() and any(
        "its host is left out: cpu computes other bits" in line for line in broken.lines
    )
    assert any("check: " in line and "computes other bits than 2 equal devices of 3" in line for line in leader.lines)
