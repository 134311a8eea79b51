"""The part of `python -m benchmarks.grow` about a rank that becomes slow: what the job makes of it.

One real job of four ranks, each of which holds all layers (`--layout 4x1`, `auto`). When they have run for a while one of them
takes three times as long for every layer. It is left alone until the job reacts by itself (launcher/health/slow_ranks.py); then
the job goes on with the plan that it has chosen; then the slow rank is killed for good, and the job goes on without it, as if
the remedy had been to drop it. All three are timed in the same job, by the median from commit to commit.

The ranks, what they tell, the detection, the search and the transitions are real. The layers are not: a device that each rank
has for itself is stood in for by a wait, of which a fifth is spent on the rank's processor (benchmarks/jobs/slow_rank.py). Else
there would be nothing to gain: where ranks share few processors the slow one's work slows all others, whoever does it. There
are four, as eight would want more than two processors for that fifth and for what torch does beside it. That does not become
slower with the rank, so the job takes it for somewhat less slow than it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import joblog, trial
from benchmarks.report import Row

N_RANKS, SLOW_RANK = 4, 3
N_MICRO_BATCHES = 30
"""So many that four ranks of these speeds, and three, can share them without a remainder: 9, 9, 9 and 3; 10 each."""
SCRIPT = trial.JOBS / "slow_rank.py"
USUAL_S = 40.0
"""How long all ranks are as fast as each other: the detector wants 40 reports of each, one every half second at most."""
REACTION_S = 150.0
"""A job that has not reacted by then leaves the rank alone."""
STEPS_S = 15.0
"""How long each of the other two plans is timed."""
N_WARM_UP = 3


class SlowRank(msgspec.Struct, frozen=True):
    """Seconds of a step: with the slow rank left alone, with what the job made of it, and without it. `strategy`: what it made,
    empty for nothing. `reacted_after_s`: from then on that it was slow."""

    alone_s: float
    after_s: float
    dropped_s: float
    strategy: str
    reacted_after_s: float


def measure() -> SlowRank:
    """One job. Raises TrialError if it does not go on."""
    with trial.new_folder() as name:
        folder = Path(name)
        slow = folder / "slow"
        arguments = ["--steps", "1000000", "--global-batch", str(N_MICRO_BATCHES), "--micro-batch", "1", "--slow", str(slow)]
        profile = trial.profile_of_own_processors(folder, N_RANKS, SCRIPT, arguments)
        run = [sys.executable, "-m", "odyssey_cli", "run", "--nodes", str(N_RANKS), "--log-dir", str(folder / "logs")]
        flags = ["--no-display", "--layout", f"{N_RANKS}x1", "--profile", str(profile)]
        with trial.Trial([*run, *flags, str(SCRIPT), *arguments], {"PYTHONPATH": str(trial.ROOT)}, folder) as job:
            job.wait_for_step(N_WARM_UP)
            job.ends_before(time.monotonic() + USUAL_S)
            slow.write_text(str(SLOW_RANK))
            slow_at = time.time()
            # To look takes the processors of the job.
            while len(joblog.generations(job.events())) < 2 and time.time() < slow_at + REACTION_S:
                if job.ends_before(time.monotonic() + 2.0):
                    break
            job.ends_before(time.monotonic() + STEPS_S)
            reacted = joblog.generations(job.events())[-1]
            os.kill(dict(job.living_ranks())[SLOW_RANK], signal.SIGKILL)
            job.ends_before(time.monotonic() + STEPS_S)
            found = joblog.generations(job.events())
            if job.ends_before(0.0) or SLOW_RANK in found[-1].plan.workers:
                raise trial.TrialError(f"the job does not go on without rank {SLOW_RANK}\n{job.output_end()}")
        return slow_rank_of(found[0], reacted, found[-1], slow_at)


def slow_rank_of(alone: joblog.Generation, reacted: joblog.Generation, dropped: joblog.Generation, slow_at: float) -> SlowRank:
    """`reacted`: the same as `alone` where the job has not. `slow_at`: when the rank became slow. Raises TrialError where a
    plan has made too few steps."""
    has_reacted = reacted.plan.generation != alone.plan.generation
    times = [commit.time for commit in alone.commits if commit.time > slow_at][N_WARM_UP:]
    after_s, dropped_s = reacted.step_s(N_WARM_UP), dropped.step_s(N_WARM_UP)
    if len(times) < 2 or after_s is None or dropped_s is None:
        raise trial.TrialError("a plan has made too few steps")
    alone_s = median(late - early for early, late in pairwise(times))
    if not has_reacted:
        return SlowRank(alone_s, alone_s, dropped_s, "", reacted.commits[-1].time - slow_at)
    return SlowRank(alone_s, after_s, dropped_s, reacted.plan.strategy, reacted.went_at - slow_at)


def summarise(found: Sequence[SlowRank]) -> dict[str, float]:
    """Throughput with what the job has made of the slow rank, over that of leaving it alone, and over that without it."""
    if not found:
        return {}
    return {
        "slow_rank_throughput_ratio": median(one.alone_s / one.after_s for one in found),
        "slow_rank_over_dropped": median(one.dropped_s / one.after_s for one in found),
    }


def row(found: Sequence[SlowRank]) -> Row:
    """Medians."""
    return {
        "case": f"slow: {', '.join(sorted({one.strategy or 'nothing' for one in found}))}",
        "ranks": len(found),
        "step": median(one.after_s for one in found),
        "left alone": median(one.alone_s for one in found),
        "dropped": median(one.dropped_s for one in found),
        "reacted after": median(one.reacted_after_s for one in found),
    }
