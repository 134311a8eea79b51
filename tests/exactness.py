"""One case of the promise: a job with kills at given moments ends with the parameters of an undisturbed run, or says why not.

The oracle is tests/reference.py: one process, none of our engine. Where every holder of some layer was killed, the job
must have stopped and named just these layers; which, is worked out here from what the survivors reported to hold.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from launcher import events, replay
from launcher.events import Event, JobEnded, Pausing, PlanChosen, RankLost, RankPaused, UnitCommitted, Went
from tests import models, reference
from tests.jobs.train import make_optimizer, make_scheduler

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 90
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """A job and its kills; `seed` is only its name."""

    seed: int
    n_ranks: int
    layout: str
    strategy: str = "auto"
    variant: str = "gpt"
    steps: int = 14
    global_batch: int = 15
    micro_batch: int = 2
    max_restarts: int = 0
    eval_every: int = 5
    kills: tuple[dict[str, Any], ...] = ()


@dataclass
class Outcome:
    """What became of a case. `state_lost`: the job stopped, rightly. `marks`: the odd branches that it went through."""

    n_kills: int
    state_lost: bool
    strategies: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    recovery_s: list[float] = field(default_factory=list)


def run(case: Case, folder: Path) -> Outcome:
    """Run it and check everything that the promise says. AssertionErrors carry the case and the job's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    result, outcome_file, case_file = folder / "result.pt", folder / "outcome.json", folder / "case.json"
    arguments = [
        *("--model", case.variant, "--steps", str(case.steps), "--out", str(result), "--clip", "0.5", "--schedule"),
        *("--global-batch", str(case.global_batch), "--micro-batch", str(case.micro_batch)),
        *("--dropout", "0" if case.variant == "mlp" else "0.1", "--eval-every", str(case.eval_every)),
    ]
    options = {
        "script": str(ROOT / "tests/jobs/train.py"),
        "arguments": arguments,
        "n_nodes": case.n_ranks,
        "layout": case.layout,
        "strategy": case.strategy,
        "max_restarts": case.max_restarts,
        "log_dir": str(folder / "log"),
    }
    case_file.write_text(json.dumps({"options": options, "kills": case.kills}, indent=1))
    command = [sys.executable, str(ROOT / "tests/jobs/run_with_kills.py"), str(case_file), str(outcome_file)]
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            for rank in psutil.Process(process.pid).children(recursive=True):
                rank.kill()
            process.kill()
            raise AssertionError(f"{case} hangs, see {folder}") from None
    where = f"{case}, see {folder}"
    assert outcome_file.exists(), f"the agent itself failed: {where}\n{(folder / 'output.txt').read_text()[-3000:]}"
    ended = json.loads(outcome_file.read_text())
    (log_file,) = (folder / "log").glob("*/events.jsonl")
    log = [events.decode(line) for line in log_file.read_bytes().splitlines()]
    for logged, taken in replay.replay(log_file):
        assert logged == taken, f"the log does not replay: {where}"
    outcome = _outcome(log, len(ended["fired"]))
    end = log[-1].body
    assert isinstance(end, JobEnded), where
    if outcome.state_lost:
        assert ended["code"] == 1, where
        _check_stop(log, end, where)
        return outcome
    assert ended["code"] == 0, f"exit code {ended['code']}, {end.reason}: {where}"
    _check_result(case, log, result, where)
    return outcome


def _outcome(log: list[Event], n_kills: int) -> Outcome:
    end = log[-1].body
    outcome = Outcome(n_kills, isinstance(end, JobEnded) and "every holder of layer" in end.reason)
    paused: dict[int, RankPaused] = {}
    in_recovery = False
    for event in log:
        body = event.body
        if isinstance(body, Pausing):
            paused = {}
            if in_recovery:
                outcome.marks.add("lost during recovery")
            in_recovery = True
        elif isinstance(body, RankPaused):
            paused[body.rank] = body
        elif isinstance(body, PlanChosen) and in_recovery:
            outcome.strategies.append(body.plan.strategy)
            if {report.position for report in paused.values() if report.phase == "contributed"} & {
                result.position for result in body.results
            }:
                outcome.marks.add("rolled forward")
            elif any(report.phase in ("compute", "contributed") for report in paused.values()):
                outcome.marks.add("redone")
            if any(report.phase == "between" for report in paused.values()):
                outcome.marks.add("paused in the script's own code")
        elif isinstance(body, Went):
            in_recovery = False
            if body.total_s is not None:
                outcome.recovery_s.append(body.total_s)
    return outcome


def _check_stop(log: list[Event], end: JobEnded, where: str) -> None:
    """The layers that the last survivors lack are exactly those named."""
    held: dict[int, set[int]] = {}
    n_layers = 0
    for event in log:
        body = event.body
        if isinstance(body, PlanChosen):
            n_layers = body.plan.n_layers
        elif isinstance(body, Pausing):
            held = {}
        elif isinstance(body, RankPaused):
            held[body.rank] = set(body.held)
        elif isinstance(body, RankLost):
            held.pop(body.rank, None)
    missing = set(range(n_layers)) - set().union(*held.values()) if held else set(range(n_layers))
    named = {int(number) for number in re.findall(r"(\d+) \(", end.reason)}
    assert missing and missing == named, f"layers {missing} are lost, named are {named} in {end.reason!r}: {where}"


def _check_result(case: Case, log: list[Event], result: Path, where: str) -> None:
    expected_losses, expected = expected_of(case.variant, case.steps, case.global_batch, case.micro_batch)
    committed: dict[int, float] = {}
    for event in log:
        body = event.body
        if isinstance(body, UnitCommitted) and body.result.kind == "step":
            step, loss = body.result.position[0], body.result.values[0]
            assert abs(loss - committed.setdefault(step, loss)) < TOLERANCE, f"step {step} has two results: {where}"
    assert sorted(committed) == list(range(case.steps)), f"steps {sorted(committed)}: {where}"
    worst = max(abs(committed[step] - loss) for step, loss in enumerate(expected_losses))
    assert worst < TOLERANCE, f"a loss differs by {worst}: {where}"
    assert result.exists(), f"no result: {where}"
    state = torch.load(result, weights_only=False)["state"]["model"]
    assert set(state) == set(expected), where
    worst = max((state[name].double() - tensor.double()).abs().max().item() for name, tensor in expected.items())
    assert worst < TOLERANCE, f"a parameter differs by {worst}: {where}"


@functools.cache
def expected_of(variant: str, steps: int, global_batch: int, micro_batch: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The undisturbed run, in one process."""
    dropout = 0.0 if variant == "mlp" else 0.1
    return reference.train(
        partial(models.build_layers, variant, n_blocks=4, dropout=dropout, dtype=torch.float64),
        models.loss_for(variant),
        make_optimizer,
        models.data_for(variant, 96, torch.float64),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        steps=steps,
        scheduler=make_scheduler,
        clip_norm=0.5,
    )
