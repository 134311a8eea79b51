"""One job of a run id goes on: an agent that comes anew to the endpoint begins no other one beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.cluster import Cluster, cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.timeout(300)

GIVEN = {"nnodes": "1:3", "nproc_per_node": 2, "layout": "3x2", "detect": "2s"}


def test_an_agent_that_is_started_again_at_the_endpoint_joins_the_job_that_lives(cluster: Callable[[int], Cluster]) -> None:
    """It would be enough for a job of its own, and nobody leads the first one yet when it comes."""
    its = cluster(3)
    its.n_steps, its.pause_s = 40, 0.15
    its.train(**GIVEN)
    first = its.agents[1]
    its.hosts.crash(1)
    its.hosts.heal(1)
    first.end()
    its.start_training(1, **GIVEN, rdzv_conf="last_call_timeout=0")
    its.agents[1].until(lambda line: "the job of this endpoint goes on: it is led at" in line)
    assert [its.agents[i].end() for i in (1, 2, 3)] == [0, 0, 0], its.lines()
    assert "generation 1: go" not in "".join(its.agents[1].lines)
    its.assert_exact()


@pytest.mark.soak
def test_of_two_jobs_that_meet_the_younger_one_is_given_up_for_the_older(cluster: Callable[[int], Cluster]) -> None:
    """Each has begun where nobody of the other could be heard."""
    its = cluster(3)
    its.n_steps, its.pause_s = 500, 0.1
    its.train(**GIVEN)
    first = its.agents[1]
    its.hosts.partition((1,))
    its.agents[2].until(lambda line: "leads from now on" in line)
    first.process.kill()
    first.end()
    its.start_training(1, **(GIVEN | {"layout": "1x2", "rdzv_conf": "last_call_timeout=0"}))
    its.agents[1].until(lambda line: "an earlier job of this --rdzv-id" in line)
    its.agents[1].until(lambda line: line.startswith("step 5 "))
    its.hosts.unite()
    its.agents[1].until(lambda line: "an older job of this --rdzv-id is led at" in line)
    its.agents[1].until(lambda line: "joined the job led at" in line)
    assert [its.agents[i].end() for i in (1, 2, 3)] == [0, 0, 0], its.lines()
    its.assert_exact()


@pytest.mark.soak
def test_a_leading_agent_that_was_cut_off_joins_again_as_a_member(cluster: Callable[[int], Cluster]) -> None:
    its = cluster(3)
    its.n_steps, its.pause_s = 40, 0.15
    its.train(**GIVEN)
    its.hosts.cut(1)
    for i in (2, 3):
        its.agents[i].until(lambda line: "leads from now on" in line or "is heard: the ranks go on" in line)
    its.hosts.heal(1)
    its.agents[1].until(lambda line: "the ranks here end, and this agent joins again" in line)
    assert [its.agents[i].end() for i in (1, 2, 3)] == [0, 0, 0], its.lines()
    its.assert_exact()
    assert not any(its.hosts.pids(i) for i in its.hosts.numbers)
