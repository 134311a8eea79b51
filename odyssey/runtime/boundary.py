"""What passes between two layers: a tensor, or a nesting of tuples, lists and dicts of tensors, and its description.

Receivers must know what comes before it comes. The profile notes it for a full micro-batch (Boundary); for a smaller
one, the tensors whose dimension 0 is the number of samples have fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from odyssey.errors import JobError
from odyssey.protocol.model_spec import Boundary, TensorSpec


def flatten(value: Any, layer: int) -> list[torch.Tensor]:
    """The tensors of `value` in order. Raises JobError if `layer` gave anything but tensors."""
    leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            what = f"layer {layer} passes on a {type(leaf).__name__}"
            raise JobError(what, "let layers return a tensor, or a nested tuple or dict of tensors")
    return leaves


def detached(value: Any) -> Any:
    """The same values, on which a graph of its own can begin."""
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)


def describe(value: Any, layer: int, n_samples: int) -> Boundary:
    """The Boundary behind `layer`, from an output for `n_samples`."""
    leaves = flatten(value, layer)
    return Boundary(
        layer=layer,
        n_samples=n_samples,
        tree=pytree.treespec_dumps(pytree.tree_structure(value)),
        tensors=tuple(TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in leaves),
    )


class Expectation:
    """What to expect behind one layer for micro-batches of one size: `empty` makes room for it, `check` compares."""

    def __init__(self, boundary: Boundary, n_samples: int) -> None:
        self._layer = boundary.layer
        self._n_samples = n_samples
        self._spec = pytree.treespec_loads(boundary.tree)
        self.tensors = tuple(_resized(tensor, boundary.n_samples, n_samples) for tensor in boundary.tensors)
        self._dtypes = tuple(getattr(torch, tensor.dtype) for tensor in self.tensors)
        self._facts = [(tensor.shape, dtype) for tensor, dtype in zip(self.tensors, self._dtypes, strict=True)]

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors to receive into."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._facts]

    def nest(self, leaves: list[torch.Tensor]) -> Any:
        """The nesting that these tensors stand for."""
        return pytree.tree_unflatten(leaves, self._spec)

    def check(self, leaves: list[torch.Tensor]) -> None:
        """Raise JobError if the layer gave other shapes than in the profile: a receiver would wait for something else."""
        if [(tuple(leaf.shape), leaf.dtype) for leaf in leaves] != self._facts:
            got = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves)
            expected = ", ".join(f"{shape} {dtype}" for shape, dtype in self._facts)
            what = f"layer {self._layer} gave {got} for {self._n_samples} samples, expected {expected}"
            raise JobError(what, "shapes may depend on the number of samples only, which is dimension 0")


class Expectations:
    """What to expect behind each layer of one plan."""

    def __init__(self, boundaries: Iterable[Boundary]) -> None:
        self._boundaries = {boundary.layer: boundary for boundary in boundaries}
        self._known: dict[tuple[int, int], Expectation] = {}

    def behind(self, layer: int, n_samples: int) -> Expectation:
        """What `layer` passes on for a micro-batch of `n_samples`."""
        key = (layer, n_samples)
        if key not in self._known:
            self._known[key] = Expectation(self._boundaries[layer], n_samples)
        return self._known[key]


def _resized(tensor: TensorSpec, known: int, wanted: int) -> TensorSpec:
    if wanted == known or not tensor.shape or tensor.shape[0] != known:
        return tensor
    return TensorSpec((wanted, *tensor.shape[1:]), tensor.dtype, tensor.requires_grad)
