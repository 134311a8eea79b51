"""Small builders for tests of plans, the performance model and the strategies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from odyssey.plan.estimate import Estimate
from odyssey.plan.moves import Move
from odyssey.plan.plan import Compute, ComputeOrder, Plan
from perfmodel import price as pricing
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from perfmodel.step.costs import Costs
from perfmodel.transition.moving import Resource, add, occupied
from strategies.search import initial_plan
from strategies.situation import Aim, Protect, Situation

FREE = Link(0.0, 1e30)


def layer(name: str = "layer", forward: float = 1.0, i: float = 1.0, w: float = 1.0, **sizes: int) -> LayerProfile:
    """A layer of unit costs, without bytes unless they are given."""
    fields = {
        "parameter_bytes": 0,
        "gradient_bytes": 0,
        "optimizer_bytes": 0,
        "buffer_bytes": 0,
        "activation_bytes": 0,
        "output_bytes": 0,
        **sizes,
    }
    return LayerProfile(name, f"digest of {name}", forward, i, w, 0.0, **fields)


def profile(
    layers: int | Sequence[LayerProfile],
    global_batch: int,
    micro_batch: int = 1,
    *,
    cores: int | None = None,
    memory_bytes: int = 10**15,
    ranks_per_node: int = 1000,
    intra: Link = FREE,
    inter: Link = FREE,
    ties: tuple[tuple[int, ...], ...] = (),
    tie_bytes: tuple[int, ...] = (),
    loss_s: float = 0.0,
    op_overhead_s: float = 0.0,
    commit_s: float = 0.0,
    runtime_bytes: int = 0,
    recovery: Recovery | None = None,
) -> Profile:
    """A profile whose transfers, overheads and memory are free unless they are given."""
    rows = [layer(f"layer {i}") for i in range(layers)] if isinstance(layers, int) else layers
    return Profile(
        model="toy",
        micro_batch=micro_batch,
        global_batch=global_batch,
        layers=tuple(rows),
        ties=ties,
        tie_bytes=tie_bytes,
        loss_s=loss_s,
        op_overhead_s=op_overhead_s,
        commit_s=commit_s,
        runtime_bytes=runtime_bytes,
        cluster=Cluster(ranks_per_node, 1, cores, memory_bytes, intra, inter),
        recovery=recovery or Recovery(),
    )


def situation(
    of: Profile,
    plan: Plan | None,
    alive: Sequence[int],
    *,
    respawnable: Sequence[int] = (),
    seconds_to_change: float = 3600.0,
    held: Mapping[int, frozenset[int]] | None = None,
    aim: Aim | None = None,
) -> Situation:
    """`alive` are left of the workers of `plan`, each with the layers that it holds there."""
    known = () if plan is None else (*plan.workers, *plan.idle)
    holds = {} if plan is None else {worker: plan.holds.get(worker, frozenset()) for worker in alive}
    return Situation(
        generation=0 if plan is None else plan.generation + 1,
        step=0 if plan is None else plan.step + 1,
        plan=plan,
        alive=tuple(alive),
        lost=tuple(worker for worker in known if worker not in alive),
        respawnable=tuple(respawnable),
        held=holds if held is None else held,
        node_of={worker: worker // of.cluster.ranks_per_node for worker in alive},
        profile=of,
        seconds_to_change=seconds_to_change,
        aim=aim or Aim(),
    )


def first_plan(of: Profile, layout: str, n_workers: int) -> Plan:
    """The first plan of a job with this layout, in plain 1F1B, in which nobody keeps layers of others."""
    table = initial_plan(situation(of, None, range(n_workers), aim=Aim(protect=Protect.NONE)), layout)
    plain = [c.plan for c in table if c.plan is not None and c.plan.schedule.rule == "1f1b"]
    assert plain, table[0].reason
    return plain[0]


def price(
    plan: Plan,
    of: Profile,
    *,
    seconds_to_change: float,
    search_s: float = 0.0,
    node_of: Mapping[int, int] | None = None,
    slow: Mapping[int, float] | None = None,
) -> Estimate:
    """The estimate of a plan at the costs of a profile; `node_of`, `slow`: see Costs."""
    costs = Costs(of, node_of, slow)
    return pricing.price(plan, costs, seconds_to_change=seconds_to_change, search_s=search_s).estimate


def busiest_s(moves: Iterable[Move], costs: Costs) -> float:
    """Seconds that the busiest worker or interface is occupied: no order of these moves ends sooner."""
    busy: dict[Resource, float] = {}
    for move in moves:
        add(busy, occupied(move, costs))
    return max(busy.values(), default=0.0)


def unsplit(of: Profile) -> Profile:
    """The same model, whose backward cannot be split."""
    layers = (replace(layer, input_gradient_s=layer.backward_s, weight_gradient_s=0.0) for layer in of.layers)
    return replace(of, layers=tuple(layers))


def sharded(of: Profile) -> Profile:
    """A model whose layers are shards: what a layer costs is a pass through the whole of it."""
    return replace(of, n_shards=len(of.layers), uncut="the model is sharded")


def without(plan: Plan, *lost: int) -> list[int]:
    """The workers of a plan, idle ones too, but for some."""
    return sorted({*plan.workers, *plan.idle} - set(lost))


def break_even(a: Estimate, b: Estimate) -> float | None:
    """The D at which two plans of one global batch are worth the same; None if one is better at every D.

    (D - Ta)/ta = (D - Tb)/tb, so D = (Ta tb - Tb ta) / (tb - ta). Below it the one with the shorter transition wins.
    """
    if a.step_s == b.step_s:
        return None
    tie = (a.transition.total_s * b.step_s - b.transition.total_s * a.step_s) / (b.step_s - a.step_s)
    return tie if tie > max(a.transition.total_s, b.transition.total_s) else None


def order_of(worker: int, text: str) -> ComputeOrder:
    """Ops as people write them: `0F0 0I0 1F2 1B2`."""
    ops = (re.fullmatch(r"(\d+)([FBIW])(\d+)", op) for op in text.split())
    return ComputeOrder(worker, msgspec.convert([(op[2], int(op[1]), int(op[3])) for op in ops if op], tuple[Compute, ...]))
