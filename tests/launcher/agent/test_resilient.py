"""A script's own model, optimizer and loop (odyssey.resilient): exact wherever ranks are lost, and when they come back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded, PlanChosen, RankLost, Restarting
from launcher.options import RunOptions
from odyssey.protocol.reports import Hello
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile
from tests import ROOT
from tests.agent_runs import Ran, nothing_left
from tests.held import Held
from tests.jobs.resilient import N_STEPS, POINTS, VARIANTS
from tests.resilient_reference import differences

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]
SCRIPT = str(ROOT / "tests" / "jobs" / "resilient.py")
N_RANKS = 3


def quick(names: Sequence[str], *also: str) -> list[Any]:
    """All of them in the soak, and some also in `make test`."""
    return [pytest.param(name, marks=() if name in also else pytest.mark.soak) for name in names]


def options(tmp_path: Path, *arguments: str, **given: Any) -> RunOptions:
    (tmp_path / "out").mkdir(exist_ok=True)
    given = {"script": SCRIPT, "n_ranks_per_node": N_RANKS, "log_dir": tmp_path / "logs", "capture_output": True} | given
    return RunOptions(arguments=(str(tmp_path / "out"), *arguments), **given)


def assert_exact(ran: Ran, tmp_path: Path, variant: str, lost: Collection[int] = (), n_ranks: int = N_RANKS) -> None:
    """Each rank that lived has what one process makes, in its own objects."""
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    ended = {int(path.stem): torch.load(path) for path in (tmp_path / "out").glob("*.pt")}
    assert ended.keys() == set(range(n_ranks)) - set(lost)
    assert {rank: most for rank, most in differences(variant, ended).items() if most > 1e-10} == {}


@pytest.mark.parametrize("variant", quick(VARIANTS[:-1], "batchnorm"))
def test_what_nobody_disturbs_is_what_one_process_trains(variant: str, tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, variant))
    assert_exact(ran, tmp_path, variant)
    assert ran.steps() == list(range(N_STEPS))


@pytest.mark.parametrize("point", quick(POINTS, "backward", "optimizer"))
@pytest.mark.parametrize("variant", quick(VARIANTS[:-1], "plain", "unlike"))
def test_survivors_go_on_wherever_a_rank_is_lost(variant: str, point: str, tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, variant, f"1:5:{point}"))
    assert_exact(ran, tmp_path, variant, {1})
    assert len(ran.all(GenerationStarted)) == 2


def test_a_rank_that_starts_again_before_the_first_plan_begins_with_the_model_of_the_first(tmp_path: Path) -> None:
    """It is lost when another has joined: before that it is one of a plain script, and all start again."""
    held = Held(tmp_path / "held", -1)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Hello):
            held.release()

    ran = Ran(options(tmp_path, "unlike", *held.arguments, "2:-1:built", max_restarts=1), watch)
    assert_exact(ran, tmp_path, "unlike")
    assert len(ran.all(RankLost)) == len(ran.all(GenerationStarted)) == 1


@pytest.mark.parametrize("variant", quick(VARIANTS[:-1], "batchnorm", "tokens"))
def test_all_but_one_are_lost(variant: str, tmp_path: Path) -> None:
    """The first rank is one like any other. Two are lost at the same commit point, and later one more."""
    kills = ("0:2:at_commit", "3:2:at_commit", "1:6:after_commit")
    ran = Ran(options(tmp_path, variant, *kills, n_ranks_per_node=4))
    assert_exact(ran, tmp_path, variant, {0, 1, 3}, n_ranks=4)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """It says that each rank has a processor of its own: then it pays to take in who comes back."""
    folder = tmp_path_factory.mktemp("profile")
    path = folder / "profile.json"
    assert Ran(options(folder, "plain", write_profile=path)).code == 0
    measured = profiles.read(path)
    return replace(measured, cluster=replace(measured.cluster, cores=None))


def taken_in_behind(step: int, variant: str, kill: str, profile: Profile, tmp_path: Path, script: str = SCRIPT) -> Ran:
    """A job in which a rank is lost and comes back: all wait behind the step until it is about to be taken in."""
    profiles.write(profile, tmp_path / "profile.json")
    held = Held(tmp_path / "held", step)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    try:
        given = {"script": script, "max_restarts": 3, "strategy": "reroute", "profile": tmp_path / "profile.json"}
        return Ran(options(tmp_path, variant, *held.arguments, kill, **given), watch)
    finally:
        held.release()


@pytest.mark.parametrize("behind", [6, N_STEPS - 2])
@pytest.mark.parametrize("variant", quick([each for each in VARIANTS[:-1] if each != "batchnorm"], "average"))
def test_a_rank_that_comes_back_has_all_that_the_loop_has_changed(
    variant: str, behind: int, profile: Profile, tmp_path: Path
) -> None:
    """Behind a step all wait until it is about to be taken in: what the loop did behind the steps before came with the state,
    and is done only once. Where the rank is taken in behind the last one, it takes part in no unit of the loop."""
    ran = taken_in_behind(behind, variant, "1:3:loop", profile, tmp_path)
    assert_exact(ran, tmp_path, variant)
    assert len(ran.all(GenerationStarted)) == 3


def test_what_a_local_variable_has_put_back_on_a_spare_ends_the_job(tmp_path: Path) -> None:
    """The loop puts the average in the model's place for three calls, and a rank is lost in the first of them: what the spare
    puts back is of the model as it was built."""
    ran = Ran(options(tmp_path, "swapped", "1:5:evaluation", n_spares=1))
    assert ran.code == 1
    ran.assert_replays()
    (ended,) = ran.all(JobEnded)
    assert "rank 2 has other parameters than rank 0" in ended.reason and "belongs into extra" in ended.reason
    assert ran.steps() == list(range(6)), "none is made with that"


def test_what_a_local_variable_has_put_back_on_a_rank_that_comes_back_has_all_start_again(
    profile: Profile, tmp_path: Path
) -> None:
    """It is taken in before the evaluation, when the average is in the model's place."""
    ran = taken_in_behind(6, "swapped", "1:3:evaluation", profile, tmp_path)
    assert_exact(ran, tmp_path, "swapped")
    (restart,) = ran.all(Restarting)
    assert "rank 1 has other parameters than rank 0" in restart.reason and "belongs into extra" in restart.reason


def test_the_loop_of_the_page_saves_the_best_though_a_rank_comes_back_where_it_is_found(
    profile: Profile, tmp_path: Path
) -> None:
    """It comes back with the best loss that it is about to find."""
    script = str(ROOT / "tests" / "jobs" / "best_of_page.py")
    ran = taken_in_behind(6, "average", "1:3:loop", profile, tmp_path, script)
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert len(ran.all(GenerationStarted)) == 3
    assert [path.name for path in (tmp_path / "out" / "best").glob("step-*")] == ["step-000010"]


def test_an_average_that_is_evaluated_is_that_of_the_others_on_a_spare(tmp_path: Path) -> None:
    """A rank is lost within the evaluation."""
    ran = Ran(options(tmp_path, "evaluated", "1:5:evaluation", n_spares=1))
    assert_exact(ran, tmp_path, "evaluated", {1})
    assert len(ran.all(GenerationStarted)) == 2


def test_a_job_of_more_ranks_than_micro_batches_does_not_start(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "plain", n_ranks_per_node=5))
    assert ran.code == 1
    assert ran.all(JobEnded)[0].reason == "global_batch 14 is 4 micro-batches of 4, for 5 copies of the model"


@pytest.mark.soak
def test_one_of_two_spares_goes_on_standing_by_where_there_is_work_for_no_more(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "average", "1:5:backward", n_ranks_per_node=6, n_spares=2))
    assert ran.code == 0
    ran.assert_replays()
    first, after = (chosen.plan for chosen in ran.all(PlanChosen))
    assert (first.idle, len(after.workers), len(after.idle)) == ((4, 5), 4, 1)


@pytest.mark.soak
def test_an_average_that_is_not_that_of_the_others_on_a_spare_is_not_evaluated(tmp_path: Path) -> None:
    """What comes to it are other tensors than the evaluation was called with."""
    ran = Ran(options(tmp_path, "stale", "1:5:evaluation", n_spares=1))
    assert ran.code == 1
    assert "evaluate(): rank 2 has other weights than rank 0" in ran.all(JobEnded)[0].reason


def test_an_average_that_is_evaluated_is_that_of_the_others_on_a_rank_that_comes_back(profile: Profile, tmp_path: Path) -> None:
    ran = taken_in_behind(6, "evaluated", "1:3:evaluation", profile, tmp_path)
    assert_exact(ran, tmp_path, "evaluated")
    assert len(ran.all(GenerationStarted)) == 3 and not ran.all(Restarting)


def test_all_ranks_are_lost_and_all_start_again(tmp_path: Path) -> None:
    """From the beginning, as nothing was saved; each has built another model, and they begin with the first one's. Where one is
    lost after the others, these may have been started again, which counts."""
    ran = Ran(options(tmp_path, "unlike", *(f"{rank}:5:at_commit" for rank in range(N_RANKS)), max_restarts=3))
    assert_exact(ran, tmp_path, "unlike")
    assert len(ran.all(Restarting)) == 1


def test_a_later_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    """With what the loop keeps beside the model."""
    first = Ran(options(tmp_path, "saved"))
    assert first.code == 0
    assert first.steps() == list(range(6))
    assert not list((tmp_path / "out").glob("*.pt"))
    second = Ran(options(tmp_path, "saved", log_dir=tmp_path / "second"))
    assert_exact(second, tmp_path, "saved")
    assert second.steps() == list(range(4, N_STEPS))
