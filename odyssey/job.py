"""`odyssey.Job`: what a training script hands over, and the loop that it gets back.

    job = odyssey.Job(layers=build_layers, loss=loss, optimizer=make_optimizer, data=dataset, global_batch=64, micro_batch=4)
    for step in job.steps(1000):
        ...

Every rank runs the same script and makes the same calls of `steps`, `evaluate`, `state_dict`, `load_state_dict`, `save`
and `load` in the same order. Which rank holds which layers, and how, is the plan's business and may change between any
two steps.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from odyssey import checkpoint, link
from odyssey.data import Dataset, Prefetcher, Sampler, draws_random_numbers, fetch
from odyssey.engine import Engine
from odyssey.errors import JobError, NonFiniteLoss, OdysseyError
from odyssey.evaluation import evaluate_body
from odyssey.frames import users_frames
from odyssey.given import OptimizerFactory, SchedulerFactory, check_autocast
from odyssey.local import LocalSession
from odyssey.messages import ModelSpec
from odyssey.model import LayerFactory, Model
from odyssey.plan import Plan
from odyssey.recipe import Recipe
from odyssey.session import Session, Values, Work


@dataclass(frozen=True)
class Step:
    """A committed training step. `loss`: mean over the step's samples; `grad_norm`: of the mean gradient, before clipping."""

    index: int
    loss: float
    grad_norm: float
    n_samples: int


class Job:
    """A model in layers, trained by all ranks together, that goes on when ranks are lost."""

    def __init__(
        self,
        layers: Callable[[], Sequence[nn.Module | LayerFactory]],
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerFactory,
        data: Dataset,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe the job and wait until this rank has its part of it.

        `layers()`: the model as a list of modules, each called with what the one before returned: a tensor, or a nested
        tuple or dict of tensors. It runs under `seed`. An element may be a function that builds the module; it is then
        called only on ranks that hold the layer. Modules may share parameters.
        `loss(output, target)`: scalar, the mean over the samples of a micro-batch.
        `optimizer(parameters)`: called for each layer; must step just these, alike on all ranks. `scheduler(optimizer)`:
        likewise, stepped after each step. Both are called once at the start for a look at what they make.
        `data[i]`: `(input, target)` of a sample. `global_batch` samples make a step, in micro-batches of `micro_batch`.
        `clip_norm`: largest global gradient norm. `autocast`: `torch.bfloat16` computes in mixed precision.
        `device`: default this rank's GPU if there is one, else the CPU.

        Raises JobError for what cannot be trained.
        """
        connection = link.connect()
        if connection is not None:
            _report_uncaught_errors()
        if not callable(layers):
            raise JobError(f"layers is a {type(layers).__name__}", "give a function that returns the list of layers")
        for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
            if not isinstance(value, int) or value < 1:
                raise JobError(f"{name} is {value!r}", "give the number of samples, at least 1")
        if len(data) < 1:
            raise JobError("data has no samples", "give a dataset with at least one sample")
        if connection is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise JobError(
                "started by another launcher", "start it with `odyssey run`, which brings the same flags as torchrun"
            )
        check_autocast(autocast)
        self._global_batch = global_batch
        self._clip_norm = clip_norm
        self._loss = loss
        device = _default_device() if device is None else torch.device(device)
        self._model = Model(layers, optimizer, scheduler, device, seed)
        sampler = Sampler(len(data), seed)
        is_random = draws_random_numbers(data, 0)

        def first_micro_batch() -> Any:
            sample_ids = sampler.ids(0, min(micro_batch, global_batch))
            return fetch(data, sample_ids, sample_ids)

        spec = ModelSpec(
            layers=self._model.specs,
            ties=self._model.ties,
            tie_bytes=self._model.tie_bytes,
            global_batch=global_batch,
            micro_batch=micro_batch,
            n_samples=len(data),
            seed=seed,
            device=device.type,
            optimizers=self._model.optimizers(),
            values=self._model.values() if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else (),
        )
        recipe = Recipe(
            spec=spec,
            loss=loss,
            optimizer=optimizer,
            prefetcher=lambda plan: Prefetcher(data, sampler, plan, is_random=is_random),
            first_micro_batch=first_micro_batch,
            seed=seed,
            autocast=autocast,
        )
        self._session: Session | LocalSession
        if connection is None:
            self._session = LocalSession(self._model, recipe)
        else:
            self._session = Session(connection, int(os.environ["RANK"]), self._model, recipe)
            self._session.start()
            atexit.register(self._session.finish)

    # -- who and where ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force on this rank."""
        assert self._session.plan is not None
        return self._session.plan

    @property
    def rank(self) -> int:
        """This rank's number; it keeps it for as long as it lives."""
        return self._session.rank

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for the job. When the leader is lost another rank becomes it."""
        return not self._session.replaying and self._session.leader == self.rank

    @property
    def next_step(self) -> int:
        """Number of committed steps."""
        return self._session.position[0]

    # -- training -----------------------------------------------------------------------------------------------------

    def steps(self, n_steps: int) -> Iterator[Step]:
        """Train until `n_steps` steps are committed in all, and yield each when it is.

        Raises NonFiniteLoss, with the step not applied, if the loss is NaN or infinite.
        """
        while self._session.replaying or self.next_step < n_steps:
            replaying = self._session.replaying
            step = replaying[0].position[0] if replaying else self.next_step
            loss, norm = self._session.run(self._training_step(step))
            if not math.isfinite(loss):
                raise NonFiniteLoss(
                    f"the loss of step {step} is {loss}", "lower the learning rate, or clip gradients with clip_norm"
                )
            yield Step(step, loss, norm, self._global_batch)

    def _training_step(self, step: int) -> Work:
        def conclude(sums: Sequence[float]) -> Values:
            return (sums[0] / self._global_batch, math.sqrt(sums[1]) / self._global_batch)

        def take(engine: Engine, values: Values) -> None:
            loss, norm = values
            if math.isfinite(loss):
                engine.apply(self._clip_factor(norm) / self._global_batch)

        return Work("step", lambda engine: engine.run_step(step), conclude, take, self._global_batch)

    def _clip_factor(self, norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_."""
        return 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))

    def evaluate(self, data: Dataset) -> float:
        """Mean loss over all of `data`, without gradients and with the layers in evaluation mode. All ranks call it."""
        n_samples = len(data)

        def conclude(sums: Sequence[float]) -> Values:
            return (sums[0] / n_samples,)

        work = Work("evaluate", lambda engine: evaluate_body(engine, data), conclude, lambda engine, values: None)
        return self._session.run(work)[0]

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state on the leader, an empty dict elsewhere. All ranks call it.

        `model`: `layers.3.weight` -> tensor on the CPU; `optimizer`: state of each unit by parameter name; `step`.
        """
        gathered: dict[str, Any] = {}
        step = self.next_step

        def body(engine: Engine) -> Sequence[float]:
            gathered.clear()
            gathered.update(checkpoint.gather(engine, self._model, step))
            return (0.0,)

        self._session.run(Work("state_dict", body, lambda sums: (0.0,), lambda engine, values: None))
        return gathered

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on what `state_dict` gave on some rank. All ranks call it with the whole state; each takes its layers.

        Raises JobError if it belongs to another model.
        """
        checkpoint.check(self._model, state, range(len(self._model.layers)))
        self._load(lambda engine: state)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint with torch.distributed.checkpoint: every rank its part, in a form free of the layout."""
        step = self.next_step

        def body(engine: Engine) -> Sequence[float]:
            checkpoint.save(engine, self._model, step, Path(folder))
            return (0.0,)

        self._session.run(Work("save", body, lambda sums: (0.0,), lambda engine, values: None))

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint that `save` wrote, under whatever layout. Raises JobError if it is not one of this model."""
        self._load(lambda engine: checkpoint.load(self._model, Path(folder)))

    def _load(self, read: Callable[[Engine], dict[str, Any]]) -> None:
        read_state: dict[str, Any] = {}

        def body(engine: Engine) -> Sequence[float]:
            read_state.clear()
            read_state.update(read(engine))
            return (float(read_state["step"]) if engine.worker == engine.plan.leader else 0.0,)

        def take(engine: Engine, values: Values) -> None:
            checkpoint.take(self._model, read_state)

        self._session.run(Work("load", body, lambda sums: (sums[0],), take))


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _report_uncaught_errors() -> None:
    """Tell the agent of an exception that ends this script. Errors of ours are the agent's to print, once for all ranks."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link.report_failure(error)
        if isinstance(error, OdysseyError):
            return
        if isinstance(error, KeyboardInterrupt) and before is sys.__excepthook__:
            return  # of all ranks at once: Ctrl-C; if it was not, the agent tells of it
        if before is sys.__excepthook__:
            # In one write, so that the lines of ranks that fail together do not mix.
            sys.stderr.write("".join(traceback.format_exception(kind, error, users_frames(trace))))
        else:
            before(kind, error, trace)

    sys.excepthook = report
