"""Runs a case as `odyssey run` would, and says what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from launcher.joblog.events import Event, GenerationStarted, PlanChosen
from tests.soak import verdict
from tests.soak.case import Case
from tests.soak.classes import classes
from tests.soak.start import Broken, Start

GOOD = ("exact", "stopped")


@dataclass
class Outcome:
    """`verdict`: `exact`, `stopped` (rightly, because of what was lost), or what went wrong, and `why`."""

    case: Case
    folder: Path
    verdict: str = "exact"
    why: str = ""
    struck: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    strategies: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD

    @property
    def classes(self) -> dict[str, int]:
        """Name the faults and surroundings that it belongs to, and how many faults struck in each."""
        return classes(self.case, self.struck)

    def __str__(self) -> str:
        case = self.case
        options = f"{case.layout} {case.strategy} protect {case.protect}"
        what = f"{options}, {case.recipe.variant} {case.recipe.optimizer}, {len(self.struck)} faults"
        if case.agents is not None:
            what = f"{'+'.join(map(str, case.agents.n_ranks))} on {case.agents.n_first} agents, {what}"
        bad = "" if self.is_good else f": {self.why}; see {self.folder}"
        return f"seed {case.seed}: {self.verdict} ({what}, {self.seconds:.1f} s){bad}"


def run(case: Case, folder: Path) -> Outcome:
    """Run it and check everything that the promise says. `folder` is its own, and keeps all of it."""
    folder.mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "case.json").write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1))
    outcome = Outcome(case, folder)
    started = time.monotonic()
    starts: list[Start] = []
    try:
        while len(starts) <= len(case.again) and (not starts or starts[-1].is_killed):
            starts.append(Start(case, folder, len(starts)))
            starts[-1].run()
        outcome.verdict = verdict.judge(case, folder, starts)
        for each in starts:
            _look_at(each.log(), each, outcome)
    except Broken as broken:
        outcome.verdict, outcome.why = broken.verdict, broken.why
    outcome.struck = [what["struck"] for each in starts for what in each.struck]
    outcome.seconds = time.monotonic() - started
    return outcome


def _look_at(log: list[Event], start: Start, outcome: Outcome) -> None:
    outcome.marks |= verdict.marks(log)
    for event in log:
        if isinstance(event.body, PlanChosen):
            outcome.strategies.append(event.body.plan.strategy)
        elif isinstance(event.body, GenerationStarted) and event.body.total_s is not None:
            outcome.recovery_s.append(event.body.total_s)
