"""A loss and a return, a leave, with real ranks: what is trained is what one process trains. Whole sequences: tests/soak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import Draining, Event, GenerationStarted, PlanChosen, RankLost
from launcher.options import RunOptions
from perfmodel.profile import profile as profiles
from strategies.situation import Aim, Protect
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left, profile_of_own_processors
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
Watch = Callable[[Event, Ran], None] | None


def run(tmp_path: Path, n_steps: int, drills: tuple[str, ...], *also: str, on_event: Watch = None, **more: object) -> Ran:
    arguments = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(n_steps))
    arguments += ("--pause", "0.05", "--out", str(tmp_path / "out.pt"), *also)
    options = {"n_nodes": 4, "layout": "2x2", "drills": drills, "max_restarts": 9, "capture_output": True}
    return Ran(RunOptions(TRAIN, arguments, log_dir=tmp_path / "logs", **(options | more)), on_event)


def assert_exact(ran: Ran, tmp_path: Path, n_steps: int) -> None:
    assert ran.code == 0, (ran.events[-1], ran.text("stderr")[-2000:])
    _, expected = exactness.expected_of("gpt", n_steps, 15, 2)
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert ran.steps() == list(range(n_steps)), "each step is told once"
    ran.assert_replays()


def test_a_rank_that_was_lost_comes_back_and_has_work_again(tmp_path: Path) -> None:
    """Behind a later step all wait until it is there."""
    profiles.write(profile_of_own_processors(), tmp_path / "profile.json")
    held = Held(tmp_path / "held", 16)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    try:
        given = {"strategy": "reroute", "profile": tmp_path / "profile.json"}
        ran = run(tmp_path, 20, ("step=4 kill=2",), *held.arguments, on_event=watch, **given)
    finally:
        held.release()
    assert_exact(ran, tmp_path, 20)
    assert [body.rank for body in ran.all(RankLost)] == [2]
    (draining,) = ran.all(Draining)
    assert draining.joined == (2,)
    assert ran.all(PlanChosen)[-1].plan.generation == 3
    assert ran.all(GenerationStarted)[-1].stood_s is not None


def test_a_rank_that_is_asked_to_leave_hands_over_what_it_holds(tmp_path: Path) -> None:
    """It alone holds half of the model."""
    ran = run(tmp_path, 30, ("step=4 leave=1",), layout="1x2", n_nodes=2, aim=Aim(protect=Protect.NONE))
    assert_exact(ran, tmp_path, 30)
    assert not [body for body in ran.all(RankLost) if body.rank != 1]
    assert {move.source for move in ran.all(PlanChosen)[-1].plan.moves} == {1}
    assert ran.all(PlanChosen)[-1].plan.workers == (0,)


@pytest.mark.soak
def test_more_ranks_than_one_group_has_lose_one_and_go_on(tmp_path: Path) -> None:
    """Whether it pays to take it in again is this machine's to say."""
    ran = run(tmp_path, 40, ("step=6 kill=7",), layout="6x3", n_nodes=18)
    assert_exact(ran, tmp_path, 40)
    assert [body.rank for body in ran.all(RankLost)] == [7]
