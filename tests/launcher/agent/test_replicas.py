"""Unchanged DDP scripts go on with who is left of their ranks: exact, wherever a rank is lost; or all start again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.joblog.events import CauseKind, GenerationStarted, JobEnded, Note, RankLost, Restarting
from launcher.options import OnLoss, RunOptions
from odyssey.protocol.reports import Committed, Paused
from tests import ROOT
from tests.agent_runs import Ran, nothing_left
from tests.jobs import nano_loop
from tests.replicas_reference import difference, logs

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]
DDP = str(ROOT / "tests" / "jobs" / "ddp.py")
N_RANKS = 4
VARIANTS = ("plain", "view", "accumulate", "clip", "unused", "hook", "batchnorm", "function", "scaler", "compiled")
COLLECTIVES = (
    *("all_reduce", "all_reduce_max", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_gather"),
    *("all_gather_into_tensor", "all_gather_coalesced", "gather", "scatter"),
    *("broadcast_object_list", "scatter_object_list", "barrier"),
)
POINTS = (
    "before_forward",
    "in_forward",
    "in_backward",
    "at_sums",
    "after_sums",
    "after_backward",
    "in_step",
    "after_step",
    "before_metric",
)


def quick(names: Sequence[str], *also: str) -> list[Any]:
    """All of them in the soak, and some also in `make test`."""
    return [pytest.param(name, marks=() if name in also else pytest.mark.soak) for name in names]


def run(tmp_path: Path, variant: str, *kills: str, max_restarts: int = 0) -> Ran:
    folder = tmp_path / "out"
    folder.mkdir()
    return Ran(
        RunOptions(
            script=DDP,
            arguments=(str(folder), variant, *kills),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
            max_restarts=max_restarts,
        )
    )


def run_script(tmp_path: Path, text: str, *arguments: str, n_ranks: int = N_RANKS, max_restarts: int = 0) -> Ran:
    """A script of these lines, to its good end."""
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = Ran(
        RunOptions(
            script=str(script),
            arguments=arguments,
            n_ranks_per_node=n_ranks,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
            max_restarts=max_restarts,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    return ran


def assert_exact(ran: Ran, tmp_path: Path, variant: str, lost: Collection[int] = ()) -> None:
    """All but the lost ranks came to the end, with the model that they should have."""
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert logs(tmp_path / "out").keys() == set(range(N_RANKS)) - set(lost)
    assert difference(tmp_path / "out", N_RANKS, variant) == ""


@pytest.mark.parametrize("variant", quick(VARIANTS, "plain"))
def test_nothing_is_lost_and_nothing_changes(variant: str, tmp_path: Path) -> None:
    ran = run(tmp_path, variant)
    assert_exact(ran, tmp_path, variant)
    assert len(ran.all(GenerationStarted)) == 1


@pytest.mark.parametrize("point", quick(POINTS, "in_forward", "in_backward", "at_sums", "in_step"))
def test_survivors_go_on_wherever_a_rank_is_lost(point: str, tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", f"2:3:{point}")
    assert_exact(ran, tmp_path, "plain", {2})
    assert len(ran.all(GenerationStarted)) == 2


@pytest.mark.parametrize("variant", quick(VARIANTS[1:], "accumulate", "unused", "batchnorm", "scaler", "compiled"))
def test_whatever_ddp_does_beside(variant: str, tmp_path: Path) -> None:
    ran = run(tmp_path, variant, "1:2:in_backward", "3:4:after_backward")
    assert_exact(ran, tmp_path, variant, {1, 3})


def test_all_but_the_first_are_lost_one_after_the_other(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", "1:0:in_backward", "2:1:at_sums", "3:11:after_step")
    assert_exact(ran, tmp_path, "plain", {1, 2, 3})
    assert {unit.result.kind for unit in ran.all(Committed)} == {"backward"}
    assert {unit.rank for unit in ran.all(Committed)} == {0}


def test_groups_that_lost_nobody_go_on(tmp_path: Path) -> None:
    """One of the first two ranks, and a mesh of all."""
    ran = run(tmp_path, "groups", "2:3:in_backward", "3:5:after_step")
    assert_exact(ran, tmp_path, "groups", {2, 3})


def test_a_lost_rank_of_a_group_of_some_is_a_restart(tmp_path: Path) -> None:
    ran = run(tmp_path, "groups", "1:3:in_backward", max_restarts=1)
    assert_exact(ran, tmp_path, "groups")
    assert any("rank 1 was in its group" in note.text for note in ran.all(Note))


def test_a_rank_that_stands_still_is_lost(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", "2:3:stands_in_backward")
    assert_exact(ran, tmp_path, "plain", {2})
    assert [lost.cause.kind for lost in ran.all(RankLost)] == [CauseKind.HANG]


def test_two_are_lost_at_once(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", "1:4:in_backward", "3:4:in_backward")
    assert_exact(ran, tmp_path, "plain", {1, 3})


@pytest.mark.parametrize("point", ["at_commit", "after_commit"])
def test_who_is_lost_at_a_commit_point(point: str, tmp_path: Path) -> None:
    """The commit point is that of the buffers that DDP broadcasts."""
    ran = run(tmp_path, "batchnorm", f"2:3:{point}")
    assert_exact(ran, tmp_path, "batchnorm", {2})


@pytest.mark.parametrize("kill", [(), ("2:3:after_commit",)])
def test_who_lacks_the_result_that_others_have_takes_it_over(kill: tuple[str, ...], tmp_path: Path) -> None:
    ran = run(tmp_path, "batchnorm", "1:3:misses_commit", *kill)
    assert_exact(ran, tmp_path, "batchnorm", {2} if kill else ())
    assert {paused.phase for paused in ran.all(Paused) if paused.rank == 1} >= {"contributed"}


LACK = "{}:3:misses_sums"
HANDED_ON = {
    "to one that only lost a connection": (LACK.format(1),),
    "to two, by the one that is left": (LACK.format(1), LACK.format(3), "2:3:after_sums"),
    "to all others": (LACK.format(1), LACK.format(2), LACK.format(3)),
    "to the first": (LACK.format(0),),
    "to the first, and who has it is lost": (LACK.format(0), LACK.format(1), "2:3:after_sums"),
    "by the first of two that have it, which is lost on the way": (LACK.format(0), LACK.format(2), "1:3:giving"),
    "by the only one that has it, which is lost on the way": (LACK.format(0), LACK.format(2), LACK.format(3), "1:3:giving"),
    "to two, of which one is lost on the way": (LACK.format(1), LACK.format(2), "2:3:receiving"),
    "by the second, as the first is lost, and one who receives": (
        *(LACK.format(0), LACK.format(3)),
        *("1:3:giving", "3:3:receiving"),
    ),
}


@pytest.mark.parametrize("variant", ["clip", pytest.param("view", marks=pytest.mark.soak)])
@pytest.mark.parametrize("points", [pytest.param(points, id=name) for name, points in HANDED_ON.items()])
def test_sums_that_some_have_are_handed_on(points: tuple[str, ...], variant: str, tmp_path: Path) -> None:
    """I14: who lacks them has the same model then, to the bit, whatever clipping has made of the others' gradients."""
    ran = run(tmp_path, variant, *points)
    lack = {int(point[0]) for point in points if point.endswith("misses_sums")}
    assert_exact(ran, tmp_path, variant, {int(point[0]) for point in points if not point.endswith("misses_sums")})
    first = {paused.rank: paused for paused in reversed(ran.all(Paused))}
    newest = max(paused.passed.position for paused in first.values() if paused.passed is not None)
    assert {rank for rank, paused in first.items() if paused.position == newest and paused.phase == "compute"} == lack
    assert all(paused.hands_on for rank, paused in first.items() if rank not in lack)


def test_sums_that_nobody_alive_has_are_made_anew(tmp_path: Path) -> None:
    ran = run(tmp_path, "clip", "2:3:after_sums", *(LACK.format(rank) for rank in (0, 1, 3)))
    assert_exact(ran, tmp_path, "clip", {2})
    made_by = [line["by"] for line in logs(tmp_path / "out")[0][:-1]]
    assert made_by == [4, 4, 4] + [3] * (len(made_by) - 3)


def test_all_start_again_without_the_rank_that_speaks_for_them(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", "0:3:in_backward", max_restarts=1)
    assert_exact(ran, tmp_path, "plain")
    assert len(ran.all(Restarting)) == 1
    assert any("rank 0 speaks for all" in note.text for note in ran.all(Note))


def test_without_a_restart_that_is_the_end(tmp_path: Path) -> None:
    ran = run(tmp_path, "plain", "0:3:in_backward")
    assert ran.code == 1
    assert "rank 0 was lost" in ran.all(JobEnded)[0].reason


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        pytest.param("static", "its DDP has static_graph", marks=pytest.mark.soak),
        ("zero", "its optimizer has collectives of its own"),
        ("bare", "without Distr"),
    ],
)
def test_what_cannot_be_begun_anew_is_told_by_name(variant: str, why: str, tmp_path: Path) -> None:
    """ZeRO has a part of the optimizer's state on one rank only."""
    ran = run(tmp_path, variant, "2:3:after_backward", max_restarts=1)
    assert_exact(ran, tmp_path, variant)
    assert any(why in note.text for note in ran.all(Note))


@pytest.mark.parametrize(
    "kill", quick(("2:0:in_backward", "2:0:in_step", "2:3:before_forward"), "2:0:in_step", "2:3:before_forward")
)
def test_an_optimizer_that_is_shared_out_is_a_restart(kill: str, tmp_path: Path) -> None:
    """In its first step, and before that, and when ranks have had momentum of their own."""
    ran = run(tmp_path, "owners", kill, max_restarts=1)
    assert_exact(ran, tmp_path, "owners")
    assert len(ran.all(Restarting)) == 1
    assert any("its optimizer has collectives of its own" in note.text for note in ran.all(Note))


def run_saving(
    tmp_path: Path, on_loss: OnLoss, n_steps: int = 40, max_restarts: int = 3, by: str = "path", until: int = 15
) -> list[tuple[int, int]]:
    """The steps that rank 0 has printed, with how many ranks made each: 4 before step `until`, and a save every 20."""
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "ddp_saves.py"),
            arguments=(str(tmp_path), str(n_steps), "20", str(until), by),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=on_loss,
            max_restarts=max_restarts,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    lines = [line.split() for line in ran.text().splitlines() if line.startswith("step ")]
    return [(int(step), int(n)) for _, step, _, n in lines]


@pytest.mark.parametrize("by", ["path", "file"])
def test_auto_goes_on_and_brings_the_rank_back_when_the_script_has_saved(by: str, tmp_path: Path) -> None:
    """Nothing has been saved yet: all that was done would be done again. The script would go on for years without a restart."""
    steps = run_saving(tmp_path, OnLoss.AUTO, n_steps=10**9, by=by)
    before, after = steps[:-20], steps[-20:]
    assert before == [(step, 4 if step < 15 else 3) for step in range(len(before))]
    first = after[0][0]
    assert after == [(step, 4) for step in range(first, first + 20)]
    assert first > 0 and first % 20 == 0
    assert first <= len(before)


def test_continue_goes_on_to_the_end(tmp_path: Path) -> None:
    steps = run_saving(tmp_path, OnLoss.CONTINUE)
    assert steps == [(step, 4 if step < 15 else 3) for step in range(40)]


def test_a_rank_is_lost_while_the_first_saves(tmp_path: Path) -> None:
    """The file is whole, and has the state that was to be saved."""
    steps = run_saving(tmp_path, OnLoss.CONTINUE, n_steps=30, by="slowly", until=20)
    assert steps == [(step, 4 if step < 20 else 3) for step in range(30)]
    assert torch.load(tmp_path / "state.pt")["step"] == 20
    assert not (tmp_path / "state.new").exists()


def test_auto_without_a_restart_goes_on_to_the_end(tmp_path: Path) -> None:
    steps = run_saving(tmp_path, OnLoss.AUTO, max_restarts=0)
    assert steps == [(step, 4 if step < 15 else 3) for step in range(40)]


@pytest.mark.parametrize(
    "ends",
    [
        ("1:all_reduce", "3:all_gather", "2:barrier"),
        *(pytest.param(each, marks=pytest.mark.soak) for each in [(), *((f"2:{name}",) for name in COLLECTIVES)]),
    ],
)
def test_every_collective_is_right_for_who_is_there(ends: tuple[str, ...], tmp_path: Path) -> None:
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "collectives.py"),
            arguments=(str(tmp_path), *ends),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    left = sorted(set(range(N_RANKS)) - {int(end[0]) for end in ends})
    assert ran.text().splitlines() == [f"right to the end with {left}"] * len(left)


def test_the_example_goes_on_and_learns(tmp_path: Path) -> None:
    ran = Ran(
        RunOptions(
            script=str(ROOT / "examples" / "train_ddp.py"),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
            drills=("step=40 kill=2",),
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    lines = [line.split() for line in ran.text().splitlines()]
    n_there = [int(line[-2]) for line in lines]  # the agent hears of a step when it is over, and ranks train on meanwhile
    assert len(lines) == 8 and n_there == sorted(n_there, reverse=True) and set(n_there) == {4, 3}
    assert float(lines[-1][3].rstrip(",")) < 0.5 < float(lines[0][3].rstrip(","))


TWICE = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

for part in range(2):
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    for step in range(6):
        if (os.environ["RANK"], part, step) in ((sys.argv[1], 0, 3), (sys.argv[2], 1, 3)):
            os.kill(os.getpid(), 9)
        replica.zero_grad()
        replica(torch.ones(3, 2)).sum().backward()
        assert torch.equal(replica.module.weight.grad, torch.full((1, 2), 3.0))
    print("part", part, "of", dist.get_world_size(), flush=True)
    del replica
    dist.destroy_process_group()
"""


def test_a_script_makes_its_groups_twice(tmp_path: Path) -> None:
    """A mean of equal gradients stays what it is, whatever DDP divides by."""
    ran = run_script(tmp_path, TWICE, "1", "3")
    assert sorted(ran.text().splitlines()) == ["part 0 of 3"] * 3 + ["part 1 of 2"] * 2


def nano_model(made_by: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """What one process makes of the batches of these ranks in each step, without a scaler, and without torch.compile."""
    net = nano_loop.model()
    steps = nano_loop.optimizer(net)
    generators = [nano_loop.generator_of(rank) for rank in range(N_RANKS)]
    batches = [[nano_loop.batch(its) for _ in range(nano_loop.N_STEPS * nano_loop.N_ACCUMULATED)] for its in generators]
    for step, ranks in enumerate(made_by):
        steps.zero_grad()
        for group in steps.param_groups:
            group["lr"] = nano_loop.rate_at(step)
        for rank in ranks:
            for micro_step in range(nano_loop.N_ACCUMULATED):
                loss = net(*batches[rank][step * nano_loop.N_ACCUMULATED + micro_step])
                (loss / nano_loop.N_ACCUMULATED / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), nano_loop.CLIP)
        steps.step()
    return net.state_dict()


@pytest.mark.parametrize("micro_step", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_loop_as_nanogpt_has_it(micro_step: int, tmp_path: Path) -> None:
    """The lost rank has given nothing to its last step: it ended before the last of its backwards."""
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "nano_loop.py"),
            arguments=(str(tmp_path), f"2:5:{micro_step}"),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    found = {int(path.stem): torch.load(path) for path in tmp_path.glob("[0-9].pt")}
    assert found.keys() == {0, 1, 3}
    expected = nano_model([(0, 1, 2, 3)] * 5 + [(0, 1, 3)] * (nano_loop.N_STEPS - 5))
    for one in found.values():
        assert one["by"] == [4] * 5 + [3] * (nano_loop.N_STEPS - 5)
        for name, tensor in one["model"].items():
            assert torch.equal(tensor, found[0]["model"][name])
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


MIXED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

dtype = getattr(torch, sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))
replica = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
torch.manual_seed(int(os.environ["RANK"]))
n_skipped = 0
for step in range(20):
    if (os.environ["RANK"], step) == ("2", 9):
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    inputs = torch.randn(32, 16)
    with torch.autocast("cpu", dtype):
        loss = nn.functional.mse_loss(replica(inputs), 1000 * inputs.sum(1, keepdim=True))
    before = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    n_skipped += scaler.get_scale() < before
assert (n_skipped > 0) == (dtype == torch.float16), n_skipped
total = sum(parameter.double().sum().item() for parameter in net.parameters())
print(total, scaler.get_scale(), dist.get_world_size(), flush=True)
del replica
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_mixed_precision(dtype: str, tmp_path: Path) -> None:
    """All survivors have one model and one scale, in float16 behind steps that were left out for all."""
    ran = run_script(tmp_path, MIXED, dtype)
    lines = ran.text().splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert lines[0].endswith(" 3")


HOOKS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
replica = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
if sys.argv[1] == "fp16":
    replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
else:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
torch.manual_seed(int(os.environ["RANK"]))
for step in range(10):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("2", "0", 6):
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    replica(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print(sum(parameter.double().sum().item() for parameter in net.parameters()), flush=True)
del replica
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("hook", "n_at_end"), [("fp16", 3), ("power", 4)])
def test_communication_hooks(hook: str, n_at_end: int, tmp_path: Path) -> None:
    """One that reduces twice cannot be begun anew as a whole: that is a restart, by its name."""
    ran = run_script(tmp_path, HOOKS, hook, max_restarts=1)
    sums = ran.text().split()
    assert len(sums) == n_at_end and len(set(sums)) == 1
    assert any("reduces again" in note.text for note in ran.all(Note)) == (hook == "power")


WAITS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

members = [int(rank) for rank in sys.argv[2].split(",")]
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[3:]:
    store = dist.distributed_c10d._get_default_store()
    replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    store.set(f"{rank} has built", "")
if (rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (int(sys.argv[1]), "0"):
    if sys.argv[3:]:
        store.wait(["0 has built"])  # else it may be that nobody alive has what DDP has exchanged
    os.kill(os.getpid(), 9)
group = dist.new_group(members)
dist.barrier()
if rank in members:
    there = torch.ones(1)
    dist.all_reduce(there, group=group)
    assert there.item() == len(members) and members[dist.get_rank(group)] == rank
print("to the end with", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("victim", "members", "with_ddp", "why"),
    [
        pytest.param(2, "1,2", False, "without Distr", id="loading"),
        pytest.param(2, "1,2", True, "rank 2 was in its group", id="of them", marks=pytest.mark.soak),
        pytest.param(1, "2,3", True, "without rank 1 ranks of its group", id="before them"),
        pytest.param(3, "1,2", True, "", id="behind them", marks=pytest.mark.soak),
    ],
)
def test_nobody_waits_in_torch_for_a_lost_rank(victim: int, members: str, with_ddp: bool, why: str, tmp_path: Path) -> None:
    """Those of a group of torch's own wait for each other in C++, the others in a collective of ours. Where none of them is
    lost, and none has another number then, all go on."""
    ran = run_script(tmp_path, WAITS, str(victim), members, *["ddp"][:with_ddp], max_restarts=1)
    assert ran.text().splitlines() == [f"to the end with {N_RANKS if why else N_RANKS - 1}"] * (N_RANKS if why else N_RANKS - 1)
    assert len(ran.all(Restarting)) == (1 if why else 0)
    assert any(why in note.text for note in ran.all(Note) if "cannot go on" in note.text) == bool(why)


OBJECTS = """
import itertools, os, sys
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
replica(torch.ones(1, 2)).sum().backward()
replica.eval()
store = c10d._get_default_store()
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
calls = itertools.count(1)

def counted(call):
    def called(*arguments, **named):
        number = next(calls)
        if rank == 0:
            store.set(f"call {number}", "")
        if is_first and (rank, number) == (1, int(sys.argv[2])):
            store.wait([f"call {number}"])  # else it may be that nobody alive has what was called before
            os.kill(os.getpid(), 9)
        return call(*arguments, **named)

    return called

c10d.all_gather, c10d.gather = counted(c10d.all_gather), counted(c10d.gather)
found = [None] * n
mine = {"rank": rank, "bytes": list(range(10 ** rank))}
if sys.argv[1] == "all":
    dist.all_gather_object(found, mine)
else:
    dist.gather_object(mine, found if rank == 0 else None)
if rank == 0:
    print([each["rank"] for each in found], flush=True)
dist.barrier()
del replica
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("which", "at", "found"),
    [
        pytest.param("all", 1, [0, 0, 2, 3], marks=pytest.mark.soak),
        ("all", 2, [0, 1, 2, 3]),
        pytest.param("one", 1, [0, 0, 2, 3], marks=pytest.mark.soak),
        pytest.param("one", 2, [0, 1, 2, 3], marks=pytest.mark.soak),
    ],
)
def test_gathered_objects_are_whole(which: str, at: int, found: list[int], tmp_path: Path) -> None:
    """Before all know their sizes the first's comes in the place of a lost rank's, and then it is a restart."""
    ran = run_script(tmp_path, OBJECTS, which, str(at), max_restarts=1)
    assert ran.text().splitlines() == [str(found)]
    assert len(ran.all(Restarting)) == at - 1
    assert any("whose sizes are known of other ranks" in note.text for note in ran.all(Note)) == (at == 2)
