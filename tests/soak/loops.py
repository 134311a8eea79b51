"""Random jobs of scripts with loops of their own: ranks are killed or stand still at random moments, and at drawn points.

`ddp`: an unchanged script. All that live have one model, which is what a single process makes of the samples that were
contributed (tests/replicas_reference.py). Where the rank that speaks for all is lost, all start again.
`resilient`: a script's own model, and whoever is lost comes back. All have what a single process makes of all samples
(tests/resilient_reference.py). Of the variant `saved` there are two jobs, and the second goes on from what the first has saved.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from launcher.agent.start import run as run_agent
from launcher.coordinator.decided_again import replay
from launcher.joblog.events import Draining, Event, GenerationStarted, JobEnded, RankLost, RankStarted, Restarting
from launcher.options import OnLoss, RunOptions
from odyssey.protocol.reports import Committed
from tests import ROOT
from tests.warm import popen

VARIANTS = {
    "ddp": ("plain", "view", "accumulate", "clip", "unused", "hook", "batchnorm", "function", "scaler", "static"),
    "resilient": (
        "plain",
        "batchnorm",
        "average",
        "plateau",
        "clamped",
        "frozen",
        "eased",
        "padded",
        "scaled",
        "compiled",
        "weighted",
        "several",
        "plain+drawn+1",
        "batchnorm+drawn",
        "padded+whole+1",
        "tokens",
        "tokens+drawn stated",
        "plain+divided stated+1",
        "average+whole stated",
        "plain/2",
        "average/2",
        "scaled/2",
        "several/2",
        "batchnorm/2",
        "tokens/2+drawn stated",
        "saved",
        "saved/2",
    ),
}
POINTS = {
    "ddp": (
        *("before_forward", "in_backward", "at_sums", "after_sums", "at_commit", "after_commit"),
        *("after_backward", "after_step", "before_metric"),
    ),
    "resilient": ("forward", "backward", "at_commit", "after_commit", "optimizer", "loop"),
}
N_EPOCHS, N_STEPS = 12, 250
LIMIT_S = 180.0


@dataclass(frozen=True)
class Strike:
    """`signal` to `rank`, `delay_s` after the unit number `after` was final."""

    rank: int
    after: int
    delay_s: float
    signal: int


@dataclass(frozen=True)
class Case:
    kind: str
    seed: int
    variant: str
    n_ranks: int
    strikes: tuple[Strike, ...]
    points: tuple[str, ...]
    """RANK:STEP:POINT, as the scripts take them."""
    returns: bool = False
    """Lost ranks are started again. In an unchanged script that is all of them."""


@dataclass
class Outcome:
    """`why`: empty for a good one. `n_lost`: ranks that were; `n_generations`, `n_restarts`: that ran, and of all ranks;
    `n_joined`: ranks that came back."""

    case: Case
    why: str = ""
    n_lost: int = 0
    n_generations: int = 0
    n_restarts: int = 0
    n_joined: int = 0
    seconds: float = 0.0
    recovery_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.n_lost} lost, {self.n_joined} back, {self.n_restarts} restarts"
        what = f"{self.case.variant}, {self.case.n_ranks} ranks, {counts}"
        told = f": {self.why}" if self.why else ""
        return f"seed {self.case.seed}: {'bad' if self.why else 'exact'} ({what}, {self.seconds:.1f} s){told}"


def draw(kind: str, seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    n_ranks = rng.choice((2, 3, 4, 4, 5, 6) if kind == "ddp" else (2, 3, 4))
    first = 0 if kind == "resilient" or rng.random() < 0.15 else 1
    victims = rng.sample(range(first, n_ranks), rng.randint(1, n_ranks - 1))
    variant = rng.choice(VARIANTS[kind])
    if "/" in variant:  # two copies of two shards, and of each shard one holder lives
        n_ranks, victims = 4, [rng.choice((shard, shard + 2)) for shard in rng.sample((0, 1), rng.randint(1, 2))]
    n_units, n_steps = (40, 10) if kind == "ddp" else (200, 150)
    strikes, points = [], []
    for rank in victims:
        if rng.random() < 0.4:
            points.append(f"{rank}:{rng.randint(0, n_steps)}:{rng.choice(POINTS[kind])}")
        else:
            sign = signal.SIGSTOP if rng.random() < 0.06 else signal.SIGKILL
            strikes.append(Strike(rank, rng.randint(1, n_units), rng.random() * 0.05, sign))
    if len(strikes) > 1 and rng.random() < 0.3:  # together
        strikes = [Strike(each.rank, strikes[0].after, strikes[0].delay_s, each.signal) for each in strikes]
    if kind == "ddp" and rng.random() < 0.5:
        points += _lacking_sums(rng, n_ranks, victims[0], rng.randint(0, n_steps))
    returns = kind == "ddp" or rng.random() < 0.7
    return Case(kind, seed, variant, n_ranks, tuple(strikes), tuple(points), returns)


def _lacking_sums(rng: random.Random, n_ranks: int, victim: int, step: int) -> list[str]:
    """Some ranks lack the sums of a step that others may have, and while these hand them on, one is lost."""
    lacking = rng.sample(range(n_ranks), rng.randint(1, n_ranks))
    end = rng.choice(("after_sums", "giving", "receiving"))
    return [*(f"{rank}:{step}:misses_sums" for rank in lacking), f"{victim}:{step}:{end}"]


def run(case: Case, folder: Path) -> Outcome:
    """In this process, whose main thread is the agent's."""
    os.environ |= {"DDP_EPOCHS": str(N_EPOCHS), "RESILIENT_STEPS": str(N_STEPS), "RESILIENT_PAUSE_S": "0.004"}
    os.environ |= {"RESILIENT_SAVE_EVERY": "20"}
    out = folder / "out"
    out.mkdir(parents=True)
    outcome, processes, n_units, ended = Outcome(case), dict[int, int](), 0, list[JobEnded]()
    timers: list[threading.Timer] = []

    def strike(each: Strike) -> None:
        with suppress(ProcessLookupError):
            os.kill(processes[each.rank], each.signal)

    def watch(event: Event) -> None:
        nonlocal n_units
        match event.body:
            case RankStarted(rank=rank, pid=pid):
                processes[rank] = pid
            case Committed():
                n_units += 1
                for each in case.strikes:
                    if each.after == n_units:
                        timers.append(timer := threading.Timer(each.delay_s, strike, (each,)))
                        timer.start()
            case RankLost():
                outcome.n_lost += 1
            case GenerationStarted(total_s=total_s):
                outcome.n_generations += 1
                if total_s is not None:
                    outcome.recovery_s.append(total_s)
            case Draining(joined=joined):
                outcome.n_joined += len(joined)
            case Restarting():
                outcome.n_restarts += 1
            case JobEnded():
                ended.append(event.body)

    options = RunOptions(
        script=str(ROOT / "tests" / "jobs" / f"{case.kind}.py"),
        arguments=(str(out), case.variant, *case.points),
        n_ranks_per_node=case.n_ranks,
        capture_output=True,
        on_loss=OnLoss.CONTINUE if case.kind == "ddp" else OnLoss.RESTART,
        max_restarts=8 if case.returns else 0,
        restart_backoff_s=0.0,
    )
    began = time.monotonic()
    code, pairs = 0, list[tuple[object, object]]()
    for logs in ("logs", "logs of the second")[: 2 if case.variant.startswith("saved") else 1]:
        code = run_agent(replace(options, log_dir=folder / logs), watch, lambda rank, stream, data: None)
        pairs += replay(next((folder / logs).iterdir()) / "events.jsonl")
        if code != 0:
            break
    outcome.seconds = time.monotonic() - began
    for timer in timers:
        timer.cancel()
    if code != 0:
        outcome.why = f"exit code {code}: {ended[-1].reason if ended else 'no end'}"
    elif any(logged != taken for logged, taken in pairs):
        outcome.why = "the log leads to other decisions"
    elif outcome.seconds > LIMIT_S:
        outcome.why = f"it took {outcome.seconds:.0f} s"
    else:
        outcome.why = difference(case, out)
    return outcome


def difference(case: Case, out: Path) -> str:
    """How what ranks have differs from what a single process makes; empty if it does not."""
    from tests import replicas_reference, resilient_reference  # they read how long the job is

    if case.kind == "ddp":
        return replicas_reference.difference(out, case.n_ranks, case.variant)
    found = {int(path.stem): torch.load(path) for path in out.glob("*.pt")}
    far = {rank: most for rank, most in resilient_reference.differences(case.variant, found).items() if most > 1e-10}
    return f"ranks are off by {far}" if far else "" if found else "no rank came to the end"


def soak(kind: str, first_seed: int, n_jobs: int, folder: Path) -> list[Outcome]:
    """One after the other, in forks of processes that have imported everything; each is told."""
    outcomes = []
    popen.start()
    try:
        for seed in range(first_seed, first_seed + n_jobs):
            outcomes.append(outcome := run(draw(kind, seed), folder / str(seed)))
            print(outcome, flush=True)
    finally:
        popen.templates.close()
    lost, back, restarts = (sum(getattr(each, name) for each in outcomes) for name in ("n_lost", "n_joined", "n_restarts"))
    bad = [each for each in outcomes if each.why]
    print(f"{len(outcomes)} jobs, {lost} ranks lost, {back} back, {restarts} restarts, {len(bad)} bad")
    return outcomes
