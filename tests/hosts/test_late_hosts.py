"""Hosts that come while a Job runs: their ranks and those that were there first reach each other, however the job began."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.cluster import Cluster, cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
def test_ranks_that_began_alone_are_reached_by_those_of_a_host_that_comes_late(cluster: Callable[[int], Cluster]) -> None:
    """Until then nothing has told by which address: the host's own name stands for one that only the host itself can use."""
    its = cluster(2)
    its.n_steps = 30
    its.hosts.names(1).write_text("127.0.0.1 localhost\n127.0.1.1 h1\n")
    its.hosts.names(2).write_text("127.0.0.1 localhost\n")
    given = {"nnodes": "1:2", "nproc_per_node": 2, "detect": "2s", "rdzv_conf": "last_call_timeout=0"}
    given |= {"profile": its.own_processors()}
    given |= {"rdzv_endpoint": f"[{its.hosts.address(1, ipv6=True)}]:29400"}
    with its.held_after(10):
        its.start_training(1, **given)
        its.agents[1].until(lambda line: line.startswith("step 10 "))
        its.start_training(2, **given)
        its.agents[1].until(lambda line: "ranks 2 and 3 have joined" in line)
    its.agents[1].until(lambda line: "all stood still for" in line)
    assert [agent.end() for agent in its.agents.values()] == [0, 0], its.lines()
    its.assert_exact()
    assert "lost its connection" not in its.lines()
