"""As many jobs as it takes for so many faults to strike, some at the same time, and what became of them all.

Their processes begin as those of users do, or as forks of some that have imported everything (tests/warm): those are cheap.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak import draw, sequences
from tests.soak.case import Case
from tests.soak.classes import row
from tests.soak.run import Outcome, run
from tests.warm import popen


@dataclass
class Total:
    """What a soak comes to."""

    first_seed: int
    verdicts: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    classes: dict[str, Counter[str]] = field(default_factory=dict)
    """Verdicts of the jobs of each (classes.py)."""
    in_class: Counter[str] = field(default_factory=Counter)
    """Faults."""
    bad: list[str] = field(default_factory=list)
    n_long: int = 0
    """Jobs in which as much has struck as a sequence is to have."""
    minutes: float = 0.0

    @property
    def n_faults(self) -> int:
        return self.struck.total()

    def add(self, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        self.n_long += len(outcome.struck) >= sequences.N_LEAST
        self.struck.update(outcome.struck)
        self.marks.update(outcome.marks)
        self.strategies.update(outcome.strategies)
        self.recovery_s = sorted([*self.recovery_s, *outcome.recovery_s])
        for name, n_faults in outcome.classes.items():
            self.classes.setdefault(name, Counter())[outcome.verdict] += 1
            self.in_class[name] += n_faults
        if not outcome.is_good:
            self.bad.append(str(outcome))

    def include(self, other: Total) -> None:
        """What another soak has come to."""
        for name in ("verdicts", "struck", "marks", "strategies", "in_class"):
            getattr(self, name).update(getattr(other, name))
        for name, verdicts in other.classes.items():
            self.classes.setdefault(name, Counter()).update(verdicts)
        self.recovery_s = sorted([*self.recovery_s, *other.recovery_s])
        self.bad += other.bad
        self.n_long += other.n_long
        self.minutes += other.minutes

    def table(self) -> list[dict[str, str | int]]:
        """A row for all jobs, and one for each class."""
        rows = [row("all", self.n_faults, self.verdicts)]
        return rows + [row(name, self.in_class[name], verdicts) for name, verdicts in sorted(self.classes.items())]

    def __str__(self) -> str:
        lines = [
            f"{self.verdicts.total()} jobs from seed {self.first_seed}, {self.n_faults} faults, {self.minutes:.1f} minutes",
            *(
                f"  {name}: {dict(sorted(getattr(self, name).items()))}"
                for name in ("verdicts", "struck", "marks", "strategies")
            ),
            *self.bad,
        ]
        return "\n".join(lines)


def soak(first_seed: int, n_faults: int, folder: Path, at_once: int) -> Total:
    """Run the job of `first_seed`, and those after it until so many faults have struck. Folders of good ones are removed."""
    print(f"soak: {n_faults} faults from seed {first_seed}, in {folder}", flush=True)
    return _run(Total(first_seed), draw.case, lambda total: total.n_faults >= n_faults, folder, at_once)


def soak_jobs(first_seed: int, n_jobs: int, folder: Path, at_once: int) -> Total:
    """Run so many jobs from this seed on, as `soak` does."""
    print(f"soak: {n_jobs} jobs from seed {first_seed}, in {folder}", flush=True)
    return _run(Total(first_seed), draw.case, lambda total: total.verdicts.total() >= n_jobs, folder, at_once)


def soak_protected(first_seed: int, n_jobs: int, folder: Path, at_once: int) -> Total:
    """Run so many jobs of one pipeline, whose ranks keep each other's layers. Their processes are forks."""
    print(f"soak: {n_jobs} protected jobs from seed {first_seed}, in {folder}", flush=True)
    total = Total(first_seed)
    return _run(total, draw.protected_case, lambda total: total.verdicts.total() >= n_jobs, folder, at_once, _be_warm)


def soak_sequences(first_seed: int, n_sequences: int, folder: Path, at_once: int) -> Total:
    """Run so many sequences in which enough has changed; a good one in which too little has does not count. Their processes are
    forks."""
    print(f"soak: {n_sequences} sequences from seed {first_seed}, in {folder}", flush=True)
    return _run(Total(first_seed), sequences.case, lambda total: total.n_long >= n_sequences, folder, at_once, _be_warm)


def _be_warm() -> None:
    popen.start()
    multiprocessing.util.Finalize(None, popen.templates.close, exitpriority=1)


def _run(
    total: Total, draw_case: Callable[[int], Case], is_enough: Callable[[Total], bool], folder: Path, at_once: int,
    begin: Callable[[], None] | None = None,
) -> Total:  # fmt: skip
    """`begin`: what each process that runs jobs does first."""
    started = time.monotonic()
    seed = total.first_seed
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), begin) as pool:
        running: set[Future[Outcome]] = set()
        while running or seed == total.first_seed or not is_enough(total):
            while len(running) < at_once and (seed == total.first_seed or not is_enough(total)):
                running.add(pool.submit(run, draw_case(seed), folder / str(seed)))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (each.result() for each in done):
                total.add(outcome)
                print(f"{total.n_faults:5} {outcome}", flush=True)
                if outcome.is_good:
                    shutil.rmtree(outcome.folder)
    total.minutes = (time.monotonic() - started) / 60
    return total
