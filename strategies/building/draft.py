"""Drafts: a layout with its layer ranges, before its workers are chosen, and the Plan that comes of it."""

from __future__ import annotations

from odyssey.errors import PlanError
from odyssey.pipelines import Stage
from strategies.building.compose import Slot, assign, batch_of, compose
from strategies.building.layouts import Ranges, Shapes, distribute
from strategies.situation import Proposal, Situation

Draft = list[tuple[Ranges, list[int | None]]]
"""Pipelines as layer ranges, and for each stage the worker that has it now."""


def no_layout(situation: Situation, n_workers: int) -> str:
    """Why no layout of `n_workers` exists."""
    profile = situation.profile
    if n_workers == 0:
        return "no worker is left"
    limit = profile.cluster.memory_bytes / 1e9
    return f"no split of {len(profile.layers)} layers over at most {n_workers} workers fits {limit:.1f} GB each"


def realise(situation: Situation, strategy: str, shapes: Shapes, draft: Draft) -> Proposal:
    """A plan of a draft: shares by speed, workers by bytes."""
    text = "+".join(str(len(ranges)) for ranges, _ in draft)
    shares = distribute([shapes.shape(ranges) for ranges, _ in draft], shapes.n_micro_batches)
    if shares is None:
        pipelines = f"{len(draft)} pipelines for {shapes.n_micro_batches} micro-batches of {batch_of(situation)[1]}"
        return Proposal(strategy, None, pipelines)
    slots: list[Slot] = [
        (first, stop, worker) for ranges, workers in draft for (first, stop), worker in zip(ranges, workers, strict=True)
    ]
    if len(slots) > len(situation.alive):
        return Proposal(strategy, None, f"{text} needs {len(slots)} workers, {len(situation.alive)} are left")
    workers = iter(assign(situation, slots, sorted(situation.alive)))
    pipelines_of = [[Stage(next(workers), first, stop) for first, stop in ranges] for ranges, _ in draft]
    try:
        return Proposal(strategy, compose(situation, strategy, pipelines_of, shares), "")
    except PlanError as error:
        return Proposal(strategy, None, error.what)
