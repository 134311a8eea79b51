"""Random jobs of an unchanged DDP script: ranks are killed or stand still at random moments, and at drawn points of a step.

What must come of it: all that live have one model, which is what a single process makes of the samples that were contributed
(tests/replicas_reference.py). Where the rank that speaks for all is lost, all start again.
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

from launcher.agent.start import run as run_agent
from launcher.coordinator.replay import replay
from launcher.joblog.events import Event, GenerationStarted, JobEnded, RankLost, RankStarted, Restarting
from launcher.options import OnLoss, RunOptions
from odyssey.messages import Committed
from tests import ROOT

VARIANTS = ("plain", "view", "accumulate", "clip", "unused", "hook", "batchnorm", "function", "static")
POINTS = ("before_forward", "in_backward", "at_commit", "after_commit", "after_backward", "after_step", "before_metric")
N_EPOCHS = 12
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
    seed: int
    variant: str
    n_ranks: int
    strikes: tuple[Strike, ...]
    points: tuple[str, ...]
    """RANK:STEP:POINT, as ddp.py takes them."""


@dataclass
class Outcome:
    """`why`: empty for a good one. `n_lost`: ranks that were; `n_generations`, `n_restarts`: that ran, and of all ranks."""

    case: Case
    why: str = ""
    n_lost: int = 0
    n_generations: int = 0
    n_restarts: int = 0
    seconds: float = 0.0
    recovery_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.case.variant}, {self.case.n_ranks} ranks, {self.n_lost} lost, {self.n_restarts} restarts"
        told = f": {self.why}" if self.why else ""
        return f"seed {self.case.seed}: {'bad' if self.why else 'exact'} ({what}, {self.seconds:.1f} s){told}"


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    n_ranks = rng.choice((2, 3, 4, 4, 5, 6))
    first = 0 if rng.random() < 0.15 else 1
    victims = rng.sample(range(first, n_ranks), rng.randint(1, n_ranks - 1))
    strikes, points = [], []
    for rank in victims:
        if rng.random() < 0.4:
            points.append(f"{rank}:{rng.randint(0, 10)}:{rng.choice(POINTS)}")
        else:
            sign = signal.SIGSTOP if rng.random() < 0.06 else signal.SIGKILL
            strikes.append(Strike(rank, rng.randint(1, 40), rng.random() * 0.05, sign))
    if len(strikes) > 1 and rng.random() < 0.3:  # together
        strikes = [Strike(each.rank, strikes[0].after, strikes[0].delay_s, each.signal) for each in strikes]
    return Case(seed, rng.choice(VARIANTS), n_ranks, tuple(strikes), tuple(points))


def run(case: Case, folder: Path) -> Outcome:
    """In this process, whose main thread is the agent's."""
    os.environ["DDP_EPOCHS"] = str(N_EPOCHS)
    from tests.replicas_reference import difference  # reads it

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
            case Restarting():
                outcome.n_restarts += 1
            case JobEnded():
                ended.append(event.body)

    options = RunOptions(
        script=str(ROOT / "tests" / "jobs" / "ddp.py"),
        arguments=(str(out), case.variant, *case.points),
        n_ranks_per_node=case.n_ranks,
        log_dir=folder / "logs",
        capture_output=True,
        on_loss=OnLoss.CONTINUE,
        max_restarts=8,
        restart_backoff_s=0.0,
    )
    began = time.monotonic()
    code = run_agent(options, watch, lambda rank, stream, data: None)
    outcome.seconds = time.monotonic() - began
    for timer in timers:
        timer.cancel()
    pairs = replay(next((folder / "logs").iterdir()) / "events.jsonl")
    if code != 0:
        outcome.why = f"exit code {code}: {ended[0].reason if ended else 'no end'}"
    elif any(logged != taken for logged, taken in pairs):
        outcome.why = "the log leads to other decisions"
    elif outcome.seconds > LIMIT_S:
        outcome.why = f"it took {outcome.seconds:.0f} s"
    else:
        outcome.why = difference(out, case.n_ranks, case.variant)
    return outcome


def soak(first_seed: int, n_jobs: int, folder: Path) -> list[Outcome]:
    """One after the other; each is told."""
    outcomes = []
    for seed in range(first_seed, first_seed + n_jobs):
        outcomes.append(outcome := run(draw(seed), folder / str(seed)))
        print(outcome, flush=True)
    lost, restarts = sum(each.n_lost for each in outcomes), sum(each.n_restarts for each in outcomes)
    bad = [each for each in outcomes if each.why]
    print(f"{len(outcomes)} jobs, {lost} ranks lost, {restarts} restarts, {len(bad)} bad")
    return outcomes
