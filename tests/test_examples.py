"""The examples of `odyssey.resilient` and `odyssey.Job`: whoever is lost and comes back, and whatever they have saved and gone
on from, they train what they train alone, to 1e-10 in float64."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded, PlanChosen, RankLost
from launcher.options import RunOptions
from perfmodel.profile import profile as profiles
from tests import ROOT
from tests.agent_runs import Ran, nothing_left
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(400), pytest.mark.usefixtures("nothing_left")]
IN_DOUBLE = str(ROOT / "tests" / "jobs" / "in_double.py")
TEXT = str(ROOT / "docs" / "internals" / "benchmarks")
TUNED = ("fine_tune.py", "--steps", "30", "--context", "32", "--eval-every", "10", "--text", TEXT)
EXAMPLES = {
    "resilient": ("train_resilient.py", "--epochs", "2"),
    "images": ("train_images.py", "--steps", "40"),
    "sharded": ("train_sharded.py", "--epochs", "2"),
    "gpt": ("train_gpt.py", "--steps", "30", "--layers", "2", "--width", "32", "--context", "32", "--eval-every", "10"),
    "tuned": TUNED,
    "tuned in pipelines": (*TUNED, "--pipeline"),
}
SAVE = {"images": "--folder", "gpt": "--save", "tuned": "--save", "tuned in pipelines": "--save"}
"""The option that says where to."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(name: str, *given: str) -> tuple[str, ...]:
    if name.startswith("tuned") and importlib.util.find_spec("transformers") is None:
        pytest.skip("`make soak` installs transformers")
    script, *arguments = EXAMPLES[name]
    return (*given, str(ROOT / "examples" / script), *arguments)


def alone(name: str) -> dict[str, torch.Tensor]:
    """The model that the script has trained in one process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, IN_DOUBLE, *command(name, "--write", "alone.pt")], env=environment, check=True, timeout=200)
    return torch.load("alone.pt")


def ran(logs: str, command: tuple[str, ...], n_ranks: int, watch: Held | None = None, **given: object) -> Ran:
    """To its good end."""

    def release(event: Event, ran: Ran) -> None:
        if watch is not None and (isinstance(event.body, Draining) or comes_at_once(event.body)):
            watch.release()

    options = RunOptions(IN_DOUBLE, command, n_ranks_per_node=n_ranks, log_dir=Path(logs), capture_output=True, **given)
    found = Ran(options, release)
    assert found.code == 0, (found.all(JobEnded), found.text("stderr"))
    found.assert_replays()
    return found


def comes_at_once(body: object) -> bool:
    """Whether the plan that was chosen after a loss has the rank start again before anybody goes on."""
    return isinstance(body, PlanChosen) and bool(body.plan.spawned)


def lost(rank: int, step: int) -> tuple[str, ...]:
    """At a random moment of that step."""
    return ("--lose", str(rank), str(step), f"{random.random() * 20:.1f}")


def difference(path: str, expected: dict[str, torch.Tensor]) -> float:
    found = torch.load(path)
    assert found.keys() == expected.keys()
    return max((found[name].double() - tensor.double()).abs().max().item() for name, tensor in expected.items())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_exact_though_a_rank_is_lost_and_comes_back(name: str, victim: int) -> None:
    """All wait behind a later step until it is about to be taken in, which pays as each has a processor of its own; it may also
    pay to wait for it at once, where a start is cheap."""
    expected = alone(name)
    ran("measured", command(name), 4, write_profile=Path("measured.json"))
    measured = profiles.read(Path("measured.json"))
    profiles.write(replace(measured, cluster=replace(measured.cluster, cores=None)), Path("profile.json"))
    held = Held(Path("held"), 14)
    given = (*lost(victim, random.randint(2, 13)), *held.arguments, "--write", "found.pt")
    try:
        found = ran("logs", command(name, *given), 4, held, max_restarts=3, strategy="reroute", profile=Path("profile.json"))
    finally:
        held.release()
    assert [each.rank for each in found.all(RankLost)] == [victim]
    assert len(found.all(GenerationStarted)) == 3 - any(map(comes_at_once, found.all(PlanChosen)))
    assert difference("found.pt", expected) < 1e-10


@pytest.mark.parametrize("name", SAVE)
def test_an_example_goes_on_exactly_from_what_it_has_saved(name: str) -> None:
    """The first job loses a rank and ends behind a later step than the one that it has saved; the next one has fewer ranks."""
    expected = alone(name)
    saves = (SAVE[name], "checkpoints")
    ran("first", (*command(name, *lost(2, random.randint(2, 20)), "--end", "24"), *saves), 4)
    ran("second", (*command(name, *lost(0, random.randint(25, 29)), "--write", "found.pt"), *saves), 3)
    assert difference("found.pt", expected) < 1e-10
