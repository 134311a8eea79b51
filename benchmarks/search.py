"""What a search costs as jobs grow: `python -m benchmarks.search`.

A search after a loss, as a job makes it that has nothing prepared: in a process that has found the first layout and nothing
else. Two models, 8 stages and 32 (as many as leave two pipelines), for 8 to 16,384 workers on two nodes at least, one loss and
eight at once. Time is processor time of one thread;
memory is the process's high-water mark; the plan is the chosen one as it is sent.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.apart import apart
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from odyssey.errors import StateLost
from odyssey.plan.plan import encode
from perfmodel.profile.catalog import load_job
from perfmodel.profile.profile import Profile
from strategies.search import best, initial_plan, search, warm_up
from strategies.situation import Situation

SIZES = (8, 64, 256, 1024, 4096, 16384)
RANKS_PER_NODE = 8
D_S = 6 * 3600.0
LIMIT_S = 300.0
"""For one search and the layout before it, which take seconds."""


class Config(msgspec.Struct, frozen=True):
    """A job of `configs/`, on more and fewer workers; its stages, and micro-batches a rank."""

    job: str
    n_stages: int
    per_rank: int


CONFIGS = {"6.7b": Config("gpt3-6.7b@a100-32", 8, 4), "65b": Config("llama-65b@a100-32", 32, 2)}
ABOUT = (
    "One search after losses, with nothing prepared: processor seconds of one thread, the process's largest memory, the "
    "chosen plan as JSON. 4 micro-batches a rank in 8 stages (6.7B) and 2 in 32 stages (65B), fewer where that leaves no two "
    "pipelines; nodes of 8, of 4 for 8 workers. Growth is the exponent x of n^x from 1,024 to 16,384 workers. What does not "
    "fit, or losses that leave a layer without holder, are left out."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("search")
    warm_up()
    rows: list[dict[str, Cell]] = []
    seconds: dict[tuple[str, int, int], float] = {}
    for name in CONFIGS:
        for n_workers in options.sizes:
            for n_lost in (1, 8):
                fresh = partial(apart, partial(measure, name, n_workers, n_lost), LIMIT_S)
                row = kept.once(f"{name} {n_workers} {n_lost}", Row | None, fresh)
                if row is not None:
                    rows.append(row)
                    seconds[name, n_workers, n_lost] = float(row["cpu s"] or 0.0)
    kept.publish(ABOUT, summary(rows, seconds), rows, options.results)


def summary(rows: list[dict[str, Cell]], seconds: dict[tuple[str, int, int], float]) -> dict[str, float]:
    """The worse of both models after one loss, at two sizes; how it grows between the larger ones."""
    result: dict[str, float] = {}
    for size in (8, 64, 16384):
        if worst := [s for (_, n, lost), s in seconds.items() if (n, lost) == (size, 1)]:
            result[f"search_cpu_s_{size}"] = max(worst)
    if sizes := [float(row["plan kB"] or 0.0) for row in rows if row["workers"] == 16384]:
        result["plan_kb_16384"] = max(sizes)
    few = [seconds[name, 1024, 1] for name in CONFIGS if (name, 1024, 1) in seconds]
    if few and "search_cpu_s_16384" in result:
        result["search_growth"] = math.log(result["search_cpu_s_16384"] / max(few)) / math.log(16)
    return result


def measure(name: str, n_workers: int, n_lost: int) -> dict[str, Cell] | None:
    """One search; None where there is nothing to search."""
    config = CONFIGS[name]
    if 2 * n_lost > n_workers:
        return None
    n_stages = min(config.n_stages, n_workers // 2)
    profile = msgspec.structs.replace(load_job(config.job).profile, global_batch=config.per_rank * n_workers)
    chosen = best(initial_plan(_situation(profile, n_workers), f"{n_workers // n_stages}x{n_stages}"))
    if chosen is None or chosen.plan is None:
        return None
    plan = chosen.plan
    step = max(1, n_workers // n_lost)
    lost = {(3 + i * step + i) % n_workers for i in range(n_lost)}
    situation = _situation(profile, n_workers)
    situation = msgspec.structs.replace(
        situation,
        generation=1,
        plan=plan,
        alive=tuple(worker for worker in range(n_workers) if worker not in lost),
        lost=tuple(sorted(lost)),
        held={worker: plan.holds.get(worker, frozenset()) for worker in range(n_workers) if worker not in lost},
    )
    gc.collect()
    gc.disable()  # as the agent does from a loss on
    before_s = time.process_time()
    try:
        table = search(situation)
    except StateLost:
        return None
    cpu_s = time.process_time() - before_s
    taken = best(table)
    return {
        "model": name,
        "workers": n_workers,
        "lost": n_lost,
        "cpu s": cpu_s,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "plan kB": len(encode(taken.plan)) / 1000 if taken is not None and taken.plan is not None else None,
        "taken": taken.strategy if taken is not None else None,
        "candidates": len(table),
    }


def _situation(profile: Profile, n_workers: int) -> Situation:
    """The situation of a job that starts."""
    return Situation(
        generation=0,
        step=0,
        plan=None,
        alive=tuple(range(n_workers)),
        lost=(),
        respawnable=(),
        held={},
        node_of={worker: worker // min(RANKS_PER_NODE, n_workers // 2) for worker in range(n_workers)},
        profile=profile,
        seconds_to_change=D_S,
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
