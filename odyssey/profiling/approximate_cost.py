"""What the approximate backward of a layer takes (approximate.py), measured; or why the layer has none."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.model.model import size_bytes
from odyssey.model.sublayers import sublayers
from odyssey.plan.approximation import ApproximateCost, LowRank
from odyssey.profiling.saved_bytes import saved_bytes
from odyssey.runtime.approximate import Approximately
from odyssey.runtime.clock import now_s
from odyssey.runtime.handed_out import anew
from odyssey.runtime.job_spec import JobSpec, precision

N_ROUNDS = 3
NO_SUBLAYERS = "no attention and feed-forward are found in it (Job(attention=, feed_forward=) says what they are called)"
NO_EFFECT = "its attention gets its gradients all the same, or has none (is it compiled, or frozen?)"
SHARED = "layers share parameters of its attention, and each step of theirs would be another on each holder"
NO_RESIDUAL = "the residual connection around its attention is within what is called attention"


def approximate_cost(
    module: nn.Module, value: Any, low_rank: LowRank, job_spec: JobSpec, shared: Iterable[nn.Parameter] = ()
) -> ApproximateCost | str:
    """Measure it for one layer and one micro-batch; `value`: what the layer is given; `shared`: what other layers have, too."""
    its = sublayers(module, job_spec.sublayers)
    if not any(its):
        return NO_SUBLAYERS
    try:
        with _input_bytes(its.feed_forward) as given:
            found = _measured(module, value, low_rank, job_spec, given)
    except Exception as error:  # what a layer does when it is computed again, or without its attention's graph, is its own
        return f"its approximate passes fail: {type(error).__name__}: {error}"
    if isinstance(found, ApproximateCost) and not {*map(id, shared)}.isdisjoint(
        map(id, map(module.get_parameter, found.without))
    ):
        return SHARED
    return found


@contextmanager
def _input_bytes(modules: Iterable[nn.Module]) -> Iterator[list[int]]:
    """Collects in element 0 the bytes that these modules are called with: a checkpoint keeps them, unseen by autograd."""
    total = [0]

    def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
        total[0] += sum(size_bytes(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))

    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield total


def _measured(module: nn.Module, value: Any, low_rank: LowRank, job_spec: JobSpec, given: list[int]) -> ApproximateCost | str:
    """`given`: see `_input_bytes`."""
    device = next(module.parameters()).device
    inputs = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    named = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    passes = Approximately(job_spec.sublayers, low_rank)
    forward_s, backward_s, kept_bytes, lacking = [], [], [], []
    for _ in range(N_ROUNDS + 1):  # the first one takes the singular vectors
        before_bytes, start_s = given[0], now_s(device)
        with saved_bytes(named.values()) as saved, precision(device, job_spec.autocast), passes.passing(module):
            output = [leaf for leaf in pytree.tree_leaves(module(anew(value))) if leaf.requires_grad]
        forward_s.append(now_s(device) - start_s)
        kept_bytes.append(saved[0] + given[0] - before_bytes)
        start_s, targets = now_s(device), [*inputs, *named.values()]
        found = torch.autograd.grad(output, targets, [torch.ones_like(leaf) for leaf in output], allow_unused=True)
        backward_s.append(now_s(device) - start_s)
        if any(gradient is None for gradient in found[: len(inputs)]):
            return NO_RESIDUAL
        lacking = [name for name, gradient in zip(named, found[len(inputs) :], strict=True) if gradient is None]
    if not lacking:
        return NO_EFFECT
    return ApproximateCost(
        backward_s=statistics.median(backward_s[1:]),
        activation_bytes=kept_bytes[-1],
        refresh_s=max(0.0, forward_s[0] - statistics.median(forward_s[1:])),
        without=tuple(lacking),
    )
