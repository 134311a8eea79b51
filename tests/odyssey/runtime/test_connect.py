"""Groups of the next generation that are built beside the training, as the ranks that build them see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odyssey.plan.plan import Plan
from odyssey.protocol.orders import Connect, Drain
from odyssey.protocol.reports import Committed, Connected, Hello, Offered, Paused
from odyssey.protocol.units import Position
from odyssey.runtime.control import Control
from odyssey.runtime.phase import Phase
from tests.agent_runs import nothing_left
from tests.held import Held
from tests.launcher.coordinator.talk import make_plan
from tests.mini_agent import MiniAgent, forks
from tests.odyssey.runtime.test_drain import Out, agent_of, assert_all_stopped, grown, out, start_until
from tests.odyssey.runtime.test_session import held

__all__ = ["agent_of", "forks", "held", "nothing_left", "out"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def to_come(agent: MiniAgent) -> Plan:
    """The plan with rank 2, as far as it is known while the others train."""
    assert agent.plan is not None
    held = {rank: tuple(agent.plan.holds.get(rank, ())) for rank in range(3)}
    return grown(agent, {rank: Paused(rank, agent.generation, Position(0, 0), "between", its) for rank, its in held.items()})


def n_offers(agent: MiniAgent) -> int:
    return sum(isinstance(report, Offered) for reports in agent.heard.values() for report in reports)


def connected(agent: MiniAgent, number: int) -> None:
    answers = agent.wait(Connected, when=lambda report: report.number == number)
    assert {report.problem for report in answers.values()} == {""}


def with_a_newcomer(agent_of: Callable[..., MiniAgent], held: Held) -> MiniAgent:
    """It has joined, and the scripts of the others do not come back from their own code until `held` is released."""
    agent = agent_of(2, *held.arguments)
    start_until(agent, "2x1", Position(2, 0))
    agent.spawn(2)
    agent.wait(Hello, 2)
    return agent


def drained(agent: MiniAgent, held: Held) -> dict[int, Paused]:
    agent.ask_to_drain()
    agent.order(Drain(agent.generation), 2)
    held.release()
    paused = agent.paused()
    assert_all_stopped({rank: paused[rank] for rank in (0, 1)}, Position(4, 0))
    return paused


def test_the_next_generation_takes_groups_that_were_built_beside_the_script(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out
) -> None:
    agent = with_a_newcomer(agent_of, held)
    agent.order(Connect(agent.generation, 1, to_come(agent)))
    connected(agent, 1)
    n_before = n_offers(agent)

    ready = agent.prepare(grown(agent, drained(agent, held)))

    assert {report.position for report in ready.values()} == {Position(4, 0)}
    assert n_offers(agent) == n_before, "nobody has told again where it listens"
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_what_was_built_for_another_plan_is_let_go(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    agent = with_a_newcomer(agent_of, held)
    assert agent.plan is not None
    agent.order(Connect(agent.generation, 1, to_come(agent)))
    connected(agent, 1)
    agent.order(Connect(agent.generation, 2, agent.plan))  # of two ranks; rank 2 has no groups in it
    connected(agent, 2)
    n_before = n_offers(agent)

    agent.prepare(grown(agent, drained(agent, held)))

    assert n_offers(agent) > n_before
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_nothing_is_built_for_a_script_that_has_ended() -> None:
    """The agent may ask for it before it hears of that."""
    link: Any = SimpleNamespace(rank=0, report=pytest.fail)
    state: Any = SimpleNamespace(held=frozenset())
    asked: list[Connect] = []

    def groups_for(order: Connect) -> Any:
        asked.append(order)
        return SimpleNamespace(build_beside=lambda *told: None, release=lambda: None)

    control = Control(link, Phase(), state, lambda: None, groups_for)
    plan = make_plan([[(0, 0, 4)], [(1, 0, 4)]], None)
    control.handle(Connect(0, 1, plan))
    control.close()
    control.handle(Connect(0, 2, plan))
    assert [order.number for order in asked] == [1]


def test_the_others_train_on_where_one_never_connects_and_a_pause_ends_the_wait(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out, tmp_path: Path
) -> None:
    later = Held(tmp_path / "later", 4)  # they would end before they hear of the pause
    agent = with_a_newcomer(lambda n, *arguments: agent_of(n, *arguments, *later.arguments), held)
    agent.order(Connect(agent.generation, 1, to_come(agent)), 0, 1)
    held.release()
    agent.wait(Committed, 0, 1, when=lambda report: report.result.position == Position(4, 0))

    paused = agent.pause()
    later.release()
    agent.prepare(grown(agent, paused))

    assert not [report for reports in agent.heard.values() for report in reports if isinstance(report, Connected)]
    agent.go()
    agent.finish()
    out.assert_exact()
