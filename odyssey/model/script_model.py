"""A model that a script has built by itself, with the optimizer that it made for it: one layer, which every rank holds.

The script keeps its objects, and whatever refers to them: state that arrives is copied into them, and nothing is ever put in
their place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from odyssey.errors import JobError
from odyssey.model import given
from odyssey.model.attributes import Attributes
from odyssey.model.dtensors import part_of
from odyssey.model.given import check_state, in_words, needs_closure
from odyssey.model.loss_scale import LossScale, ScalersScale, enabled
from odyssey.model.model import Model, Replay, full_name
from odyssey.model.optimizers import copied, is_of, parts_of
from odyssey.model.other_values import Weights, in_place_of_own
from odyssey.model.state_shard import Stateful, StateShard
from odyssey.model.statistics import Statistics
from odyssey.protocol.model_spec import LayerSpec


class Loss(nn.Module):
    """The script's `loss(batch)`, as the module that it computes with: the layer. Its output is the loss, with metrics."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], given.Loss], statistics: Statistics) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._statistics = statistics

    def forward(self, batch: Any) -> given.Loss:
        """Raises JobError if it is nothing to train with."""
        with self._statistics.of_micro_batch():
            loss, metrics = given.with_metrics(self._loss(batch))
        if not isinstance(loss, torch.Tensor):
            raise JobError(f"loss(batch) returned a {type(loss).__name__}", _A_MEAN)
        if loss.dim() != 0:
            raise JobError(f"loss(batch) has shape {tuple(loss.shape)}", _A_MEAN)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError("loss(batch) has no gradient", "compute it from the model's output, without .item() or .detach()")
        return (loss, metrics) if metrics else loss


class WholeReplay(Replay):
    """The script does then what it does behind each step. `copy_in`: a state, into the script's objects."""

    def __init__(self, copy_in: Callable[[dict[str, Any]], None]) -> None:
        self._copy_in = copy_in
        self._is_to_come = False
        self._state: dict[str, Any] | None = None
        """It has come before that."""

    def arrived(self, state: dict[str, Any]) -> None:
        """State has come, which has all in it that the script will do between the units of others."""
        if self._is_to_come:
            self._state = copy.deepcopy(state)

    def gone(self) -> None:
        """This rank holds the layer no more, and others train it: that state is not put back any more."""
        self._state = None

    def joining(self) -> None:
        self._is_to_come = True

    def replaying(self) -> None:
        """The script has done some of it, to that state."""
        if self._state is not None:
            self._copy_in(self._state)

    def replayed(self) -> None:
        """And the last of it."""
        self.replaying()
        self._is_to_come, self._state = False, None


class ScriptModel(Model):
    """Its one shard is of the script's own optimizer, scheduler and extra objects."""

    changes_between_units = True
    n_shards = 1
    own = 0
    """The layer that this rank has."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], given.Loss],
        optimizer: Optimizer,
        scheduler: Any,
        extra: Sequence[Stateful],
        scaler: GradScaler | None = None,
    ) -> None:
        """Raises JobError for what could not be trained, or not be moved."""
        self._divide(model)
        if (scaler := enabled(scaler)) is not None:
            self.loss_scale = ScalersScale(scaler)
        device = _check(model, optimizer, scheduler, extra)
        self._given = model
        self._own_optimizer = optimizer
        self._own_scheduler = scheduler
        self._extra = (*extra, *([] if scaler is None else [scaler]))
        self._strides: dict[str, tuple[int, ...]] = {}
        """Those of the parameters when the first step began."""
        self.replay: WholeReplay = WholeReplay(self._copy_in)
        self.statistics: Statistics = Statistics(model)
        self._attributes = Attributes(model)
        layer = Loss(model, loss, self.statistics)
        make_scheduler = None if scheduler is None else lambda its: scheduler
        super().__init__(lambda: self._as_layers(layer), lambda parameters: optimizer, make_scheduler, device, 0)
        self.specs = self._specs_of(type(model).__name__)

    def _divide(self, model: nn.Module) -> None:
        """Nothing is divided."""

    def _specs_of(self, name: str) -> tuple[LayerSpec, ...]:
        """What the layers of a model of this name are."""
        return (msgspec.structs.replace(self.specs[0], name=name),)

    def _as_layers(self, loss: Loss) -> list[nn.Module]:
        return [loss]

    def optimizers(self) -> tuple[str, ...]:
        """What the script has made."""
        return (in_words(self._own_optimizer, self._own_scheduler),)

    def twin(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """An optimizer as the script's, for the same parameters, with a state of its own."""
        twin: Optimizer = copied(self._own_optimizer, {id(parameter): parameter for parameter in parameters})
        return twin

    def own_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state under its own names, of that of all layers."""
        prefix = full_name(0, "model.")
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def begin_step(self) -> None:
        """What is summed and stepped are the parameters that there were when the job began, in the same order in memory."""
        own = self.shards[self.own].trainable
        trained = [parameter for parameter in self._given.parameters() if parameter.requires_grad]
        if len(own) != len(trained) or any(one is not other for one, other in zip(own, trained, strict=True)):
            known = set(map(id, own))
            others = [name for name, p in self._given.named_parameters() if p.requires_grad != (id(p) in known)]
            what = f"other parameters are to be trained than when the job began{f': {others[0]}' if others else ''}"
            raise JobError(what, "freeze, unfreeze and replace them before odyssey.resilient is called")
        strides = {name: parameter.stride() for name, parameter in self.shards[self.own].named.items()}
        self._strides = self._strides or strides
        if changed := [name for name in strides if strides[name] != self._strides[name]]:
            what = f"{changed[0].removeprefix(full_name(self.own, 'model.'))} lies in memory otherwise than when the job began"
            raise JobError(what, "call model.to(memory_format=...) before the first step")
        _check_hooks(self._given)
        self.statistics.begin()
        self.loss_scale.begin()

    def measured(self, metric: Callable[..., Any], batch: Any, output: Any, target: Any) -> Any:
        """The one layer gives nothing but the loss: a metric is computed from the batch."""
        return metric(batch)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around what is measured: afterwards all values are as before."""
        tensors = [*self._given.parameters(), *self._given.buffers()]
        values = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            self.statistics.undo()
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            for parameter in self._given.parameters():
                parameter.grad = None

    def with_values(self, weights: Weights) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """See other_values.py."""
        return in_place_of_own(self._given, weights)

    def copy_of(self, layers: Iterable[int]) -> Model:
        """The same modules, which `unchanged` is around, with an optimizer of its own, and no scale that it would change."""
        other = copy.copy(self)
        other.loss_scale = LossScale()
        named = self._named(self.own, frozenset(layers))
        other.held, other.shards = frozenset(layers), {self.own: StateShard(named, self.twin, None)}
        return other

    # -- holding ------------------------------------------------------------------------------------------------------

    def hold_built(self, layers: Iterable[int]) -> None:
        """Hold what the script has made, with its values."""
        self.is_as_built = False
        self._begin()
        self._take(frozenset(layers))

    def _begin(self) -> None:
        """What the script has made is what this rank begins with, but for gradients that its own backward has left: a step
        that others have begun would go on with them."""
        self._attributes.begin()
        for parameter in self._given.parameters():
            parameter.grad = None

    def keep_only(self, layers: Iterable[int]) -> None:
        """The script's objects stay in any case, as they are."""
        self._take(self.held & frozenset(layers))
        if not self.held:
            self.replay.gone()

    def export(self, layer: int) -> dict[str, Any]:
        """With what the loop has set its modules to."""
        return {**super().export(layer), "modes": self._modes(), "attributes": self._attributes.changed()}

    def shard_state(self, number: int) -> dict[str, Any]:
        """With the modes."""
        return {**super().shard_state(number), "modes": self._modes()}

    def _modes(self) -> list[bool]:
        return [module.training for module in self._given.modules()]

    def adopt(self, layer: int, state: dict[str, Any]) -> None:
        """Copy a state into the script's objects; once more when the script has passed the units of others."""
        self.replay.arrived(state)
        self.is_as_built = False
        self._begin()
        self.read_on(state["reading"])
        self._take(frozenset({layer}))
        self._copy_in(state)

    def _copy_in(self, state: dict[str, Any]) -> None:
        values = state["parameters"] | state["buffers"]
        with torch.no_grad():
            layer = self.layers[self.own]
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                part_of(tensor).copy_(values[name])
        self.shards[self.own].load_progress(state["progress"][self.own])
        for module, mode in zip(self._given.modules(), state["modes"], strict=True):
            module.training = mode
        self._attributes.put(state["attributes"])

    def _shard(self, number: int, layers: frozenset[int]) -> StateShard:
        return StateShard(self._named(number, layers), self._optimizer, self._scheduler, self._extra)


_A_MEAN = "return a scalar tensor, the mean over the micro-batch's samples"


def _check_hooks(model: nn.Module) -> None:
    """Raises JobError for a hook that sees what a rank has summed up to then: how much that is changes with the ranks."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter._post_accumulate_grad_hooks:
            what = f"parameter {name} has a hook behind the sum of its gradient, called for each micro-batch of a rank"
            raise JobError(what, "change gradients with parameter.register_hook, which sees those of one micro-batch each time")


def _check(model: nn.Module, optimizer: Optimizer, scheduler: Any, extra: Sequence[Stateful]) -> torch.device:
    """The device of all that is trained."""
    if not isinstance(model, nn.Module):
        raise JobError(f"model is a {type(model).__name__}", "give the torch.nn.Module that is trained")
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise JobError(
            f"model is wrapped in {type(model).__name__}", "give the module within, and let loss(batch) call that: Odyssey sums"
        )
    check_state(model, "model")
    _check_hooks(model)
    named = dict(model.named_parameters())
    devices = {tensor.device for tensor in (*named.values(), *model.buffers())}
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "no device, as it has no parameters"
        raise JobError(f"model is on {where}", "give a model with parameters, all on one device")
    if not all(hasattr(optimizer, name) for name in ("step", "state", "param_groups", "state_dict")):
        raise JobError(f"optimizer is a {type(optimizer).__name__}", "give the optimizer of model.parameters()")
    if wanting := next(filter(needs_closure, parts_of(optimizer)), None):
        raise JobError(f"optimizer is a {type(wanting).__name__}, whose step() needs an argument", "give one that needs none")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if missing := [name for name, parameter in trained.items() if id(parameter) not in stepped]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise JobError(
            f"optimizer leaves out {missing[0]}{more}", "what is not to be trained is frozen, with requires_grad_(False)"
        )
    if stepped - {id(parameter) for parameter in trained.values()}:
        what = "optimizer steps parameters that model has not, or that are frozen"
        raise JobError(what, "let model contain all that is trained (torch.nn.ModuleDict), and optimizer nothing else")
    if isinstance(scheduler, ReduceLROnPlateau):
        what = "scheduler is a ReduceLROnPlateau, which needs a loss at each step"
        raise JobError(what, "give it in extra=[...], and step it in the loop, with step.loss")
    if scheduler is not None and not (hasattr(scheduler, "optimizer") and is_of(scheduler, optimizer)):
        raise JobError(f"scheduler is a {type(scheduler).__name__} that is not of optimizer", "give a scheduler of optimizer")
    for one in (*extra, *([] if scheduler is None else [scheduler])):
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            what = f"a {type(one).__name__} has no state_dict() and load_state_dict()"
            raise JobError(
                what, "give objects that have both: what is in extra=[...] is the same on all ranks, and comes to new ones"
            )
    return next(iter(devices))
