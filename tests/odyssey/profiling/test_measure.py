"""What measuring leaves of a model, alone in a process."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import odyssey
from odyssey.plan.needs import Needs
from odyssey.plan.pipelines import Stage
from odyssey.plan.worker import Rank, worker_of
from odyssey.profiling.measure import measure
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Measured
from odyssey.runtime.backend import Backend
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.layers import Layers
from perfmodel.profile.merge import merge
from perfmodel.step.costs import Costs
from perfmodel.step.memory import Memory

ALONE = worker_of(Rank(0))


def measured(
    net: nn.Module, loss: Callable[[Any], torch.Tensor], collate: Callable[[list[Any]], Any] | None = None
) -> Measured:
    optimizer, data = torch.optim.SGD(net.parameters(), 0.1), [torch.ones(2)] * 8
    run = odyssey.resilient(net, optimizer, loss, data, global_batch=4, micro_batch=2, collate=collate)
    spec = run._session._engine.computation.job_spec
    groups = Groups(to_nobody, 1, Needs((ALONE,)), ALONE, run._model.device)
    return Layers(run._model, spec, Backend(), measure).measure(Measure(1, (Stage(ALONE, 0, 1),)), ALONE, groups)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def seed_all() -> None:
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)


def test_measuring_leaves_the_generators_of_the_script_as_they_were() -> None:
    """Not all ranks measure: others would draw something else from then on, such as the same weights of a head."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    n_calls = 0

    def loss(batch: Any) -> torch.Tensor:
        nonlocal n_calls
        n_calls += 1
        return net(batch).mean() * (1 + sum(drawn()))

    seed_all()
    expected = drawn()
    seed_all()
    measured(net, loss)
    assert n_calls > 0 and drawn() == expected


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_loss_that_takes_something_out_of_its_batch_is_measured(kind: type) -> None:
    net = nn.Linear(2, 2)
    taken = []

    def loss(batch: Any) -> torch.Tensor:
        taken.append(batch.pop("points"))
        return net(taken[-1]).mean()

    (cost,) = measured(net, loss, lambda samples: kind(points=torch.stack(samples))).costs
    assert cost.layer == 0 and len(taken) > 1, "and again and again"


def test_what_layers_share_is_counted_in_none_of_them_and_once_among_what_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    n_words, width = 100, 8

    def layers() -> list[nn.Module]:
        embedding, head = nn.Embedding(n_words, width), nn.Linear(width, n_words, bias=False)
        head.weight = embedding.weight
        return [embedding, nn.Linear(width, width, bias=False), head]

    job = odyssey.Job(
        layers=layers,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        data=[(torch.tensor(i), torch.tensor(i)) for i in range(8)],
        global_batch=4,
        micro_batch=2,
    )
    spec = job._session._engine.computation.job_spec
    monkeypatch.setattr("odyssey.own_process.proportional_bytes", lambda: 10**9)
    groups = Groups(to_nobody, 1, Needs((ALONE,)), ALONE, job._model.device)
    report = Layers(job._model, spec, Backend(), measure).measure(Measure(1, (Stage(ALONE, 0, 3),)), ALONE, groups)

    own, shared = 4 * width * width, 4 * n_words * width
    assert [(cost.parameter_bytes, cost.optimizer_bytes) for cost in report.costs] == [(0, 0), (own, own), (0, 0)]
    assert report.runtime_bytes == 10**9 - (own + shared) - 3 * (own + shared), "the model as built, and what has been trained"
    places = {"ranks_per_node": 1, "nodes_per_host": 1, "cores": 1}
    costs = Costs(merge(spec.spec, [report], [0], **places, model_name="tied"))
    assert costs.move_bytes == (2 * shared, 2 * own, 2 * shared), "weights, and their momentum"
    state_bytes = [Memory(costs).peak(frozenset(held), 0, 0) - report.runtime_bytes for held in ([0], [1], [0, 1, 2])]
    assert state_bytes == [3 * shared, 3 * own, 3 * (own + shared)], "and their gradients"
