"""What a script hands to `odyssey.Job`, checked as it is handed over: an error for each thing that would train wrongly.

What is made here on every rank is also put in words, so that ranks that were given different things are told apart before
the first step (launcher/coordinator/gate.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from odyssey.errors import AutocastError, JobError, OptimizerError, SchedulerError
from odyssey.model.optimizers import is_of, parts_of
from odyssey.model.packing import digest

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], Any]
Metric = torch.Tensor | float
"""It is a scalar, the mean over the samples of a micro-batch."""
Loss = torch.Tensor | tuple[torch.Tensor, Mapping[str, Metric]]
"""It is a scalar, alone or with metrics by name."""

Weight = Callable[[Any], torch.Tensor | float]
"""How much a micro-batch counts in the mean over a step."""

_OPTIMIZER = "return an optimizer, for example `lambda params: torch.optim.AdamW(params, lr=3e-4)`"
_SCHEDULER = "return a scheduler of the argument, for example `lambda opt: torch.optim.lr_scheduler.StepLR(opt, 100)`"
_PLAIN = (bool, int, float, str, type(None))
_OWN_PARTS = ("_parameters", "_buffers", "_modules")
"""Where a module gets new tensors when its layer is put on other ranks, and no other place."""


def check_state(model: nn.Module, where: str) -> None:
    """Raises JobError for a module that keeps what is neither a parameter nor a buffer: no other rank would get it."""
    for name, module in model.named_modules(prefix=where):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"{name} is a {type(module).__name__}, which keeps a state of its own by get_extra_state()"
            raise JobError(what, "keep it in buffers, or in an object of odyssey.resilient's extra=[...]")


def check_layer(layer: nn.Module, where: str) -> None:
    """Raises JobError for one that has to do something else than compute, and cannot do it on whatever ranks hold it; or that
    would compute with other parameters than those that are trained."""
    if its := next((module for module in layer.modules() if getattr(module, "track_running_stats", False)), None):
        what = f"{where} has running statistics ({type(its).__name__}), which differ between pipelines"
        raise JobError(what, "use LayerNorm, GroupNorm or RMSNorm, or track_running_stats=False; or odyssey.resilient")
    for name, parameter in layer.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            what = f"{where}: parameter {name} has a hook, which does not come along when the layer is put on other ranks"
            raise JobError(what, "change gradients in forward, with a torch.autograd.Function around the parameter")
    for path, module in layer.named_modules(prefix=where):
        for name, value in vars(module).items():
            is_kept_up = name in _OWN_PARTS or (name == "_flat_weights" and isinstance(module, nn.RNNBase))
            if not is_kept_up and _has_parameter(value):
                kind = type(value).__name__
                what = f"{path} keeps parameters in {name}, a {kind}, and would compute with these when it has got others"
                raise JobError(what, "keep them in torch.nn.ParameterList or ParameterDict, or look them up by name in forward")


def _has_parameter(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_parameter, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_has_parameter, value))
    return isinstance(value, nn.Parameter)


Seen = Mapping[str, tuple[int, int, torch.Size]]


def seen_of(layer: nn.Module) -> Seen:
    """By which changes of its parameters and buffers are seen."""
    named = chain(layer.named_parameters(), layer.named_buffers())
    return {name: (id(tensor), tensor._version, tensor.shape) for name, tensor in named}


def check_unchanged(layer: nn.Module, name: str, before: Seen) -> None:
    """Raises JobError if a forward has changed, replaced or made a parameter or buffer: each rank that holds the layer would
    have another one."""
    after = seen_of(layer)
    if changed := next((its for its in {**before, **after} if before.get(its) != after.get(its)), ""):
        did = "makes" if changed not in before else "changes"
        raise JobError(
            f"the forward of layer {name} {did} its {changed}, which would be another on each rank that holds it",
            "let it leave parameters and buffers as __init__ has made them, buffers in the largest size that is needed",
        )


def made_optimizer(make: OptimizerFactory, named: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer that the script makes for just these parameters. Raises OptimizerError."""
    optimizer = make(list(named.values()))
    wanting = [name for name in ("step", "state", "param_groups", "state_dict") if not hasattr(optimizer, name)]
    if wanting:
        raise OptimizerError(f"optimizer() returned {_kind(optimizer)}, which is no optimizer", _OPTIMIZER)
    if needs_closure(optimizer):
        raise OptimizerError(f"optimizer() returned {_kind(optimizer)}, whose step() needs an argument", _OPTIMIZER)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = {id(parameter) for parameter in named.values()}
    if missing := [name for name, parameter in named.items() if id(parameter) not in stepped]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OptimizerError(
            f"optimizer() leaves out {missing[0]}{more} of the parameters that it was given",
            "step all of them; what is not to be trained is frozen in layers(), with requires_grad_(False)",
        )
    if foreign := stepped - given:
        what = f"{len(foreign)} parameter{'s' if len(foreign) > 1 else ''} that it was not given"
        raise OptimizerError(f"optimizer() steps {what}", "use the argument of optimizer(parameters), and no other ones")
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step wants to compute the loss again, as that of LBFGS: a step is computed once. Its class is asked: a
    scheduler has put another function in the place of its own."""
    step = type(optimizer).step.__get__(optimizer)
    return any(_is_required(parameter) for parameter in inspect.signature(step).parameters.values())


def made_scheduler(make: SchedulerFactory, optimizer: Optimizer) -> Any:
    """The scheduler that the script makes for this optimizer. Raises SchedulerError."""
    scheduler = make(optimizer)
    is_one = all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict"))
    if not is_one or scheduler is optimizer:
        raise SchedulerError(f"scheduler() returned {_kind(scheduler)}, which is no scheduler", _SCHEDULER)
    if not is_of(scheduler, optimizer):
        raise SchedulerError("scheduler() returned a scheduler of another optimizer than it was given", _SCHEDULER)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SchedulerError("scheduler() returned a ReduceLROnPlateau, which needs a loss at each step", _SCHEDULER)
    return scheduler


def with_metrics(returned: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take apart what `loss` returned: the loss itself, which is still to be checked, and the metrics beside it. Raises
    JobError."""
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise JobError("the loss is a tuple", "return the loss alone, or (loss, {name: scalar, ...})")
    return returned[0], {name: metric(name, value) for name, value in returned[1].items()}


def metric(name: str, value: Any) -> torch.Tensor:
    """Take what the script gives by this name for a micro-batch, without its gradient. Raises JobError if it is no scalar."""
    if not isinstance(name, str):
        raise JobError(f"a metric is called {name!r}", "let names be strings")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.detach()
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {_kind(value)}"
    raise JobError(f"the metric {name!r} {what}", "return a number or a scalar tensor, the mean over the micro-batch's samples")


def weight_of(value: Any) -> float:
    """Take what the script's `weight` gives for a micro-batch. Raises JobError if that is no number that could be meant."""
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(found, Real) and math.isfinite(number := float(found)) and number >= 0:
        return number
    what = f"has shape {tuple(value.shape)}" if isinstance(found, torch.Tensor) else f"is {found!r}"
    raise JobError(f"the weight of a micro-batch {what}", "return a number, at least 0: of the tokens that are no padding")


def check_autocast(dtype: object, is_scaled: bool) -> None:
    """Raises AutocastError for what cannot be computed in. `is_scaled`: the loss is, before its backward."""
    if dtype == torch.float16:
        if is_scaled:
            return
        what = "autocast=torch.float16 needs a gradient scaler: small gradients would become 0"
        raise AutocastError(
            what, "give torch.bfloat16, which needs none, or scaler=torch.amp.GradScaler(), which odyssey.resilient takes"
        )
    if dtype not in (None, torch.bfloat16):
        raise AutocastError(f"autocast is {dtype!r}", "give torch.bfloat16, or leave it out")


def in_words(optimizer: Optimizer, scheduler: Any) -> str:
    """`AdamW(lr=0.001, …)`: class and hyper-parameters, the same on ranks that were given the same."""
    words = " and ".join(map(_part_in_words, parts_of(optimizer)))
    if scheduler is not None:
        words += f" with {type(scheduler).__name__} {digest(scheduler.state_dict())[:8]}"
    return words


def _part_in_words(optimizer: Optimizer) -> str:
    groups = [
        ", ".join(f"{key}={_value(value)}" for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _value(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor {digest(value)[:8]}"
    return type(value).__name__


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
