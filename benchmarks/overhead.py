"""What our engine costs while nothing fails: `python -m benchmarks.overhead`.

Pairs of runs: a job of ours, and the same model, cuts, micro-batches and orders written plainly on torch.distributed
(benchmarks/jobs/pipeline_gpt.py); in 1F1B, with the backward in halves, and with gradients summed in small buckets. The plan is
given (benchmarks/with_plan.py), so both do the same ops in the same order. The two go first in turn. The ratio of the median
step times of a pair is one row; the summary has the median of the rows. What keeping costs is a plan in which each rank keeps
the layers of the next one over the same in which nobody keeps any, both run by our engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import structs
from rich.console import Console

from benchmarks import joblog, report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from odyssey.plan.form import form_of
from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import LayerWork, Plan, Schedule, StateFrom, Work
from odyssey.plan.proof import prove
from odyssey.plan.schedule import compute_order
from strategies.building.compose import reductions

N_RANKS = 4
GLOBAL_BATCH, MICRO_BATCH = 64, 8
SIZES = ["--context", "128", "--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(MICRO_BATCH), "--blocks", "4"]
N_LAYERS = 6
EMBEDDING, BLOCK, HEAD = ((1, 1, 0, 1), (9, 18, 9, 9), (3, 6, 3, 3))
WORK = Work(
    (LayerWork(1, *EMBEDDING, 1, 1, 1, 0), LayerWork(4, *BLOCK, 1, 8, 1, 0), LayerWork(1, *HEAD, 1, 2, 1, 0)),
    op_us=0,
    room_bytes=10**9,
)
"""Embedding, blocks and head by their rough proportions: they decide about the order of the halves and nothing else."""
N_WARM_UP = 5
ABOUT = (
    "Median step time of our engine over that of the same model, cuts and orders written plainly on torch.distributed, four "
    "ranks without failures, in pairs of runs that alternate. 1f1b: two pipelines of two stages, the gradients of a stage in "
    "one reduction; buckets: the same in several, within the last backward; split: one pipeline of four stages, the backward "
    "in halves. kept: one pipeline of four stages in which each rank keeps the layers of the next one, over the same without."
)


@dataclass(frozen=True)
class Form:
    """`metric`: its key in the summary. `cuts`: the layers at which stages begin but for the first."""

    metric: str
    n_pipelines: int
    cuts: tuple[int, ...]
    schedule: Schedule
    bucket_bytes: int = 25 * 2**20
    keeps: bool = False


FORMS = {
    "1f1b": Form("overhead_ratio", 2, (3,), Schedule()),
    "buckets": Form("overhead_buckets_ratio", 2, (3,), Schedule(), 2**18),
    "split": Form("overhead_split_ratio", 1, (2, 3, 4), Schedule("split", None, WORK)),
    "kept": Form("protect_overhead_ratio", 1, (2, 3, 4), Schedule(), keeps=True),
}


def main() -> None:
    options = _parse_arguments()
    kept = Kept("overhead")
    console = Console(stderr=True)
    rows: list[dict[str, Cell]] = []
    for pair in range(options.pairs):
        for name in options.forms:
            row = kept.once(f"{name} {pair}", Row, partial(measure, name, pair, options.steps))
            rows.append(row)
            console.print(" ".join(f"{key}={report.number(cell)}" for key, cell in row.items()), highlight=False)
    ratios = {name: [float(row["ratio"] or 0) for row in rows if row["form"] == name] for name in options.forms}
    summary = {FORMS[name].metric: median(its) for name, its in ratios.items()}
    kept.publish(ABOUT, summary, rows, options.results)


def measure(name: str, pair: int, n_steps: int) -> dict[str, Cell]:
    """A pair of runs right after each other."""
    form = FORMS[name]
    plan, arguments = plan_of(form), ["--steps", str(n_steps), "--bucket-bytes", str(form.bucket_bytes), *SIZES]
    runs = {"odyssey s": partial(measure_odyssey, plan, arguments), "plain s": partial(measure_plain, plan, arguments)}
    if form.keeps:
        runs["plain s"] = partial(measure_odyssey, plan_of(replace(form, keeps=False)), arguments)
    seconds = {which: runs[which]() for which in (runs if pair % 2 == 0 else reversed(runs))}
    ours, plain = seconds["odyssey s"], seconds["plain s"]
    return {"form": name, "pair": pair, "odyssey s": ours, "plain s": plain, "ratio": ours / plain}


def plan_of(form: Form) -> Plan:
    """Consecutive ranks are a pipeline, all cut alike."""
    ranges = list(pairwise((0, *form.cuts, N_LAYERS)))
    share = GLOBAL_BATCH // MICRO_BATCH // form.n_pipelines
    rows = [[Stage(p * len(ranges) + s, *its) for s, its in enumerate(ranges)] for p in range(form.n_pipelines)]
    keeps = [
        Keep(stage.worker, its.first, its.stop)
        for row in rows
        for stage, its in zip(row, (*row[1:], row[0]), strict=True)
        if form.keeps and stage.worker is not None
    ]
    plan = Plan(
        generation=1,
        strategy="initial",
        step=0,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        n_layers=N_LAYERS,
        blocks=blocks_of(Pipeline(tuple(row), p * share, (p + 1) * share) for p, row in enumerate(rows)),
        reductions=(),
        schedule=form.schedule,
        keep_runs=keep_runs(keeps),
        state_from=StateFrom.SCRIPT,
    )
    return prove(structs.replace(plan, reductions=reductions(plan.holds.values(), N_LAYERS, ())))


def measure_odyssey(plan: Plan, arguments: Sequence[str]) -> float:
    """Median step time."""
    with trial.new_folder() as name:
        with trial.odyssey_with_plan(Path(name), N_RANKS, plan, arguments) as job:
            job.wait_for_end(600)
            marks, log = job.marks(), job.events()
        ran = joblog.generations(log)[0].plan
        if (ran.blocks, ran.schedule, ran.keep_runs) != (plan.blocks, plan.schedule, plan.keep_runs):
            raise trial.TrialError(f"the job ran {form_of(ran)} and not the plan that it was given, {form_of(plan)}")
        return trial.step_s(marks, N_WARM_UP)


def measure_plain(plan: Plan, arguments: Sequence[str]) -> float:
    """Median step time."""
    first = plan.pipelines[0]
    cuts = ",".join(str(stage.first) for stage in first.stages[1:])
    orders = [compute_order(plan, stage.worker) for stage in first.stages if stage.worker is not None]
    texts = ",".join(" ".join(f"{op.kind}{op.micro_batch}" for op in order) for order in orders)
    with trial.new_folder() as name:
        same = [*arguments, "--cuts", cuts, "--orders", texts]
        with trial.torchrun(Path(name), N_RANKS, "pipeline_gpt.py", [], same) as job:
            job.wait_for_end(600)
            marks = job.marks()
        return trial.step_s(marks, N_WARM_UP)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of each run (default %(default)s)")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
