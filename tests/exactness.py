"""What tests/jobs/train.py must end with: the same training in one process, see tests/reference.py. Random jobs: tests/soak."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from tests import models, reference
from tests.jobs.train import N_EVALUATED, make_optimizer, make_scheduler
from tests.streams import Stream, steps_of

TOLERANCE = 1e-10
N_STEPS = 6
EXACT = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
"""Options of tests/jobs/train.py for `expected_of(variant, N_STEPS, 15, 2)`: eight micro-batches, the last one smaller."""


@functools.cache
def expected_of(
    variant: str,
    steps: int,
    global_batch: int,
    micro_batch: int,
    dropout: float = 0.1,
    draw_after: int | None = None,
    stream: str = "",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state with `--clip 0.5 --schedule`, and `--dropout` but for the `mlp`, and `--draw-after` and `--stream`."""

    def after_step(n_done: int, layers: list[nn.Module]) -> None:
        if n_done - 1 == draw_after:
            models.set_dropout(layers, 0.1)

    dropout = 0.0 if variant == "mlp" else dropout
    data = models.data_for(variant, 96, torch.float64)
    return reference.train(
        partial(models.build_layers, variant, n_blocks=4, dropout=dropout, dtype=torch.float64),
        models.loss_for(variant),
        make_optimizer,
        data,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        steps=steps,
        scheduler=make_scheduler,
        clip_norm=0.5,
        after_step=after_step,
        streamed=steps_of(Stream(data, stream), global_batch, micro_batch, 0, steps) if stream else None,
    )


@functools.cache
def told_of(variant: str, steps: int, global_batch: int, micro_batch: int, eval_every: int = 0) -> dict[str, dict[str, Any]]:
    """What `--told` has of steps and evaluations, by their step, with `--clip 0.5 --schedule` and `--dropout`."""
    loss, metrics = models.loss_for(variant), models.metrics_for(variant)
    noted: list[tuple[int, dict[str, float]]] = []
    told: dict[str, dict[str, Any]] = {"steps": {}, "evaluations": {}}

    def measured(output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {name: float(metric(output, target)) for name, metric in metrics.items()}

    def noting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean = loss(output, target)
        noted.append((len(target), {"loss": mean.item(), **measured(output, target)}))
        return mean

    def after_step(n_done: int, layers: list[nn.Module]) -> None:
        means = {name: sum(n * each[name] for n, each in noted) / global_batch for name in noted[0][1]}
        noted.clear()
        told["steps"][str(n_done - 1)] = {"lr": 3e-3 * min(1.0, n_done / 5) * 0.98 ** (n_done - 1), **means}
        if eval_every and n_done % eval_every == 0:
            told["evaluations"][str(n_done - 1)] = evaluated(layers)

    def evaluated(layers: list[nn.Module]) -> dict[str, float]:
        whole = nn.Sequential(*layers).eval()
        data = models.data_for(variant, N_EVALUATED, torch.float64)
        inputs, target = default_collate([data[i] for i in range(N_EVALUATED)])
        with torch.no_grad():
            output = whole(inputs)
        whole.train()
        return {"loss": loss(output, target).item(), **measured(output, target)}

    dropout = 0.0 if variant == "mlp" else 0.1
    reference.train(
        partial(models.build_layers, variant, n_blocks=4, dropout=dropout, dtype=torch.float64),
        noting,
        make_optimizer,
        models.data_for(variant, 96, torch.float64),
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        steps=steps,
        scheduler=make_scheduler,
        clip_norm=0.5,
        after_step=after_step,
    )
    return told


def assert_told(folder: Path, ranks: Iterable[int], expected: dict[str, dict[str, Any]], *, late: Iterable[int] = ()) -> None:
    """Each of these ranks was told what one process computes, of every step; `late`: of those since it came."""
    found = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}
    assert found.keys() == set(ranks)
    for rank, told in found.items():
        for kind, wanted in expected.items():
            assert told[kind].keys() <= wanted.keys() if rank in late else told[kind].keys() == wanted.keys(), (rank, kind)
            assert rank not in late or kind != "steps" or told[kind]
            for step, values in told[kind].items():
                assert values == pytest.approx(wanted[step], abs=TOLERANCE, rel=0), (rank, kind, step)
