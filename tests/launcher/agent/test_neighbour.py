"""Real ranks of which one does two ranks' work, with an approximate backward: they train what the published formulas say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import GenerationStarted, PlanChosen
from launcher.options import RunOptions
from odyssey.plan.approximation import LowRank
from odyssey.plan.plan import Plan
from odyssey.plan.rest import kept_layers, rest_of_step
from odyssey.plan.worker import worker_of
from odyssey.protocol.reports import Paused
from strategies.situation import Aim, Protect
from tests import approximate_reference, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.approximate_reference import How
from tests.exactness import EXACT, N_STEPS, TOLERANCE

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]

LOW_RANK = LowRank(4, 2)
GLOBAL_BATCH, MICRO_BATCH = 15, 2


def run(tmp_path: Path, layout: str, *at_ops: str, protect: Protect = Protect.NONE, **options: object) -> Ran:
    """`at_ops`: see tests/jobs/train.py."""
    stands = tmp_path / "stands"
    os.mkfifo(stands)
    words = [word for at in at_ops for word in ("--at-op", *at.split())]
    arguments = (*EXACT, "--model", "parts", *words, "--stands", str(stands), "--out", str(tmp_path / "out.pt"))
    aim = Aim(approximate=LOW_RANK, protect=protect)
    options = {"strategy": "neighbour", **options}
    ran = Ran(RunOptions(TRAIN, arguments, layout=layout, log_dir=tmp_path / "logs", capture_output=True, aim=aim, **options))
    assert ran.code == 0, ran.text("stderr")
    ran.assert_replays()
    return ran


def how_it_ran(ran: Ran) -> dict[int, How]:
    """By step, of those that were approximate."""
    went = {event.generation for event in ran.events if isinstance(event.body, GenerationStarted)}
    plans = [e.body.plan for e in ran.events if isinstance(e.body, PlanChosen) and e.body.plan.generation in went]
    summed: dict[int, dict[int, tuple]] = {}
    for paused in ran.all(Paused):
        summed.setdefault(paused.generation, {})[paused.rank] = paused.summed
    found = {}
    for plan, behind in zip(plans, [*(plan.step for plan in plans[1:]), N_STEPS], strict=True):
        for step in range(plan.step, behind):
            found.pop(step, None)
            if plan.approximation is not None:
                paused = summed.get(plan.generation, {}) if step == plan.step else {}
                found[step] = _how(plan, paused)
    return found


def _how(plan: Plan, summed: dict[int, tuple]) -> How:
    rest = rest_of_step(plan, summed)
    ways = {position // MICRO_BATCH: k for k in range(plan.n_micro_batches) for position in plan.samples.positions(k)[:1]}
    if rest is not None:
        ways |= {part.first // MICRO_BATCH: part.micro_batch for part in rest.parts}
    kept = {
        (layer, first)
        for rank, its in (summed.items() if rest is not None else ())
        for one in its
        for layer in kept_layers(its, plan, worker_of(rank)).intersection(one.layers)
        for span in one.samples
        for first in range(span[0], span[1], MICRO_BATCH)
    }

    def approximate(layer: int, first: int) -> bool:
        k = ways[first // MICRO_BATCH]
        stages = plan.pipelines[plan.home[k]].stages
        s = next(s for s, stage in enumerate(stages) if layer in stage.layers)
        return plan.runner(k, s) in plan.approximation.workers

    return How(plan.approximation.low_rank, plan.step, approximate, lambda layer, first: (layer, first) in kept)


def assert_as_published(ran: Ran, tmp_path: Path) -> dict[int, How]:
    hows = how_it_ran(ran)
    losses, expected = approximate_reference.train(hows.get, N_STEPS, GLOBAL_BATCH, MICRO_BATCH, dropout=0.1)
    saved = torch.load(tmp_path / "out.pt")
    assert [saved["losses"][step] for step in range(N_STEPS)] == pytest.approx(losses, abs=TOLERANCE)
    assert reference.largest_difference(saved["state"]["model"], expected) < TOLERANCE
    assert saved["state"]["approximate"] is (N_STEPS - 1 in hows)
    return hows


def plans(ran: Ran) -> list[Plan]:
    return [chosen.plan for chosen in ran.all(PlanChosen)]


def test_one_of_three_does_two_ranks_work_and_attention_learns_of_the_third(tmp_path: Path) -> None:
    ran = run(tmp_path, "3x1", "2 2 0F6 die", n_nodes=3)
    _, second = plans(ran)
    assert second.strategy == "neighbour" and len(second.approximate) == 1
    hows = assert_as_published(ran, tmp_path)
    assert list(hows) == [2, 3, 4, 5]
    healthy = {first for first in range(0, GLOBAL_BATCH, 2) if not hows[3].approximate(1, first)}
    assert 0 < len(healthy) < 8


def test_where_both_are_approximate_attention_is_not_updated(tmp_path: Path) -> None:
    """One of two pipelines has lost its second stage: what the other one's second stage holds has no healthy sample."""
    ran = run(tmp_path, "2x2", "3 2 1F5 die", n_nodes=4)
    _, second = plans(ran)
    assert {1} <= second.approximate <= {0, 1}, "0, where the measured stages of the pipelines are unlike"
    hows = assert_as_published(ran, tmp_path)
    assert all(hows[3].approximate(4, first) for first in range(0, GLOBAL_BATCH, 2))


def test_what_was_summed_exactly_before_the_loss_stays(tmp_path: Path) -> None:
    """Rank 1 has gone back through two of its three micro-batches, rank 0 through one, when rank 2 is lost."""
    ran = run(tmp_path, "3x1", "0 3 0F1 stand", "1 3 0F5 stand", "2 3 0B6 die", n_nodes=3)
    assert [chosen.n_kept for chosen in ran.all(PlanChosen)][1] == 6
    assert_as_published(ran, tmp_path)


def test_a_keeper_does_both_stages(tmp_path: Path) -> None:
    ran = run(tmp_path, "1x3", "1 2 1F1 die", n_nodes=3, protect=Protect.STATE)
    second = plans(ran)[1]
    assert second.strategy == "neighbour" and second.approximate == {0}, "it keeps what comes behind its stage"
    assert_as_published(ran, tmp_path)


def test_nothing_of_a_step_that_was_approximate_in_part_is_kept(tmp_path: Path) -> None:
    """A second loss in an approximate step, of which rank 0 has gone back through micro-batches: all of it is run anew."""
    ran = run(tmp_path, "3x1", "2 2 0F6 die", "0 3 0F2 stand", "1 3 0F4 die", n_nodes=3)
    third = plans(ran)[2]
    assert third.approximate == {0} and [chosen.n_kept for chosen in ran.all(PlanChosen)][2] == 0
    hows = assert_as_published(ran, tmp_path)
    assert [how.begun for how in hows.values()] == [2, 3, 3, 3]
