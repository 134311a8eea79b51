"""Real ranks of one pipeline that keep layers of each other: whoever is killed when, the job goes on and is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import PlanChosen, RankLost
from odyssey.plan.plan import Plan
from strategies.situation import Aim, Protect
from tests.agent_runs import Ran, nothing_left
from tests.launcher.agent.test_kept_gradients import run

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

STATE = Aim(protect=Protect.STATE)


def plans(ran: Ran) -> list[Plan]:
    return [chosen.plan for chosen in ran.all(PlanChosen)]


LOSSES = [(0, "0B3"), (1, "1F1"), (2, "2B7")]
MODELS = ["gpt", "tied", "frozen"]


@pytest.mark.parametrize(
    ("lost", "op", "model"),
    [(*loss, model) for loss, model in zip(LOSSES, MODELS, strict=True)]
    + [pytest.param(*loss, model, marks=pytest.mark.soak) for loss in LOSSES for model in MODELS if model != MODELS[loss[0]]],
)
def test_any_rank_of_a_single_pipeline_may_be_lost(lost: int, op: str, model: str, tmp_path: Path) -> None:
    ran, _ = run(tmp_path, "1x3", f"{lost} 3 {op} die", model=model, n_nodes=3, strategy="redundant", aim=STATE)
    first, second = plans(ran)
    assert {frozenset(first.holders[layer]) for layer in range(first.n_layers)} == {
        frozenset({0, 1}),
        frozenset({1, 2}),
        frozenset({0, 2}),
    }
    assert second.strategy == "redundant" and bool(second.routes) is (lost == 0)
    assert all(len(second.holders[layer]) == 2 for layer in range(second.n_layers)), "what is left is protected anew"


def test_a_second_loss_right_after_the_first_is_survived_too(tmp_path: Path) -> None:
    """Rank 2 dies in the first step that it runs after the loss of rank 1, and rank 0 has all that it had."""
    ran, _ = run(tmp_path, "1x3", "1 3 1B2 die", "2 3 1F0 die", n_nodes=3, strategy="redundant", aim=STATE)
    assert [lost.rank for lost in ran.all(RankLost)] == [1, 2]
    assert [len(plan.workers) for plan in plans(ran)] == [3, 2, 1]
