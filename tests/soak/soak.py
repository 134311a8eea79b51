"""As many jobs as it takes for so many faults to strike, some at the same time, and what became of them all."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak import draw
from tests.soak.classes import row
from tests.soak.run import Outcome, run


@dataclass
class Total:
    """Of a soak."""

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
    minutes: float = 0.0

    @property
    def n_faults(self) -> int:
        return self.struck.total()

    def add(self, outcome: Outcome) -> None:
        self.verdicts[outcome.verdict] += 1
        self.struck.update(outcome.struck)
        self.marks.update(outcome.marks)
        self.strategies.update(outcome.strategies)
        self.recovery_s = sorted([*self.recovery_s, *outcome.recovery_s])
        for name, n_faults in outcome.classes.items():
            self.classes.setdefault(name, Counter())[outcome.verdict] += 1
            self.in_class[name] += n_faults
        if not outcome.is_good:
            self.bad.append(str(outcome))

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
    total = Total(first_seed)
    started = time.monotonic()
    seed = first_seed
    print(f"soak: {n_faults} faults from seed {first_seed}, in {folder}", flush=True)
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Outcome]] = set()
        while running or seed == first_seed or total.n_faults < n_faults:
            while len(running) < at_once and (seed == first_seed or total.n_faults < n_faults):
                running.add(pool.submit(run, draw.case(seed), folder / str(seed)))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (each.result() for each in done):
                total.add(outcome)
                print(f"{total.n_faults:5} {outcome}", flush=True)
                if outcome.is_good:
                    shutil.rmtree(outcome.folder)
    total.minutes = (time.monotonic() - started) / 60
    return total
