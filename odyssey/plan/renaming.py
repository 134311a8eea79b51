"""The same plan for other workers: what was found for some holds, by other names, wherever all else is alike."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from msgspec.structs import replace

from odyssey.plan.moves import Move, MoveRun, keep_runs, move_runs
from odyssey.plan.pipelines import Block, Column, Run, runs_of
from odyssey.plan.plan import Plan, Route
from odyssey.plan.worker import Worker


def renamed(plan: Plan, names: Mapping[Worker, Worker]) -> Plan:
    """The plan with worker `names[w]` wherever it has `w`; a worker without a new name keeps its own. `names`: a permutation.

    Micro-batches, layers and orders stay where they are in the plan, and so does its estimate.
    """

    def name(worker: Worker) -> Worker:
        return names.get(worker, worker)

    of = plan.approximation
    orders = tuple(replace(order, worker=name(order.worker)) for order in plan.schedule.orders)
    return replace(
        plan,
        blocks=tuple(_renamed_block(block, names) for block in plan.blocks),
        routes=tuple(Route(route.micro_batch, route.stage, name(route.worker)) for route in plan.routes),
        schedule=replace(plan.schedule, orders=orders),
        move_runs=tuple(chain.from_iterable(_renamed_moves(run, names) for run in plan.move_runs)),
        keep_runs=keep_runs(replace(run.keep, worker=name(worker)) for run in plan.keep_runs for worker in run.workers),
        spawned=tuple(sorted(map(name, plan.spawned))),
        idle=tuple(sorted(map(name, plan.idle))),
        approximation=of and replace(of, workers=tuple(sorted(map(name, of.workers)))),
    )


def _renamed_moves(run: MoveRun, names: Mapping[Worker, Worker]) -> tuple[MoveRun, ...]:
    _, by_source, by_target = run.step
    sources, targets = Run(run.first.source, run.n, by_source), Run(run.first.target, run.n, by_target)
    if names.keys().isdisjoint(sources.numbers) and names.keys().isdisjoint(targets.numbers):
        return (run,)
    return move_runs(
        Move(move.layer, names.get(move.source, move.source), names.get(move.target, move.target)) for move in run.moves
    )


def _renamed_block(block: Block, names: Mapping[Worker, Worker]) -> Block:
    return replace(block, columns=tuple(_renamed_column(column, names) for column in block.columns))


def _renamed_column(column: Column, names: Mapping[Worker, Worker]) -> Column:
    workers = list(chain.from_iterable(run.numbers for run in column.workers))
    if names.keys().isdisjoint(workers):
        return column
    return replace(column, workers=runs_of(worker if worker is None else names.get(worker, worker) for worker in workers))
