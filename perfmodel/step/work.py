"""What the rule `split` orders by, of a profile: whole microseconds and bytes, layers that are alike written once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from statistics import fmean

from odyssey.plan.plan import LayerWork, Work
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.memory import most_message_bytes


@lru_cache(maxsize=8)
def work_of(profile: Profile) -> Work:
    """The work of a profile's layers, transfers over whichever link takes longer.

    Layers in a row with equal sizes are taken for alike, each at their mean: the plan stays small, and what was measured of one
    of them by chance says nothing.
    """
    costs, cluster, n_layers = Costs(profile), profile.cluster, len(profile.layers)
    states = [layer.state_bytes + layer.gradient_bytes for layer in profile.layers]
    for tie, size in zip(profile.ties, profile.tie_bytes, strict=True):
        for layer in tie:
            states[layer] += round(size * (1 + costs.state_per_parameter))

    def kind(i: int) -> object:
        layer = profile.layers[i]
        sizes = states[i], layer.parameter_bytes, layer.activation_bytes, layer.output_bytes
        return sizes, layer.input_gradient_s > 0, layer.weight_gradient_s > 0, i == n_layers - 1

    runs = []
    for _, numbers in groupby(range(n_layers), kind):
        first, *others = numbers
        alike = [profile.layers[i] for i in (first, *others)]
        loss_s = profile.loss_s if first == n_layers - 1 else 0.0
        size = alike[0].output_bytes
        runs.append(
            LayerWork(
                n=len(alike),
                forward_us=_us(layer.forward_s + loss_s for layer in alike),
                backward_us=_us(layer.backward_s for layer in alike),
                input_gradient_us=_us(profile.halves_scale * layer.input_gradient_s for layer in alike),
                weight_gradient_us=_us(profile.halves_scale * layer.weight_gradient_s for layer in alike),
                transfer_us=_us([max(link.transfer_s(size) for link in (cluster.intra_host, cluster.inter_host))]),
                activation_bytes=alike[0].activation_bytes,
                output_bytes=size,
                state_bytes=states[first],
            )
        )
    room_bytes = cluster.memory_bytes - profile.runtime_bytes - most_message_bytes(profile)
    return Work(tuple(runs), _us([profile.op_overhead_s]), room_bytes)


def _us(seconds: Iterable[float]) -> int:
    """The mean in microseconds; at least one of what is not nothing."""
    mean_s = fmean(seconds)
    return max(1, round(mean_s * 1e6)) if mean_s > 0 else 0
