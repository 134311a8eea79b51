"""A start on several hosts, one of which is cut off: the others begin the job without it, or wait until it is back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.cluster import Cluster, cluster
from tests.launcher.cluster.test_first_second import PROGRAM

__all__ = ["cluster"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]


def come(its: Cluster, **given: object) -> None:
    """Agents of three hosts, one after the other."""
    values = {"nnodes": "2:4", "detect": "2s", "max_restarts": 9, "rdzv_conf": "last_call_timeout=10"} | given
    for i in its.hosts.numbers:
        its.start(i, "--no-python", *PROGRAM, **values)
        if i < 3:
            its.agents[i].until(lambda line: "leading at" in line or "joined the job" in line)


def test_the_leading_agents_host_is_cut_off_while_others_are_awaited(cluster: Callable[[int], Cluster]) -> None:
    """Whether it goes on alone nobody knows, so it is looked for until it is back."""
    its = cluster(3)
    come(its, nnodes="3:4", rdzv_conf="last_call_timeout=60")
    its.agents[3].until(lambda line: "joined the job" in line)
    its.hosts.cut(1)
    its.agents[2].until(lambda line: "it asks to join again" in line)
    its.hosts.heal(1)
    its.agents[1].until(lambda line: "start sh" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()


def test_a_members_host_is_cut_off_while_others_are_awaited(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    come(its)
    its.agents[3].until(lambda line: "joined the job" in line)
    its.hosts.cut(2)
    assert its.agents[1].end() == its.agents[3].end() == 0, its.lines()
    assert its.lines().count("of 2\n") == 2, its.lines()


@pytest.mark.parametrize("struck", [1, 2], ids=["the leading one's", "a member's"])
@pytest.mark.parametrize("event", ["start sh", "BEGINS"], ids=["the job begins", "a rank begins"])
def test_a_host_is_cut_off_when_the_job_begins(cluster: Callable[[int], Cluster], event: str, struck: int) -> None:
    its = cluster(3)
    come(its, nnodes="2:3")
    its.agents[1].until(lambda line: event in line)
    its.hosts.cut(struck)
    others = [i for i in its.hosts.numbers if i != struck]
    assert [its.agents[i].end() for i in others] == [0, 0], its.lines()
    assert its.lines().count("of 2\n") >= 2, its.lines()
