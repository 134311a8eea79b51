"""A step whose nodes are hosts: they meet by name, and one of them loses its power."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import Hosts
from tests.slurm.cluster import Cluster, by_recipe, hosts, slurm_of_hosts

__all__ = ["hosts", "slurm_of_hosts"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
LOST = [pytest.param(3, id="a follower")]
"""Hosts that are lost. The first one runs the batch script, with which SLURM ends the job."""

GROUP = """
import os, signal, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
words = ["attempt", os.environ["ODYSSEY_ATTEMPT"], "rank", dist.get_rank(), "sum", int(total.item()), "on", os.uname().nodename]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
if os.environ["ODYSSEY_ATTEMPT"] == "0":
    signal.pause()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("host", LOST)
def test_hosts_meet_by_name_and_go_on_without_one_that_loses_its_power(
    slurm_of_hosts: Cluster, hosts: Hosts, tmp_path: Path, host: int
) -> None:
    cluster = slurm_of_hosts
    job = by_recipe(cluster, tmp_path, GROUP, "--nodes=3", "--elastic=1", "odyssey", "run", "--max-restarts=1", "train.py")
    job.wait_for("attempt 0", 3)
    assert job.lines("attempt 0") == [f"attempt 0 rank {n} sum 3 on h{n + 1}" for n in range(3)], job.story()
    assert "leading at n1:" in job.output
    hosts.crash(host)
    job.ends("COMPLETED")
    left = [n for n in (1, 2, 3) if n != host]
    assert job.lines("attempt 1") == [f"attempt 1 rank {rank} sum 2 on h{n}" for rank, n in enumerate(left)], job.story()
