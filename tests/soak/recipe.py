"""What a case trains, for the script and for the oracle: layers, loss, data, and optimizers with odd state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from tests import models, reference
from tests.soak.case import Recipe
from tests.streams import Stream, steps_of

N_EVALUATED = 24
N_MORE = 5
"""Steps that the oracle does beyond the job's: a checkpoint has to be good for some."""


class Odd(torch.optim.Optimizer):
    """Momentum, with a factor that needs all of an odd state: ints, lists, None, text, a dict, tensors of other types."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "n_steps": 0, "kept": []})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["n_steps"] += 1
            group["kept"] = [*group["kept"], group["n_steps"]][-3:]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(n=0, history=[], last=None, name="fresh", flags={"odd": False}, velocity=torch.zeros_like(parameter))
            state.update(decay=torch.ones((), dtype=torch.float32), count=torch.zeros(2, dtype=torch.int64))
        state["n"] += 1
        state["count"][0] += state["n"]
        state["decay"] *= 0.97
        state["flags"]["odd"] = not state["flags"]["odd"]
        last = 0.0 if state["last"] is None else state["last"]
        state["history"] = [*state["history"], 1.0 / state["n"]][-4:]
        state["last"] = sum(state["history"]) if state["n"] % 3 else None
        factor = 1 + 0.1 * last + 0.01 * sum(group["kept"]) / group["n_steps"] + 0.1 * state["flags"]["odd"]
        factor *= (
            state["decay"].item() * (1 + 0.01 * (state["count"][0].item() % 7)) * (1.5 if state["name"] == "fresh" else 1.0)
        )
        state["name"] = "used"
        state["velocity"].mul_(0.9).add_(parameter.grad)
        parameter.add_(state["velocity"], alpha=-group["lr"] * factor)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=3e-3),
    "nadam": partial(torch.optim.NAdam, lr=3e-3),
    "asgd": partial(torch.optim.ASGD, lr=0.02, t0=3),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-6),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True, eps=1e-6),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "odd": partial(Odd, lr=0.01),
}
"""Rprop is for models whose gradients are nowhere nothing but rounding, of which it takes the sign."""

SCHEDULERS = ("none", "warmup", "steps")


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)


def steps(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, list(range(2, 60, 3)), gamma=0.9)


def parts(recipe: Recipe) -> dict[str, Any]:
    """What odyssey.Job takes."""
    dtype = getattr(torch, recipe.dtype)
    data = models.data_for(recipe.variant, recipe.n_samples, dtype)
    return {
        "layers": partial(models.build_layers, recipe.variant, n_blocks=4, dropout=recipe.dropout, dtype=dtype),
        "loss": models.loss_for(recipe.variant),
        "optimizer": OPTIMIZERS[recipe.optimizer],
        "data": Stream(data, recipe.stream) if recipe.stream else data,
        "global_batch": recipe.global_batch,
        "micro_batch": recipe.micro_batch,
        "seed": 0,
        "scheduler": {"none": None, "warmup": warmup, "steps": steps}[recipe.scheduler],
        "clip_norm": recipe.clip,
        "independent_samples": recipe.independent_samples,
    }


def has_metrics(recipe: Recipe) -> bool:
    """Whether its script tells metrics of steps and evaluations, `twice` the loss: half of the scripts do."""
    return recipe.global_batch % 2 == 1


def evaluated(recipe: Recipe) -> Any:
    """The data of its evaluations."""
    return models.data_for(recipe.variant, N_EVALUATED, getattr(torch, recipe.dtype))


@dataclass
class Expected:
    """The undisturbed run in one process. `evaluations`, `states`: by the number of steps that are done."""

    losses: list[float]
    evaluations: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


@functools.lru_cache(maxsize=4)
def expected_of(recipe: Recipe) -> Expected:
    expected = Expected([])
    given = parts(recipe)
    build, loss = given.pop("layers"), given["loss"]
    del given["independent_samples"]
    if recipe.stream:
        sizes = recipe.global_batch, recipe.micro_batch
        given["streamed"] = steps_of(given["data"], *sizes, given["seed"], recipe.steps + N_MORE)

    def after_step(n_done: int, layers: list[nn.Module]) -> None:
        if recipe.eval_every and n_done % recipe.eval_every == 0:
            expected.evaluations[n_done] = mean_loss(layers, loss, evaluated(recipe))
        expected.states[n_done] = reference.state_of(layers)

    expected.losses, _ = reference.train(build, steps=recipe.steps + N_MORE, after_step=after_step, **given)
    return expected


@torch.no_grad()
def mean_loss(layers: list[nn.Module], loss: Callable[[Any, Any], torch.Tensor], data: Any) -> float:
    """Over all samples at once, in evaluation mode."""
    output, target = default_collate([data[i] for i in range(len(data))])
    for layer in layers:
        layer.eval()
        output = layer(output)
        layer.train()
    return loss(output, target).item()
