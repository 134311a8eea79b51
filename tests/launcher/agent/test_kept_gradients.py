"""Real ranks that are killed in the middle of a step: what the others have summed of it is not computed again, and is exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import PlanChosen, RankLost
from launcher.options import RunOptions
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import compute_order
from odyssey.protocol.reports import Paused, Ready
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.exactness import EXACT, N_STEPS

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def run(tmp_path: Path, layout: str, *at_ops: str, model: str = "gpt", **options: object) -> tuple[Ran, int]:
    """A job that is exact, in what it tells of steps, too; and how often a loss was computed. `at_ops`: see
    tests/jobs/train.py."""
    count, stands, told = tmp_path / "count", tmp_path / "stands", tmp_path / "told"
    os.mkfifo(stands)
    told.mkdir()
    words = [word for at in at_ops for word in ("--at-op", *at.split())]
    arguments = (*EXACT, "--model", model, *words, "--stands", str(stands), "--count", str(count))
    arguments = (*arguments, "--out", str(tmp_path / "out.pt"), "--told", str(told))
    ran = Ran(RunOptions(TRAIN, arguments, layout=layout, log_dir=tmp_path / "logs", capture_output=True, **options))
    assert ran.code == 0, ran.text("stderr")
    losses, expected = exactness.expected_of(model, N_STEPS, 15, 2)
    saved = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(saved["state"]["model"], expected) < exactness.TOLERANCE
    assert [saved["losses"][step] for step in range(N_STEPS)] == pytest.approx(losses, abs=exactness.TOLERANCE)
    ran.assert_replays()
    living = {int(path.name) for path in told.iterdir()}
    exactness.assert_told(told, living, exactness.told_of(model, N_STEPS, 15, 2))
    return ran, len(count.read_bytes())


def test_micro_batches_that_the_survivor_has_done_are_not_done_again(tmp_path: Path) -> None:
    """There are eight: rank 0 has done three of its four when rank 1 is lost: five are left."""
    ran, n_losses = run(tmp_path, "2x1", "0 3 0F3 stand", "1 3 0B6 die", n_nodes=2)
    assert [chosen.n_kept for chosen in ran.all(PlanChosen)] == [0, 6]
    assert n_losses == 8 * N_STEPS + 3  # those that rank 1 had computed, and nothing of rank 0's
    assert [lost.rank for lost in ran.all(RankLost)] == [1]


def test_a_rank_that_is_lost_in_the_rest_of_a_step_leaves_what_others_have_of_both(tmp_path: Path) -> None:
    """Rank 0 has 0 and 1, rank 1 has 3 and 4 of eight micro-batches when rank 2 is lost. Of the other four rank 0 does number 5
    on the way of number 0 before rank 1 is lost, and with it 3 and 4."""
    first = ("0 3 0F2 stand", "1 3 0F5 stand", "2 3 0B6 die")
    ran, _ = run(tmp_path, "3x1", *first, "0 3 0F2 stand", "1 3 0B6 die", n_nodes=3)
    assert [chosen.n_kept for chosen in ran.all(PlanChosen)] == [0, 8, 6]


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.soak), "tied"])
def test_what_is_in_flight_goes_back_through_layers_that_have_it_and_adds_nothing(model: str, tmp_path: Path) -> None:
    """Rank 1, the last stage, is a micro-batch ahead of rank 0; of the other pipeline the last stage is lost."""
    ops = ("0 3 0B1 stand", "1 3 1F2 stand", "2 3 0F7 stand", "3 3 1B6 die")
    ran, _ = run(tmp_path, "2x2", *ops, model=model, n_nodes=4, strategy="reroute")
    kept = {ready.rank: ready.kept_members for ready in ran.all(Ready) if ready.generation == 2}
    assert kept[0] == 2 <= kept[2], "both first stages reduce in the group that they had"
    plan = ran.all(PlanChosen)[0].plan
    summed = {paused.rank: {span for its in paused.summed for span in its.samples} for paused in ran.all(Paused)}
    assert summed == {rank: summed_before(plan, rank, op) for rank, op in ((0, "0B1"), (1, "1F2"), (2, "0F7"))}
    assert [chosen.n_kept for chosen in ran.all(PlanChosen)] == [0, 2 if summed[0] and summed[1] else 0]


def summed_before(plan: Plan, rank: int, op: str) -> set[tuple[int, int]]:
    """The span of samples that `rank` has summed when it comes to `op`: prices may have chosen backwards in halves, which go
    on in another order."""
    order = compute_order(plan, rank)
    stop = next(i for i, its in enumerate(order) if str(its).replace("I", "B") == op)
    done = [its.micro_batch for its in order[:stop] if its.kind in "BW"]
    return {(2 * done[0], 2 * done[-1] + 2)} if done else set()
