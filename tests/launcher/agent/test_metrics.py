"""What ranks are told of steps and evaluations, metrics and the learning rate: exact under any layout, whoever is lost when."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded, PlanChosen, RankLost
from launcher.options import RunOptions
from perfmodel.profile import profile as profiles
from tests import exactness
from tests.agent_runs import TRAIN, Ran, nothing_left, profile_of_own_processors
from tests.exactness import EXACT, N_STEPS
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]


def run(
    tmp_path: Path,
    layout: str,
    n: int,
    *arguments: str,
    on_event: Callable[[Event, Ran], None] | None = None,
    **options: object,
) -> Ran:
    (tmp_path / "told").mkdir()
    given = (*EXACT, "--told", str(tmp_path / "told"), "--eval-every", "3", *arguments)
    given_also = {"n_nodes": n, "log_dir": tmp_path / "logs", "capture_output": True, **options}
    return Ran(RunOptions(TRAIN, given, layout=layout, **given_also), on_event)


def assert_told(ran: Ran, tmp_path: Path, ranks: Sequence[int], model: str = "gpt", late: Sequence[int] = ()) -> None:
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    exactness.assert_told(tmp_path / "told", ranks, exactness.told_of(model, N_STEPS, 15, 2, 3), late=late)


@pytest.mark.parametrize(
    ("layout", "n", "model"),
    [("2x2", 4, "gpt"), ("1x2", 3, "tied"), pytest.param("3+1", 4, "nested", marks=pytest.mark.soak)],
)
def test_all_ranks_are_told_what_one_process_computes(layout: str, n: int, model: str, tmp_path: Path) -> None:
    """Also who has no last stage, and who has no work. Each has the modules of the layers that it holds, and no others."""
    ran = run(tmp_path, layout, n, "--model", model)
    assert_told(ran, tmp_path, range(n), model)
    (chosen,) = ran.all(PlanChosen)
    held = {rank: json.loads((tmp_path / "told" / str(rank)).read_text())["held"] for rank in range(n)}
    assert held == {rank: sorted(chosen.plan.holds.get(rank, ())) for rank in range(n)}


@pytest.mark.parametrize(
    ("victim", "sample", "num_workers"), [(0, 13, 0), (0, 13, 1), pytest.param(3, 15, 0, marks=pytest.mark.soak)]
)
def test_a_rank_that_is_lost_in_an_evaluation_changes_nothing(
    victim: int, sample: int, num_workers: int, tmp_path: Path
) -> None:
    """The leader, when it reads a sample for the first stage, or a process of its does; and a last stage."""
    lost = ("--die-reading", str(victim), str(sample), str(tmp_path / "mark"))
    ran = run(tmp_path, "2x2", 4, *lost, "--num-workers", str(num_workers))
    assert_told(ran, tmp_path, [rank for rank in range(4) if rank != victim])
    assert [lost.rank for lost in ran.all(RankLost)] == [victim]


def test_a_rank_that_comes_back_from_an_evaluation_is_told_of_the_step_that_it_missed(tmp_path: Path) -> None:
    """The others stand still behind the evaluation until it is to be taken in, which is a step later, or two."""
    profiles.write(profile_of_own_processors(), tmp_path / "profile.json")
    held = Held(tmp_path / "held", 2)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    given = {"max_restarts": 1, "strategy": "reroute", "profile": tmp_path / "profile.json", "on_event": watch}
    lost = ("--die-reading", "0", "13", str(tmp_path / "mark"))
    try:
        ran = run(tmp_path, "2x2", 4, *held.arguments, *lost, **given)
    finally:
        held.release()
    assert_told(ran, tmp_path, range(4), late=[0])
    assert len(ran.all(GenerationStarted)) == 3
    told = json.loads((tmp_path / "told" / "0").read_text())
    assert told["steps"].keys() - {"3"} == {"4", "5"} and told["evaluations"].keys() == {"5"}
