"""What backwards in halves bring at 32 workers, rehearsed: `python -m benchmarks.gain` (some four minutes).

Each job is rehearsed twice, at the same speed and with the same loss: as it is, and with a profile whose backwards have no
halves, so that all its plans are 1F1B.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks import report
from benchmarks.apart import Unfinished, apart
from benchmarks.kept import Kept
from benchmarks.pace import speed_of
from benchmarks.rehearsal import LIMIT_S, SECONDS_TO_CHANGE
from benchmarks.report import Cell
from benchmarks.run import run
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import plan_now
from odyssey_cli.planning.source import Source
from odyssey_cli.rehearsal.comparison import Generation
from odyssey_cli.rehearsal.rehearse import SIGNALS, Wanted, rehearse
from perfmodel.profile.profile import Profile

N_STEPS = 10
ABOUT = (
    "Rehearsed on this machine, 32 ranks: seconds of a step in 1F1B over those with the backward in halves where the search "
    "takes that, less 1; measured, and as both were predicted. Before a loss and behind it."
)


class Case(NamedTuple):
    """A job of `configs/` on four nodes of eight."""

    job: str
    layout: str
    lost: int


CASES = (Case("gpt3-3.35b-a100-32", "4x8", 12), Case("gpt3-medium-a100-32", "8x4", 16))


def main() -> None:
    options = _parse_arguments()
    kept = Kept("gain")
    rows: list[dict[str, Cell]] = []
    gains: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="odyssey-gain-") as folder:
        for case in CASES:
            measure = partial(apart, partial(_rehearsed, case, Path(folder)), 2 * LIMIT_S)
            try:
                found = kept.once(case.job, tuple[list[Generation], list[Generation]], measure)
            except Unfinished as error:
                raise SystemExit(f"{case.job}: {error}") from None
            for plain, split in zip(*found, strict=True):
                if plain.step_s is None or split.step_s is None:
                    raise SystemExit(f"{case.job}: a generation without steps")
                measured, predicted = plain.step_s / split.step_s - 1, plain.predicted_step_s / split.predicted_step_s - 1
                rows.append(
                    {
                        "job": case.job,
                        "1F1B": plain.layout,
                        "in halves": split.layout,
                        "1F1B s": plain.step_s,
                        "in halves s": split.step_s,
                        "gain": measured,
                        "gain predicted": predicted,
                    }
                )
                gains.append((measured, predicted))
    measured_gains, predicted_gains = zip(*gains, strict=True)
    summary = {
        "split_gain_32": median(measured_gains),
        "split_gain_32_predicted": median(predicted_gains),
        "split_gain_32_worst": min(measured_gains),
    }
    kept.publish(ABOUT, summary, rows, options.results)


def _rehearsed(case: Case, folder: Path) -> tuple[list[Generation], list[Generation]]:
    """The generations without halves, and with them. Raises SystemExit if somebody ends it."""
    of = source.find(case.job).resized(4, 8)
    plan = plan_now(of, case.layout, SECONDS_TO_CHANGE)
    drills = (f"step={N_STEPS // 2} lose={case.lost}",)
    wanted = Wanted(case.layout, ("auto",), drills, N_STEPS, speed_of(plan), SECONDS_TO_CHANGE, 0.0, {}, 0, 0, folder)

    def generations(of: Source) -> list[Generation]:
        (one,) = rehearse(of, wanted, display=False)
        if one.code:
            raise SystemExit(one.code if one.code > SIGNALS else f"{case.job}: ended with {one.code}")
        return list(one.generations)

    return generations(replace(of, profile=_whole(of.profile))), generations(of)


def _whole(profile: Profile) -> Profile:
    """The same model, whose backwards have no halves."""
    layers = (replace(its, input_gradient_s=its.backward_s, weight_gradient_s=0.0) for its in profile.layers)
    return replace(profile, layers=tuple(layers))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gain", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
