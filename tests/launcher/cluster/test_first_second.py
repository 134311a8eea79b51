"""A start of several agents, with one of them struck at each of its events: the others begin the job, or go on with it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import pytest

from launcher.cluster.links import addresses, secret
from launcher.cluster.wire import LedBy
from odyssey.protocol.frames import packed
from tests.launcher.cluster.links import open_to
from tests.launcher.cluster.test_agents import Agent, endpoint_port, start
from tests.launchers import free_port

__all__ = ["start"]
pytestmark = pytest.mark.timeout(120)
PROGRAM = ("sh", "-c", "echo BEGINS; sleep 2; echo RANK $RANK of $WORLD_SIZE")
GIVEN = {"script": "--no-python", "nnodes": "2:4", "detect": "2s", "max_restarts": 9, "rdzv_conf": "last_call_timeout=4"}


def come(start: Callable[..., Agent], n: int, **given: object) -> list[Agent]:
    """This many agents, one after the other."""
    agents = []
    for _ in range(n):
        agents.append(start(*PROGRAM, **(GIVEN | given)))
        agents[-1].until(lambda line: "leading at" in line or "joined the job" in line)
    return agents


def assert_others_end_well(agents: list[Agent], struck: int) -> None:
    others = [agent for i, agent in enumerate(agents) if i != struck]
    ended = [agent.end() for agent in others]
    lines = [line for agent in others for line in agent.lines]
    assert ended == [0] * len(others), lines
    n = len(others)
    assert {f"RANK {rank} of {n}\n" for rank in range(n)} <= set(lines), lines


@pytest.mark.parametrize("struck", [0, pytest.param(1, marks=pytest.mark.soak)], ids=["the leading agent", "a member"])
def test_an_agent_is_killed_while_others_are_awaited(start: Callable[..., Agent], struck: int) -> None:
    agents = come(start, 3)
    agents[struck].process.kill()
    assert_others_end_well(agents, struck)


def test_an_agent_that_came_again_to_where_it_listened_is_waited_for_by_none_of_those_that_wait_for_it(
    start: Callable[..., Agent],
) -> None:
    """It came before another one, and now comes after that. The agent that leads is lost: both would wait for each other."""
    given = {"nnodes": "4", "rdzv_conf": "last_call_timeout=4"}
    first, lost, other = come(start, 3, **given)
    lost.process.kill()
    first.until(lambda line: "is gone" in line)
    again = come(start, 1, **given)
    first.process.kill()
    other.until(lambda line: "leading at" in line)
    last = come(start, 2, **given)
    assert_others_end_well([other, *again, *last], -1)


def test_an_agent_begins_at_an_endpoint_whose_first_agent_is_lost_before_it_took_others_in(start: Callable[..., Agent]) -> None:
    """Somebody has the endpoint when it comes, as one that is about to listen beside it, and has gone without a word."""
    gone = socket.create_server(("127.0.0.1", free_port()))
    given = GIVEN | {"nnodes": "2", "rdzv_endpoint": f"127.0.0.1:{gone.getsockname()[1]}"}
    first = start(*PROGRAM, **given)
    first.until(lambda line: "waiting for the leading agent at" in line)
    gone.close()
    first.until(lambda line: "the job begins here" in line)
    second = start(*PROGRAM, **given)
    assert_others_end_well([first, second], -1)


@pytest.mark.parametrize("n", [2, 3])
def test_agents_that_were_sent_on_to_a_job_that_is_over_begin_one_by_themselves(start: Callable[..., Agent], n: int) -> None:
    """Nobody listens where it was led. None of them waits for another one of them that leads no job."""
    agents = come(start, n, rdzv_conf="last_call_timeout=100")
    port, over = endpoint_port(agents[0]), free_port()
    with socket.create_connection(("127.0.0.1", addresses.control_ports(port)[0])) as connection:
        older = LedBy("none", "127.0.0.1", over, endpoint="127.0.0.1")
        open_to(connection, secret.key(os.environ, None), port).say_frame(packed(older))
        agents[0].until(lambda line: f"it is led at 127.0.0.1:{over}" in line)
    for agent in agents:
        agent.until(lambda line: "leading at" in line or "joined the job" in line)
    agents += come(start, 4 - n, rdzv_conf="last_call_timeout=100")
    assert_others_end_well(agents, -1)


@pytest.mark.parametrize("struck", [0, pytest.param(1, marks=pytest.mark.soak)], ids=["the leading agent", "a member"])
def test_an_agent_is_stopped_for_a_while_when_others_are_awaited(start: Callable[..., Agent], struck: int) -> None:
    agents = come(start, 3, rdzv_conf="last_call_timeout=100")
    agents[struck].process.send_signal(signal.SIGSTOP)
    others = [agent for i, agent in enumerate(agents) if i != struck]
    others[0].until(lambda line: "is silent" in line or "is gone: nothing heard of it" in line)
    agents[struck].process.send_signal(signal.SIGCONT)
    agents += come(start, 1, rdzv_conf="last_call_timeout=100")
    ended = [agent.end() for agent in agents]
    assert ended == [0] * 4, [agent.lines for agent in agents]


@pytest.mark.parametrize("struck", [0, 1], ids=["the leading agent", "a member"])
@pytest.mark.parametrize("event", ["start sh", "BEGINS"], ids=["the job begins", "a rank begins"])
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)], ids=lambda how: how.name
)
def test_an_agent_is_struck_when_the_job_begins(
    start: Callable[..., Agent], how: signal.Signals, event: str, struck: int
) -> None:
    """With all three, however late the last one comes: of two, one could not go on without the one that leads."""
    given = GIVEN | {"nnodes": "2:3", "rdzv_conf": "last_call_timeout=100"}
    agents = [*come(start, 2, **given), start(*PROGRAM, **given)]
    agents[0].until(lambda line: event in line)
    agents[struck].process.send_signal(how)
    assert_others_end_well(agents, struck)


def test_who_comes_to_a_job_whose_leading_agent_is_lost_before_all_know_begins_none_beside_it(
    start: Callable[..., Agent],
) -> None:
    """Each listens at an address of its own, none but the first at the endpoint's. The newcomer has only the word of that one
    that it is in, and would be enough for a job of its own."""

    def come(i: int, **more: object) -> Agent:
        lasts = ("sh", "-c", "echo RANK $RANK of $WORLD_SIZE; sleep 1000")
        return start(*lasts, **(GIVEN | {"nnodes": "3:4", "detect": "3s", "local_addr": f"127.0.0.{1 + i}"} | more))

    first = come(0)
    first.until(lambda line: "leading at" in line)
    others = [come(1), come(2)]
    for agent in (first, *others):
        agent.until(lambda line: "of 3" in line)
    for agent in others:
        agent.process.send_signal(signal.SIGSTOP)
    late = come(3, nnodes="1:4")
    late.until(lambda line: "joined the job" in line)
    first.process.kill()
    late.until(lambda line: "it asks to join again" in line)
    for agent in others:
        agent.process.send_signal(signal.SIGCONT)
    assert "joined the job" in late.until(lambda line: "leading at" in line or "joined the job" in line)
    late.until(lambda line: "of 3" in line)
