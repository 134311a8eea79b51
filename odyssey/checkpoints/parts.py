"""A checkpoint in parts: every rank writes its own and reads what it holds, in the form of torch.distributed.checkpoint.

The planners and the file format are its. Its own driver talks over a process group that is registered for the whole
process and cannot be cut, so what ranks tell each other goes over the generation's groups. All files are touched on the
generation's thread: a rank that writes for minutes is cut as quickly as any other, and what it still writes then is in a
folder that nobody else uses (odyssey/checkpoints/folder.py).

Whatever becomes of it, all workers come to the same end: the leader tells the others.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.storage import WriteResult

from odyssey.checkpoints import folder as folders
from odyssey.checkpoints.checkpoint import check, local_state
from odyssey.checkpoints.folder import Damaged, FileRecord, Found, Manifest
from odyssey.errors import JobError
from odyssey.model.model import Model
from odyssey.plan.needs import NO_LIMIT
from odyssey.plan.worker import Worker
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.transfer import receive_state, send_state

_METADATA = ".metadata"
_AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""The keys are flat already, and to look for sharded tensors in the values would leave out what is empty."""
T = TypeVar("T")


class Written(NamedTuple):
    """A worker's part, durable."""

    results: list[WriteResult]
    files: dict[str, FileRecord]


def save(engine: Engine, model: Model, step: int, folder: Path, keep: int) -> JobError | None:
    """Write the whole state as the newest checkpoint in `folder`, each layer by its lowest holder, and keep the last `keep`.

    Returns why it could not be written, the same on all workers. Raises Cut when communication ends.
    """
    plan, me, groups = engine.plan, engine.worker, engine.groups
    own = {layer for layer in model.held if plan.holders[layer][0] == me}
    planner = DefaultSavePlanner(**_AS_IT_IS)
    planner.set_up_planner(_flat(local_state(model, own, step)), is_coordinator=me == plan.leader)
    mine = planner.create_local_plan()

    def write(path: Path, final: SavePlan) -> Written | JobError:
        return _tried(groups, folder, lambda: _write(FileSystemWriter(path), planner, final))

    if me != plan.leader:
        _send(mine, plan.leader, groups)
        begun = _receive(plan.leader, groups, "the checkpoint's plan")
        if not isinstance(begun, JobError):
            _send(write(*begun), plan.leader, groups)
            begun = _receive(plan.leader, groups, "whether the checkpoint is written")
        return begun if isinstance(begun, JobError) else None
    others = [worker for worker in plan.workers if worker != me]
    plans = [mine, *(_receive(worker, groups, "its part of the checkpoint's plan") for worker in others)]
    path = _tried(groups, folder, lambda: folders.begin(folder, step))
    if isinstance(path, JobError):
        return _tell(path, others, groups)
    plans, metadata = planner.create_global_plan(plans)
    writer = FileSystemWriter(path)
    plans = writer.prepare_global_plan(plans)
    for worker, its in zip(others, plans[1:], strict=True):
        _send((path, its), worker, groups)
    answers = [write(path, plans[0]), *(_receive(worker, groups, "what it wrote") for worker in others)]
    parts = [answer for answer in answers if isinstance(answer, Written)]
    problem = next((answer for answer in answers if isinstance(answer, JobError)), None)

    def complete() -> None:
        writer.finish(metadata, [part.results for part in parts])
        files = {name: written for part in parts for name, written in part.files.items()}
        files[_METADATA] = folders.record(path / _METADATA)
        folders.complete(path, step, files, approximate=plan.approximation is not None)

    problem = problem or _tried(groups, folder, complete)
    if problem is None:
        problem = _attempt(folder, lambda: folders.publish(path, step))
    tidy = (lambda: folders.prune(folder, keep)) if problem is None else (lambda: folders.discard(path))
    problem = _tried(groups, folder, tidy) or problem
    return _tell(problem, others, groups)


def _write(writer: FileSystemWriter, planner: DefaultSavePlanner, plan: SavePlan) -> Written:
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    names = sorted({result.storage_data.relative_path for result in results})
    return Written(results, {name: folders.record(Path(writer.path) / name) for name in names})


# -- reading ----------------------------------------------------------------------------------------------------------


def load(engine: Engine, model: Model, folder: Path) -> dict[str, Any] | JobError | None:
    """What `checkpoint.take` needs for the held layers, from the newest checkpoint in `folder` that is whole.

    None if there is none at all; a JobError if none can be used. All workers come to the same. Raises Cut.
    """
    plan, me, groups = engine.plan, engine.worker, engine.groups
    if me != plan.leader:
        state: dict[str, Any] | JobError | str = {}
        while isinstance(order := _receive(plan.leader, groups, "which checkpoint to read"), Found):
            state = _read(groups, model, order)
            _send(state if isinstance(state, str | JobError) else None, plan.leader, groups)
        if isinstance(order, JobError) or order is None:
            return order
        assert isinstance(state, dict), "the leader has heard that it was read"
        return state
    others = [worker for worker in plan.workers if worker != me]
    found = _attempt(folder, lambda: folders.checkpoints(folder))
    if isinstance(found, JobError):
        return _tell(found, others, groups)
    problems: list[str] = []
    for one in found:
        _tell(one, others, groups)
        mine = _read(groups, model, one)
        answers = [mine, *(_receive(worker, groups, "what it read") for worker in others)]
        if (error := next((answer for answer in answers if isinstance(answer, JobError)), None)) is not None:
            return _tell(error, others, groups)
        if (problem := next((answer for answer in answers if isinstance(answer, str)), None)) is None and isinstance(
            mine, dict
        ):
            for text in problems:
                print(f"odyssey: {folder}: {text}; going on from {one.path.name}", file=sys.stderr, flush=True)
            if one.manifest is not None and one.manifest.approximate:
                note = "was written while gradients were approximate (--allow-approximate)"
                print(f"odyssey: {one.path} {note}", file=sys.stderr, flush=True)
            _tell(True, others, groups)
            return mine
        problems.append(f"{one.path.name}: {problem}")
    return _tell(folders.none_whole(folder, problems) if problems else None, others, groups)


def _read(groups: Groups, model: Model, found: Found) -> dict[str, Any] | JobError | str:
    """The state of the held layers; or what is damaged, in words; or why it is no checkpoint of this model."""
    manifest = found.manifest
    if manifest is None:
        return found.problem

    def read() -> dict[str, Any] | JobError | str:
        try:
            return _read_held(model, found.path, manifest)
        except Damaged as damage:
            return str(damage)
        except (OSError, RuntimeError) as error:  # torch's own words for a file that it cannot read
            return f"it cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}"
        except JobError as error:
            return JobError(f"{found.path}: {error.what}", error.help)

    result: dict[str, Any] | JobError | str = groups.waiter.beside(read)
    return result


def _read_held(model: Model, path: Path, manifest: Manifest) -> dict[str, Any]:
    folders.verify(path, manifest, _METADATA)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    shards = {str(number) for number in model.shards_of(model.held)}
    wanted: dict[str, Any] = {}
    names = set()
    for index, stored in metadata.storage_data.items():
        key = index.fqn
        part, _, rest = key.partition("/")
        layer = int(rest.split(".")[1]) if part == "model" else -1
        if layer >= len(model.layers):
            raise JobError(
                f"the state has layer {layer}, the model {len(model.layers)} layers", "load a state of the same model"
            )
        if part in ("step", "reading") or layer in model.held or (part == "optimizer" and rest.split("/")[0] in shards):
            entry = metadata.state_dict_metadata[key]
            if isinstance(entry, TensorStorageMetadata):
                wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                wanted[key] = None
            names.add(stored.relative_path)
    for name in sorted(names):
        folders.verify(path, manifest, name)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it says that each rank reads by itself
        try:
            load_into(wanted, storage_reader=reader, planner=DefaultLoadPlanner(**_AS_IT_IS), no_dist=True)
        except CheckpointException as error:  # what was raised is in there, and of no kind that it had
            ((cause, _), *_) = error.failures.values()
            raise cause from None
    state = _nested(wanted)
    check(model, state, model.held)
    return state


# -- what workers tell each other --------------------------------------------------------------------------------------


def _tried(groups: Groups, folder: Path, act: Callable[[], T]) -> T | JobError:
    """What `act` gives, on the generation's thread; a JobError for what the operating system refuses. Raises Cut."""
    result: T | JobError = groups.waiter.beside(lambda: _attempt(folder, act))
    return result


def _attempt(folder: Path, act: Callable[[], T]) -> T | JobError:
    try:
        return act()
    except (OSError, RuntimeError) as error:
        return folders.cannot_save(folder, error)
    except JobError as error:
        return error


def _tell(value: T, workers: Sequence[Worker], groups: Groups) -> T:
    for worker in workers:
        _send(value, worker, groups)
    return value


def _send(value: Any, worker: Worker, groups: Groups) -> None:
    send_state(value, worker, groups, NO_LIMIT)


def _receive(worker: Worker, groups: Groups, what: str) -> Any:
    """Waits as long as the other reads or writes."""
    return receive_state(worker, groups, what, NO_LIMIT)[0]


# -- one level, as the planners want it ---------------------------------------------------------------------------------


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """One level, keys with slashes: `model/layers.0.weight`, `optimizer/0/state/layers.0.weight/exp_avg`, `optimizer/0/rest`.

    `rest` is pickled as one: what a planner gets it takes apart, and makes text of every key.
    """
    flat = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for number, shard in state["optimizer"].items():
        rest: dict[str, dict[Any, Any]] = {}
        for name, values in shard["state"].items():
            rest[name] = {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(key, str) and "/" not in key:
                    flat[f"optimizer/{number}/state/{name}/{key}"] = value
                else:
                    rest[name][key] = value
        flat[f"optimizer/{number}/rest"] = _pickled({**shard, "state": rest})
    reading = {"reading": _pickled(state["reading"])} if "reading" in state else {}
    return {**flat, "step": state["step"], **reading}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """What `_flat` was given. Names may have slashes; numbers of shards and the keys of a parameter's state have none."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": flat["step"]}
    if "reading" in flat:
        state["reading"] = _unpickled(flat["reading"])
    tensors = []
    for key, value in flat.items():
        part, _, name = key.partition("/")
        if part == "model":
            state["model"][name] = value
        elif part == "optimizer":
            number, _, name = name.partition("/")
            if name == "rest":
                state["optimizer"][number] = _unpickled(value)
            else:
                tensors.append((number, *name.removeprefix("state/").rpartition("/")[::2], value))
    for number, name, key, value in tensors:
        state["optimizer"][number]["state"][name][key] = value
    return state


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpickled(data: bytes) -> Any:
    """As torch.distributed.checkpoint reads what is no tensor: a checkpoint is as trusted as the script that loads it."""
    return torch.load(io.BytesIO(data), weights_only=False)
