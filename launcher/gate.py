"""The gate before `go`: what the ranks report must agree, or nothing runs. Pure; answers what differs, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.events import RankPaused, RankReady
from launcher.state import ranks_text
from odyssey.messages import ModelSpec, Position, Result, position_after
from odyssey.plan import Plan


def model_difference(models: Mapping[int, ModelSpec]) -> str | None:
    """Which ranks were given another model than the others, and the first layer or value that differs."""
    first_rank = min(models)
    first = models[first_rank]
    others = {rank: model for rank, model in models.items() if model != first}
    if not others:
        return None
    rank = min(others)
    same = tuple(r for r, model in models.items() if model == others[rank])
    alike = tuple(r for r, model in models.items() if model == first)
    where = f"{ranks_text(same)} built another model than {ranks_text(alike)}"
    for i, (mine, its) in enumerate(zip(first.layers, others[rank].layers, strict=False)):
        if mine != its:
            return f"{where}: layer {i} ({mine.name}) differs"
    if len(first.layers) != len(others[rank].layers):
        return f"{where}: {len(others[rank].layers)} layers, expected {len(first.layers)}"
    fields = [name for name in ModelSpec.__struct_fields__ if getattr(first, name) != getattr(others[rank], name)]
    values = f"{getattr(others[rank], fields[0])}, expected {getattr(first, fields[0])}"
    return f"{where}: {fields[0]} is {values}"


def roll_forward_problem(paused: Mapping[int, RankPaused], results: tuple[Result, ...]) -> str | None:
    """Why some survivor cannot be brought to the position behind the newest result; None if all can.

    Whoever passes the commit point needed everybody's contribution, so a holder of state is there, or one unit behind
    with everything of that unit done but its result.
    """
    holders = {rank: report for rank, report in paused.items() if report.held}
    if not holders:
        return None
    end = final_position(paused, results)
    for rank, report in sorted(holders.items()):
        if report.position == end:
            continue
        if report.position > end:
            return f"rank {rank} is at {_at(report.position)}, but no result before {_at(report.position)} was reported"
        newest = results[-1] if results else None
        if newest is None or report.position != newest.position or position_after(newest) != end:
            return f"rank {rank} is at {_at(report.position)}, more than one unit behind {_at(end)}"
        if report.phase != "contributed":
            return f"rank {rank} has not contributed to {_at(report.position)}, which others report as final ({report.phase})"
    return None


def final_position(paused: Mapping[int, RankPaused], results: tuple[Result, ...]) -> Position:
    """Behind the newest result; where there is none yet, where the ranks are."""
    if results:
        return position_after(results[-1])
    return max((report.position for report in paused.values()), default=(0, 0))


def layers_without_holder(held: Mapping[int, frozenset[int]], n_layers: int) -> list[int]:
    """Layers of which no survivor has full state."""
    kept = {layer for layers in held.values() for layer in layers}
    return [layer for layer in range(n_layers) if layer not in kept]


def gate_problem(plan: Plan, ready: Mapping[int, RankReady], end: Position | None) -> str | None:
    """The first thing in which the ranks at the gate disagree with each other or with the plan; None: go."""
    return next(_gate_problems(plan, ready, end), None)


def _gate_problems(plan: Plan, ready: Mapping[int, RankReady], end: Position | None) -> Iterator[str]:
    expected = end if end is not None else ready[plan.leader].position
    for rank, report in sorted(ready.items()):
        if report.position != expected:
            yield f"rank {rank} stands at {_at(report.position)}, expected {_at(expected)}"
    digests: dict[int, dict[int, str]] = {}
    for worker in plan.workers:
        mine = dict(ready[worker].digests)
        for unit in sorted(set(mine) ^ _units(plan, worker)):
            yield f"rank {worker} {'holds' if unit in mine else 'lacks'} {_name(plan, unit)}, against the plan"
        for unit, digest in mine.items():
            digests.setdefault(unit, {})[worker] = digest
    for unit, by_rank in sorted(digests.items()):
        if len(set(by_rank.values())) > 1:
            texts = ", ".join(f"rank {rank} {digest}" for rank, digest in sorted(by_rank.items()))
            yield f"{_name(plan, unit)} differs between its holders: {texts}"
    owner: dict[int, int] = {}
    for worker in plan.workers:
        for micro_batch, n_samples in ready[worker].samples:
            if micro_batch in owner:
                yield f"micro-batch {micro_batch} is run by {ranks_text([owner[micro_batch], worker])}"
            owner[micro_batch] = worker
            if not 0 <= micro_batch < plan.n_micro_batches or n_samples != plan.n_samples(micro_batch):
                yield f"rank {worker} counts {n_samples} samples in micro-batch {micro_batch}"
        if ready[worker].denominator != plan.global_batch:
            yield f"rank {worker} divides by {ready[worker].denominator} samples, the global batch is {plan.global_batch}"
    for micro_batch in range(plan.n_micro_batches):
        if micro_batch not in owner:
            yield f"micro-batch {micro_batch} is run by no rank"


def _units(plan: Plan, worker: int) -> set[int]:
    """What a worker's digests are of: its layers, and the ties that these take part in, numbered behind all layers."""
    held = plan.held[worker]
    return {*held, *(plan.n_layers + t for t, tie in enumerate(plan.ties) if held & set(tie))}


def _name(plan: Plan, unit: int) -> str:
    return f"layer {unit}" if unit < plan.n_layers else f"tie {unit - plan.n_layers}"


def _at(position: Position) -> str:
    step, unit = position
    return f"step {step}" if unit == 0 else f"unit {unit} of step {step}"
