"""State in a form free of the layout: by the names of parameters, whoever held them.

`model`: `layers.3.attention.weight` -> tensor, persistent buffers among them; a tied parameter stands under each of its
names. `optimizer`: for each unit, the optimizer's state by the name of the parameter, its groups' settings, and the
scheduler. `step`: number of committed steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.storage import WriteResult

from odyssey.engine import Engine
from odyssey.errors import JobError
from odyssey.groups import Groups
from odyssey.model import Model, full_name
from odyssey.moves import receive_state, send_state


def local_state(model: Model, layers: Collection[int], step: int) -> dict[str, Any]:
    """The state of `layers`, which this rank holds. Tensors are the model's own."""
    tensors = {}
    for layer in sorted(layers):
        for name, tensor in model.layers[layer].state_dict().items():
            tensors[full_name(layer, name)] = tensor
    units = {str(number): _unit_state(model, number) for number in model.units_of(layers)}
    return {"model": tensors, "optimizer": units, "step": step}


def _unit_state(model: Model, number: int) -> dict[str, Any]:
    progress = model.units[number].progress()
    if progress["optimizer"] is None:
        return {"state": {}, "groups": [], "scheduler": progress["scheduler"]}
    names = [name for name, parameter in model.units[number].named.items() if parameter.requires_grad]
    packed = progress["optimizer"]
    return {
        "state": {names[i]: values for i, values in packed["state"].items()},
        "groups": packed["param_groups"],
        "scheduler": progress["scheduler"],
    }


def take(model: Model, state: dict[str, Any]) -> None:
    """Copy into the held layers, their optimizers and schedulers."""
    with torch.no_grad():
        for layer in model.held:
            for name, tensor in model.layers[layer].state_dict(keep_vars=True).items():
                tensor.copy_(state["model"][full_name(layer, name)])
    for number, unit in model.units.items():
        saved = state["optimizer"][str(number)]
        names = [name for name, parameter in unit.named.items() if parameter.requires_grad]
        packed = {
            "state": {i: saved["state"][name] for i, name in enumerate(names) if name in saved["state"]},
            "param_groups": saved["groups"],
        }
        unit.load_progress({"optimizer": packed, "scheduler": saved["scheduler"]})


def check(model: Model, state: dict[str, Any], layers: Collection[int]) -> None:
    """Raises JobError if `state` does not hold `layers` of this model."""
    for part in ("model", "optimizer", "step"):
        if part not in state:
            raise JobError(f"the state has no {part!r}", "load what job.state_dict() gave on the leader, on every rank")
    for layer in layers:
        for name, tensor in model.layers[layer].state_dict(keep_vars=True).items():
            key = full_name(layer, name)
            saved = state["model"].get(key)
            shape = None if saved is None else tuple(saved.shape)
            if shape != tuple(tensor.shape):
                what = f"the state has {'no' if shape is None else f'shape {shape} for'} {key}, the model {tuple(tensor.shape)}"
                raise JobError(what, "load a state of the same model")


def gather(engine: Engine, model: Model, step: int) -> dict[str, Any]:
    """The whole state on the leader, each layer from its lowest holder; an empty dict elsewhere. Raises Cut."""
    plan, me = engine.plan, engine.worker
    sources: dict[int, set[int]] = {}
    for layer in range(plan.n_layers):
        holders = plan.holders(layer)
        sources.setdefault(plan.leader if plan.leader in holders else holders[0], set()).add(layer)
    if me != plan.leader:
        if me in sources:
            for work, _ in send_state(local_state(model, sources[me], step), plan.leader, engine.groups):
                engine.groups.wait(work.wait)
        return {}
    whole: dict[str, Any] = _copied(local_state(model, sources.pop(me, set()), step))
    for source in sorted(sources):
        part = _copied(receive_state(source, engine.groups, "state")[0])
        whole["model"].update(part["model"])
        whole["optimizer"].update(part["optimizer"])
    return whole


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state


# -- files ----------------------------------------------------------------------------------------------------------------
#
# The planners and the file format are torch.distributed.checkpoint's. Its own driver talks over a process group that is
# registered for the whole process and cannot be cut, so the two exchanges it needs go over the generation's groups.


def save(engine: Engine, model: Model, step: int, folder: Path) -> None:
    """Write the whole state into `folder`, each layer by its lowest holder. Raises Cut when communication ends."""
    plan, me, groups = engine.plan, engine.worker, engine.groups
    own = {layer for layer in model.held if plan.holders(layer)[0] == me}
    is_leader = me == plan.leader
    planner, writer = DefaultSavePlanner(flatten_state_dict=False), FileSystemWriter(folder, overwrite=True)
    planner.set_up_planner(_flat(local_state(model, own, step)), writer.storage_meta(), is_leader)
    writer.set_up_storage_writer(is_leader)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    if not is_leader:
        _send(local_plan, plan.leader, groups)
        final_plan = receive_state(plan.leader, groups, "the checkpoint's plan")[0]
        _send(_written(writer, planner, final_plan), plan.leader, groups)
        return
    others = [worker for worker in plan.workers if worker != me]
    local_plans = [local_plan, *(receive_state(worker, groups, "its part of the checkpoint's plan")[0] for worker in others)]
    global_plans, metadata = planner.create_global_plan(local_plans)
    global_plans = writer.prepare_global_plan(global_plans)
    for worker, worker_plan in zip(others, global_plans[1:], strict=True):
        _send(worker_plan, worker, groups)
    results = [_written(writer, planner, global_plans[0])]
    results += [receive_state(worker, groups, "what it wrote")[0] for worker in others]
    writer.finish(metadata, results)


def _written(writer: FileSystemWriter, planner: DefaultSavePlanner, plan: SavePlan) -> list[WriteResult]:
    return writer.write_data(planner.finish_plan(plan), planner).wait()


def _send(value: Any, worker: int, groups: Groups) -> None:
    for work, _ in send_state(value, worker, groups):
        groups.wait(work.wait)


def load(model: Model, folder: Path) -> dict[str, Any]:
    """What `take` needs for the held layers, from a folder that `save` wrote. Raises JobError if it does not fit."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except OSError as error:
        raise JobError(f"{folder}: no checkpoint: {error.strerror}", "give a folder that job.save() wrote") from None
    units = {str(number) for number in model.units_of(model.held)}
    wanted: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        part, _, rest = key.partition("/")
        layer = int(rest.split(".")[1]) if part == "model" else -1
        if part == "step" or layer in model.held or (part == "optimizer" and rest.split("/")[0] in units):
            if isinstance(entry, TensorStorageMetadata):
                wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                wanted[key] = None
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it says that each rank reads by itself
        load_into(wanted, storage_reader=FileSystemReader(folder), no_dist=True)
    state = _nested(wanted)
    check(model, state, model.held)
    return state


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """One level, keys with slashes: `model/layers.0.weight`, `optimizer/0/state/layers.0.weight/exp_avg`, `step`."""
    flat = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for number, unit in state["optimizer"].items():
        flat[f"optimizer/{number}/groups"] = unit["groups"]
        flat[f"optimizer/{number}/scheduler"] = unit["scheduler"]
        for name, values in unit["state"].items():
            flat |= {f"optimizer/{number}/state/{name}/{key}": value for key, value in values.items()}
    return {**flat, "step": state["step"]}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": flat["step"]}
    for key, value in flat.items():
        part, *rest = key.split("/")
        if part == "model":
            state["model"][rest[0]] = value
        elif part == "optimizer":
            unit = state["optimizer"].setdefault(rest[0], {"state": {}, "groups": [], "scheduler": None})
            if rest[1] == "state":
                unit["state"].setdefault(rest[2], {})[rest[3]] = value
            else:
                unit[rest[1]] = value
    return state
