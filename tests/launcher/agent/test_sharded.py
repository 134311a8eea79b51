"""A script's own model that torch has sharded (odyssey.shard_mesh, fully_shard): exact wherever ranks are lost or come back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.fsdp import FSDPModule

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded, Note, PlanChosen, RankLost
from launcher.options import RunOptions
from launcher.planning.live_profile import LiveProfile
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile
from tests import ROOT
from tests.agent_runs import Ran, nothing_left
from tests.held import Held
from tests.jobs.resilient import N_STEPS, POINTS
from tests.launcher.agent.test_resilient import assert_exact, options, quick

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]
VARIANTS = (*("plain/2", "batchnorm/2", "average/2", "plateau/2", "clamped/2", "frozen/2", "padded/2", "tokens/2", "scaled/2"),)


@pytest.mark.parametrize("variant", quick(VARIANTS, "batchnorm/2"))
def test_what_nobody_disturbs_is_what_one_process_trains(variant: str, tmp_path: Path) -> None:
    """Two copies of two shards, of which one parameter is smaller than the copy."""
    ran = Ran(options(tmp_path, variant, n_ranks_per_node=4))
    assert_exact(ran, tmp_path, variant, n_ranks=4)


@pytest.mark.parametrize("n_shards", [pytest.param(1, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)])
def test_one_copy_is_on_all_ranks(n_shards: int, tmp_path: Path) -> None:
    """Four micro-batches of three ranks: in the second turn two of them compute for others."""
    ran = Ran(options(tmp_path, f"average/{n_shards}", n_ranks_per_node=n_shards))
    assert_exact(ran, tmp_path, f"average/{n_shards}", n_ranks=n_shards)


@pytest.mark.parametrize("point", quick(POINTS, "backward"))
@pytest.mark.parametrize("variant", quick(VARIANTS, "average/2"))
def test_survivors_go_on_wherever_a_rank_is_lost(variant: str, point: str, tmp_path: Path) -> None:
    """The other rank of its copy is in the midst of a pass, and keeps its shard from then on."""
    ran = Ran(options(tmp_path, variant, f"1:5:{point}", n_ranks_per_node=4))
    assert_exact(ran, tmp_path, variant, {1}, n_ranks=4)
    assert [len(plan.pipelines) for plan in plans(ran)] == [2, 1]
    assert plans(ran)[-1].keeps == {0: {0}}


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot leave a pass in its midst")
@pytest.mark.parametrize("kill", ["1:5:forward", pytest.param(f"1:{N_STEPS}:evaluation", marks=pytest.mark.soak)])
def test_a_model_that_objects_to_values_of_no_worth_goes_on(kill: str, tmp_path: Path) -> None:
    """A rank is lost, and the other one of its copy raises in the midst of the pass that goes on without it."""
    ran = Ran(options(tmp_path, "strict/2", kill, n_ranks_per_node=4))
    assert_exact(ran, tmp_path, "strict/2", {1}, n_ranks=4)


def test_a_copy_is_made_of_what_two_losses_have_left(tmp_path: Path) -> None:
    """The rank with shard 0 of one copy is lost, and later the one with shard 1 of the other."""
    ran = Ran(options(tmp_path, "tokens/2", "0:2:at_commit", "3:6:after_commit", n_ranks_per_node=4))
    assert_exact(ran, tmp_path, "tokens/2", {0, 3}, n_ranks=4)
    assert [stage.worker for stage in plans(ran)[-1].pipelines[0].stages] == [2, 1]


@pytest.mark.parametrize(
    ("variant", "point"), [("average/2", "loop"), pytest.param("evaluated/2", "evaluation", marks=pytest.mark.soak)]
)
def test_a_rank_that_comes_back_makes_a_copy_whole(
    variant: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a step all wait until it is about to be taken in; what the loop did before comes with the state. A process is said
    to take a minute to start: on a busy machine, whose steps are slow, it would pay to wait for it otherwise."""

    def spawned_in_a_minute(self: LiveProfile, profile: Profile) -> Profile:
        return replace(profile, recovery=replace(profile.recovery, spawn_s=60.0))

    monkeypatch.setattr(LiveProfile, "_with_spawn", spawned_in_a_minute)
    (tmp_path / "first").mkdir()
    assert Ran(options(tmp_path / "first", "plain/2", n_ranks_per_node=4, write_profile=tmp_path / "measured.json")).code == 0
    measured = profiles.read(tmp_path / "measured.json")
    profiles.write(replace(measured, cluster=replace(measured.cluster, cores=None)), tmp_path / "profile.json")
    held = Held(tmp_path / "held", 6)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    try:
        given = {"n_ranks_per_node": 4, "max_restarts": 3, "profile": tmp_path / "profile.json"}
        ran = Ran(options(tmp_path, variant, *held.arguments, f"1:3:{point}", **given), watch)
    finally:
        held.release()
    assert_exact(ran, tmp_path, variant, n_ranks=4)
    assert [len(plan.pipelines) for plan in plans(ran)] == [2, 1, 2]


def test_a_later_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    first = Ran(options(tmp_path, "saved/2", n_ranks_per_node=2))
    assert first.code == 0, first.text("stderr")
    second = Ran(options(tmp_path, "saved/2", n_ranks_per_node=4, log_dir=tmp_path / "second"))
    assert_exact(second, tmp_path, "saved/2", n_ranks=4)
    assert second.steps() == list(range(4, N_STEPS))


def test_where_nobody_has_a_shard_all_start_again_from_what_was_saved(tmp_path: Path) -> None:
    """Those of any script do so, as long as restarts are left."""
    assert Ran(options(tmp_path, "saved/2", n_ranks_per_node=2)).code == 0
    given = {"n_ranks_per_node": 2, "max_restarts": 1, "log_dir": tmp_path / "second"}
    second = Ran(options(tmp_path, "saved/2", "1:6:forward", **given))
    assert_exact(second, tmp_path, "saved/2", n_ranks=2)
    again = [4, *range(4, N_STEPS)]
    assert second.steps() in (again, sorted([*again, 5])), "the leader may end before it has printed step 5"
    assert any("shard 1 of Sequential) is lost (rank 1); all ranks start again" in note.text for note in second.all(Note))


def test_a_shard_that_nobody_has_any_more_ends_the_job(tmp_path: Path) -> None:
    """By its name: there is no copy to go on with."""
    ran = Ran(options(tmp_path, "plain/2", "1:3:forward", n_ranks_per_node=2))
    assert ran.code == 1
    (ended,) = ran.all(JobEnded)
    assert "layer 1 (shard 1 of Sequential) is lost (rank 1)" in ended.reason and "checkpoint" in ended.help


def plans(ran: Ran) -> list[PlanChosen]:
    chosen = {event.generation: event.body.plan for event in ran.events if isinstance(event.body, PlanChosen)}
    return [chosen[event.generation] for event in ran.events if isinstance(event.body, GenerationStarted)]


SCRIPT = """
import sys, torch, odyssey
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
n_shards, calls = int(sys.argv[1]), sys.argv[2:]
model = nn.Linear(6, 1).double()
fully_shard(model, mesh=odyssey.shard_mesh(n_shards))
loss = lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1])
data = TensorDataset(torch.randn(16, 6).double(), torch.randn(16, 1).double())
run = odyssey.resilient(model, torch.optim.SGD(model.parameters()), loss, data, global_batch=8, micro_batch=4)
for step in run.steps(3):
    if calls and run.is_leader:
        model(torch.ones(1, 6).double())
"""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("2", "calls"), "all_gather_into_tensor: the sharded model is used outside of a step"),
        (("3",), "shard_mesh(3): there are 2 ranks"),
    ],
)
def test_what_would_make_ranks_wait_for_each_other_is_refused(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    """One rank that calls the model by itself would meet the others in their next step."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    given = {"n_ranks_per_node": 2, "log_dir": tmp_path / "logs", "capture_output": True}
    ran = Ran(RunOptions(script=str(path), arguments=arguments, **given))
    assert ran.code == 1
    assert why in ran.all(JobEnded)[0].reason


@pytest.mark.soak
def test_the_example_writes_the_model_of_a_script_that_runs_alone(tmp_path: Path) -> None:
    """To float32's rounding, though a rank is killed on the way: docs/own-model.md."""
    script, alone, together = ROOT / "examples" / "train_sharded.py", tmp_path / "alone.pt", tmp_path / "together.pt"
    subprocess.run([sys.executable, script, "--epochs", "1", "--model", alone], check=True, timeout=120)
    given = {"n_ranks_per_node": 4, "max_restarts": 3, "log_dir": tmp_path / "logs", "capture_output": True}
    ran = Ran(RunOptions(str(script), ("--epochs", "1", "--model", str(together)), drills=("step=12 kill=2",), **given))
    assert ran.code == 0, ran.text("stderr")
    assert [loss.rank for loss in ran.all(RankLost)] == [2]
    expected, found = torch.load(alone), torch.load(together)
    assert list(found) == list(expected)
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-5) for name in expected)
