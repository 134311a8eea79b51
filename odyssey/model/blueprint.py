"""What the script builds layers by: modules, or functions that make one, which are called only where the layer is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from odyssey.errors import JobError
from odyssey.model.draws import apart

LayerFactory = Callable[[], nn.Module]

META = torch.device("meta")


class Blueprint:
    """`build()` under `seed` gives the layers. It may draw by generators of torch, on `device` too, of Python and numpy."""

    def __init__(self, build: Callable[[], Sequence[nn.Module | LayerFactory]], seed: int, device: torch.device) -> None:
        self._build = build
        self._seed = seed
        self._device = device
        self.factories: dict[int, LayerFactory] = {}
        """By layer number, where it is a function."""

    def skeletons(self) -> list[nn.Module]:
        """Build all layers, those of functions without tensors. Raises JobError for what are no layers."""
        with apart(self._device) as generators:
            generators.seed(self._seed)
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
            return self.layer(index)

    def layer(self, index: int) -> nn.Module:
        """Call a layer's function: every rank that does has the same values, and the same of what never moves."""
        with apart(self._device) as generators:
            generators.seed(self._seed + index)
            return self.factories[index]()
