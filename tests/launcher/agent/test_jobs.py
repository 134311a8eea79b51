"""Real jobs, real kills: every step is made once, and the log of every run replays to the same decisions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from launcher.joblog.events import (
    Event,
    GenerationStarted,
    JobEnded,
    Note,
    PlanChosen,
    Profiled,
    Proposed,
    RankLost,
    RankStarted,
    StoreLost,
)
from launcher.options import RunOptions
from launcher.planning.situations import PlanSearch
from odyssey.protocol.reports import Committed, Failed
from odyssey.protocol.units import Position
from perfmodel.profile.profile import Recovery
from strategies.situation import Aim, Protect
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.exactness import EXACT, N_STEPS
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def options(tmp_path: Path, *arguments: str, **rest: object) -> RunOptions:
    """Between two steps there is time for what a test or a drill does at one."""
    return RunOptions(
        script=TRAIN, arguments=("--pause", "0.05", *arguments), log_dir=tmp_path / "logs", capture_output=True, **rest
    )


def test_a_killed_rank_costs_no_step(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "--steps", "12", n_nodes=4, layout="2x2", drills=("step=5 kill=2",)))
    assert ran.code == 0
    assert ran.steps() == list(range(12))
    assert [lost.rank for lost in ran.all(RankLost)] == [2]
    first, second = ran.all(GenerationStarted)
    assert first.total_s is None and second.total_s is not None
    ran.assert_replays()


def test_layers_that_share_a_module_go_on_exactly_on_other_ranks(tmp_path: Path) -> None:
    """As the blocks of a Llama share their rotary module: its buffers move with each layer."""
    arguments = ("--model", "shared", *EXACT, "--out", str(tmp_path / "out.pt"))
    ran = Ran(options(tmp_path, *arguments, n_nodes=4, layout="2x2", strategy="repartition", drills=("step=3 kill=2",)))
    assert ran.code == 0, ran.text("stderr")
    assert ran.all(PlanChosen)[-1].plan.moves
    _, expected = exactness.expected_of("shared", N_STEPS, 15, 2)
    state = torch.load(tmp_path / "out.pt")["state"]["model"]
    assert reference.largest_difference(expected, state) < exactness.TOLERANCE


def test_a_lost_node_takes_all_its_ranks(tmp_path: Path) -> None:
    drill = "step=4 lose=node1"
    ran = Ran(options(tmp_path, "--steps", "8", n_nodes=2, n_ranks_per_node=2, layout="4x1", max_restarts=3, drills=(drill,)))
    assert ran.code == 0
    assert ran.steps() == list(range(8))
    assert {lost.rank for lost in ran.all(RankLost)} == {2, 3}
    assert len(ran.all(RankStarted)) == 4, "a lost slot is not spawned again"
    ran.assert_replays()


def test_a_stopped_rank_is_found_and_replaced_by_the_others(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "--steps", "8", n_nodes=3, layout="3x1", drills=("step=4 hang=1",)))
    assert ran.code == 0
    assert ran.steps() == list(range(8))
    assert [lost.cause.kind for lost in ran.all(RankLost)] == ["hang"]
    ran.assert_replays()


def test_a_killed_rank_is_spawned_again_where_that_is_the_plan(tmp_path: Path) -> None:
    ran = Ran(
        options(
            tmp_path, "--steps", "10", n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1, drills=("step=4 kill=1",)
        )
    )
    assert ran.code == 0
    assert ran.steps() == list(range(10))
    assert [started.rank for started in ran.all(RankStarted)][-1] == 1 and len(ran.all(RankStarted)) == 3
    chosen, went = ran.all(PlanChosen)[-1].plan, ran.all(GenerationStarted)[-1]
    assert chosen.spawned == (1,) and chosen.estimate is not None
    assert chosen.estimate.transition.spawn_s != Recovery().spawn_s, "it is known from the start of the job"
    assert went.spawn_s is not None
    parts = (went.pause_s, went.plan_s, went.spawn_s, went.groups_s, went.moves_s, went.rest_s)
    assert sum(parts) == pytest.approx(went.total_s)
    ran.assert_replays()


def test_losing_every_holder_of_a_layer_ends_the_job_and_names_it(tmp_path: Path) -> None:
    """I10."""
    alone = {"layout": "1x2", "aim": Aim(protect=Protect.NONE)}
    ran = Ran(options(tmp_path, "--steps", "10", n_nodes=2, drills=("step=3 kill=1",), **alone))
    assert ran.code == 1
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded)
    (chosen,) = ran.all(PlanChosen)
    first, last = min(chosen.plan.holds[1]), max(chosen.plan.holds[1])
    assert ended.reason.startswith(f"every holder of layers {first} (") and f" {last} (5.Head) is lost (rank 1)" in ended.reason
    ran.assert_replays()


def test_a_drill_that_never_fires_is_told(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "--steps", "2", drills=("step=50 kill=0",)))
    assert ran.code == 0
    assert any("never fired" in note.text for note in ran.all(Note))


def test_a_measured_profile_is_written_and_taken(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ran = Ran(options(tmp_path, "--steps", "2", n_nodes=2, write_profile=path))
    assert ran.code == 0 and path.exists() and ran.steps() == []
    taken = Ran(RunOptions(TRAIN, ("--steps", "2"), n_nodes=2, log_dir=tmp_path / "more", capture_output=True, profile=path))
    assert taken.code == 0 and taken.steps() == [0, 1]
    assert [profiled.seconds for profiled in taken.all(Profiled)] == [0.0]
    other = RunOptions(
        TRAIN, ("--steps", "2", "--blocks", "5"), n_nodes=2, log_dir=tmp_path / "other", capture_output=True, profile=path
    )
    refused = Ran(other)
    assert refused.code == 1
    assert "layers" in refused.events[-1].body.reason


def test_the_loss_of_zygote_and_store_is_no_loss_of_the_job(tmp_path: Path) -> None:
    """Both are killed in step 3, a rank in step 6: its replacement comes from a new zygote, and needs no store."""

    def kill_helpers(event: Event, ran: Ran) -> None:
        body = event.body
        if isinstance(body, Committed) and body.result.position == Position(3, 0):
            ranks = {started.pid for started in ran.all(RankStarted)}
            helpers = [child for child in psutil.Process().children() if "zygote/server.py" in " ".join(child.cmdline())]
            for helper in helpers:
                if helper.pid not in ranks:
                    os.kill(helper.pid, signal.SIGKILL)

    wanted = options(
        tmp_path, "--steps", "12", n_nodes=2, layout="2x1", strategy="respawn", max_restarts=1, drills=("step=6 kill=1",)
    )
    ran = Ran(wanted, kill_helpers)
    assert ran.code == 0
    assert ran.steps() == list(range(12))
    assert len(ran.all(StoreLost)) == 1
    assert len(ran.all(RankStarted)) == 3
    ran.assert_replays()


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Ranks wait behind step 11 until the process that plans ahead has answered."""
    held = Held(tmp_path / "held", 11)
    take = PlanSearch._on_process

    def look(search: PlanSearch, mask: int) -> None:
        take(search, mask)
        if search._answers and not search._is_due:
            held.release()

    monkeypatch.setattr(PlanSearch, "_on_process", look)
    yield held
    held.release()


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.soak), "respawn"])
def test_the_usual_loss_is_looked_up(strategy: str, tmp_path: Path, planned: Held) -> None:
    """The first loss comes when the answers of the process that plans ahead are there: those of the other
    strategies too, where the one that is asked for has no plan, as nothing may be respawned."""
    slow = ("--steps", "20", "--pause", "0.1", *planned.arguments)
    ran = Ran(options(tmp_path, *slow, n_nodes=3, layout="3x1", strategy=strategy, drills=("step=14 kill=1",)))
    assert ran.code == 0
    assert [proposed.ahead for proposed in ran.all(Proposed)] == [False, True]
    ran.assert_replays()


@pytest.mark.parametrize(
    ("drill", "lost"),
    [
        pytest.param("kill=3", {3}, id="a rank", marks=pytest.mark.soak),
        pytest.param("lose=node1", {2, 3}, id="a node"),
    ],
)
def test_a_loss_is_looked_up_that_only_its_like_was_searched_for(
    drill: str, lost: set[int], tmp_path: Path, planned: Held
) -> None:
    """Two pipelines on a node each. What is searched for is the loss of rank 0, 1, and node 0."""
    slow = ("--steps", "20", "--pause", "0.1", *planned.arguments)
    wanted = options(tmp_path, *slow, n_nodes=2, n_ranks_per_node=2, layout="2x2", drills=(f"step=14 {drill}",))
    ran = Ran(wanted)
    assert ran.code == 0
    assert ran.steps() == list(range(20))
    assert {loss.rank for loss in ran.all(RankLost)} == lost
    assert [proposed.ahead for proposed in ran.all(Proposed)] == [False, True]
    proposed = ran.all(Proposed)[-1]
    assert proposed.ahead_problem == ""
    assert proposed.n_planned == proposed.n_to_plan == 6, "two ranks, a node, and the three pairs of both nodes"
    assert lost.isdisjoint(ran.all(PlanChosen)[-1].plan.workers)
    ran.assert_replays()


def test_a_script_that_fails_in_mid_job_ends_it_with_its_own_words(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    text = Path(TRAIN).read_text().replace("losses[step.index] = step.loss", "assert job.is_leader or step.index < 3, 'mine'")
    script.write_text(text.replace("Path(__file__).resolve().parents[2]", repr(str(Path(TRAIN).parents[2]))))
    ran = Ran(RunOptions(str(script), n_nodes=2, log_dir=tmp_path / "logs", capture_output=True, layout="2x1"))
    assert ran.code == 1
    assert ran.events[-1].body == JobEnded(1, "rank 1 failed: AssertionError: mine", "")
    assert len(ran.all(Failed)) == 1
    assert "AssertionError: mine" in ran.output[1, "stderr"].decode()
    ran.assert_replays()
