"""Real jobs on data that can only be iterated over: exact whoever is lost, comes back, or goes on from a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded
from launcher.options import RunOptions
from perfmodel.profile import profile as profiles
from tests import ROOT, exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left, profile_of_own_processors
from tests.held import Held
from tests.launcher.agent import test_resilient as resilient
from tests.resilient_reference import differences
from tests.streams import STATED

__all__ = ["nothing_left"]
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
RESUMED = str(ROOT / "tests" / "jobs" / "resumed.py")
WAYS = ["divided+2", "drawn", "drawn stated+2", "whole", "divided", "drawn+2", "whole+2", "whole drawn"]
WAYS += [f"{kind}{workers}" for kind in STATED for workers in ("", "+2") if f"{kind}{workers}" not in WAYS]
"""What is read, and by how many worker processes."""


def quick(*ways: str) -> list[Any]:
    """All of them in the soak, and these also in `make test`. Worker processes, which take most, are there at a loss, a return
    and a resumption, of a script's own model or of one in layers."""
    return [pytest.param(way, marks=() if way in ways else pytest.mark.soak) for way in WAYS]


# -- a script's own model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "point"),
    [("divided+2", "backward"), ("drawn", "loop"), ("whole", "forward")]
    + [pytest.param(way, point, marks=pytest.mark.soak) for way in WAYS for point in ("backward", "at_commit", "loop")],
)
def test_survivors_read_on_for_who_is_lost(way: str, point: str, tmp_path: Path) -> None:
    """The smallest share begins its second epoch with the second step."""
    ran = Ran(resilient.options(tmp_path, f"plain+{way}", f"1:5:{point}"))
    resilient.assert_exact(ran, tmp_path, f"plain+{way}", {1})
    assert len(ran.all(GenerationStarted)) == 2


@pytest.mark.parametrize("way", ["divided stated", "drawn stated+2"])
def test_survivors_read_on_from_where_the_lost_rank_was(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody begins a split anew that another rank has read: but the first, which all have looked at."""
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    ran = Ran(resilient.options(tmp_path, f"plain+{way}", "1:6:loop"))
    resilient.assert_exact(ran, tmp_path, f"plain+{way}", {1})
    begun = [tuple(map(int, line.split())) for line in (tmp_path / "begun").read_text().splitlines()]
    ranks = {split: {rank for rank, its, *place in begun if its == split and place == [0, 0]} for _, split, *_ in begun}
    assert any(its == {1} for its in ranks.values())
    assert all(len(its) == 1 for split, its in ranks.items() if split > 0)


@pytest.mark.parametrize("way", quick("divided+2", "drawn"))
def test_who_comes_back_reads_what_the_others_would_have(way: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert Ran(resilient.options(tmp_path, "plain", log_dir=tmp_path / "measured", write_profile=path)).code == 0
    measured = profiles.read(path)
    profiles.write(replace(measured, cluster=replace(measured.cluster, cores=None)), path)
    for written in (tmp_path / "out").glob("*.pt"):
        written.unlink()
    held = Held(tmp_path / "held", 6)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    try:
        given = {"max_restarts": 3, "strategy": "reroute", "profile": path}
        ran = Ran(resilient.options(tmp_path, f"plain+{way}", *held.arguments, "1:3:loop", **given), watch)
    finally:
        held.release()
    resilient.assert_exact(ran, tmp_path, f"plain+{way}")
    assert len(ran.all(GenerationStarted)) == 3


@pytest.mark.parametrize("way", quick("drawn"))
def test_a_later_run_of_fewer_ranks_reads_on_from_what_was_saved(way: str, tmp_path: Path) -> None:
    assert Ran(resilient.options(tmp_path, f"saved+{way}")).code == 0
    ran = Ran(resilient.options(tmp_path, f"saved+{way}", log_dir=tmp_path / "second", n_ranks_per_node=2))
    resilient.assert_exact(ran, tmp_path, f"saved+{way}", n_ranks=2)
    assert ran.steps() == list(range(4, resilient.N_STEPS))


@pytest.mark.soak
def test_a_script_that_runs_alone_reads_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "resilient.py"), str(tmp_path), "plain+drawn"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert differences("plain+drawn", {0: torch.load(tmp_path / "0.pt")})[0] < 1e-10


# -- a model in layers ----------------------------------------------------------------------------------------------------


def options(tmp_path: Path, way: str, *arguments: str, n_steps: int = exactness.N_STEPS, **given: Any) -> RunOptions:
    kind, num_workers = [*way.split("+"), "0"][:2]
    arguments = (*exactness.EXACT, "--stream", kind, "--num-workers", num_workers, *arguments)
    arguments = (*arguments, "--steps", str(n_steps), "--out", str(tmp_path / "out.pt"))
    given = {"n_nodes": 4, "layout": "2x2", "log_dir": tmp_path / "logs", "capture_output": True} | given
    return RunOptions(TRAIN, arguments, **given)


def assert_exact(ran: Ran, tmp_path: Path, way: str, n_steps: int = exactness.N_STEPS) -> None:
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    losses, expected = exactness.expected_of("gpt", n_steps, 15, 2, stream=way.partition("+")[0])
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


@pytest.mark.parametrize("way", quick("drawn", "whole"))
def test_a_job_in_pipelines_reads_on_for_who_is_lost_within_a_step(way: str, tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, way, "--die", "2", "3"))
    assert_exact(ran, tmp_path, way)
    assert len(ran.all(GenerationStarted)) == 2


@pytest.mark.parametrize("way", quick("drawn"))
def test_a_rank_of_a_pipeline_comes_back_and_reads_on(way: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profiles.write(profile_of_own_processors(), profile)
    held = Held(tmp_path / "held", 4)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    try:
        given = {"max_restarts": 3, "strategy": "reroute", "profile": profile, "log_dir": tmp_path / "job"}
        ran = Ran(options(tmp_path, way, "--die", "2", "3", *held.arguments, n_steps=8, **given), watch)
    finally:
        held.release()
    assert_exact(ran, tmp_path, way, n_steps=8)
    assert ran.all(Draining), "it came back, and may have been killed again"


@pytest.mark.parametrize("way", quick("divided+2"))
def test_a_job_goes_on_from_what_another_number_of_ranks_has_saved(way: str, tmp_path: Path) -> None:
    kind, num_workers = [*way.split("+"), "0"][:2]

    def resumed(name: str, n_steps: int, n_nodes: int) -> Ran:
        arguments = (str(tmp_path / "saved"), str(n_steps), str(tmp_path / "out.pt"))
        arguments = (*arguments, "--stream", kind, "--num-workers", num_workers)
        return Ran(RunOptions(RESUMED, arguments, n_nodes=n_nodes, log_dir=tmp_path / name, capture_output=True))

    assert resumed("first", 4, 2).code == 0
    ran = resumed("second", 8, 3)
    assert ran.steps() == list(range(4, 8))
    assert_exact(ran, tmp_path, way, n_steps=8)


def test_ranks_that_would_read_other_data_do_not_begin(tmp_path: Path) -> None:
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    ran = Ran(RunOptions(str(script), n_nodes=2, log_dir=tmp_path / "logs", capture_output=True))
    (ended,) = ran.all(JobEnded)
    assert (ended.code, ended.reason) == (1, "rank 1 read other first samples of data than rank 0")


UNLIKE = """
import os
import torch
import odyssey

class OfItsRank(torch.utils.data.IterableDataset):
    def __iter__(self):
        rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield from ((torch.full((4,), float(i)), torch.zeros(4)) for i in range(rank, 40, n))

layers = lambda: [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
optimizer = lambda parameters: torch.optim.SGD(parameters, 0.1)
odyssey.Job(layers, torch.nn.functional.mse_loss, optimizer, OfItsRank(), global_batch=8, micro_batch=2)
"""
