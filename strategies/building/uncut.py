"""Whole micro-batches again, where a plan in force has cut them and it has turned out since that this is not exact."""

from __future__ import annotations

from msgspec.structs import replace

from odyssey.plan.pipelines import blocks_of
from odyssey.plan.plan import Plan
from perfmodel.profile.profile import Profile
from strategies.building.closed_form import distribute
from strategies.building.shapes import shapes_of


def exact(plan: Plan, profile: Profile) -> Plan:
    """The plan itself, or its pipelines with whole micro-batches. Routes and orders are of those that there were: they go."""
    if not plan.is_cut or not profile.uncut:
        return plan
    n_whole = -(-plan.global_batch // plan.micro_batch)
    shapes = shapes_of(profile, n_whole)
    rows = [shapes.shape(its.ranges) for its in plan.pipelines]
    shares = distribute(rows, n_whole)
    assert shares is not None, "who cuts micro-batches has had a whole one for each pipeline"
    found, first = [], 0
    for its, share in zip(plan.pipelines, shares, strict=True):
        found.append(replace(its, first_micro_batch=first, stop_micro_batch=first + share, n_samples=None))
        first += share
    schedule = replace(plan.schedule, orders=())
    return replace(plan, blocks=blocks_of(found), routes=(), schedule=schedule)
