"""Ranks that were lost come back, with real processes: what is trained is exact, no step is done twice, and nothing hangs.

A rank of a 2x2 job is lost behind a step, while all others wait in the script's own code: so its loss costs no micro-batch
either. Behind a later step they wait again, until what a test is about has come. The profile lets each rank have a processor
to itself, so that it pays to take ranks in however many this machine has; and a strategy is forced that does not wait for a
process that starts.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from launcher.joblog.events import (
    Draining,
    Event,
    GenerationStarted,
    Note,
    NoticeGiven,
    Pausing,
    PlanChosen,
    Proposed,
    RankExited,
    RankLost,
    RankStarted,
)
from launcher.options import RunOptions
from odyssey.plan.form import layout_of
from odyssey.protocol.reports import Broken, Committed, Hello, Paused
from odyssey.protocol.units import Position
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile
from strategies.situation import Aim, Protect
from tests import ROOT, exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left, profile_of_own_processors
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]

EXACT = ("--dropout", "0.1", "--clip", "0.5", "--schedule")
N_STEPS = 8
FIRST, SECOND, THIRD = 1, 3, 5
"""Behind these steps all wait."""
Moment = Callable[[Event, Ran], bool]
Act = Callable[[Event, Ran], None]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of_own_processors()


def on(profile: Profile, cores: int | None) -> Profile:
    return replace(profile, cluster=replace(profile.cluster, cores=cores))


@dataclass
class Job:
    """`holds`: behind which step all wait, until when. `acts`: what is done upon an event."""

    folder: Path
    profile: Profile
    holds: dict[int, Moment] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)
    n_steps: int = N_STEPS
    global_batch: int = 15
    lost: tuple[int, ...] = (3,)

    def run(self, *arguments: str, writes: bool = True, **options: object) -> Ran:
        """To its end, which must be a good one. The ranks `lost` are killed behind the step FIRST."""
        profiles.write(self.profile, self.folder / "profile.json")
        holds = {FIRST: have_paused()} | self.holds
        with ExitStack() as stack:
            held = {step: Held(self.folder / f"held-{step}", step) for step in holds}
            for each in held.values():
                stack.callback(each.release)

            def watch(event: Event, ran: Ran) -> None:
                if is_behind(FIRST)(event, ran):
                    for rank in self.lost:
                        send(ran, rank, signal.SIGKILL)
                for act in self.acts:
                    act(event, ran)
                for step, is_over in holds.items():
                    if is_over(event, ran):
                        held[step].release()

            arguments += (*EXACT, "--global-batch", str(self.global_batch), "--steps", str(self.n_steps))
            arguments += ("--count", str(self.folder / "count"))
            arguments += tuple(part for each in held.values() for part in each.arguments)
            arguments += ("--out", str(self.folder / "out.pt")) if writes else ()
            given = {"n_nodes": 4, "layout": "2x2", "strategy": "repartition", "max_restarts": 5}
            given |= {"profile": self.folder / "profile.json", "log_dir": self.folder / "logs", "capture_output": True}
            ran = Ran(RunOptions(TRAIN, arguments, **given | options), watch)
        assert ran.code == 0, (ran.events[-1], ran.text("stderr")[-2000:])
        return ran

    def assert_exact(self, ran: Ran, n_redone: int = 0, n_leaders_killed: int = 0) -> None:
        """What was trained is what one process trains, and at most so many steps were done again. A leader that is killed when
        a step is final may not have printed it."""
        _, expected = exactness.expected_of("gpt", self.n_steps, self.global_batch, 2)
        state = torch.load(self.folder / "out.pt")["state"]["model"]
        assert reference.largest_difference(expected, state) < exactness.TOLERANCE
        told = ran.steps()
        assert set(told) <= set(range(self.n_steps)) and len(told) == len(set(told)), "no step is told twice"
        assert len(told) >= self.n_steps - n_leaders_killed, "each step is told"
        n_micro_batches = math.ceil(self.global_batch / 2)
        done = (self.folder / "count").stat().st_size
        assert self.n_steps * n_micro_batches <= done <= (self.n_steps + n_redone) * n_micro_batches
        ran.assert_replays()


@pytest.fixture
def job(profile: Profile, tmp_path: Path) -> Job:
    return Job(tmp_path, profile)


def when(kind: type, number: int = 1, rank: int | None = None) -> Moment:
    """The so many'th event of this kind, of this rank if one is given."""
    return lambda event, ran: is_nth(event, ran, kind, number, rank)


def have_paused(number: int = 1) -> Moment:
    """All that live, for the so many'th time: who is let go on from now on computes nothing for the generation before."""
    return lambda event, ran: isinstance(event.body, PlanChosen) and len(ran.all(Pausing)) >= number


def is_nth(event: Event, ran: Ran, kind: type, number: int, rank: int | None) -> bool:
    def counts(body: object) -> bool:
        return rank is None or getattr(body, "rank", None) == rank

    return isinstance(event.body, kind) and counts(event.body) and sum(map(counts, ran.all(kind))) == number


def does(moment: Moment, rank: int, number: signal.Signals) -> Act:
    """This signal to the newest process of the rank."""

    def act(event: Event, ran: Ran) -> None:
        if moment(event, ran):
            send(ran, rank, number)

    return act


def send(ran: Ran, rank: int, number: signal.Signals) -> None:
    (*_, pid) = (started.pid for started in ran.all(RankStarted) if started.rank == rank)
    os.kill(pid, number)


def is_behind(step: int) -> Moment:
    """It is final."""

    def moment(event: Event, ran: Ran) -> bool:
        body = event.body
        if not isinstance(body, Committed) or body.result.kind != "step" or body.result.position[0] != step:
            return False
        return sum(each.result.position[0] == step for each in ran.all(Committed)) == 1

    return moment


def workers_at_the_end(ran: Ran) -> set[int]:
    return set(ran.all(PlanChosen)[-1].plan.workers)


EVERYBODY = {0, 1, 2, 3}
OF_WHOLE_MODELS = {"layout": "4x1", "strategy": "reroute"}
"""Any two ranks may be lost."""


@pytest.mark.parametrize("strategy", ["repartition", "reroute"])
def test_a_rank_comes_back_and_no_micro_batch_is_done_twice(job: Job, strategy: str) -> None:
    job.holds = {SECOND: when(Draining)}
    ran = job.run(strategy=strategy)
    job.assert_exact(ran)
    assert [loss.rank for loss in ran.all(RankLost)] == [3]
    (draining,) = ran.all(Draining)
    assert draining.joined == (3,) and workers_at_the_end(ran) == EVERYBODY
    *_, last = ran.all(GenerationStarted)
    assert last.total_s is None and last.stood_s is not None


@pytest.mark.parametrize("within", ["10m", "1ms"])
def test_a_rank_leaves_that_a_command_has_told_to(job: Job, within: str) -> None:
    """From another process, which finds the one agent by the job's folder. Where there is no time for it the rank is lost."""
    told: list[subprocess.Popen[bytes]] = []
    is_late = within == "1ms"

    def tell(event: Event, ran: Ran) -> None:
        if is_behind(FIRST)(event, ran):
            (folder,) = (job.folder / "logs").iterdir()
            told.append(
                subprocess.Popen(
                    [sys.executable, "-m", "odyssey_cli", "leave", "2", str(folder), f"--within={within}"], cwd=ROOT
                )
            )

    job.lost, job.acts = (), [tell]
    job.holds = {FIRST: when(Pausing if is_late else NoticeGiven), THIRD: when(RankLost, rank=2)}
    job.holds |= {} if is_late else {SECOND: when(Draining)}
    ran = job.run()
    assert [process.wait() for process in told] == [0]
    assert [(body.ranks, body.within_s) for body in ran.all(NoticeGiven)] == [((2,), 0.001 if is_late else 600.0)]
    assert [body.lost for body in ran.all(Pausing)] == ([(2,)] if is_late else [])
    assert is_late == any("rank 2 cannot leave in time" in body.text for body in ran.all(Note))
    assert not (ran.folder / "notices").exists()
    job.assert_exact(ran)


def test_more_ranks_than_one_group_has_take_one_in(job: Job) -> None:
    """They sum through a tree and send over pairs; states go over pairs, too, those of the file at the end included."""
    job.holds = {SECOND: when(Draining)}
    ran = job.run("--branch", "2", "--eval-every", "4")
    assert ran.code == 0 and workers_at_the_end(ran) == EVERYBODY
    _, expected = exactness.expected_of("gpt", job.n_steps, job.global_batch, 2)
    state = torch.load(job.folder / "out.pt")["state"]["model"]
    assert reference.largest_difference(expected, state) < exactness.TOLERANCE


def test_two_ranks_that_come_back_are_taken_in_together(job: Job) -> None:
    job.lost, job.holds = (2, 3), {SECOND: when(Draining)}
    ran = job.run()
    job.assert_exact(ran)
    assert [draining.joined for draining in ran.all(Draining)] == [(2, 3)]
    assert workers_at_the_end(ran) == EVERYBODY


def test_ranks_are_lost_and_come_back_three_times(job: Job) -> None:
    job.n_steps = 14
    for i, (step, rank) in enumerate(((5, 0), (9, 2))):
        job.acts.append(does(is_behind(step), rank, signal.SIGKILL))
        job.holds |= {step: have_paused(i + 2), step + 2: when(Draining, i + 2)}
    job.holds[SECOND] = when(Draining)
    ran = job.run()
    job.assert_exact(ran, n_leaders_killed=1)
    assert [loss.rank for loss in ran.all(RankLost)] == [3, 0, 2]
    assert [draining.joined for draining in ran.all(Draining)] == [(3,), (0,), (2,)]
    assert workers_at_the_end(ran) == EVERYBODY


# -- the newcomer is lost ----------------------------------------------------------------------------------------------


def test_a_newcomer_that_is_killed_before_it_takes_part_comes_once_more(job: Job) -> None:
    job.acts = [does(when(RankStarted, 2, rank=3), 3, signal.SIGKILL)]
    job.holds = {SECOND: when(Draining)}
    ran = job.run()
    job.assert_exact(ran)
    assert len(ran.all(Pausing)) == 1, "it costs the others nothing"
    assert workers_at_the_end(ran) == EVERYBODY


@pytest.mark.parametrize("moment", [when(Hello, 2, rank=3), pytest.param(when(Proposed, 3), marks=pytest.mark.soak)])
def test_a_newcomer_that_is_killed_while_groups_are_built_costs_the_others_nothing(job: Job, moment: Moment) -> None:
    job.acts = [does(moment, 3, signal.SIGKILL)]
    job.holds = {SECOND: when(RankStarted, 3, rank=3), THIRD: when(Draining)}
    ran = job.run()
    job.assert_exact(ran)
    assert [loss.rank for loss in ran.all(RankLost)] == [3, 3]
    assert len(ran.all(Pausing)) == 1 and workers_at_the_end(ran) == EVERYBODY


def test_a_newcomer_that_is_killed_again_and_again_is_not_started_any_more(job: Job) -> None:
    """Its slot has used two restarts since, and others have theirs."""

    def is_retired(event: Event, ran: Ran) -> bool:
        return isinstance(event.body, Note) and event.body.text.startswith("rank 3 is not started again: lost 3 times in a row")

    job.acts = [does(when(RankStarted, number, rank=3), 3, signal.SIGKILL) for number in (2, 3, 4)]
    job.acts.append(does(is_behind(THIRD), 1, signal.SIGKILL))
    job.holds = {SECOND: is_retired, THIRD: have_paused(2), THIRD + 1: when(Draining)}
    ran = job.run(**OF_WHOLE_MODELS, max_restarts=9)
    job.assert_exact(ran)
    assert [loss.rank for loss in ran.all(RankLost)] == [3, 3, 3, 3, 1]
    *first, a, b, c, d = (started.rank for started in ran.all(RankStarted))
    assert sorted(first) == [0, 1, 2, 3] and [a, b, c, d] == [3, 3, 3, 1]
    assert workers_at_the_end(ran) == {0, 1, 2}


@pytest.mark.parametrize(("moment", "n_redone"), [(when(Draining), 0), (when(GenerationStarted, 3), 1)])
def test_a_newcomer_that_is_killed_as_it_takes_part_comes_once_more(job: Job, moment: Moment, n_redone: int) -> None:
    job.acts = [does(moment, 3, signal.SIGKILL)]
    job.holds = {SECOND: when(Draining) if n_redone else have_paused(2), THIRD: when(Draining, 2)}
    if n_redone:  # or none, if the others have finished that step before: then they have to come out of their scripts
        job.holds |= {THIRD: have_paused(2), THIRD + 1: when(Draining, 2)}
    ran = job.run()
    job.assert_exact(ran, n_redone)
    assert [loss.rank for loss in ran.all(RankLost)] == [3, 3]
    assert workers_at_the_end(ran) == EVERYBODY


def test_the_others_train_on_without_a_newcomer_that_stands_still(job: Job) -> None:
    """Nobody waits for it, and it is gone with the job."""
    job.acts = [does(when(RankStarted, 2, rank=3), 3, signal.SIGSTOP)]
    ran = job.run()
    job.assert_exact(ran)
    assert not ran.all(Draining) and len(ran.all(Pausing)) == 1


@pytest.mark.soak
def test_a_newcomer_that_stands_still_when_it_is_to_take_part_is_found(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is to connect, and the others train meanwhile: they drain for the one that comes in its place."""
    monkeypatch.setattr("launcher.coordinator.transition.JOIN_S", 3.0)
    job.acts = [does(when(Hello, 2, rank=3), 3, signal.SIGSTOP)]
    job.holds = {SECOND: when(Draining)}
    ran = job.run()
    job.assert_exact(ran)
    assert [loss.cause.kind for loss in ran.all(RankLost)] == ["signal", "hang"]
    assert workers_at_the_end(ran) == EVERYBODY


def test_a_rank_that_it_does_not_pay_to_take_in_stands_by_and_may_stand_still(job: Job) -> None:
    """There is one micro-batch, and one processor for all."""
    job.profile, job.global_batch = replace(on(job.profile, cores=1), global_batch=2), 2

    def stands_by(event: Event, ran: Ran) -> bool:
        return isinstance(event.body, Note) and event.body.text.startswith("rank 3 stands by")

    job.acts = [does(stands_by, 3, signal.SIGSTOP)]
    job.holds = {SECOND: stands_by}
    ran = job.run(layout="1x2", aim=Aim(protect=Protect.NONE))
    job.assert_exact(ran)
    assert not ran.all(Draining) and len(ran.all(Pausing)) == 1


# -- ranks that stand by from the start --------------------------------------------------------------------------------

OF_FIVE = {"n_nodes": 5, "n_spares": 1}


@pytest.mark.parametrize("lost", [1, 4])
def test_a_rank_that_stands_by_has_work_after_a_loss_and_nothing_is_started(job: Job, lost: int) -> None:
    """Rank 4 does, unless it is lost itself."""
    job.lost = (lost,)
    ran = job.run(**OF_FIVE, max_restarts=0)
    job.assert_exact(ran)
    first, after = (chosen.plan for chosen in ran.all(PlanChosen))
    assert (layout_of(first), first.workers, first.idle) == ("2x2", (0, 1, 2, 3), (4,))
    assert set(after.workers) == {0, 1, 2, 3, 4} - {lost} and after.spawned == after.idle == ()
    assert (4 in {move.target for move in after.moves}) == (lost == 1)
    assert len(ran.all(RankStarted)) == 5


def test_a_job_without_a_loss_ends_well_with_a_rank_that_has_stood_by(job: Job) -> None:
    job.lost, job.holds = (), {FIRST: is_behind(FIRST)}
    ran = job.run(**OF_FIVE)
    job.assert_exact(ran)
    assert [chosen.plan.idle for chosen in ran.all(PlanChosen)] == [(4,)]
    assert {ended.rank for ended in ran.all(RankExited)} == {*EVERYBODY, 4}


def test_a_rank_that_stood_by_has_the_place_of_one_that_comes_back(job: Job) -> None:
    """A rank that has come back stands by in its turn, unless the price says something better."""

    def is_weighed(event: Event, ran: Ran) -> bool:
        body = event.body
        return isinstance(body, Draining) or (isinstance(body, Note) and body.text.startswith("rank 3 stands by"))

    job.holds = {SECOND: is_weighed}
    ran = job.run(**OF_FIVE)
    job.assert_exact(ran)
    assert set(ran.all(PlanChosen)[1].plan.workers) == {0, 1, 2, 4}
    assert len(ran.all(Pausing)) == 1 and {ended.rank for ended in ran.all(RankExited)} == {*EVERYBODY, 4}


def test_a_rank_lost_before_the_first_plan_has_its_place_taken(job: Job) -> None:
    job.lost = ()
    job.holds = {FIRST: is_behind(FIRST)}
    job.acts = [does(when(RankStarted, rank=2), 2, signal.SIGKILL)]
    ran = job.run(**OF_FIVE, max_restarts=0)
    job.assert_exact(ran)
    (first,) = (chosen.plan for chosen in ran.all(PlanChosen))
    assert (layout_of(first), set(first.workers), first.idle) == ("2x2", {0, 1, 3, 4}, ())


# -- something happens while all drain ---------------------------------------------------------------------------------


def test_a_member_lost_before_the_unit_is_final_behind_which_all_stop(job: Job) -> None:
    job.acts = [does(when(Draining), 0, signal.SIGKILL)]
    job.holds = {SECOND: have_paused(2), THIRD: when(Draining, 2)}
    ran = job.run(**OF_WHOLE_MODELS)
    job.assert_exact(ran, n_leaders_killed=1)
    assert [loss.rank for loss in ran.all(RankLost)] == [3, 0]
    assert workers_at_the_end(ran) == EVERYBODY


def test_a_member_lost_behind_the_unit_at_which_all_stop_costs_no_step(job: Job) -> None:
    def has_stopped(event: Event, ran: Ran) -> bool:
        body = event.body
        return isinstance(body, Paused) and bool(ran.all(Draining)) and body.position > Position(SECOND, 0) and body.rank != 3

    lost: list[int] = []

    def lose_another(event: Event, ran: Ran) -> None:
        if has_stopped(event, ran) and not lost:
            lost.append(1 if event.body.rank == 0 else 0)
            send(ran, lost[0], signal.SIGKILL)

    job.acts = [lose_another]
    job.holds = {SECOND: when(Draining)}
    ran = job.run(**OF_WHOLE_MODELS)
    job.assert_exact(ran, n_leaders_killed=lost.count(0))
    assert [loss.rank for loss in ran.all(RankLost)] == [3, *lost]


@pytest.mark.soak
def test_a_member_that_stands_still_while_all_drain_is_found(job: Job) -> None:
    job.acts = [does(when(Draining), 0, signal.SIGSTOP)]
    job.holds = {SECOND: when(Draining), THIRD: when(Draining, 2)}
    ran = job.run(**OF_WHOLE_MODELS)
    job.assert_exact(ran, n_redone=1)
    assert [(loss.rank, loss.cause.kind) for loss in ran.all(RankLost)] == [(3, "signal"), (0, "hang")]
    assert workers_at_the_end(ran) == EVERYBODY


@pytest.mark.soak
def test_a_message_lost_while_all_drain_is_noticed_by_its_silence(job: Job) -> None:
    """No connection ends, and all ranks answer: they only wait for each other. Rank 0 has a next stage to send to."""
    job.holds = {SECOND: when(Draining)}
    ran = job.run("--lose-message-after", "0", str(SECOND), strategy="reroute")
    job.assert_exact(ran, n_redone=1)
    (broken,) = ran.all(Broken)
    assert broken.what.startswith("nothing has moved for")
    assert [loss.rank for loss in ran.all(RankLost)] == [3]
    assert workers_at_the_end(ran) == EVERYBODY


@pytest.mark.parametrize("has_a_last_unit", [True, False])
def test_the_script_may_end_while_all_drain(job: Job, has_a_last_unit: bool) -> None:
    """Behind the last step: there is one more unit, that of the result, or none."""
    job.holds = {N_STEPS - 1: when(Draining)}
    ran = job.run(writes=has_a_last_unit)
    assert ran.all(Draining) and ran.steps() == list(range(N_STEPS))
    if has_a_last_unit:
        job.assert_exact(ran)
    ran.assert_replays()
