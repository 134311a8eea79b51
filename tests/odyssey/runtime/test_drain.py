"""Ranks that stop behind a unit, so that others can come in: nothing is cut, nothing is done twice, and all is exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.moves import Move, move_runs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.proof import prove
from odyssey.protocol.orders import Drain, Go, Pause
from odyssey.protocol.reports import Broken, Committed, Hello, Paused
from odyssey.protocol.units import Position
from tests.agent_runs import TRAIN, nothing_left
from tests.exactness import EXACT, N_STEPS
from tests.held import Held
from tests.mini_agent import Forks, MiniAgent, forks
from tests.odyssey.runtime.test_session import assert_exact, held

__all__ = ["forks", "held", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
N_LOSSES = 8 * N_STEPS
"""Micro-batches of the whole job."""


class Out:
    """What a job leaves: `state`, and a byte in `count` for each micro-batch that was trained."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "out.pt"
        self.count = folder / "count"
        self.arguments = ("--out", str(self.state), "--count", str(self.count))

    def assert_exact(self) -> None:
        assert_exact(self.state)
        optimizer = torch.load(self.state)["state"]["optimizer"]
        steps = {float(its["step"]) for shard in optimizer.values() for its in shard["state"].values()}
        assert steps == {float(N_STEPS)}

    def assert_nothing_was_redone(self) -> None:
        assert self.count.stat().st_size == N_LOSSES


@pytest.fixture
def out(tmp_path: Path) -> Out:
    return Out(tmp_path)


@pytest.fixture
def agent_of(forks: Forks, nothing_left: None, out: Out) -> Iterator[Callable[..., MiniAgent]]:
    """Makes agents, whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(n_ranks: int, *arguments: object) -> MiniAgent:
            agent = MiniAgent(forks, n_ranks, Path(TRAIN), *EXACT, *out.arguments, *map(str, arguments))
            stack.callback(agent.close)
            return agent

        yield make


def start_until(agent: MiniAgent, layout: str, position: Position) -> None:
    """Train until all that have work have made the unit at `position`."""
    agent.start(layout)
    agent.go()
    assert agent.plan is not None
    agent.wait(Committed, *agent.plan.workers, when=lambda report: report.result.position == position)


def again(agent: MiniAgent) -> Plan:
    """The plan in force as the next generation."""
    assert agent.plan is not None
    step = agent.results[-1].position[0] + 1
    return replace(agent.plan, generation=agent.generation, step=step, state_from=StateFrom.HOLDERS)


def grown(agent: MiniAgent, paused: dict[int, Paused]) -> Plan:
    """A pipeline of one stage for each rank that has answered. Who holds nothing gets every layer, from another in turn."""
    plan = again(agent)
    ranks, n_layers = sorted(paused), plan.n_layers
    cuts = [plan.n_micro_batches * i // len(ranks) for i in range(len(ranks) + 1)]
    pipelines = [Pipeline((Stage(rank, 0, n_layers),), cuts[i], cuts[i + 1]) for i, rank in enumerate(ranks)]
    sources = [rank for rank in ranks if paused[rank].held]
    moves = [Move(k, sources[k % len(sources)], rank) for rank in ranks if rank not in sources for k in range(n_layers)]
    held = {rank: frozenset(report.held) for rank, report in paused.items()}
    return prove(replace(plan, blocks=blocks_of(pipelines), move_runs=move_runs(moves)), held)


def commits(agent: MiniAgent, rank: int) -> list[tuple[int, Position]]:
    """Generation and position of each unit that the rank has told of."""
    return [(report.generation, report.result.position) for report in agent.heard[rank] if isinstance(report, Committed)]


def assert_all_stopped(paused: dict[int, Paused], position: Position) -> None:
    assert {(report.position, report.phase) for report in paused.values()} == {(position, "between")}


def test_a_third_pipeline_comes_in_and_no_step_is_done_twice(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    """The evaluation that the scripts call behind the unit is the first of the next generation."""
    agent = agent_of(2, "--eval-every", "4", *held.arguments)
    start_until(agent, "2x1", Position(2, 0))
    agent.spawn(2)
    agent.wait(Hello, 2)

    agent.ask_to_drain()
    agent.order(Drain(agent.generation), 0, 1)  # said twice it is the same
    held.release()
    paused = agent.paused(0, 1)

    assert_all_stopped(paused, Position(4, 0))
    agent.order(Drain(agent.generation), 0, 1)
    agent.order(Pause(agent.generation), 2)
    paused |= agent.paused(2)
    ready = agent.prepare(grown(agent, paused))
    assert {report.position for report in ready.values()} == {Position(4, 0)}
    agent.go()
    agent.finish()

    first, second = (
        [(1, Position(step, 0)) for step in range(4)],
        [(2, Position(4, 0)), (2, Position(4, 1)), (2, Position(5, 0)), (2, Position(6, 0))],
    )
    assert [commits(agent, rank) for rank in range(3)] == [first + second, first + second, second]
    stops = {rank: [r.generation for r in agent.heard[rank] if isinstance(r, Paused)] for rank in range(3)}
    assert stops == {0: [2], 1: [2], 2: [2]}
    assert not [report for reports in agent.heard.values() for report in reports if isinstance(report, Broken)]
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_all_stop_behind_the_same_unit_though_one_of_them_was_told(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out
) -> None:
    """I12."""
    agent = agent_of(3, *held.arguments)
    start_until(agent, "3x1", Position(2, 0))

    agent.ask_to_drain(1)
    held.release()

    assert_all_stopped(agent.paused(), Position(4, 0))
    agent.prepare(again(agent))
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_a_drain_that_comes_with_go_stops_behind_the_first_unit(agent_of: Callable[..., MiniAgent], out: Out) -> None:
    agent = agent_of(2)
    agent.start("2x1")

    agent.order(Go(1))
    agent.ask_to_drain()
    paused = agent.paused()

    assert paused[0].position == paused[1].position
    agent.prepare(again(agent))
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_a_rank_that_trains_alone_stops_behind_its_unit(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    agent = agent_of(1, *held.arguments)
    start_until(agent, "1x1", Position(2, 0))
    agent.spawn(1)
    agent.wait(Hello, 1)

    agent.ask_to_drain()
    held.release()
    paused = agent.paused(0)

    assert_all_stopped(paused, Position(4, 0))
    agent.order(Pause(agent.generation), 1)
    agent.prepare(grown(agent, paused | agent.paused(1)))
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_a_drain_in_an_evaluation_stops_behind_it(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    """Rank 1 is held within it: in a layer, behind the start of the call."""
    agent = agent_of(2, "--eval-every", "3", "--slow", held.file.name, 1, 3)
    start_until(agent, "2x1", Position(2, 0))
    while agent.ping(1)[1].kind != "evaluate":
        pass

    agent.ask_to_drain()
    held.release()

    assert_all_stopped(agent.paused(), Position(3, 1))
    agent.prepare(again(agent))
    agent.go()
    agent.finish()
    assert commits(agent, 0)[3:5] == [(1, Position(3, 0)), (2, Position(3, 1))]
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_the_start_of_a_call_stops_nobody_and_the_last_unit_ends_a_script_well(
    agent_of: Callable[..., MiniAgent], tmp_path: Path, out: Out
) -> None:
    """The unit behind the last step is the one that writes the state: all have agreed to begin it, one has written, all end."""
    held = Held(tmp_path / "held", N_STEPS - 1)
    agent = agent_of(2, *held.arguments)
    start_until(agent, "2x1", Position(N_STEPS - 1, 0))

    agent.ask_to_drain()
    held.release()

    assert_all_stopped(agent.paused(), Position(N_STEPS, 1))
    finished = agent.finish()
    assert {report.position for report in finished.values()} == {Position(N_STEPS, 1)}
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_a_loss_before_the_unit_is_final_overrides(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    agent = agent_of(3, *held.arguments)
    start_until(agent, "3x1", Position(2, 0))
    agent.ask_to_drain()

    agent.kill(1)
    held.release()
    broken = agent.wait(Broken)
    assert {(report.generation, report.position) for report in broken.values()} == {(1, Position(3, 0))}
    paused = agent.pause()

    assert {(report.generation, report.position) for report in paused.values()} == {(3, Position(3, 0))}
    agent.prepare(agent.replan("reroute", paused))
    agent.go()
    agent.finish()
    for rank in (0, 2):
        assert [generation for generation, position in commits(agent, rank) if position >= Position(3, 0)] == [3, 3, 3, 3]
    out.assert_exact()


def test_a_loss_when_some_have_stopped_and_others_lack_the_result(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out
) -> None:
    """Rank 0 has passed the unit and stopped; ranks 1 and 2 have contributed and know no more: 1 rolls forward, 2 is killed."""
    agent = agent_of(3, *held.arguments, "--at-commit", 1, 3, "lose", "--at-commit", 2, 3, "stay")
    start_until(agent, "3x1", Position(2, 0))
    agent.ask_to_drain()
    held.release()
    assert_all_stopped(agent.paused(0), Position(4, 0))
    broken = agent.wait(Broken, 1)
    assert (broken[1].generation, broken[1].position) == (1, Position(3, 0))

    agent.kill(2)
    paused = agent.pause()

    assert paused[0].position == Position(4, 0)
    assert (paused[1].position, paused[1].phase) == (Position(3, 0), "contributed")
    ready = agent.prepare(agent.replan("reroute", paused))
    assert {report.position for report in ready.values()} == {Position(4, 0)}
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()


@pytest.mark.parametrize("order", [Pause, Drain])
def test_an_idle_rank_stops_at_once_and_follows_what_becomes_final(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out, order: type[Pause | Drain]
) -> None:
    agent = agent_of(3, *held.arguments)
    start_until(agent, "1x2", Position(2, 0))

    agent.order(order(2), 2)
    assert agent.wait(Paused, 2)[2].generation == 2
    agent.ask_to_drain(0, 1)
    held.release()

    assert_all_stopped(agent.paused(0, 1), Position(4, 0))
    ready = agent.prepare(again(agent))
    assert {report.position for report in ready.values()} == {Position(4, 0)}
    agent.go()
    finished = agent.finish()
    assert {report.position for report in finished.values()} == {Position(N_STEPS, 1)}
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_an_idle_rank_that_was_stopped_before_it_ran_comes_to_the_place_of_the_others(
    agent_of: Callable[..., MiniAgent], held: Held, out: Out
) -> None:
    """Its script has not come out of the making of its Job; the steps of the others come first when it does."""
    agent = agent_of(3, *held.arguments)
    agent.start("1x2")
    assert agent.plan is not None
    agent.followers = agent.plan.idle
    agent.order(Pause(2), 2)  # before Go was obeyed, which it drops
    agent.order(Go(1))
    agent.wait(Committed, 0, 1, when=lambda report: report.result.position == Position(2, 0))
    agent.ask_to_drain()
    held.release()
    assert_all_stopped(agent.paused(0, 1), Position(4, 0))

    ready = agent.prepare(again(agent))

    assert {report.position for report in ready.values()} == {Position(4, 0)}
    agent.go()
    finished = agent.finish()
    assert {report.position for report in finished.values()} == {Position(N_STEPS, 1)}
    out.assert_exact()
    out.assert_nothing_was_redone()


def test_a_newcomer_waits_for_its_plan_and_answers(agent_of: Callable[..., MiniAgent], held: Held, out: Out) -> None:
    agent = agent_of(2, *held.arguments)
    start_until(agent, "2x1", Position(2, 0))
    agent.spawn(2)
    agent.wait(Hello, 2)

    pong = agent.ping(2)[2]
    assert (pong.position, pong.waiting) == (Position(0, 0), True)
    for _ in range(2):  # a growth that comes to nothing, and another one
        agent.ask_to_drain(0)
        paused = agent.pause()
        assert (paused[2].position, paused[2].held) == (Position(0, 0), ())
    agent.send_prepare(grown(agent, paused))
    held.release()
    ready = agent.wait_ready()

    assert {report.position for report in ready.values()} == {Position(3, 0)}
    agent.go()
    agent.finish()
    out.assert_exact()
    out.assert_nothing_was_redone()
