"""`odyssey.Job`: what a training script hands over, and the loop that it gets back.

    job = odyssey.Job(layers=build_layers, loss=loss, optimizer=make_optimizer, data=dataset, global_batch=64, micro_batch=4)
    for step in job.steps(1000):
        ...

Every rank runs the same script and makes the same calls of `steps`, `evaluate`, `once`, `once_with_state`, `state_dict`,
`load_state_dict`, `save` and `load` in the same order. Which rank holds which layers, and how, is the plan's business and
may change between any two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from odyssey import joining
from odyssey.checkpoints import checkpoint, parts
from odyssey.errors import JobError, NonFiniteLoss
from odyssey.model import draws
from odyssey.model.blueprint import LayerFactory
from odyssey.model.given import Loss, Metric, OptimizerFactory, SchedulerFactory, Weight, check_autocast
from odyssey.model.loss_scale import ScalersScale
from odyssey.model.model import Model
from odyssey.model.other_values import Weights
from odyssey.model.script_model import ScriptModel
from odyssey.model.sublayers import ATTENTION, FEED_FORWARD, Names
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from odyssey.protocol import link
from odyssey.protocol.units import NOTHING, UNUSABLE
from odyssey.runtime.agreed_numbers import N_RATE, rate_of
from odyssey.runtime.backend import Backend
from odyssey.runtime.batches import Batches
from odyssey.runtime.data import Data, Dataset, check_is_map_style, collating_draws, draws_random_numbers, pairs_by
from odyssey.runtime.engine import Engine
from odyssey.runtime.evaluation import Reader, evaluate_body
from odyssey.runtime.job_spec import TO_ROUNDING, JobSpec
from odyssey.runtime.metrics import NOT_ALIKE, SAME_NAMES, mean, means
from odyssey.runtime.run_once import Once
from odyssey.runtime.transaction import Transaction, Values


@dataclass(frozen=True)
class Step:
    """A committed training step.
    `loss`, `metrics`: means over the step's samples; `grad_norm`: of the mean gradient, before clipping. `lr`: the learning
    rate that it was made with, that of all parameter groups of all optimizers; None where these have not one in common. All
    ranks see the same, those without work and those that come back as well.
    """

    index: int
    loss: float
    grad_norm: float
    n_samples: int
    lr: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


class Job:
    """A model in layers, trained by all ranks together, that goes on when ranks are lost.

    `layers()`: the model as a list of modules, each called with what the one before returned: a tensor, or a nested
    tuple or dict of tensors. It runs under `seed`, and builds all modules anew each time: it is called again if a rank is lost
    before the first step. An element may be a function that builds the module; it is then called only on ranks that hold the
    layer. Modules may share parameters. `odyssey.layers_of(model)` makes the list of one.
    `loss(output, target)`: scalar, the mean over the samples of a micro-batch; or `(loss, {name: scalar, ...})` with metrics
    that are such means, too, for `Step.metrics`.
    `optimizer(parameters)`: called for each layer; must step just these, alike on all ranks. `scheduler(optimizer)`:
    likewise, stepped after each step. Both are called once at the start for a look at what they make.
    `data[i]`: `(input, target)` of a sample; or what gives such samples when it is iterated over, each time the same (torch's
    `IterableDataset`). `collate(samples)`: of a micro-batch, default torch's `default_collate`;
    `num_workers`: processes that do both, 0 for a thread. `global_batch` samples make a step, in micro-batches of
    `micro_batch`. `sampler`: the sample ids of an epoch, iterated over for each (torch's `Sampler`, `range`), after `set_epoch`
    if it has that; what it draws is seeded for the epoch. Default: all samples, shuffled.
    `weight(target)`: how much a micro-batch counts in the means over a step, such as its number of tokens that are no padding;
    default its number of samples. Losses and metrics are means over what is counted.
    `clip_norm`: largest global gradient norm. `autocast`: `torch.bfloat16` computes in mixed precision.
    `independent_samples`: layers and loss take each sample by itself, whatever the data: no statistics or contrast over a
    micro-batch, no mean over the tokens that are not padding. Then micro-batches may be cut where they do not divide among
    the ranks that are left, which changes no number but for the order of sums; what draws random numbers is not cut. Nor is
    what is rounded to fewer digits than float32's, under autocast or in bfloat16, as each micro-batch is rounded by itself;
    `independent_samples="to rounding"` cuts there as well, and losses then differ by that (1e-6 and more).
    `attention`, `feed_forward`: names of the modules of a block that are these, where they are not those of Hugging Face's
    blocks, for `--allow-approximate`.
    `device`: default this rank's GPU if there is one, else the CPU.
    `resume`: go on from the newest whole checkpoint that `save` wrote into this folder; if there is none, from the
    beginning. It is decided once for the job: a rank that is started again later goes where the others are.
    `backend`: what carries out the ops, for rehearsals; default: it is computed.
    """

    def __init__(
        self,
        layers: Callable[[], Sequence[nn.Module | LayerFactory]],
        loss: Callable[[Any, Any], Loss],
        optimizer: OptimizerFactory,
        data: Data,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        sampler: Iterable[int] | None = None,
        weight: Weight | None = None,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        independent_samples: bool | Literal["to rounding"] = False,
        attention: str | Sequence[str] = ATTENTION,
        feed_forward: str | Sequence[str] = FEED_FORWARD,
        device: torch.device | str | None = None,
        resume: str | Path | None = None,
        backend: Backend | None = None,
    ) -> None:
        """Describe the job and wait until this rank has its part of it. A Job that the script has made before is over then.

        Raises JobError for what cannot be trained.
        """
        connection = joining.connection()
        if isinstance(layers, nn.Module) or not callable(layers):
            raise JobError(f"layers is a {type(layers).__name__}", "give a function that returns the list of layers")
        batches = Batches(data, global_batch, micro_batch, seed, pairs_by(collate), num_workers, sampler).checked()
        self._begin(
            connection,
            Model(layers, optimizer, scheduler, joining.device_of(device), seed),
            loss,
            optimizer,
            batches,
            weight=weight and (lambda sample: weight(sample[1])),
            clip_norm=clip_norm,
            autocast=autocast,
            independent_samples=independent_samples,
            sublayers=Names(_several(attention), _several(feed_forward)),
            resume=resume,
            backend=backend or Backend(),
        )

    @classmethod
    def of_whole(
        cls,
        model: ScriptModel,
        batches: Batches,
        *,
        weight: Weight | None,
        clip_norm: float | None,
        autocast: torch.dtype | None,
        resume: str | Path | None,
    ) -> Job:
        """See `odyssey.resilient` (own_model.py)."""
        connection = joining.connection()
        batches = batches.checked()
        job = cls.__new__(cls)
        job._begin(
            connection,
            model,
            lambda output, target: output,
            model.twin,
            batches,
            weight=weight and (lambda sample: weight(sample[0])),
            clip_norm=clip_norm,
            autocast=autocast,
            resume=resume,
            independent_samples=False,
            sublayers=Names(),
            backend=Backend(),
        )
        return job

    def _begin(
        self,
        connection: link.AgentLink | None,
        model: Model,
        loss: Callable[[Any, Any], Loss],
        optimizer: OptimizerFactory,
        batches: Batches,
        *,
        weight: Weight | None,
        clip_norm: float | None,
        autocast: torch.dtype | None,
        independent_samples: bool | Literal["to rounding"],
        sublayers: Names,
        resume: str | Path | None,
        backend: Backend,
    ) -> None:
        check_autocast(autocast, is_scaled=isinstance(model.loss_scale, ScalersScale))
        joining.begin_on(model.device)
        if independent_samples not in (True, False, TO_ROUNDING):
            raise JobError(f"independent_samples is {independent_samples!r}", f"give True, False or {TO_ROUNDING!r}")
        self._batches = batches
        self._clip_norm = clip_norm
        self._model = model
        self._looked_at: tuple[Dataset, bool] | None = None
        """What was last evaluated on, and whether that draws random numbers."""
        samples = batches.samples()
        model.reading = samples.snapshots
        job_spec = JobSpec(
            spec=backend.spec(joining.model_spec(model, batches, samples, clip_norm, autocast)),
            loss=loss,
            optimizer=optimizer,
            prefetcher=samples.prefetcher,
            first_micro_batch=samples.first,
            seed=batches.seed,
            autocast=autocast,
            independent_samples=independent_samples,
            sublayers=sublayers,
            weight=weight,
            collating_draws=samples.collating_draws,
        )
        self._session = joining.session_of(connection, model, job_spec, backend)
        if resume is not None:
            self._load("resume", lambda engine: parts.load(engine, self._model, Path(resume)))

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
        """Whether this rank speaks for the unit that was committed last: True on one rank at most, for logs and progress.

        It is the leader of the plan that the unit ran under. Where that one is lost in this very moment nobody speaks for
        the unit, and another rank for the next. What must not be missing belongs in `once`.
        """
        return not self._session.replay.results and self._session.leader == self.rank

    @property
    def next_step(self) -> int:
        """Number of committed steps. On a rank that has joined later, what it was on the others at this place in the script."""
        return self._session.place[0]

    def module(self, layer: int) -> nn.Module | None:
        """Give the module of a layer where this rank holds it, else None. What a rank holds may change with every call that all
        ranks make together: ask again behind it. To change it is for all its holders alike, and in no plan: look only."""
        if not 0 <= layer < len(self._model.layers):
            raise JobError(f"module({layer}): the model has layers 0 to {len(self._model.layers) - 1}", "give one of them")
        return self._model.layers[layer] if layer in self._model.held else None

    # -- training -----------------------------------------------------------------------------------------------------

    def steps(self, n_steps: int) -> Iterator[Step]:
        """Train until `n_steps` steps are committed in all, and yield each when it is.

        Raises NonFiniteLoss, with the step not applied, if the loss is NaN or infinite.
        """
        try:
            while self.next_step < n_steps:
                replaying = self._session.replay.results
                step = replaying[0].position[0] if replaying else self.next_step
                with draws.apart(self._model.device):
                    result = self._session.run(self._training_step(step, n_steps))
                loss, norm, _, *lr = result.values
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"the loss of step {step} is {loss}", "lower the learning rate, or clip gradients with clip_norm"
                    )
                yield Step(step, loss, norm, self._batches.global_batch, lr[0] if lr else None, result.metrics)
        finally:
            self._model.replay.replaying()

    def _training_step(self, step: int, n_steps: int) -> Transaction[Engine]:
        n_samples = self._batches.global_batch

        def conclude(sums: Sequence[float]) -> Values:
            weight, lr = sums[2], rate_of(sums[3 : 3 + N_RATE])
            return (*_over(weight, sums[0], math.sqrt(sums[1])), weight, *([] if lr is None else [lr]))

        def take(engine: Engine, values: Values) -> None:
            loss, norm, weight, *_ = values
            if math.isfinite(loss):
                engine.apply(self._clip_factor(norm) / weight, is_finite=math.isfinite(norm))
            else:
                engine.leave_out()

        def its_metrics(sums: Sequence[float]) -> Mapping[str, float]:
            return means(sums[3 + N_RATE :], n_samples, sums[2])

        return Transaction(
            "step", lambda engine: engine.run_step(step), conclude, take, n_samples, metrics=its_metrics, n_steps=n_steps
        )

    def _clip_factor(self, norm: float) -> float:
        """As torch.nn.utils.clip_grad_norm_."""
        return 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))

    @overload
    def evaluate(self, data: Dataset, *, weights: Weights | None = None) -> float: ...

    @overload
    def evaluate(
        self, data: Dataset, metrics: Mapping[str, Callable[..., Metric]], *, weights: Weights | None = None
    ) -> dict[str, float]: ...

    def evaluate(
        self,
        data: Dataset,
        metrics: Mapping[str, Callable[..., Metric]] | None = None,
        *,
        weights: Weights | None = None,
    ) -> float | dict[str, float]:
        """Compute the mean loss over all of `data`, without gradients, with the layers in evaluation mode. All ranks call it.

        With `metrics`, by name: each `metric(output, target)` is the mean over the samples of a micro-batch, as the loss is, or
        `metric(batch)` in a job of `odyssey.resilient`. Then it returns them all, with `"loss"` among them. Samples are read
        ahead, by as many processes as those that are trained on. Metrics that `loss` returns are those of steps alone.

        `weights`, in a job of `odyssey.resilient`: other values for the model meanwhile, such as an average of its own. A
        module of the same form (torch's `AveragedModel`), or tensors by the model's names, or a function that gives one of
        these, and is called within. They must be the same on all ranks: let `extra` have what they are made of.
        """
        measures = {} if metrics is None else dict(metrics)
        check_is_map_style(data)
        n_samples = len(data)
        if n_samples < 1:
            raise JobError("evaluate(): data has no samples", "give a dataset with at least one sample")
        if "loss" in measures:
            raise JobError("evaluate(): a metric is called 'loss'", "give it another name: the loss itself is there anyway")
        other_values = None if weights is None else partial(self._script_model().with_values, weights)
        made = Reader(data, self._batches.collate, self._batches.num_workers, is_random=self._is_random(data))
        with closing(made) as reader, draws.apart(self._model.device):
            result = self._session.run(
                Transaction[Engine](
                    "evaluate",
                    partial(evaluate_body, reader=reader, measures=measures, other_values=other_values),
                    lambda sums: _over(sums[1], sums[0]),
                    lambda engine, values: None,
                    metrics=lambda sums: means(sums[2:], n_samples, sums[1]),
                )
            )
        if result.metrics.keys() != measures.keys():
            raise JobError(f"evaluate(): {NOT_ALIKE}", SAME_NAMES)
        return result.values[0] if metrics is None else {"loss": result.values[0], **result.metrics}

    def _script_model(self) -> ScriptModel:
        if not isinstance(self._model, ScriptModel):
            raise JobError("evaluate(): weights are given in a Job of layers", "give them in a job of odyssey.resilient")
        return self._model

    def _is_random(self, data: Dataset) -> bool:
        """Tell whether its samples draw random numbers, or collating them does. A few are looked at, once for each data set,
        and none where that makes no difference: worker processes have generators of their own, and nothing is read of what
        others have done."""
        if self._batches.num_workers or self._session.replay.results:
            return True
        if self._looked_at is None or self._looked_at[0] is not data:
            collating = collating_draws(data, self._batches.micro_batch, self._batches.collate)
            self._looked_at = data, collating or draws_random_numbers(data, [0])
        return self._looked_at[1]

    # -- acts of one rank -----------------------------------------------------------------------------------------------

    def once(self, action: Callable[[], object]) -> None:
        """Have one rank run `action`, and go on when it has been completed. All ranks call it.

        At least once, and known to be done: it is run again only if the rank that ran it was lost before any other knew, so
        let it bear that (write a file beside and rename it). An exception of it is the script's. The rank is the one that
        has been in the job the longest.
        """
        self._once("once", action, lambda engine, runner: None)

    def once_with_state(self, action: Callable[[dict[str, Any]], object]) -> None:
        """As `once`, with the whole model's state, as `state_dict` gives it, for `action(state)`."""
        step = self.next_step
        gathered: dict[str, Any] = {}

        def gather(engine: Engine, runner: Worker) -> None:
            gathered.clear()
            gathered.update(checkpoint.gather(engine, self._model, step, runner))

        self._once("once_with_state", lambda: action(gathered), gather)

    def _once(self, kind: str, action: Callable[[], object], prepare: Callable[[Engine, Worker], None]) -> None:
        once = Once(action, prepare, self._session.replay.joined_step, self._session)
        self._session.run(Transaction(kind, once.body, lambda sums: (0.0,), lambda engine, values: None))

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state on the leader, an empty dict elsewhere. All ranks call it.

        `model`: `layers.3.weight` -> tensor on the CPU; `optimizer`: state of each shard by parameter name; `step`.
        To write it to a file, use `once_with_state`: the leader of this moment may be lost in the next.
        """
        gathered: dict[str, Any] = {}
        step = self.next_step

        def body(engine: Engine) -> Sequence[float]:
            gathered.clear()
            gathered.update(checkpoint.gather(engine, self._model, step, engine.plan.leader))
            return (0.0,)

        self._session.run(Transaction("state_dict", body, lambda sums: (0.0,), lambda engine, values: None))
        return gathered

    def model_state(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model's own `state_dict`, of what `state_dict` gave or `once_with_state` gives: for a file that others read.

        In a job of `odyssey.resilient` under the names that the script's model has, and whole where it is sharded; in a Job of
        layers under those of `state_dict`.
        """
        tensors: dict[str, torch.Tensor] = state["model"]
        return self._model.own_state(tensors) if isinstance(self._model, ScriptModel) else dict(tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on what `state_dict` gave on some rank. All ranks call it with the whole state; each takes its layers.

        Raises JobError if it belongs to another model.
        """
        checkpoint.check(self._model, state, range(len(self._model.layers)))
        self._load("load_state_dict", lambda engine: state)

    def save(self, folder: str | Path, keep: int = 2) -> None:
        """Write a checkpoint into `folder/step-000123`, every rank its part, in a form free of the layout. All ranks call it.

        When it returns, the checkpoint is whole and durable; whatever is lost or killed before leaves the one before as it
        was. The last `keep` stay. Raises JobError on all ranks if it cannot be written; training can go on then.
        """
        if not isinstance(keep, int) or keep < 1:
            raise JobError(f"keep is {keep!r}", "give the number of checkpoints to keep, at least 1")
        step = self.next_step
        problem: JobError | None = None

        def body(engine: Engine) -> Sequence[float]:
            nonlocal problem
            problem = parts.save(engine, self._model, step, Path(folder), keep)
            return (0.0 if problem is None else 1.0,)

        if self._session.run(Transaction("save", body, lambda sums: (sums[0],), lambda engine, values: None)).values[0]:
            raise problem or JobError(f"{folder}: the checkpoint cannot be written", _TOLD_BY_OTHERS)

    def load(self, folder: str | Path) -> None:
        """Go on from the newest whole checkpoint that `save` wrote into `folder`, or from that one of its checkpoints.

        All ranks call it; each reads what it holds. One that is damaged is told of, and the one before is used. Raises
        JobError if there is none of this model. To go on after a restart if there is a checkpoint, use `Job(resume=folder)`.
        """
        given = Path(folder)
        nothing = JobError(f"{given}: no checkpoint", "give a folder that job.save() wrote")
        self._load("load", lambda engine: parts.load(engine, self._model, given) or nothing)

    def _load(self, kind: str, read: Callable[[Engine], dict[str, Any] | JobError | None]) -> None:
        """Take on what is read: a state, nothing, or the reason why there is none, which all ranks raise."""
        found: dict[str, Any] | JobError | None = None

        def body(engine: Engine) -> Sequence[float]:
            nonlocal found
            found = read(engine)
            value = UNUSABLE if isinstance(found, JobError) else NOTHING if found is None else float(found["step"])
            return (value if engine.worker == engine.plan.leader else 0.0,)

        def take(engine: Engine, values: Values) -> None:
            if isinstance(found, dict):
                checkpoint.take(self._model, found)

        result = self._session.run(Transaction(kind, body, lambda sums: (sums[0],), take))
        if result.values[0] == UNUSABLE:
            raise found if isinstance(found, JobError) else JobError(f"{kind}: no usable checkpoint", _TOLD_BY_OTHERS)


_TOLD_BY_OTHERS = "another rank tells why"


def _over(weight: float, *sums: float) -> Values:
    """Each of the sums as a mean."""
    return tuple(mean(value, weight) for value in sums)


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
