"""Units that are cut at random moments, and recoveries that are cut in their turn: real ranks end with the exact parameters.

A connection that is lost at a commit point leaves some ranks with a step and others without. A Prepare that comes to some ranks
only leaves those at the next step, before the gate. Where layers move, a cut leaves some of them at both ends of their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from launcher.coordinator import gate
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.rest import Rest, rest_of_step
from odyssey.protocol.orders import Finish, Pause
from odyssey.protocol.reports import Broken, Finished, Hello, Offered, Paused, Ready
from odyssey.protocol.units import FIRST, Position, position_after
from strategies.building.compose import compose, n_micro_batches_of
from tests.agent_runs import nothing_left
from tests.exactness import EXACT, N_STEPS, assert_told, told_of
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


def have_said(agent: MiniAgent, *kinds: type) -> set[int]:
    """The ranks that have, in the newest generation."""
    return {
        rank
        for rank, heard in agent.heard.items()
        if any(isinstance(its, kinds) and its.generation == agent.generation for its in heard)
    }


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
            self._agent.until(lambda until=until: have_said(self._agent, Broken) or self._next[0] >= min(until, N_STEPS))
            self._go_on()

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


class Changes:
    """What is done to a job by `random`: at every cut layers may move, ranks are lost, and others come.

    `held`: its script waits behind the unit before `end`.
    """

    def __init__(self, agent: MiniAgent, held: Held, end: Position, random: Random) -> None:
        self._agent = agent
        self._held = held
        self._end = end
        self._random = random
        self._n_ranks = len(agent.processes)

    @property
    def _next(self) -> Position:
        """The unit that is not final yet."""
        return position_after(self._agent.results[-1]) if self._agent.results else FIRST

    def to_the_end(self) -> None:
        """One generation after the other, until that is all that is left."""
        self._agent.go()
        while self._next.is_before(self._end):
            until = min(Position(self._next.step + self._random.randint(0, 2), self._random.randint(0, 1)), self._end)
            self._agent.until(lambda until=until: bool(have_said(self._agent, Broken)) or not self._next.is_before(until))
            self._change()
        while self._is_last_cut():
            self._change()

    def _is_last_cut(self) -> bool:
        """Whether nobody has passed the last unit. Where some have, the others take it, and end their scripts with them."""
        agent = self._agent
        assert agent.plan is not None
        workers = set(agent.plan.workers)
        agent.until(lambda: bool(have_said(agent, Broken)) or self._ended >= workers)
        if self._ended >= workers:
            return False
        agent.generation += 1
        agent.order(Pause(agent.generation), *(agent.living - self._ended))
        agent.until(lambda: self._stopped | self._ended >= agent.living)
        if self._ended:
            agent.order(Finish(agent.generation, agent.results), *(agent.living - self._ended))
        return not self._ended

    @property
    def _stopped(self) -> set[int]:
        """The paused ranks but those that have passed the last unit, which are on their way to their scripts' ends."""
        now = self._agent.generation
        paused = (its for heard in self._agent.heard.values() for its in heard if isinstance(its, Paused))
        return {its.rank for its in paused if its.generation == now and not self._end.is_before(its.position)}

    @property
    def _ended(self) -> set[int]:
        """The ranks that have come to their scripts' ends."""
        return {rank for rank, heard in self._agent.heard.items() if any(isinstance(its, Finished) for its in heard)}

    def _change(self) -> None:
        agent, random = self._agent, self._random
        paused = self._come_and_go(agent.pause())
        for _ in range(random.choice((0, 1, 1, 2)) if self._next.is_before(self._end) else 0):
            ranks = random.choice([set(paused), {random.choice(sorted(paused))}])
            self._prepare(self._plan(paused), paused, ranks)
            kinds, n = random.choice([((Offered, Ready), 1), ((Ready,), 1), ((Ready,), len(ranks))])
            if ranks != set(paused):
                kinds, n = (Offered, Ready), 1
            agent.until(lambda kinds=kinds, n=n: len(have_said(agent, *kinds)) >= n)
            paused = self._come_and_go(agent.pause())
        plan = self._plan(paused)
        self._prepare(plan, paused, set(paused))
        if self._next == self._end:
            self._held.release()
        held = gate.held_at_end(paused, agent.results)
        assert gate.gate_problem(plan, agent.wait_ready(), self._next, held) is None
        agent.go()

    def _come_and_go(self, paused: dict[int, Paused]) -> dict[int, Paused]:
        """Perhaps a rank is lost, where others hold what it holds, and perhaps another is there."""
        agent, random = self._agent, self._random
        if not agent.results:
            return paused
        lost, held = random.choice(sorted(paused)), gate.held_at_end(paused, agent.results)
        left = frozenset[int]().union(*(its for rank, its in held.items() if rank != lost))
        if random.random() < 0.3 and left == frozenset[int]().union(*held.values()):
            agent.kill(lost)
            paused = agent.pause()
        absent = sorted(set(range(self._n_ranks)) - set(paused))
        if absent and random.random() < 0.5:
            agent.spawn(absent[0])
            agent.wait(Hello, absent[0])
            paused = agent.pause()
        return paused

    def _prepare(self, plan: Plan, paused: dict[int, Paused], ranks: set[int]) -> None:
        summed = {rank: its.summed for rank, its in paused.items() if its.position == self._next}
        self._agent.send_prepare(plan, *sorted(ranks), rest=rest_of_step(plan, summed))

    def _plan(self, paused: dict[int, Paused]) -> Plan:
        """Any stages of any ranks, once a unit is final."""
        agent, random = self._agent, self._random
        assert gate.roll_forward_problem(paused, agent.results) is None
        assert agent.plan is not None
        if not agent.results:
            return replace(agent.plan, generation=agent.generation, state_from=StateFrom.HOLDERS)
        held = {rank: frozenset(its) for rank, its in gate.held_at_end(paused, agent.results).items()}
        situation, n_layers = agent.situation(held, agent.profile), agent.plan.n_layers
        ranks = random.sample(sorted(paused), random.randint(1, len(paused)))
        pipelines = []
        for n in parts(random, len(ranks), random.randint(1, len(ranks))):
            row, ranks = ranks[:n], ranks[n:]
            ends = [*accumulate(parts(random, n_layers, n))]
            pipelines.append([Stage(*stage) for stage in zip(row, [0, *ends], ends, strict=False)])
        shares = parts(random, n_micro_batches_of(situation), len(pipelines))
        return prove(compose(situation, "any", pipelines, shares), held)


def parts(random: Random, total: int, n: int) -> list[int]:
    """So many numbers from 1 that add up to it."""
    cuts = [0, *sorted(random.sample(range(1, total), n - 1)), total]
    return [stop - first for first, stop in pairwise(cuts)]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 100))])
def test_whatever_is_cut_while_layers_move_and_ranks_come_and_go_all_units_are_exact(
    agent_of: Callable[..., MiniAgent], nothing_left: None, seed: int, tmp_path: Path
) -> None:
    random = Random(seed)
    layout = random.choice([*LAYOUTS])
    n_ranks, every, model = LAYOUTS[layout], random.randint(1, 4), random.choice(("gpt", "tied"))
    losses = [("--at-commit", random.randrange(n_ranks), random.randrange(2 * N_STEPS), "lose") for _ in range(3)]
    words = [word for loss in losses for word in loss]
    told = ["--model", model, "--eval-every", every, "--told", tmp_path / "told"]
    (tmp_path / "told").mkdir()
    held = Held(tmp_path / "hold", N_STEPS - 1)
    try:
        agent = agent_of(n_ranks, *EXACT, *told, *held.arguments, *words, "--out", tmp_path / "out.pt")
        agent.start(layout)
        Changes(agent, held, Position(N_STEPS, int(N_STEPS % every == 0)), random).to_the_end()
        ranks = agent.finish().keys()
    finally:
        held.release()
    assert_exact(tmp_path / "out.pt", model)
    wrote = {int(path.name) for path in (tmp_path / "told").iterdir()}
    assert ranks <= wrote  # one that was killed at the last unit has written, too
    assert_told(tmp_path / "told", wrote, told_of(model, N_STEPS, 15, 2, every), late=wrote)
