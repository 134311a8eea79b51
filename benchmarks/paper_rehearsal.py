"""The second part of `python -m benchmarks.paper`: short rehearsals, and replays of what they went through.

Each job of 32 ranks is rehearsed with the adaptive choice and with single strategies forced, all losing the same ranks after
the same steps; then the losses of each rehearsal, at the moments at which they struck, are replayed. So what the simulation
leaves out can be read off: the same quantity, of the same losses, once lived through and once computed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.apart import Unfinished, apart
from benchmarks.kept import Kept
from benchmarks.published_systems import policies
from benchmarks.report import Cell, Row
from launcher.joblog import reader
from launcher.joblog.events import Event, GenerationStarted, RankLost
from odyssey.protocol.reports import Committed
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import plan_now
from odyssey_cli.planning.source import Source
from odyssey_cli.rehearsal.comparison import Rehearsal
from odyssey_cli.rehearsal.rehearse import Wanted, losses, rehearse
from odyssey_cli.replay.ask import ask
from odyssey_cli.replay.outcome import Outcome
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace

N_STEPS = 16
STEPS_TO_LOSS = 4.0
"""Mean distance of losses, in steps without failures: the published intervals, drawn together."""
STEP_S = 3.0
"""What a step without failures is to take here: the speed of a rehearsal is set by it. With less
the two cores are busy with messages."""
POLICIES = {"auto": "auto", "repartition": "oobleck", "reroute": "recycle"}
"""What is rehearsed -> the published system for whose policy it stands in (itself for the adaptive choice)."""
SEED = 6
"""Draws four losses."""
MODELS = ("gpt3-medium-a100-32", "gpt3-6.7b-a100-32")
"""The smallest and the largest."""
NEVER_S = 1e9
LIMIT_S = 900.0
"""For one rehearsal and its replay, which take two minutes."""
ABOUT = (
    "The same comparison by rehearsal: one process a rank, real losses, ops and links that take the profile's time. 16 steps, "
    "ranks lost with their slots at exponential distances of 4 steps in the mean (--mtbf compressed so far; the job is "
    "told). Rehearsals cannot follow the published policies, so single strategies stand in: `repartition`, which lays all "
    "layers out anew on who is left, for Oobleck; `reroute`, which keeps the layout, for ReCycle. `rehearsed`: 16 steps at "
    "the predicted time without failures, over what they took. `replayed`: the losses of this very rehearsal, at the "
    "moments at which they struck, by `odyssey replay`; `policy replayed`: the same by the policy like the published system's. "
    "`changes s`: time in which no step was kept, per loss."
)


class Lived(NamedTuple):
    """What a rehearsal's log tells, in seconds of the cluster. `lost`: (moment since the first Go, rank)."""

    length_s: float
    lost: tuple[tuple[float, int], ...]


def measure(kept: Kept, n_workers: int) -> tuple[dict[str, float], list[dict[str, Cell]]]:
    """The summary and the rows."""
    rows: list[dict[str, Cell]] = []
    useful: dict[str, list[float]] = {name: [] for name in POLICIES}
    off: list[float] = []
    with tempfile.TemporaryDirectory(prefix="odyssey-paper-") as folder:
        for model in MODELS:
            found = source.find(model).resized(n_workers, 1)
            for asked, stands_for in POLICIES.items():
                its = partial(_measured, found, asked, stands_for, Path(folder) / model / asked)
                try:
                    rows.append(kept.once(f"{model} {asked}", Row, partial(apart, its, LIMIT_S)))
                except Unfinished as error:
                    raise SystemExit(f"{model}, {asked}: {error}") from None
                rehearsed, replayed = rows[-1]["rehearsed"], rows[-1]["replayed"]
                assert isinstance(rehearsed, float) and isinstance(replayed, float)
                useful[asked].append(rehearsed)
                off.append(abs(replayed / rehearsed - 1))
                print(f"{model}, {asked}: rehearsed {rehearsed:.3f}, replayed {replayed:.3f}", flush=True)
    summary = {}
    for asked, stands_for in list(POLICIES.items())[1:]:
        ratios = [a / b for a, b in zip(useful["auto"], useful[asked], strict=True)]
        summary[f"rehearsed_over_{stands_for}_best"], summary[f"rehearsed_over_{stands_for}_worst"] = max(ratios), min(ratios)
    summary["replayed_over_rehearsed_most_off"] = max(off)
    return summary, rows


def _measured(found: Source, asked: str, stands_for: str, folder: Path) -> dict[str, Cell]:
    """Raises SystemExit if the rehearsal does not come to its end."""
    one, events, speed = _rehearsed(found, asked, folder)
    if one.code != 0:
        raise SystemExit(f"{found.name}, {asked}: the rehearsal ended with exit code {one.code}")
    return _row(found, one, lived(events, speed), speed, stands_for)


def _rehearsed(found: Source, asked: str, folder: Path) -> tuple[Rehearsal, list[Event], float]:
    """The rehearsal, its log, and its speed."""
    step_s = _step_s(found)
    mtbf_s = STEPS_TO_LOSS * step_s
    drills = losses(mtbf_s, step_s, N_STEPS, found.n_nodes, SEED)
    speed = step_s / STEP_S
    wanted = Wanted("auto", (asked,), drills, N_STEPS, speed, mtbf_s, 0.0, {}, SEED, 0, folder)
    (one,) = rehearse(found, wanted, display=False)
    (log,) = folder.glob(f"*/{reader.NAME}")
    return one, list(reader.events(log)), speed


def _step_s(found: Source) -> float:
    estimate = plan_now(found, "auto", STEPS_TO_LOSS).estimate
    assert estimate is not None
    return estimate.step_s


def lived(events: Iterable[Event], speed: float) -> Lived:
    """From the first Go to the last step, and when ranks died: as long before it was noticed as the log says."""
    start = end = 0.0
    lost: list[tuple[float, int]] = []
    noticed: list[tuple[float, int]] = []
    for event in events:
        match event.body:
            case GenerationStarted(detect_s=detect_s):
                start = start or event.time
                lost += [(at - start - (detect_s or 0.0), rank) for at, rank in noticed]
                noticed = []
            case RankLost(rank=rank) if start:
                noticed.append((event.time, rank))
            case Committed():
                end = event.time
    return Lived((end - start) * speed, tuple((max(0.0, at) * speed, rank) for at, rank in lost))


def _row(found: Source, one: Rehearsal, lived: Lived, speed: float, stands_for: str) -> dict[str, Cell]:
    step_s = one.generations[0].predicted_step_s
    changes = tuple(Change(at, rank, NodeEventKind.LOST) for at, rank in sorted(lived.lost))
    trace = Trace("rehearsed", "", found.n_nodes, lived.length_s, changes)
    setup = Setup(found.profile, 1, mtbf_s=STEPS_TO_LOSS * step_s)
    both = policies(one.asked, stands_for)
    answer = ask(found.name, trace, setup, RestartCosts(every_s=NEVER_S), both, lambda policy, at_s: None)
    replayed = {outcome.policy: outcome for outcome in answer.outcomes}
    kept_s = sum(generation.n_steps * (generation.step_s or generation.predicted_step_s) for generation in one.generations)
    predicted_s = sum(generation.n_steps * generation.predicted_step_s for generation in one.generations)
    return {
        "job": found.name,
        "strategy": one.asked,
        "speed": round(speed, 2),
        "stands for": "" if stands_for == one.asked else stands_for,
        "losses": len(changes),
        "layouts": " ".join(dict.fromkeys(generation.layout for generation in one.generations)),
        "rehearsed": N_STEPS * step_s / lived.length_s,
        "replayed": replayed[one.asked].useful,
        "policy replayed": None if stands_for == one.asked else replayed[stands_for].useful,
        "steps over predicted": kept_s / predicted_s,
        "changes s": (lived.length_s - kept_s) / len(changes),
        "changes s replayed": _between_steps_s(replayed[one.asked]) / len(changes),
    }


def _between_steps_s(outcome: Outcome) -> float:
    totals = outcome.totals
    return totals.transition_s + totals.redone_s + totals.restart_s


def publish(n_workers: int, results: Path) -> None:
    """Measure and write."""
    kept = Kept("paper-rehearsal")
    summary, rows = measure(kept, n_workers)
    kept.publish(ABOUT, summary, rows, results)
