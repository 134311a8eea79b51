"""The backward in halves: first the gradients of a stage's inputs, which another worker waits for, later those of its weights.

The first half goes down the paths to the inputs only, and remembers what arrives at each place where a path to weights leaves
them. The second one goes on from there: for each set of weights that have places in common, since for these alone nothing above
is needed. (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.) A weight that is used at several depths has places
below each other: the way between them is gone once more, and at the lower one counts what arrived there in the first half.
So it does at any place, where hooks that the script has put on an activation are called once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Arrived = tuple[torch.Tensor | None, ...]
"""Gradients of a node's outputs."""


class WeightGradients:
    """What is left to do for some weights.

    `places`: where the paths to them leave those to the inputs; `roots`: the outputs of the stage from which paths lead to them
    and not to inputs, with the gradients of these.
    """

    def __init__(self, weights: list[nn.Parameter], places: list[Node], roots: list[tuple[GradientEdge, torch.Tensor]]) -> None:
        self._weights = weights
        self._places = places
        self._roots = roots
        self._arrived: dict[Node, Arrived] = {}

    def listen(self) -> Iterable[Callable[[], None]]:
        """Until what this returns is called, remember what arrives."""
        for place in self._places:
            yield place.register_prehook(self._listener(place)).remove

    def _listener(self, place: Node) -> Callable[[Arrived], None]:
        def arrived(gradients: Arrived) -> None:
            self._arrived[place] = gradients

        return arrived

    def add(self) -> None:
        """Add to the `.grad` of the weights. To be called once: it lets go of the graph."""
        edges = [edge for edge, _ in self._roots]
        given = [gradient for _, gradient in self._roots]
        with ExitStack() as hooks:
            for place, gradients in self._arrived.items():
                for number, gradient in enumerate(gradients):
                    if gradient is not None:
                        edges.append(GradientEdge(place, number))
                        given.append(gradient)
                hooks.callback(place.register_prehook(lambda _, first=gradients: first).remove)
            found = torch.autograd.grad(edges, self._weights, given, retain_graph=True, allow_unused=True) if edges else ()
        for weight, gradient in zip(self._weights, found, strict=bool(edges)):
            if gradient is None:
                continue
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad += gradient
        self._places, self._roots, self._arrived = [], [], {}


def backward_input(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> list[WeightGradients]:
    """Add to the `.grad` of `inputs`, leaves of the graph; answers what `backward_weight` needs.

    A stage without inputs that need a gradient has no such half: then all of it waits for `backward_weight`.
    """
    pairs = [(get_gradient_edge(o), g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
    needing = [leaf for leaf in inputs if leaf.requires_grad]
    parents = _parents([edge.node for edge, _ in pairs])
    groups = _groups(pairs, _above([get_gradient_edge(leaf).node for leaf in needing], parents), weights, parents)
    if pairs and needing:
        with ExitStack() as hooks:
            for group in groups:
                for remove in group.listen():
                    hooks.callback(remove)
            edges, given = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            found = torch.autograd.grad(edges, needing, given, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(needing, found, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return groups


def backward_weight(groups: Iterable[WeightGradients]) -> None:
    """Add to the `.grad` of the weights."""
    for group in groups:
        group.add()


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each node of the graph, those that hand it gradients."""
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    rest = list(parents)
    while rest:
        node = rest.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                rest.append(child)
            parents[child].append(node)
    return parents


def _above(nodes: Iterable[Node], parents: dict[Node, list[Node]]) -> set[Node]:
    """These, and all from which a path leads to one of them."""
    found = {node for node in nodes if node in parents}
    rest = list(found)
    while rest:
        for parent in parents[rest.pop()]:
            if parent not in found:
                found.add(parent)
                rest.append(parent)
    return found


def _groups(
    pairs: Sequence[tuple[GradientEdge, torch.Tensor]],
    to_inputs: set[Node],
    weights: Iterable[nn.Parameter],
    parents: dict[Node, list[Node]],
) -> list[WeightGradients]:
    """`to_inputs`: the nodes from which a path leads to the inputs."""
    roots: dict[Node, list[tuple[GradientEdge, Any]]] = defaultdict(list)
    for edge, gradient in pairs:
        if edge.node not in to_inputs:
            roots[edge.node].append((edge, gradient))
    group_of: dict[Node, tuple[list[nn.Parameter], set[Node]]] = {}
    """By each place, and each root: the weights below, and all places and roots above these."""
    for weight in weights:
        tops = _tops(get_gradient_edge(weight).node, to_inputs, roots, parents)
        group: tuple[list[nn.Parameter], set[Node]] = ([weight], set(tops))
        for theirs, others in list({id(found): found for top in tops if (found := group_of.get(top)) is not None}.values()):
            group[0].extend(theirs)
            group[1].update(others)
        for top in group[1]:
            group_of[top] = group
    distinct = {id(group): group for group in group_of.values()}.values()
    return [
        WeightGradients(
            found,
            [top for top in tops if top in to_inputs],
            [root for top in tops if top not in to_inputs for root in roots[top]],
        )
        for found, tops in distinct
    ]


def _tops(leaf: Node, to_inputs: set[Node], roots: Iterable[Node], parents: dict[Node, list[Node]]) -> set[Node]:
    """Where ways up from a weight meet a path to the inputs, or begin. None where it is not used."""
    tops: set[Node] = set()
    seen = {leaf}
    rest = [leaf] if leaf in parents else []
    while rest:
        node = rest.pop()
        if node in to_inputs:
            tops.add(node)
            continue
        if node in roots:
            tops.add(node)
        for parent in parents[node]:
            if parent not in seen:
                seen.add(parent)
                rest.append(parent)
    return tops
