"""Steps that are cut at random moments, and recoveries that are cut in their turn: real ranks end with the exact parameters.

A connection that is lost at a commit point leaves some ranks with a step and others without. A Prepare that comes to some ranks
only leaves those at the next step, before the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.rest import Rest, rest_of_step
from odyssey.protocol.reports import Broken, Offered, Paused
from odyssey.protocol.units import FIRST, Position, position_after
from tests.agent_runs import nothing_left
from tests.exactness import EXACT, N_STEPS
from tests.held import Held
from tests.mini_agent import MiniAgent, forks
from tests.odyssey.runtime.test_session import agent_of, assert_exact

__all__ = ["agent_of", "forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
LAYOUTS = {"1x2": 2, "2x1": 2, "1x3": 3, "3x1": 3, "2x2": 4, "1x4": 4}
"""And how many ranks they have."""


@pytest.fixture
def held(nothing_left: None, tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "hold", N_STEPS - 1)
    yield held
    held.release()


class Cuts:
    """What is done to a job, by `random`. `held`: its script waits behind its last step."""

    def __init__(self, agent: MiniAgent, held: Held, layout: str, random: Random) -> None:
        self._agent = agent
        self._held = held
        self._random = random
        self._may_kill = layout in ("3x1", "2x2")

    @property
    def _next(self) -> Position:
        """The unit that is not final yet."""
        return position_after(self._agent.results[-1]) if self._agent.results else FIRST

    def to_the_last_step(self) -> None:
        """One generation after the other, until that is final and all have it."""
        self._agent.go()
        while self._next < Position(N_STEPS, 0):
            until = self._next[0] + self._random.randint(0, 2)
            self._agent.until(lambda until=until: self._is_broken or self._next[0] >= min(until, N_STEPS))
            self._go_on()

    @property
    def _is_broken(self) -> bool:
        """Somebody in the generation that runs has lost a connection."""
        reports = [report for its in self._agent.heard.values() for report in its if isinstance(report, Broken)]
        return any(report.generation == self._agent.generation for report in reports)

    def _go_on(self) -> None:
        agent, random = self._agent, self._random
        if self._may_kill and random.random() < 0.3:
            self._may_kill = False
            agent.kill(random.choice([*agent.heard]))
            paused = agent.pause()
            plan = agent.replan("reroute", paused)
        else:
            assert agent.plan is not None
            paused, plan = agent.pause(), agent.plan
        for _ in range(random.choice((0, 0, 1, 2)) if self._next < Position(N_STEPS, 0) else 0):
            some = random.sample(sorted(paused), random.randint(1, len(paused)))
            agent.send_prepare(self._now(plan), *some, rest=self._rest(plan, paused))
            if random.random() < 0.7:
                agent.until(lambda some=some: self._build_groups(some))
            paused = agent.pause()
        agent.send_prepare(self._now(plan), rest=self._rest(plan, paused))
        if self._next == Position(N_STEPS, 0):
            self._held.release()
        ready = agent.wait_ready()
        assert {report.position for report in ready.values()} == {self._next}
        assert not any(report.problem for report in ready.values())
        agent.go()

    def _build_groups(self, ranks: list[int]) -> bool:
        """Whatever these have taken over, they have by then."""
        heard, now = self._agent.heard, self._agent.generation
        return all(any(isinstance(its, Offered) and its.generation == now for its in heard[rank]) for rank in ranks)

    def _now(self, plan: Plan) -> Plan:
        return replace(plan, generation=self._agent.generation, step=self._next[0], state_from=StateFrom.HOLDERS)

    def _rest(self, plan: Plan, paused: dict[int, Paused]) -> Rest | None:
        summed = {rank: its.summed for rank, its in paused.items() if its.position == self._next}
        return rest_of_step(self._now(plan), summed)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 100))])
def test_whatever_is_cut_when_all_steps_are_exact(
    agent_of: Callable[..., MiniAgent], held: Held, seed: int, tmp_path: Path
) -> None:
    random = Random(seed)
    layout = random.choice([*LAYOUTS])
    n_ranks = LAYOUTS[layout]
    losses = [("--at-commit", random.randrange(n_ranks), random.randrange(N_STEPS - 1), "lose") for _ in range(3)]
    words = [word for loss in losses for word in loss]
    agent = agent_of(n_ranks, *EXACT, *held.arguments, *words, "--out", tmp_path / "out.pt")
    agent.start(layout)
    Cuts(agent, held, layout, random).to_the_last_step()
    agent.finish()
    assert_exact(tmp_path / "out.pt")
