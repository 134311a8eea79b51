"""State in a form free of the layout: by the names of parameters, whoever held them.

`model`: `layers.3.attention.weight` -> tensor, persistent buffers among them; a tied parameter stands under each of its
names. `optimizer`: for each shard, the optimizer's class (`kind`), its state by the name of the parameter, what else it keeps
(`shared`), its groups' settings, the scheduler, and what is extra. `step`: number of committed steps. `reading`: where the
reading of data stood lately, if these are a stream that tells. `approximate`: whether the plan in force then had approximate
gradients.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from odyssey.errors import JobError
from odyssey.model.dtensors import part_of
from odyssey.model.model import Model, full_name
from odyssey.model.nesting import mapped
from odyssey.model.optimizers import parts_of
from odyssey.model.state_shard import StateShard
from odyssey.plan.worker import Worker
from odyssey.runtime.engine import Engine
from odyssey.runtime.transfer import receive_state, send_state


def local_state(model: Model, layers: Collection[int], step: int) -> dict[str, Any]:
    """The state of `layers`, which this rank holds. Tensors are the model's own."""
    tensors = {}
    for layer in sorted(layers):
        for name, tensor in model.layers[layer].state_dict().items():
            tensors[full_name(layer, name)] = part_of(tensor)
    shards = {str(number): _shard_state(model, number) for number in model.shards_of(layers)}
    reading = {} if model.reading is None else {"reading": model.reading.state_dict()}
    return {"model": tensors, "optimizer": shards, "step": step, **reading}


def _shard_state(model: Model, number: int) -> dict[str, Any]:
    progress = model.shards[number].progress()
    packed = progress["optimizer"] or {"state": {}, "param_groups": []}
    names = _names(model.shards[number])
    by_name = [key for key, values in packed["state"].items() if isinstance(key, int) and isinstance(values, dict)]
    return {
        "kind": _kind(model.shards[number]),
        "state": {names[key]: packed["state"][key] for key in by_name},
        "shared": {key: values for key, values in packed["state"].items() if key not in by_name},
        "groups": packed["param_groups"],
        "scheduler": progress["scheduler"],
        "extra": progress["extra"],
    }


def _kind(shard: StateShard) -> list[str]:
    """Its optimizer's class; several, where that is several optimizers."""
    return [] if shard.optimizer is None else [type(part).__name__ for part in parts_of(shard.optimizer)]


def _names(shard: StateShard) -> list[str]:
    """Give the parameters' names in the order in which the optimizer numbers them."""
    names = {id(parameter): name for name, parameter in shard.named.items()}
    groups = shard.optimizer.param_groups if shard.optimizer is not None else []
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def take(model: Model, state: dict[str, Any]) -> None:
    """Copy into the held layers, their optimizers and schedulers."""
    model.read_on(state.get("reading"))
    with torch.no_grad():
        for layer in model.held:
            for name, tensor in model.layers[layer].state_dict(keep_vars=True).items():
                part_of(tensor).copy_(state["model"][full_name(layer, name)])
    for number, shard in model.shards.items():
        saved = state["optimizer"][str(number)]
        names = _names(shard)
        packed = {
            "state": {i: saved["state"][name] for i, name in enumerate(names) if name in saved["state"]} | saved["shared"],
            "param_groups": saved["groups"],
        }
        shard.load_progress({"optimizer": packed, "scheduler": saved["scheduler"], "extra": saved["extra"]})


def check(model: Model, state: dict[str, Any], layers: Collection[int]) -> None:
    """Raises JobError if `state` does not hold `layers` of this model."""
    for part in ("model", "optimizer", "step"):
        if part not in state:
            raise JobError(f"the state has no {part!r}", "load what job.state_dict() gave on the leader, on every rank")
    if model.n_shards > 1:
        layers = model.held  # a shard of another rank has no form here
    known = {layer: model.layers[layer].state_dict(keep_vars=True) for layer in layers}
    for key in state["model"]:
        layer, _, name = key.removeprefix("layers.").partition(".")
        if int(layer) >= len(model.layers) or (int(layer) in known and name not in known[int(layer)]):
            raise JobError(f"the state has {key}, the model has not", _SAME_MODEL)
    for layer, tensors in known.items():
        for name, tensor in tensors.items():
            saved = state["model"].get(full_name(layer, name))
            if saved is None or _form(saved) != _form(tensor):
                has = "no" if saved is None else f"{_form(saved)} for"
                raise JobError(f"the state has {has} {full_name(layer, name)}, the model {_form(tensor)}", _SAME_MODEL)
    for number in model.shards_of(known):
        if str(number) not in state["optimizer"]:
            raise JobError(f"the state has no optimizer of shard {number}", _SAME_MODEL)
        if number in model.shards:
            _check_optimizer(model.shards[number], state["optimizer"][str(number)])


def _check_optimizer(shard: StateShard, saved: dict[str, Any]) -> None:
    """The optimizer that is there must be of the kind whose state was saved; its settings are those of the state then."""
    if (saved["scheduler"] is None) != (shard.scheduler is None):
        has, lacks = ("the state", "the job") if shard.scheduler is None else ("the job", "the state")
        raise JobError(f"{has} has a scheduler, {lacks} has none", _SAME_OPTIMIZER)
    if len(saved["extra"]) != len(shard.extra):
        raise JobError(f"the state has {len(saved['extra'])} extra objects, the job {len(shard.extra)}", _SAME_OPTIMIZER)
    groups = shard.optimizer.param_groups if shard.optimizer is not None else []
    settings, given = ([{*group} - {"initial_lr"} for group in some] for some in (saved["groups"], groups))
    has_all = len(settings) == len(given) and all(map(set.issuperset, settings, given))  # and what its steps have made
    if settings != given and not (has_all and saved.get("kind") == _kind(shard)):
        theirs, ours = (list(map(sorted, each)) for each in (settings, given))
        raise JobError(f"the state is of an optimizer with settings {theirs}, this one has {ours}", _SAME_OPTIMIZER)
    sizes, own = ([len(group["params"]) for group in some] for some in (saved["groups"], groups))
    names = [name for name, parameter in shard.named.items() if parameter.requires_grad]
    if sizes != own or not set(saved["state"]) <= set(names):
        what = f"the state's optimizer of {', '.join(saved['state']) or sizes} is here one of {', '.join(names)}"
        raise JobError(what, _SAME_MODEL)


_SAME_MODEL = "load a state of the same model"
_SAME_OPTIMIZER = "give odyssey.Job the optimizer and scheduler that the state was saved with"


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(part_of(tensor).shape)} {str(tensor.dtype).removeprefix('torch.')}"


def gather(engine: Engine, model: Model, step: int, target: Worker) -> dict[str, Any]:
    """The whole state on worker `target`, each layer from its lowest holder; an empty dict elsewhere. Raises Cut."""
    plan, me = engine.plan, engine.worker
    sources: dict[Worker, set[int]] = {}
    for layer in range(plan.n_layers):
        holders = plan.holders[layer]
        sources.setdefault(target if target in holders else holders[0], set()).add(layer)
    if me != target:
        if me in sources:
            send_state(local_state(model, sources[me], step), target, engine.groups)
        return {}
    whole: dict[str, Any] = _copied(local_state(model, sources.pop(me, set()), step))
    whole["approximate"] = plan.approximation is not None
    for source in sorted(sources):
        part = _copied(receive_state(source, engine.groups, "state")[0])
        whole["model"].update(part["model"])
        whole["optimizer"].update(part["optimizer"])
    return whole


def _copied(state: Any) -> Any:
    return mapped(state, lambda value: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else None)
