"""All hosts live, and most are silent for longer than `--detect`: nobody is lost, and the job goes on as it was."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.hosts.cluster import Cluster, cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.timeout(300)
LONG_S = 5.0
"""Longer than two times `--detect` of two seconds: who hears no leader has asked others whether it is to lead."""


def _goes_on(its: Cluster) -> None:
    assert [agent.end() for agent in its.agents.values()] == [0, 0, 0], its.lines()
    for words in ("the loss of", " lost: ", " was lost (", "asks to join again"):
        assert words not in its.lines(), its.lines()
    its.assert_exact()


@pytest.mark.soak
def test_most_hosts_stand_still_for_a_while(cluster: Callable[[int], Cluster]) -> None:
    """The leading one can decide nothing meanwhile, so it forgets nobody."""
    its = cluster(3)
    its.n_steps = 25
    its.train(detect="2s", layout="6x1")
    for i in (2, 3):
        its.hosts.freeze(i)
    its.agents[1].until(lambda line: "too few other agents are heard" in line)
    time.sleep(LONG_S)
    for i in (2, 3):
        its.hosts.thaw(i)
    _goes_on(its)


def test_all_hosts_stand_still_for_a_while(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps = 25
    its.train(detect="2s")
    for i in its.hosts.numbers:
        its.hosts.freeze(i)
    time.sleep(LONG_S)
    for i in its.hosts.numbers:
        its.hosts.thaw(i)
    _goes_on(its)


@pytest.mark.soak
def test_the_network_is_out_for_a_while(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps = 25
    its.train(detect="2s", layout="6x1")
    for i in its.hosts.numbers:
        its.hosts.cut(i)
    its.agents[1].until(lambda line: "too few other agents are heard" in line)
    time.sleep(LONG_S)
    for i in its.hosts.numbers:
        its.hosts.heal(i)
    _goes_on(its)
