"""A script's loop around its steps, over a lost leader: what it logs, a metric that ends it, a scheduler and an average."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import default_collate

from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded
from launcher.options import RunOptions
from perfmodel.profile import profile as profiles
from tests import ROOT
from tests.agent_runs import Ran, nothing_left
from tests.held import Held
from tests.jobs import logged as job
from tests.reference import step_sample_ids

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]
SCRIPT = str(ROOT / "tests" / "jobs" / "logged.py")


@functools.cache
def expected() -> dict[str, Any]:
    """What one process in plain torch sees."""
    torch.set_num_threads(1)
    parts = job.Parts()
    seen: dict[str, Any] = {"steps": {}, "evaluations": {}}
    for step in range(job.N_STEPS):
        ids = step_sample_ids(step, job.GLOBAL_BATCH, len(job.TRAINED), job.SEED)
        batch = default_collate([job.TRAINED[i] for i in ids])
        parts.optimizer.zero_grad()
        loss = parts.loss(batch)
        loss.backward()
        rate = parts.optimizer.param_groups[0]["lr"]
        seen["steps"][str(step)] = {"loss": loss.item(), "lr": rate, "error": parts.error(batch).item()}
        parts.optimizer.step()
        parts.average.update_parameters(parts.net)
        if step % 2:
            with torch.no_grad():
                batch = default_collate([job.VALIDATED[i] for i in range(job.N_VALIDATED)])
                found = {"loss": parts.loss(batch), "error": parts.error(batch), "averaged": parts.averaged_error(batch)}
            seen["evaluations"][str(step)] = {name: value.item() for name, value in found.items()}
            parts.plateau.step(seen["evaluations"][str(step)]["loss"])
            if found["averaged"] < job.GOOD:
                break
    seen["average"] = [value.flatten().tolist() for value in parts.average.module.parameters()]
    return seen


def run(
    folder: Path, n: int, *arguments: str, on_event: Callable[[Event, Ran], None] | None = None, **options: Any
) -> tuple[Ran, dict[int, dict[str, Any]]]:
    """The job, and what each rank has seen."""
    (folder / "out").mkdir(parents=True)
    given = {"n_ranks_per_node": n, "log_dir": folder / "logs", "capture_output": True, **options}
    ran = Ran(RunOptions(SCRIPT, (str(folder / "out"), *arguments), **given), on_event)
    return ran, {int(path.stem): json.loads(path.read_text()) for path in (folder / "out").glob("*.json")}


def assert_seen(ran: Ran, seen: dict[int, dict[str, Any]], ranks: Iterable[int], late: Iterable[int] = ()) -> None:
    """All stop at the same step, with the same numbers."""
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert seen.keys() == set(ranks)
    for rank, its in seen.items():
        for kind in ("steps", "evaluations"):
            wanted = expected()[kind]
            assert its[kind].keys() <= wanted.keys() and max(its[kind], key=int) == max(wanted, key=int)
            assert rank in late or its[kind].keys() == wanted.keys()
            for step, values in its[kind].items():
                assert values == pytest.approx(wanted[step], abs=1e-10, rel=0), (rank, step)
        for mine, other in zip(its["average"], expected()["average"], strict=True):
            assert mine == pytest.approx(other, abs=1e-10, rel=0)


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        wanted = expected()["steps"][str(line["step"])]
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, abs=1e-10, rel=0)
    return found


def test_what_is_expected_shows_what_is_asked() -> None:
    rates = [step["lr"] for step in expected()["steps"].values()]
    assert len(set(rates)) > 2 and 12 < len(rates) < job.N_STEPS, rates


def test_a_log_has_every_step_over_lost_leaders_and_all_stop_at_the_same_step(tmp_path: Path) -> None:
    """The leader is lost before it logs; the next one within its action; and one that reads a sample of an evaluation."""
    ran, seen = run(tmp_path, 4, "0:3:loop", "1:6:once", "2:9:reading")
    assert_seen(ran, seen, [3])
    steps = [int(step) for step in expected()["steps"]]
    by_once = [line["step"] for line in lines(tmp_path / "out" / "once")]
    assert Counter(by_once) == Counter([*steps, 6]), "once more where the rank that wrote was lost before another knew"
    assert by_once == sorted(by_once)
    by_leader = [line["step"] for line in lines(tmp_path / "out" / "leader")]
    assert len(set(by_leader)) == len(by_leader), "never twice"
    assert set(steps) - set(by_leader) <= {3}


def test_what_the_leader_has_logged_nobody_logs_again(tmp_path: Path) -> None:
    """The next one is lost in the middle of the commit point of step 8, which is redone, or its rest."""
    ran, seen = run(tmp_path, 4, "0:4:logged", "1:8:told")
    assert_seen(ran, seen, [2, 3])
    assert len(ran.all(GenerationStarted)) == 3 and (tmp_path / "out" / "killed-1-8-told").exists()
    steps = [int(step) for step in expected()["steps"]]
    assert [line["step"] for line in lines(tmp_path / "out" / "leader")] == steps
    assert [line["step"] for line in lines(tmp_path / "out" / "once")] == steps


def test_a_leader_that_comes_back_stops_with_the_others(tmp_path: Path) -> None:
    """It has scheduler and average as they are on the others, who have moved both meanwhile: it is taken in behind step 7,
    where all wait until it is about to be, or behind the next one, and is told of all from there on."""
    run(tmp_path / "measured", 3, write_profile=tmp_path / "profile.json")
    measured = profiles.read(tmp_path / "profile.json")
    profiles.write(replace(measured, cluster=replace(measured.cluster, cores=None)), tmp_path / "profile.json")
    held = Held(tmp_path / "held", 7)

    def watch(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Draining):
            held.release()

    given = {"max_restarts": 3, "strategy": "reroute", "profile": tmp_path / "profile.json", "on_event": watch}
    try:
        ran, seen = run(tmp_path / "job", 3, *held.arguments, "0:3:reading", **given)
    finally:
        held.release()
    assert_seen(ran, seen, [0, 1, 2], late=[0])
    assert len(ran.all(GenerationStarted)) == 3
    first = min(map(int, seen[0]["steps"]))
    assert 3 < first <= 8
    for told in ("steps", "evaluations"):
        assert seen[0][told].keys() == {step for step in expected()[told] if int(step) >= first}, told


def test_the_loop_of_the_page_logs_every_step_over_a_lost_leader(tmp_path: Path) -> None:
    """The step that it has written last is written again: no other rank knew."""
    script = str(ROOT / "tests" / "jobs" / "log_of_page.py")
    options = RunOptions(script, (str(tmp_path), "0", "5"), n_ranks_per_node=3, log_dir=tmp_path / "logs", capture_output=True)
    ran = Ran(options)
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    first, *others = (path.read_text().splitlines() for path in sorted((tmp_path / "runs" / "first").iterdir()))
    (then,) = others
    assert [int(line.split()[2]) for line in first] == list(range(6))
    assert [int(line.split()[2]) for line in then] == list(range(5, 12))
    assert float(then[0].split()[1]) == pytest.approx(float(first[-1].split()[1]))


def test_metrics_of_other_names_on_one_rank_end_the_job(tmp_path: Path) -> None:
    ran, seen = run(tmp_path, 3, "2:5:apart")
    (ended,) = ran.all(JobEnded)
    assert ran.code != 0 and not seen
    assert "metrics have not the same names in all micro-batches and on all ranks" in str(ended), ended
