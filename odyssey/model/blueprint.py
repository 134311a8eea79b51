"""What the script builds layers by: modules, or functions that make one, which are called only where the layer is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from odyssey.errors import JobError

LayerFactory = Callable[[], nn.Module]

META = torch.device("meta")


class Blueprint:
    """`build()` under `seed` gives the layers."""

    def __init__(self, build: Callable[[], Sequence[nn.Module | LayerFactory]], seed: int) -> None:
        self._build = build
        self._seed = seed
        self.factories: dict[int, LayerFactory] = {}
        """By layer number, where it is a function."""

    def skeletons(self) -> list[nn.Module]:
        """Build all layers, those of functions without tensors. Raises JobError for what are no layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            layers = self._build()
        if not isinstance(layers, Iterable) or isinstance(layers, Mapping | torch.Tensor | str):
            what = f"layers() returned a {type(layers).__name__}" if layers is not None else "layers() returned nothing"
            raise JobError(
                what, "return the list of nn.Module that the model consists of, each called with what the last one gave"
            )
        found = [self._skeleton(i, layer) for i, layer in enumerate(list(layers))]
        if not found:
            raise JobError("layers() returned no layers", "return the list of nn.Module that the model consists of")
        return found

    def _skeleton(self, index: int, layer: nn.Module | LayerFactory) -> nn.Module:
        if isinstance(layer, nn.Module):
            return layer
        if not callable(layer):
            what = f"layers()[{index}] is a {type(layer).__name__}"
            raise JobError(what, "return modules, or functions that build one")
        self.factories[index] = layer
        with META:
            return layer()

    def layer(self, index: int) -> nn.Module:
        """Call a layer's function: every rank that does has the same values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + index)
            return self.factories[index]()
