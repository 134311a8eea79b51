"""Hosts find each other by whatever names and addresses they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster, cluster
from tests.hosts.network import Hosts

__all__ = ["cluster"]
pytestmark = pytest.mark.timeout(300)

MEETS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"all {int(total)}, store at {os.environ['MASTER_ADDR']}", flush=True)
dist.barrier()
"""


def by_name(hosts: Hosts) -> dict[str, str]:
    return {}


def by_an_address(hosts: Hosts) -> dict[str, str]:
    hosts.name_all({})
    return {"rdzv_endpoint": f"{hosts.address(1)}:29400"}


def by_ipv6(hosts: Hosts) -> dict[str, str]:
    hosts.name_all({})
    return {"rdzv_endpoint": f"[{hosts.address(1, ipv6=True)}]:29400"}


def by_a_name_that_is_the_hosts_own_on_debian(hosts: Hosts) -> dict[str, str]:
    for i in hosts.numbers:
        hosts.names(i).write_text(f"127.0.0.1 localhost\n127.0.1.1 h{i}\n")
        for other in set(hosts.numbers) - {i}:
            hosts.name(i, f"h{other}", hosts.address(other))
    return {}


def by_an_interface(hosts: Hosts) -> dict[str, str]:
    return {"local_addr": "eth0"}


@pytest.mark.parametrize(
    "meet",
    [
        by_a_name_that_is_the_hosts_own_on_debian,
        by_ipv6,
        *(pytest.param(way, marks=pytest.mark.soak) for way in (by_name, by_an_address, by_an_interface)),
    ],
)
@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.soak)])
def test_hosts_meet(
    cluster: Callable[[int], Cluster], tmp_path: Path, meet: Callable[[Hosts], dict[str, str]], backend: str
) -> None:
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    its = cluster(2)
    options = meet(its.hosts)
    if backend == "static":
        host, _, port = options.pop("rdzv_endpoint", "h1:29400").rpartition(":")
        options |= {"master_addr": host.strip("[]"), "master_port": port}
    for i in its.hosts.numbers:
        given = {"node_rank": i - 1, "rdzv_endpoint": ""} if backend == "static" else {}
        its.start(i, str(script), nnodes=2, **{"rdzv_backend": backend} | given | options)
    assert [agent.end() for agent in its.agents.values()] == [0, 0], its.lines()
    assert its.lines().count("all 2") == 2, its.lines()


def test_ranks_of_a_job_reach_each_other_by_ipv6(cluster: Callable[[int], Cluster]) -> None:
    """There are IPv4 addresses too, and nobody has given the hosts' names to anything."""
    its = cluster(2)
    its.n_steps = 30
    its.train(drill="step=20 kill=1", max_restarts=1, **by_ipv6(its.hosts))
    assert [agent.end() for agent in its.agents.values()] == [0, 0], its.lines()
    assert "recovered in" in its.lines()
    its.assert_exact()
