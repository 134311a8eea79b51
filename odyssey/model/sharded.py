"""A model that a script has built and sharded by torch's `fully_shard`: each rank has one shard of it, which is a layer here.

    layer i = what the i-th rank of a copy holds: its part of each parameter and of the optimizer's state, the buffers, and all
              that the script keeps beside

Ranks with a shard each are a copy of the model, and compute together; those with the same shard have the same state. A rank
keeps the number of its shard for as long as it lives. Buffers, scheduler and what is extra are the same in all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odyssey.errors import JobError, OdysseyError
from odyssey.model.dtensors import is_divided, parts_in
from odyssey.model.model import Peers, full_name, size_bytes
from odyssey.model.packing import digest
from odyssey.model.script_model import Loss, ScriptModel
from odyssey.model.state_shard import ShardOfParts
from odyssey.protocol.model_spec import LayerSpec


class ShardedPeers(Peers):
    """The ranks of the copy. `group`: torch's of them (odyssey/sharding/group.py); `parts`: the modules that are sharded."""

    def __init__(self, group: Any, parts: Sequence[Any]) -> None:
        self._group = group
        self._parts = parts

    def among(self, groups: Any, workers: Sequence[Any]) -> None:
        """These have a copy together now."""
        self._group.among(groups, workers)

    def begin(self) -> None:
        """A pass begins. What the script may have set otherwise in between: gradients are summed in each, and are sums."""
        for module in self._parts:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_gradient_divide_factor(1.0)
        self._group.begin()

    def settle(self) -> None:
        """A pass is over, and nothing of it is left. Raises Cut if communication ended within it."""
        self.reshard()
        self._group.settle()

    def interrupted(self) -> None:
        """An exception ends a pass in its midst. Raises Cut if communication had ended before, and torch can be left as
        behind a pass (2.13 can): what the script objects to may be of no worth."""
        if self._group.is_cut and all(hasattr(module, "reset_iter_state") for module in self._parts):
            within = {part for module in self._parts for part in module.modules() if part is not module}
            for module in self._parts:
                if module not in within:
                    module.reset_iter_state()
            self.settle()

    def reshard(self) -> None:
        """Torch leaves some parameters whole behind a forward, which would be used again whatever has come since."""
        for module in self._parts:
            module.reshard()


class Sharded(ScriptModel):
    """Its layers are shards, of which this rank holds its own or none."""

    is_divided = True

    def _divide(self, model: nn.Module) -> None:
        """Raises JobError for what is not sharded whole, or over other ranks than those of `odyssey.shard_mesh`."""
        mesh = _mesh(model)
        self.own = mesh.get_local_rank()
        self.n_shards = mesh.size()
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.peers: ShardedPeers = ShardedPeers(mesh.get_group(), parts)

    def _specs_of(self, name: str) -> tuple[LayerSpec, ...]:
        """Each shard is taken for as large as the largest."""
        parameters = list(self._given.parameters())
        largest = replace(
            self.specs[self.own],
            parameter_bytes=sum(_largest_bytes(p, self.n_shards) for p in parameters),
            trainable_bytes=sum(_largest_bytes(p, self.n_shards) for p in parameters if p.requires_grad),
        )
        of = name.removeprefix("FSDP")
        return tuple(replace(largest, name=f"shard {number} of {of}") for number in range(self.n_shards))

    def _as_layers(self, loss: Loss) -> list[nn.Module]:
        return [loss if number == self.own else nn.Module() for number in range(self.n_shards)]

    def values(self) -> tuple[str, ...]:
        """Those of the shards of other ranks are not known here."""
        layer = self.layers[self.own]
        own = digest(parts_in([*layer.named_parameters(), *layer.named_buffers()]))
        return tuple(own if number == self.own else "" for number in range(self.n_shards))

    def own_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state under its own names, whole, of that of all layers."""
        found = super().own_state(tensors)
        for name, tensor in self._given.state_dict(keep_vars=True).items():
            if is_divided(tensor):
                parts = [tensors[full_name(layer, f"model.{name}")] for layer in range(self.n_shards)]
                found[name] = torch.cat(parts, tensor.placements[0].dim)
        return found

    def begin_step(self) -> None:
        """All parameters are sharded, as they are between passes."""
        self.peers.reshard()
        super().begin_step()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around what is measured."""
        with super().unchanged():
            try:
                yield
            finally:
                self.peers.reshard()

    def export(self, layer: int) -> dict[str, Any]:
        """What is this rank's."""
        state: dict[str, Any] = parts_in(super().export(layer))
        return state

    def shard_state(self, number: int) -> dict[str, Any]:
        """What is this rank's."""
        state: dict[str, Any] = parts_in(super().shard_state(number))
        return state

    def hold_built(self, layers: Iterable[int]) -> None:
        """Hold what the script has made, with its values."""
        super().hold_built(self._only_own(layers))

    def adopt(self, layer: int, state: dict[str, Any]) -> None:
        """Copy a state into the script's objects."""
        (layer,) = self._only_own((layer,))
        super().adopt(layer, state)

    def _only_own(self, layers: Iterable[int]) -> Iterable[int]:
        if others := frozenset(layers) - {self.own}:
            raise OdysseyError(
                f"this rank's shard is {self.own}, and the plan gives it {min(others)}", "please report this bug"
            )
        return layers

    def _shard(self, number: int, layers: frozenset[int]) -> ShardOfParts:
        return ShardOfParts(self._named(number, layers), self._optimizer, self._scheduler, self._extra)


def _mesh(model: nn.Module) -> Any:
    """The one mesh that all parameters are divided over."""
    meshes = set()
    for name, parameter in model.named_parameters():
        if not is_divided(parameter):
            raise JobError(f"{name} is not sharded, and other parameters are", "call fully_shard(model, mesh=mesh) last")
        meshes.add(parameter.device_mesh)  # type: ignore[attr-defined]
        placements = parameter.placements  # type: ignore[attr-defined]
        if len(placements) != 1 or not placements[0].is_shard():
            what = f"{name} is laid out as {', '.join(map(str, placements))}"
            raise JobError(what, "shard it over the one dimension of odyssey.shard_mesh: copies of it are Odyssey's")
    mesh = next(iter(meshes))
    if len(meshes) != 1 or not hasattr(mesh.get_group(), "among"):
        what = "the model is sharded over a mesh of its own"
        raise JobError(what, "give fully_shard(..., mesh=mesh) the one of odyssey.shard_mesh")
    return mesh


def _largest_bytes(parameter: torch.Tensor, n_shards: int) -> int:
    """Bytes of its largest part."""
    dim = parameter.placements[0].dim  # type: ignore[attr-defined]
    n = parameter.shape[dim]
    return size_bytes(parameter) // n * -(-n // n_shards) if n else 0
