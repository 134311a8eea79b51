"""From what ranks measured to the Profile of the job.

A layer measured by several ranks gets the median. What nobody measured is a ProfileError, never 0; only what a profile run
cannot measure has a stated default here, some of which real steps replace (perfmodel/refine.py). Links within hosts, or between
them, are taken to be as the others where the chain has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from odyssey.errors import ProfileError
from odyssey.plan.approximation import ApproximateCost
from odyssey.protocol.model_spec import Boundary, LayerCost, ModelSpec
from odyssey.protocol.reports import Measured
from perfmodel.profile.profile import ANY_WAY, AllReduce, Cluster, LayerProfile, Link, Profile, Recovery

OP_OVERHEAD_S = 30e-6
"""Default: Python and dispatch around one op of the engine."""
MOST_HALVES = 2.0
"""The halves of a backward do nothing more than twice."""
MOST_CROWDED = 2.0
"""What is measured above, or would be with all cores of a host, is some other user of the machine."""
MOVE_BYTE_S = 1e-9
"""Default for a byte of state that moves, where no two ranks have moved any."""
LONE_LINK = Link(1e-4, 1e9)
"""Default for all links where one rank has measured alone."""
HELP = "measure it again with `odyssey profile train.py`"


def merge(
    model: ModelSpec,
    measured: Sequence[Measured],
    hosts: Sequence[int],
    *,
    ranks_per_node: int,
    nodes_per_host: int,
    cores: int | None,
    model_name: str,
) -> Profile:
    """The profile of `model`. `measured`: the answers of the chain's ranks, in its order; `hosts`: on which each of them is.

    Raises ProfileError naming a layer or link without a measurement.
    """
    if not measured:
        raise ProfileError("no rank has measured anything", HELP)
    by_layer: dict[int, list[LayerCost]] = {}
    for report in measured:
        for cost in report.costs:
            by_layer.setdefault(cost.layer, []).append(cost)
    if missing := [i for i in range(len(model.layers)) if i not in by_layer]:
        raise ProfileError(f"{model_name}: layers {_list(missing)} have no measurement", HELP)
    losses = [report.loss_s for report in measured if report.loss_s is not None]
    if not losses:
        raise ProfileError(f"{model_name}: loss_s has no measurement", HELP)
    intra, inter = _links(measured, hosts)
    n_ranks, slowest = len(measured), max(intra.latency_s, inter.latency_s)
    crowding, crowded = _crowding(measured, cores, hosts.count(hosts[-1]))
    return Profile(
        model=model_name,
        micro_batch=model.micro_batch,
        global_batch=model.global_batch,
        layers=tuple(_layer(model, i, by_layer[i], crowded) for i in range(len(model.layers))),
        ties=model.ties,
        tie_bytes=model.tie_bytes,
        loss_s=median(losses),
        halves_scale=_halves_scale(by_layer),
        op_overhead_s=_median((report.op_overhead_s for report in measured), OP_OVERHEAD_S),
        # stated default for a tiny all-reduce: up and down a binary tree of the ranks
        commit_s=2 * math.ceil(math.log2(n_ranks)) * slowest if n_ranks > 1 else slowest,
        runtime_bytes=max(report.runtime_bytes for report in measured),
        cluster=Cluster(
            ranks_per_node=ranks_per_node,
            nodes_per_host=nodes_per_host,
            cores=cores,
            memory_bytes=min(report.memory_bytes for report in measured),
            intra_host=intra,
            inter_host=inter,
            beside_reduction=_median((report.beside_reduction for report in measured), 1.0),
            crowding=crowding,
            all_reduce=(AllReduce.RING,) if model.device == "cpu" else ANY_WAY,
        ),
        recovery=Recovery(
            groups_member_s=_group_s(measured) / n_ranks,
            move_byte_s=next((report.move_byte_s for report in measured if report.move_byte_s is not None), MOVE_BYTE_S),
        ),
        boundaries=_boundaries(measured),
        uncut=next((report.uncut for report in measured if report.uncut), ""),
        n_shards=model.n_shards,
    )


def check_model(profile: Profile, model: ModelSpec) -> None:
    """Raise ProfileError if the profile was measured on another model."""
    expected, got = len(model.layers), len(profile.layers)
    if expected != got:
        raise ProfileError(f"the profile of {profile.model} has {got} layers, the model has {expected}", HELP)
    for i, (measured, layer) in enumerate(zip(profile.layers, model.layers, strict=True)):
        if measured.digest != layer.digest:
            raise ProfileError(
                f"layers[{i}] of the profile of {profile.model} is {measured.name!r} with other parameters than the "
                f"model's {layer.name!r}",
                HELP,
            )
    for name in ("micro_batch", "ties", "n_shards"):
        if getattr(profile, name) != getattr(model, name):
            raise ProfileError(
                f"{name} of the profile of {profile.model} is {getattr(profile, name)}, the model's is {getattr(model, name)}",
                HELP,
            )


def _median(measured: Iterable[float | None], default: float) -> float:
    known = [one for one in measured if one is not None]
    return median(known) if known else default


def _halves_scale(by_layer: Mapping[int, Sequence[LayerCost]]) -> float:
    """The two halves over the whole, of all layers that have both."""
    rows = [cost for costs in by_layer.values() for cost in costs if cost.halves_s > 0]
    whole_s = sum(cost.input_gradient_s + cost.weight_gradient_s for cost in rows)
    return min(max(1.0, sum(cost.halves_s for cost in rows) / whole_s), MOST_HALVES) if whole_s > 0 else 1.0


def _group_s(measured: Sequence[Measured]) -> float:
    """What members cost where groups are built."""
    return max(0.0, median(report.group_s for report in measured) - Recovery().groups_base_s)


def _crowding(measured: Sequence[Measured], cores: int | None, n_on_host: int) -> tuple[float, float]:
    """`Cluster.crowding`, and what all that was measured at once took over what it takes alone."""
    n_active = min(n_on_host, cores or 1)
    found = next((report.crowding for report in measured if report.crowding is not None), None)
    if cores is None or n_active < 2 or found is None:
        return 1.0, 1.0
    crowded = min(max(1.0, found), MOST_CROWDED)
    return min(1 + (crowded - 1) * (cores - 1) / (n_active - 1), MOST_CROWDED), crowded


def _layer(model: ModelSpec, index: int, costs: Sequence[LayerCost], crowded: float) -> LayerProfile:
    spec = model.layers[index]
    forward_s = median(cost.forward_s for cost in costs) / crowded
    if not forward_s > 0:
        raise ProfileError(f"layers[{index}].forward_s: expected a number > 0, got {forward_s:g}", HELP)
    return LayerProfile(
        name=spec.name,
        digest=spec.digest,
        forward_s=forward_s,
        input_gradient_s=median(cost.input_gradient_s for cost in costs) / crowded,
        weight_gradient_s=median(cost.weight_gradient_s for cost in costs) / crowded,
        optimizer_s=median(cost.optimizer_s for cost in costs) / crowded,
        parameter_bytes=round(median(cost.parameter_bytes for cost in costs)),
        gradient_bytes=spec.trainable_bytes,
        optimizer_bytes=round(median(cost.optimizer_bytes for cost in costs)),
        buffer_bytes=spec.buffer_bytes,
        activation_bytes=round(median(cost.activation_bytes for cost in costs)),
        output_bytes=round(median(cost.output_bytes for cost in costs)),
        approximate=_approximate([cost.approximate for cost in costs], crowded),
    )


def _approximate(costs: Sequence[ApproximateCost | str], crowded: float) -> ApproximateCost | str:
    """That of a layer; where a rank has found that it has none, why."""
    known = [cost for cost in costs if not isinstance(cost, str)]
    if len(known) < len(costs):
        return next((cost for cost in costs if isinstance(cost, str) and cost), "")
    return ApproximateCost(
        backward_s=median(cost.backward_s for cost in known) / crowded,
        activation_bytes=round(median(cost.activation_bytes for cost in known)),
        refresh_s=median(cost.refresh_s for cost in known) / crowded,
        without=known[0].without,
    )


def _links(measured: Sequence[Measured], hosts: Sequence[int]) -> tuple[Link, Link]:
    """Median links within and between hosts; the i-th report measured the link from the i-th to the next."""
    kinds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for i, report in enumerate(measured[:-1]):
        if report.latency_s is None or report.bandwidth is None:
            raise ProfileError(f"the link from place {i} of the chain to the next has no measurement", HELP)
        kinds[hosts[i] == hosts[i + 1]].append((report.latency_s, report.bandwidth))
    found = {
        same_host: Link(median(latency for latency, _ in links), median(bandwidth for _, bandwidth in links))
        for same_host, links in kinds.items()
        if links
    }
    either = next(iter(found.values()), LONE_LINK)
    return found.get(True, either), found.get(False, either)


def _boundaries(measured: Sequence[Measured]) -> tuple[Boundary, ...]:
    found: dict[tuple[int, int], Boundary] = {}
    for report in measured:
        for boundary in report.boundaries:
            key = (boundary.layer, boundary.n_samples)
            if found.setdefault(key, boundary) != boundary:
                raise ProfileError(f"two ranks see different outputs of layer {boundary.layer}", HELP)
    return tuple(found[key] for key in sorted(found))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
