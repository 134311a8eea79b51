"""Cut micro-batches on real ranks: exact, whatever the shares, also when one is killed; and never of a model that draws."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.pipelines import Pipeline, blocks_of
from odyssey.plan.plan import Plan, Schedule
from odyssey.plan.proof import prove
from odyssey.protocol.reports import Broken, Committed, OpTimes
from odyssey.protocol.units import Position
from strategies.search import answer, best
from tests import exactness, models, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.exactness import N_STEPS
from tests.held import Held
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
GLOBAL_BATCH, MICRO_BATCH = 22, 4
WITHOUT_DRAWS = (
    *("--global-batch", "22", "--micro-batch", "4", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS)),
    *("--dropout", "0", "--independent-samples"),
)


@pytest.fixture
def agent_of(forks: Forks, nothing_left: None) -> Iterator[Callable[..., MiniAgent]]:
    """Makes agents, whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: object) -> MiniAgent:
            agent = MiniAgent(forks, 4, Path(TRAIN), *WITHOUT_DRAWS, *map(str, arguments))
            stack.callback(agent.close)
            return agent

        yield make


def assert_exact(out: Path, variant: str, draw_after: int | None = None) -> None:
    """The leader wrote what the undisturbed run in one process ends with, in whole micro-batches."""
    losses, expected = exactness.expected_of(variant, N_STEPS, GLOBAL_BATCH, MICRO_BATCH, 0.0, draw_after)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert result["losses"] and all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


def cut_into(plan: Plan, samples: Sequence[int]) -> Plan:
    found: list[Pipeline] = []
    first = 0
    for pipeline, n_samples in zip(plan.pipelines, samples, strict=True):
        stop = first + (n_samples + MICRO_BATCH - 1) // MICRO_BATCH
        found.append(Pipeline(pipeline.stages, first, stop, n_samples))
        first = stop
    return prove(replace(plan, blocks=blocks_of(found)))


@pytest.mark.parametrize(
    ("variant", "layout", "samples", "cap"),
    [
        pytest.param("gpt", "4x1", (5, 9, 1, 7), None, marks=pytest.mark.soak),
        ("nested", "2x2", (3, 19), 1.5),
        pytest.param("tied", "2x2", (13, 9), None, marks=pytest.mark.soak),
        pytest.param("prefix", "2x2", (17, 5), None, marks=pytest.mark.soak),
        pytest.param("mlp", "3x1", (6, 6, 10), None, marks=pytest.mark.soak),
    ],
)
def test_cut_micro_batches_change_no_number(
    agent_of: Callable[..., MiniAgent],
    variant: str,
    layout: str,
    samples: tuple[int, ...],
    cap: float | None,
    tmp_path: Path,
) -> None:
    agent = agent_of("--model", variant, "--out", tmp_path / "out.pt")
    agent.measure()
    plan = cut_into(agent.first_plan(layout), samples)
    agent.prepare(plan if cap is None else agent.split(plan, cap))
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", variant)


@pytest.mark.parametrize(
    ("strategy", "moment"),
    [
        pytest.param(strategy, moment, marks=() if moment == quick else pytest.mark.soak)
        for quick, strategy in ((1, "reroute"), (2, "repartition"), (3, "shrink"))
        for moment in (1, 2, 3)
    ],
)
def test_a_rank_that_is_killed_changes_no_number(
    agent_of: Callable[..., MiniAgent], strategy: str, moment: int, tmp_path: Path
) -> None:
    """In whole micro-batches before, cut behind; then again cut otherwise, or routed."""
    later = Held(tmp_path / "later", moment + 1)  # they would end before they hear of the pause
    agent = agent_of("--out", tmp_path / "out.pt", *later.arguments)
    agent.measure()
    plan = agent.first_plan("2x2")
    agent.prepare(plan if moment == 2 else cut_into(plan, (9, 13)))
    agent.go()
    agent.wait(Committed, 0, when=lambda report: report.result.position == Position(moment, 0))
    agent.kill(3)  # wherever it is in the next step

    plan = agent.replan(strategy, agent.pause())
    later.release()
    if not plan.is_cut:
        n = len(plan.pipelines)
        plan = cut_into(plan, (GLOBAL_BATCH,) if n == 1 else (7, GLOBAL_BATCH - 7) if n == 2 else (7, 9, GLOBAL_BATCH - 16))
    agent.prepare(plan)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_any_shares_and_any_moment_of_a_kill_change_no_number(
    agent_of: Callable[..., MiniAgent], seed: int, tmp_path: Path
) -> None:
    """Killed before one of its reductions, one for each layer; then cut otherwise, or routed."""
    rng = random.Random(seed)
    layout = rng.choice(["4x1", "2x2", "3+1"])
    strategy = rng.choice(["reroute", "repartition"] + (["shrink"] if layout == "4x1" else []))
    lost, n_started = rng.randrange(1, 4), rng.randrange(N_STEPS)  # a stage may have one layer, and one reduction a step
    variant = rng.choice(sorted({*models.VARIANTS} - {"frozen", "prefix"}))  # or none at all in these
    agent = agent_of("--model", variant, "--bucket-bytes", 1, "--die", lost, n_started, "--out", tmp_path / "out.pt")
    agent.measure()
    plan = cut_into(agent.first_plan(layout), drawn_shares(rng, len(agent.first_plan(layout).pipelines)))
    agent.prepare(plan if rng.random() < 0.5 else agent.split(plan, rng.choice([None, 1.0, 1.5])))
    agent.go()
    assert agent.processes[lost].wait(60) == -signal.SIGKILL
    agent.leave(lost)
    plan = agent.replan(strategy, agent.pause())
    if not plan.routes:
        plan = cut_into(replace(plan, schedule=Schedule()), drawn_shares(rng, len(plan.pipelines)))
    agent.prepare(plan)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", variant)


def drawn_shares(rng: random.Random, n: int) -> list[int]:
    cuts = [0, *sorted(rng.sample(range(1, GLOBAL_BATCH), n - 1)), GLOBAL_BATCH]
    return [b - a for a, b in pairwise(cuts)]


def test_the_search_cuts_by_itself_and_goes_on_whole_where_that_is_as_good(
    agent_of: Callable[..., MiniAgent], tmp_path: Path
) -> None:
    """Six micro-batches: of four ranks some would have two, with eight samples where six are enough; three have two each."""
    later = Held(tmp_path / "later", 2)  # they would end before they hear of the pause
    agent = agent_of("--out", tmp_path / "out.pt", *later.arguments)
    agent.measure()
    assert agent.profile.uncut == ""
    plan = agent.first_plan("4x1")
    assert plan.is_cut and list(map(plan.samples.n_in, plan.pipelines)) == [6, 6, 5, 5]
    agent.prepare(plan)
    agent.go()
    agent.wait(Committed, 0, when=lambda report: report.result.position == Position(1, 0))
    agent.kill(3)
    plan = agent.replan("shrink", agent.pause())
    later.release()
    assert not plan.is_cut and len(plan.pipelines) == 3
    agent.prepare(plan)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt")


def test_a_layer_that_begins_to_draw_ends_no_job_and_changes_no_number(
    agent_of: Callable[..., MiniAgent], tmp_path: Path
) -> None:
    agent = agent_of("--draw-after", 2, "--out", tmp_path / "out.pt")
    agent.measure()
    plan = cut_into(agent.first_plan("2x2"), (9, 13))
    agent.prepare(plan)
    agent.go()
    agent.wait(Broken, 0)
    assert agent.results[-1].position == Position(2, 0)
    reasons = [report.uncut for report in agent.heard[0] if isinstance(report, OpTimes) and report.uncut]
    assert reasons == ["layer 1.Block draws random numbers"]
    held = {rank: frozenset(report.held) for rank, report in agent.pause().items()}

    situation = agent.situation(held, replace(agent.profile, uncut=reasons[0]))
    chosen = best(answer(situation))
    assert chosen is not None and chosen.plan is not None and not chosen.plan.is_cut and chosen.strategy == "unchanged"
    agent.prepare(chosen.plan)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt", draw_after=2)


def test_a_model_with_dropout_is_found_to_draw(agent_of: Callable[..., MiniAgent]) -> None:
    agent = agent_of("--dropout", 0.1)
    agent.measure()
    assert agent.profile.uncut == "layer 1.Block draws random numbers"


def test_what_each_micro_batch_rounds_by_itself_is_cut_only_where_the_script_allows_it(
    agent_of: Callable[..., MiniAgent],
) -> None:
    """Under autocast a cut changes losses in the sixth digit: more than the order of sums does."""
    agent = agent_of("--autocast", "--dtype", "float32")
    agent.measure()
    assert "rounded to bfloat16 by itself" in agent.profile.uncut and "'to rounding'" in agent.profile.uncut
    agent = agent_of("--autocast", "--dtype", "float32", "--to-rounding")
    agent.measure()
    assert agent.profile.uncut == ""
