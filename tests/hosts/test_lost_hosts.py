"""Hosts that crash, freeze and lose their network: the Job goes on exactly, and nothing is left anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.hosts.cluster import Cluster, cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.timeout(300)


PLAIN = """
import sys
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"all {int(total)}", flush=True)
if int(total) == int(sys.argv[1]):
    time.sleep(1000)
"""


def test_a_host_that_loses_its_power_is_recovered_from(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps = 25
    its.train(detect="2s")
    its.hosts.crash(3)
    assert its.agents[1].end() == its.agents[2].end() == 0, its.lines()
    assert "agent" in its.lines() and "was lost (nothing heard of it for 2 s)" in its.lines()
    its.assert_exact()
    assert not its.hosts.pids(1) and not its.hosts.pids(2)


@pytest.mark.soak
def test_a_host_that_is_cut_off_for_a_while_only_stands_still(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(2)
    its.n_steps = 25
    its.train(detect="10s")
    its.hosts.cut(2)
    its.agents[2].until(lambda line: "is silent: the ranks here stand still" in line)
    its.hosts.heal(2)
    assert its.agents[1].end() == its.agents[2].end() == 0, its.lines()
    assert "is heard: the ranks go on" in its.lines()
    assert "lost" not in its.lines()
    its.assert_exact()


@pytest.mark.soak
def test_a_host_that_is_frozen_for_a_while_costs_nothing(cluster: Callable[[int], Cluster]) -> None:
    """Its ranks are as still as the rest of it, and the others wait for them."""
    its = cluster(2)
    its.train(detect="10s")
    its.hosts.freeze(2)
    time.sleep(3.0)  # shorter than --detect
    its.hosts.thaw(2)
    assert its.agents[1].end() == its.agents[2].end() == 0, its.lines()
    assert "lost" not in its.lines()
    its.assert_exact()


@pytest.mark.soak
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_half_of_the_hosts_are_lost_and_those_with_the_leading_one_go_on(
    cluster: Callable[[int], Cluster], at_once: bool
) -> None:
    its = cluster(4)
    its.train(detect="2s", layout="8x1")  # any two hosts have all layers
    its.hosts.crash(3)
    if not at_once:
        its.agents[1].until(lambda line: "recovered in" in line)
    its.hosts.crash(4)
    assert its.agents[1].end() == its.agents[2].end() == 0, its.lines()
    its.assert_exact()
    assert not its.hosts.pids(1) and not its.hosts.pids(2)


@pytest.mark.soak
def test_another_agent_leads_after_a_host_was_lost_before(cluster: Callable[[int], Cluster]) -> None:
    """Nobody has the ranks that were lost with that."""
    its = cluster(4)
    its.train(detect="2s")
    its.hosts.crash(4)
    its.agents[1].until(lambda line: "recovered in" in line)
    its.hosts.crash(1)
    assert its.agents[2].end() == its.agents[3].end() == 0, its.lines()
    its.assert_exact()
    assert not its.hosts.pids(2) and not its.hosts.pids(3)


def test_a_host_that_comes_late_has_ranks_of_a_plain_script(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    its = cluster(3)
    for i in (1, 2):
        its.start(i, str(script), "2", nnodes="2:3", rdzv_conf="last_call_timeout=1")
    its.agents[1].until(lambda line: line.startswith("all 2"))
    its.start(3, str(script), "2", nnodes="2:3")
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    assert its.lines().count("all 3") == 3
    assert not any(its.hosts.pids(i) for i in its.hosts.numbers)


@pytest.mark.soak
def test_a_host_that_comes_late_to_a_job_is_taken_in(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    flags = {"nnodes": "2:3", "nproc_per_node": 2, "layout": "2x2", "rdzv_conf": "last_call_timeout=1"}
    flags |= {"profile": its.own_processors()}
    with its.held_after(5):
        for i in (1, 2):
            its.start_training(i, **flags)
        its.agents[1].until(lambda line: line.startswith("step 5 "))
        its.start_training(3, **flags)
        its.agents[1].until(lambda line: "ranks 4 and 5 have joined" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    its.assert_exact()


@pytest.mark.soak
@pytest.mark.parametrize("what", ["cut", "freeze"])
def test_a_host_that_comes_back_too_late_ends_its_ranks_and_asks_again(cluster: Callable[[int], Cluster], what: str) -> None:
    its = cluster(3)
    its.train(detect="2s")
    lose, give_back = (its.hosts.cut, its.hosts.heal) if what == "cut" else (its.hosts.freeze, its.hosts.thaw)
    lose(3)
    its.agents[1].until(lambda line: "recovered in" in line)
    give_back(3)
    its.agents[3].until(lambda line: "cut off for too long: the job goes on without this agent" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    its.assert_exact()
    assert not any(its.hosts.pids(i) for i in its.hosts.numbers)


@pytest.mark.soak
@pytest.mark.parametrize("lost", [2, 1], ids=["a member's", "the leading one's"])
def test_a_plain_script_starts_again_with_the_hosts_that_are_left(
    cluster: Callable[[int], Cluster], tmp_path: Path, lost: int
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    its = cluster(3)
    for i in its.hosts.numbers:
        its.start(i, str(script), "3", nnodes="1:3", max_restarts=1, detect="2s", rdzv_conf="last_call_timeout=60")
    for agent in its.agents.values():
        agent.until(lambda line: line.startswith("all 3"))
    its.hosts.crash(lost)
    left = [i for i in its.hosts.numbers if i != lost]
    assert [its.agents[i].end() for i in left] == [0, 0], its.lines()
    assert its.lines().count("all 2") == 2
    assert not any(its.hosts.pids(i) for i in left)


def test_another_agent_leads_when_the_leading_ones_host_loses_its_power(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps = 25
    its.train(detect="2s")
    its.hosts.crash(1)
    assert its.agents[2].end() == its.agents[3].end() == 0, its.lines()
    assert its.lines().count("leads from now on") >= 1
    assert f"{its.n_steps} steps in" in its.lines() and "recovered from the loss of 2 ranks" in its.lines()
    its.assert_exact()
    assert not its.hosts.pids(2) and not its.hosts.pids(3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("apart", "goes_on"),
    [((1,), (2, 3, 4)), ((4,), (1, 2, 3)), ((3, 4), (1, 2))],
    ids=["the leading one alone", "another one alone", "halves"],
)
def test_of_two_sides_of_a_network_one_goes_on(
    cluster: Callable[[int], Cluster], apart: tuple[int, ...], goes_on: tuple[int, ...]
) -> None:
    """Most agents, or the half with the leading one; the others end, and say why."""
    its = cluster(4)
    its.train(detect="2s", layout="8x1")
    its.hosts.partition(apart)
    ended = {i: agent.end() for i, agent in its.agents.items()}
    assert ended == {i: 0 if i in goes_on else 1 for i in its.hosts.numbers}, its.lines()
    its.assert_exact()
    assert not any(its.hosts.pids(i) for i in its.hosts.numbers)


@pytest.mark.soak
def test_a_leading_agent_that_comes_back_joins_again_and_does_no_harm(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.train(detect="2s")
    its.hosts.freeze(1)
    its.agents[2].until(lambda line: "leads from now on" in line)
    its.hosts.thaw(1)
    its.agents[1].until(lambda line: "the ranks here end, and this agent joins again" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    its.assert_exact()


@pytest.mark.soak
def test_one_agent_after_another_may_lead(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(4)
    its.train(detect="2s", layout="4x2", survive_nodes=1)
    its.hosts.crash(1)
    line = its.agents[4].until(lambda line: "leads from now on" in line)
    found = re.search(r"\(h(\d)\) leads|10\.\d+\.0\.(\d):", line)
    assert found is not None
    leads = int(found[1] or found[2])
    its.agents[leads].until(lambda line: "recovered in" in line)  # h1 votes no more
    its.hosts.crash(leads)
    left = [i for i in (2, 3, 4) if i != leads]
    assert [its.agents[i].end() for i in left] == [0, 0], its.lines()
    its.assert_exact()


ENDS = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("waits", flush=True)
if os.uname().nodename == "h3":
    with open(sys.argv[1]) as file:
        file.read()
"""


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [(2,), (1,), (1, 2)], ids=["a member's", "the leading one's", "both"])
def test_hosts_that_stand_still_at_the_end_of_a_job_keep_nobody(
    cluster: Callable[[int], Cluster], tmp_path: Path, frozen: tuple[int, ...]
) -> None:
    """Its ranks have ended; another host's end while these stand still. Nor do they keep each other when they go on."""
    script, pipe = tmp_path / "ends.py", tmp_path / "pipe"
    script.write_text(ENDS)
    os.mkfifo(pipe)
    n = 1 + 2 * len(frozen)
    its = cluster(n)
    for i in its.hosts.numbers:
        its.start(i, str(script), str(pipe), nnodes=n, detect="2s")
    for agent in its.agents.values():
        agent.until(lambda line: line.startswith("waits"))
    others = [i for i in its.hosts.numbers if i not in frozen]
    while any(its.log(i).count('"rank_exited"') < n - 1 for i in others):
        time.sleep(0.05)  # all have agreed upon it
    for i in frozen:
        its.hosts.freeze(i)
    with pipe.open("w"):
        pass
    assert {its.agents[i].end() for i in others} == {0}, its.lines()
    for i in frozen:
        its.hosts.thaw(i)
    is_known = 1 not in frozen  # to the others, when they ended
    assert {its.agents[i].end() for i in frozen} == {0 if is_known else 1}, its.lines()
    came_late = ("nobody of it is left", "and too few others are heard to go on without it")
    for i in frozen:
        assert any(words in line for line in its.agents[i].lines for words in came_late) != is_known, its.lines()
    assert not any(its.hosts.pids(i) for i in its.hosts.numbers)


@pytest.mark.soak
def test_of_ranks_that_their_cut_off_agent_holds_nobody_is_told_to_continue_them(
    cluster: Callable[[int], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would run on while the job goes on without them. They are no stalled ones, nor late."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    its = cluster(3)

    def say(i: int, *command: str) -> str:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"state{i}"))
        argv = its.hosts.command(i, [sys.executable, "-m", "odyssey_cli", *command])
        return subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120).stdout

    for i in its.hosts.numbers:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"state{i}"))
        given = {"nnodes": 3, "nproc_per_node": 1, "detect": "4s", "stall_timeout": "1s", "rdzv_conf": "last_call_timeout=60"}
        its.start(i, str(script), "3", **given)
    for agent in its.agents.values():
        agent.until(lambda line: line.startswith("all 3"))
    while its.log(3).count("rank_started") < 3:
        time.sleep(0.01)
    its.hosts.cut(1)  # it leads
    its.hosts.cut(3)
    for i in (1, 3):
        its.agents[i].until(lambda line: "the ranks here stand still" in line)
        shown = say(i, "status")
        assert "cut off, ranks stand still" in shown and "held by its agent, which is cut off" in shown
        assert "stopped by a signal" not in shown
    assert its.agents[1].end() == its.agents[3].end() == 1, its.lines()  # after a while in which all are looked at
    assert "-CONT" not in its.lines() and "stopped by a signal" not in its.lines()
    assert all("stopped by a signal" not in its.log(i) for i in (1, 3))
    assert not list(tmp_path.glob("logs*/*/held"))


@pytest.mark.soak
@pytest.mark.timeout(900)  # one process trains as many steps, to compare
def test_a_host_that_was_cut_off_is_taken_in_again_when_it_is_back_and_once_more(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps, its.pause_s = 400, 0.2  # a host that is lost twice has to wait for a while
    its.train(detect="2s", profile=its.own_processors(), strategy="reroute")  # so that it pays to have the places filled again
    for _ in range(2):
        its.hosts.cut(3)
        its.agents[1].until(lambda line: "recovered in" in line)
        its.hosts.heal(3)
        its.agents[1].until(lambda line: "have joined" in line)
        its.agents[1].until(lambda line: "all stood still for" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    its.assert_exact()


@pytest.mark.soak
def test_the_host_that_led_is_taken_in_again_when_it_is_back(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps, its.pause_s = 175, 0.2
    its.train(detect="2s", profile=its.own_processors())
    its.hosts.cut(1)
    its.agents[1].until(lambda line: "stand still" in line)
    its.agents[2].until(lambda line: "leads from now on" in line or "recovered in" in line)
    its.hosts.heal(1)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    # Beside the training, where its ranks may be worth no more than to stand by; or, if it was back before there was a plan,
    # within the recovery.
    taken_in = ("ranks 0 and 1 have joined", "ranks 0 and 1 stand by", "plan respawn")
    assert any(text in its.lines() for text in taken_in), its.lines()
    its.assert_exact()
