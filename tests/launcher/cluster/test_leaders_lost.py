"""The agent that leads is lost, and more than that: who leads next hears of no rank before it knows where all are."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
import torch

from tests import exactness, reference
from tests.agent_runs import TRAIN
from tests.held import Held
from tests.launcher.cluster.test_agents import Agent, start

__all__ = ["start"]
pytestmark = pytest.mark.timeout(240)
N_STEPS = 25
EXACT = ["--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule"]
GIVEN = {"script": TRAIN, "nnodes": "1:5", "layout": "5x1", "detect": "2s", "rdzv_conf": "last_call_timeout=100"}


def assert_exact(out: Path) -> None:
    """What was trained is what one process trains."""
    losses, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


def test_a_member_is_lost_with_the_leading_agent(start: Callable[..., Agent], tmp_path: Path) -> None:
    """The others' ranks find their connections closed while the one that leads next still waits for that member."""
    out = tmp_path / "out.pt"
    steps = ["--steps", str(N_STEPS), "--pause", "0.12", "--out", str(out)]
    steps += EXACT
    first = start(*steps, **GIVEN)
    first.until(lambda line: "leading at" in line)
    lost, *others = [start(*steps, **GIVEN) for _ in range(4)]
    first.until(lambda line: line.startswith("step 5 "))
    first.process.kill()
    lost.process.kill()
    seen = [agent.end() for agent in others]
    lines = [line for agent in others for line in agent.lines]
    assert seen == [0, 0, 0], lines
    assert_exact(out)


def log(folder: Path, i: int) -> str:
    """What the i-th agent has of the job's log so far."""
    return "".join(path.read_text() for path in (folder / f"logs{i}").glob("*/events.jsonl"))


def all_decided(folder: Path, agents: Iterable[int], what: str, n: int) -> None:
    """Wait until these agents have it in their logs that this was decided, so many times."""
    deadline = time.monotonic() + 60
    while any(log(folder, i).count(f'"{what}"') < n for i in agents):
        assert time.monotonic() < deadline, [log(folder, i) for i in agents]
        time.sleep(0.02)


def led_by(members: list[Agent]) -> int:
    """The number of the one that leads the others from now on, as the first of these says it."""
    found: Queue[str] = Queue()

    def look(agent: Agent) -> None:
        with contextlib.suppress(AssertionError):  # it is the one, and has ended
            found.put(agent.until(lambda line: re.search(r"agent \d leads from now on, at", line) is not None))

    for agent in members:
        Thread(target=look, args=(agent,)).start()
    return int(re.findall(r"agent (\d) leads", found.get(timeout=60))[0])


def test_a_job_that_is_stopped_before_all_are_heard_ends_for_those_that_come_later(
    start: Callable[..., Agent], tmp_path: Path
) -> None:
    given = {"script": "--no-python", "nnodes": "5", "detect": "5s"}
    agents: list[Agent] = []
    for i in range(5):
        agents.append(start("sleep", "1000", **given))
        agents[i].until(lambda line: "leading at" in line or "joined the job" in line)
    all_decided(tmp_path, range(5), "rank_started", 5)
    first, late, *others = agents
    late.process.send_signal(signal.SIGSTOP)
    first.process.kill()
    leads = led_by(others)
    agents[leads].process.send_signal(signal.SIGTERM)
    all_decided(tmp_path, [leads], "job_ended", 1)
    late.process.send_signal(signal.SIGCONT)
    assert [agent.end() for agent in (late, *others)] == [143] * 4, [agent.lines for agent in (late, *others)]


def failing(command: list[str]) -> list[str]:
    """The same agent with a bug, see tests/failing_agent.py."""
    return [part if part != "odyssey_cli" else "tests.failing_agent" for part in command]


@pytest.mark.parametrize("n_others", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_leading_agent_that_fails_by_a_bug_costs_itself_only(
    start: Callable[..., Agent], tmp_path: Path, n_others: int
) -> None:
    """Also where there is one other: it is told to lead."""
    out = tmp_path / "out.pt"
    steps = ["--steps", str(N_STEPS), "--out", str(out), *EXACT]
    given = GIVEN | {"nnodes": f"1:{1 + n_others}", "layout": f"{1 + n_others}x1"}
    first = start(*steps, **given, on=failing)
    first.until(lambda line: "leading at" in line)
    others = [start(*steps, **given) for _ in range(n_others)]
    assert first.end() == 70
    assert any("this is a bug of Odyssey, please report it" in line for line in first.lines)
    assert [agent.end() for agent in others] == [0] * n_others, [agent.lines for agent in others]
    assert_exact(out)


def test_of_two_jobs_that_meet_the_younger_ones_agents_join_the_older(start: Callable[..., Agent], tmp_path: Path) -> None:
    """All agents of the older one stand still while two others begin at the endpoint, where the one that led was lost. There is
    room for four by what these were told."""
    held, out = Held(tmp_path / "held", 20), tmp_path / "out.pt"
    steps = ["--steps", str(N_STEPS), "--pause", "0.1", "--out", str(out), *held.arguments, *EXACT]
    given = GIVEN | {"nnodes": "2:4", "layout": "auto"}
    first = start(*steps, **given | {"nnodes": "2:3"})
    first.until(lambda line: "leading at" in line)
    others = [start(*steps, **given) for _ in range(2)]
    first.until(lambda line: line.startswith("step 3 "))
    first.process.kill()
    all_decided(tmp_path, (1, 2), "leader_changed", 1)
    for agent in others:
        agent.process.send_signal(signal.SIGSTOP)
    younger = start(*steps, **given | {"rdzv_conf": "last_call_timeout=0"})
    younger.until(lambda line: "leading at" in line)
    member = start(*steps, **given)
    younger.until(lambda line: line.startswith("step 3 "))
    for agent in others:
        agent.process.send_signal(signal.SIGCONT)
    younger.until(lambda line: "an older job of this --rdzv-id is led at" in line)
    member.until(lambda line: "the job here is given up for an older one" in line)
    for agent in (younger, member):
        agent.until(lambda line: "joined the job led at" in line)
    held.release()
    seen = [agent.end() for agent in (*others, younger, member)]
    assert seen == [0, 0, 0, 0], [agent.lines for agent in (*others, younger, member)]
    assert_exact(out)
