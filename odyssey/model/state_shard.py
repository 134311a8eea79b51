"""A shard of state: parameters that are reduced, stepped and moved together, with an optimizer and a scheduler of their own.

Its state arrives elsewhere as it was, bit for bit: torch's own `Optimizer.load_state_dict` casts what it loads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from odyssey.errors import JobError
from odyssey.model.dtensors import is_divided, like, part_of, parts_in, taken_apart, whole_again
from odyssey.model.given import OptimizerFactory, SchedulerFactory, in_words, made_optimizer, made_scheduler
from odyssey.model.nesting import mapped
from odyssey.model.optimizers import is_of
from odyssey.model.strides import laid_as


class Stateful(Protocol):
    """Whatever has a state that can be taken out, and put in again."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class StateShard:
    """`named`: `layers.3.attention.weight` -> parameter. `extra`: what else of the script's belongs to its state."""

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        extra: Sequence[Stateful] = (),
    ) -> None:
        self.named = named
        self.extra = extra
        self.trainable = [parameter for parameter in named.values() if parameter.requires_grad]
        trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.optimizer = made_optimizer(optimizer, trainable) if trainable else None
        self.scheduler = made_scheduler(scheduler, self.optimizer) if scheduler and self.optimizer else None

    def words(self) -> str:
        """Its optimizer and scheduler; empty for none."""
        return in_words(self.optimizer, self.scheduler) if self.optimizer is not None else ""

    def progress(self) -> dict[str, Any]:
        """State of optimizer, scheduler and what is extra. Tensors are their own."""
        return {
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "extra": [one.state_dict() for one in self.extra],
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Take on a copy of what `progress` gave."""
        if self.optimizer is not None:
            load_exactly(self.optimizer, progress["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(progress["scheduler"])
        for one, state in zip(self.extra, progress["extra"], strict=True):
            one.load_state_dict(_copied(state, None))

    def state_by_name(self, named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """What optimizer, scheduler and extra objects keep, for a comparison between ranks: for the very parameters given.

        State of any other parameter stands under its place in the optimizer, so that it differs from what it should be.
        """
        if self.optimizer is None:
            return {}
        names = {id(parameter): name for name, parameter in named.items()}
        state = {}
        for number, (key, value) in enumerate(self.optimizer.state.items()):
            state[names.get(id(key), f"foreign {number}") if isinstance(key, torch.Tensor) else str(key)] = value
        groups = [
            {**group, "params": [names.get(id(parameter), "foreign") for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        scheduler = self.scheduler.state_dict() if self.scheduler else None
        return {"state": state, "groups": groups, "scheduler": scheduler, "extra": [one.state_dict() for one in self.extra]}

    def problems(self, named: Mapping[str, nn.Parameter]) -> Iterator[str]:
        """Why stepping this shard would not train `named`, the modules' own parameters; nothing if it would."""
        if list(named) != list(self.named) or any(self.named[name] is not parameter for name, parameter in named.items()):
            yield "its parameters are not those of the modules"
        trainable = [parameter for parameter in named.values() if parameter.requires_grad]
        stepped = [] if self.optimizer is None else [p for group in self.optimizer.param_groups for p in group["params"]]
        if sorted(map(id, stepped)) != sorted(map(id, trainable)):
            yield "its optimizer steps other parameters than those of the modules"
        if not is_of(self.scheduler, self.optimizer):
            yield "its scheduler belongs to another optimizer"


class ShardOfParts(StateShard):
    """A shard of parameters that are divided among ranks (DTensor): it tells of this rank's part only."""

    def progress(self) -> dict[str, Any]:
        """State of optimizer, scheduler and what is extra. Raises JobError for what is divided otherwise than its parameter."""
        progress = super().progress()
        if foreign := next(_divided_otherwise(self.optimizer), None):
            raise JobError(f"{type(self.optimizer).__name__} keeps {foreign} divided otherwise than its parameter", _ALIKE)
        return {**parts_in(progress), "extra": taken_apart(progress["extra"])}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Take on a copy of what `progress` gave: what has the form of a parameter's part is divided as that is."""
        saved = progress["optimizer"]
        if self.optimizer is not None and saved is not None:
            of_number = dict(zip(_numbers(saved["param_groups"]), _numbers(self.optimizer.param_groups), strict=True))
            state = {number: _divided_as(of_number.get(number), values) for number, values in saved["state"].items()}
            progress = {**progress, "optimizer": {**saved, "state": state}}
        if self.extra and self.named:
            progress = {**progress, "extra": whole_again(progress["extra"], next(iter(self.named.values())))}
        super().load_progress(progress)

    def state_by_name(self, named: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """The same is told for a comparison."""
        state: dict[str, Any] = parts_in(super().state_by_name(named))
        return state


_ALIKE = "train with an optimizer that works element by element, as AdamW and SGD do"


def _divided_otherwise(optimizer: Optimizer | None) -> Iterator[str]:
    for parameter, values in optimizer.state.items() if optimizer is not None else ():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and is_divided(value) and part_of(value).shape != part_of(parameter).shape:
                yield f"its {key}"


def _divided_as(parameter: nn.Parameter | None, values: Any) -> Any:
    if parameter is None or not isinstance(values, dict):
        return values
    form = part_of(parameter).shape
    return {
        key: like(parameter, value) if isinstance(value, torch.Tensor) and value.dim() and value.shape == form else value
        for key, value in values.items()
    }


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [one for group in groups for one in group["params"]]


def load_exactly(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take on what `state_dict` of such an optimizer gave elsewhere, every value as it was there; what has the shape of its
    parameter lies in memory as that does, however it came.

    torch's `load_state_dict` casts floating-point state to the dtype of its parameter, and makes anything else that can be
    iterated over anew by its type. It is called only where a class or a hook has made it its own.
    Raises ValueError if there are not as many parameters.
    """
    if _has_own_way(optimizer):
        optimizer.load_state_dict(saved)
    else:
        _load(optimizer, saved)
    for parameter, values in optimizer.state.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and isinstance(parameter, torch.Tensor) and value.shape == parameter.shape:
                values[key] = laid_as(parameter, value)


def _load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    own, others = optimizer.param_groups, saved["param_groups"]
    numbers = chain.from_iterable(group["params"] for group in others)
    parameters = dict(zip(numbers, chain.from_iterable(group["params"] for group in own), strict=True))
    for group, other in zip(own, others, strict=True):
        group.update({key: _copied(value, None) for key, value in other.items() if key != "params"})
    # As torch does: the count of steps stays on the host, unless a kernel reads it.
    on_host = {id(p) for group in own if not (group.get("capturable") or group.get("fused")) for p in group["params"]}
    optimizer.state.clear()
    for number, values in saved["state"].items():
        parameter = parameters.get(number)
        if parameter is None or not isinstance(values, dict):
            optimizer.state[number if parameter is None else parameter] = _copied(values, None)
            continue
        optimizer.state[parameter] = {
            key: _copied(value, None if key == "step" and id(parameter) in on_host else parameter.device)
            for key, value in values.items()
        }


def _has_own_way(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    if kind.load_state_dict is not Optimizer.load_state_dict or kind.state_dict is not Optimizer.state_dict:
        return True
    hooks = ("load_state_dict_pre_hooks", "load_state_dict_post_hooks", "state_dict_pre_hooks", "state_dict_post_hooks")
    return any(getattr(optimizer, f"_optimizer_{name}", None) for name in hooks)


def _copied(value: Any, device: torch.device | None) -> Any:
    """A copy, with its tensors on `device`; None: where they are."""

    def copied(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.detach().to(device or one.device, copy=True)
        return None if isinstance(one, dict) or type(one) in (list, tuple) else copy.deepcopy(one)

    return mapped(value, copied)
