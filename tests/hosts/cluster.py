"""Jobs with an agent on each of several hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from perfmodel.profile import profile as profiles
from tests import exactness, reference
from tests.agent_runs import TRAIN, profile_of_own_processors
from tests.held import Held
from tests.hosts.network import Hosts, Impossible
from tests.launcher.cluster.test_agents import Agent

JOB = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule")


class Cluster:
    """Hosts with an agent each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.agents: dict[int, Agent] = {}
        self.out = folder / "out.pt"
        self.n_steps = 100
        self.pause_s = 0.03
        """The steps of a Job, and the pause after each: enough for hosts to come back before its end."""
        self._holds: tuple[str, ...] = ()

    def start(self, i: int, script: str, *arguments: str, **options: object) -> Agent:
        """The agent of host i. The endpoint is on h1."""
        values = {"rdzv-backend": "c10d", "rdzv-endpoint": "h1:29400", "log-dir": self.folder / f"logs{i}"} | options
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        self.agents[i] = Agent(*flags, script, *arguments, on=lambda command: self.hosts.command(i, command))
        return self.agents[i]

    @contextlib.contextmanager
    def held_after(self, step: int) -> Iterator[None]:
        """Scripts that come to the end of this step wait there, until the end of the context."""
        held = Held(self.folder / f"held-{step}", step)
        self._holds = held.arguments
        try:
            yield
        finally:
            held.release()

    def start_training(self, i: int, **options: object) -> None:
        steps = ("--steps", str(self.n_steps), "--pause", str(self.pause_s), *self._holds)
        self.start(i, TRAIN, *JOB, *steps, "--out", str(self.out), **options)

    def own_processors(self) -> Path:
        """A profile for jobs that are to take hosts in: else the price has to say so, and a busy machine's may not."""
        path = self.folder / "profile.json"
        profiles.write(profile_of_own_processors(), path)
        return path

    def train(self, **options: object) -> None:
        """A Job of two ranks on each host."""
        n = len(self.hosts.numbers)
        given = {"nnodes": f"1:{n}", "nproc_per_node": 2, "layout": f"{n}x2", "rdzv_conf": "last_call_timeout=60"} | options
        for i in self.hosts.numbers:
            self.start_training(i, **given)
        self.agents[1].until(lambda line: line.startswith("step 5 "))

    def assert_exact(self) -> None:
        """What was trained is what one process trains."""
        losses, expected = exactness.expected_of("gpt", self.n_steps, 15, 2)
        result = torch.load(self.out)
        assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
        assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())

    def log(self, i: int) -> str:
        """What the job's log of host i has so far."""
        return "".join(path.read_text() for path in (self.folder / f"logs{i}").glob("*/events.jsonl"))

    def lines(self) -> str:
        return "".join(f"h{i}: {line}" for i, agent in self.agents.items() for line in agent.lines)

    def close(self) -> None:
        self.hosts.close()
        for agent in self.agents.values():
            agent.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    made: list[Cluster] = []

    def make(n: int) -> Cluster:
        try:
            made.append(Cluster(Hosts(n, tmp_path, 100 + os.getpid() % 100), tmp_path))
        except Impossible as error:
            pytest.skip(f"no network namespaces here: {error}")
        return made[-1]

    yield make
    for one in made:
        one.close()
