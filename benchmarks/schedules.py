"""Our schedules against the best there are: `python -m benchmarks.schedules` (with the extra `benchmarks`, for OR-tools).

Random small cases (benchmarks/schedule_cases.py): pipelines of equal and unequal stages with the backward in halves under caps
of memory, 1F1B, and pipelines of which one has lost a worker. OR-tools' CP-SAT looks for anything faster within the same
memory, in whatever order and on whichever of the workers that hold the layers. Nothing is measured: all times are ticks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from benchmarks.schedule_cases import KINDS, Case, drawn, kept, orders_of, plan_of, played, priced

try:
    from ortools.sat.python import cp_model
except ImportError:
    raise SystemExit("error: OR-tools is missing\nhelp: pip install -e '.[benchmarks]'") from None

N_CASES = 120
LIMIT_S = 20.0
ABOUT = (
    "Random small pipelines, 2 to 5 stages and 2 to 8 micro-batches, times in ticks. `ours`: the step by our price, which the "
    "order played by the benchmark's own rules has to equal. `best`: by CP-SAT, over all orders and all places within the same "
    "memory. Where it had no proof in time the case is one of `schedule_not_proved`: there `at least` is ours over the best "
    "that it found, and `at most` ours over its bound. split: backward in halves, under a cap; coupled: 1F1B; routed: one "
    "worker lost."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("schedules")
    console = Console(stderr=True)
    rows = []
    for seed in range(options.cases):
        rows.append(row := kept.once(str(seed), Row, partial(measure, seed, options.seconds)))
        console.print(" ".join(f"{name}={report.number(cell)}" for name, cell in row.items()), highlight=False)
    kept.publish(ABOUT, summary(rows), rows, options.results)


def summary(rows: Sequence[dict[str, Cell]]) -> dict[str, float]:
    """Ratios of ours to the best, of all that are proved and of each kind."""
    found: dict[str, float] = {}
    for kind in (None, *KINDS):
        ratios = [float(row["ratio"]) for row in rows if row["ratio"] is not None and kind in (None, row["kind"])]
        name = f"schedule_{kind}" if kind else "schedule"
        if ratios:
            found |= {f"{name}_median_ratio": median(ratios), f"{name}_worst_ratio": max(ratios), f"{name}_proved": len(ratios)}
    open_ = [float(row["at least"] or 1.0) for row in rows if row["ratio"] is None]
    return {**found, "schedule_not_proved": len(open_), "schedule_not_proved_worst_ratio": max(open_, default=1.0)}


def measure(seed: int, limit_s: float) -> dict[str, Cell]:
    """One case. Raises ValueError where our price is not what the order takes, or our order keeps more than it may."""
    case = drawn(seed)
    plan = plan_of(case)
    orders = orders_of(plan)
    ours = played(case, orders)
    if not math.isclose(ours, ticks := priced(case, plan), rel_tol=1e-9):
        raise ValueError(f"seed {seed}: priced at {ticks} ticks, and played it takes {ours}")
    if over := {worker: its for worker, ops in orders.items() if (its := kept(case, ops)) > case.limit(worker)}:
        raise ValueError(f"seed {seed}: more is kept than there may be: {over}")
    best = optimum(case, ours, limit_s)
    return {
        "seed": seed,
        "kind": case.kind,
        "backward": "halves" if case.halves else "whole",
        "layout": f"{case.n_pipelines}x{case.n_stages}",
        "micro-batches": case.n_micro_batches,
        "stages": "alike" if len(set(zip(case.forward, case.of_input, case.of_weight, strict=True))) == 1 else "unequal",
        "cap": "-" if case.lost else "max" if case.cap is None else f"{case.cap:g}x",
        "ours": ours,
        "best": best.ticks if best.is_proved else None,
        "ratio": ours / best.ticks if best.is_proved else None,
        "at least": ours / best.ticks,
        "at most": ours / best.bound,
    }


# -- the solver ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """`ticks`: of the best schedule that is known, ours or the solver's. `bound`: none takes less."""

    ticks: int
    bound: int

    @property
    def is_proved(self) -> bool:
        return self.ticks == self.bound


@dataclass(frozen=True)
class _Task:
    """A micro-batch at a stage. `on`: by worker, whether it runs there. `is_split`: whether its backward is in halves.

    `done`: when it lets go of its memory.
    """

    forward: Any
    backward: Any
    weight: Any
    done: Any
    is_split: Any
    on: dict[int, Any]


def optimum(case: Case, ours: int, limit_s: float) -> Optimum:
    """Whether anything is faster than `ours`, and how fast the best is."""
    model = cp_model.CpModel()
    tasks = {
        (p, s, k): _task(model, case, p, s, k, ours)
        for p in range(case.n_pipelines)
        for k in case.micro_batches(p)
        for s in range(case.n_stages)
    }
    makespan = model.new_int_var(0, ours - 1, "makespan")
    for (p, s, k), task in tasks.items():
        model.add(makespan >= task.done)
        if s > 0:
            model.add(task.forward >= tasks[p, s - 1, k].forward + case.ticks("F", s - 1) + case.hop)
        if s < case.n_stages - 1:
            model.add(task.backward >= _handed_on(case, tasks[p, s + 1, k], s + 1) + case.hop)
    for worker in case.workers:
        _one_at_a_time(model, case, tasks, worker, makespan)
    _alike(model, case, tasks)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Optimum(ours, ours)
    found = ours if status == cp_model.UNKNOWN else round(solver.objective_value)
    return Optimum(found, max(1, round(solver.best_objective_bound)))


def _task(model: Any, case: Case, p: int, s: int, k: int, most: int) -> _Task:
    forward, backward, weight, done = (model.new_int_var(0, most, f"{kind}{s}.{k}") for kind in ("F", "B", "W", "D"))
    runners = case.runners(p, s)
    on = {worker: model.new_bool_var(f"{s}.{k} on {worker}") for worker in runners}
    model.add_exactly_one(on.values())
    # where halves cost nothing beside the whole, to run them one after the other is the whole
    if not case.halves:
        is_split = model.new_constant(0)
    elif case.op or case.output_bytes:
        is_split = model.new_bool_var(f"split {s}.{k}")
    else:
        is_split = model.new_constant(1)
    task = _Task(forward, backward, weight, done, is_split, on)
    model.add(backward >= forward + case.ticks("F", s))
    model.add(weight >= _handed_on(case, task, s))
    model.add(done == weight + case.ticks("W", s)).only_enforce_if(is_split)
    model.add(done == backward + case.ticks("B", s)).only_enforce_if(~is_split)
    model.add(weight == done).only_enforce_if(~is_split)
    return task


def _handed_on(case: Case, task: _Task, s: int) -> Any:
    """When the gradient by the stage's input is there."""
    whole, half = case.ticks("B", s), case.ticks("I", s)
    return task.backward + whole - (whole - half) * task.is_split


def _one_at_a_time(model: Any, case: Case, tasks: dict[tuple[int, int, int], _Task], worker: int, makespan: Any) -> None:
    """A worker's ops one after the other, and no more kept than it may keep."""
    s = worker % case.n_stages
    runs: list[Any] = []
    keeps: list[tuple[Any, int]] = []
    loads: list[Any] = []
    for (_, stage, k), task in tasks.items():
        if stage != s or worker not in task.on:
            continue
        here = task.on[worker]
        halves, whole = (_both(model, here, its, f"{k} on {worker}") for its in (task.is_split, ~task.is_split))

        def run(kind: str, start: Any, when: Any, k: int = k) -> None:
            ticks = case.ticks(kind, s)
            runs.append(model.new_optional_fixed_size_interval_var(start, ticks, when, f"{kind}{k} on {worker}"))
            loads.append(ticks * when)

        run("F", task.forward, here)
        run("B", task.backward, whole)
        run("I", task.backward, halves)
        run("W", task.weight, halves)
        keeps.append((_span(model, task.forward, task.done, here), case.activation_bytes[s]))
        if case.output_bytes:
            keeps.append((_span(model, task.backward, task.done, halves), case.output_bytes))
    model.add_no_overlap(runs)
    model.add_cumulative([span for span, _ in keeps], [size for _, size in keeps], case.limit(worker))
    first = sum(case.ticks("F", before) + case.hop for before in range(s))
    model.add(makespan >= first + sum(loads))  # implied, and what most proofs begin with


def _span(model: Any, start: Any, end: Any, when: Any) -> Any:
    size = model.new_int_var(0, 10**6, "")
    return model.new_optional_interval_var(start, size, end, when, "")


def _both(model: Any, a: Any, b: Any, name: str) -> Any:
    found = model.new_bool_var(name)
    model.add_min_equality(found, [a, b])
    return found


def _alike(model: Any, case: Case, tasks: dict[tuple[int, int, int], _Task]) -> None:
    """A pipeline's micro-batches differ in nothing, so let them come in the order of their numbers: at the first stage, and
    where no worker is lost everywhere (whatever was first there in another order may go by the other's number)."""
    for p in range(case.n_pipelines):
        ks = case.micro_batches(p)
        for k in ks[1:]:
            for s in range(1 if case.lost else case.n_stages):
                before, task = tasks[p, s, k - 1], tasks[p, s, k]
                model.add(before.forward <= task.forward)
                if not case.lost:
                    model.add(before.backward <= task.backward)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=N_CASES)
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="for the solver, for each case (default %(default)s)")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
