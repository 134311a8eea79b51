"""Whether micro-batches may be cut is found out of the layers and the loss themselves."""

from __future__ import annotations

import random
from collections import UserDict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from odyssey.profiling.measure import uncut
from odyssey.profiling.sample_independence import Conditions, layer_problem, loss_problem
from tests import models

CPU = torch.device("cpu")
N = 4
GIVEN = Conditions(N, CPU, nullcontext, 0.0)


def autocast() -> Conditions:
    return Conditions(N, CPU, lambda: torch.autocast("cpu", torch.bfloat16), torch.finfo(torch.bfloat16).eps)


class Called(nn.Module):
    """A function with weights behind it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, value: Tensor) -> Any:
        return self.function(self.linear(value))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.n_calls += 1
        return value


class Gated(nn.Module):
    """Its branch, which takes the samples together, is shut when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.gate * value.cumsum(0)


def iterating() -> nn.Module:
    """Its power iteration has not come to its end, as it has by chance with some weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))


def value(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def problem(module: nn.Module, given: Conditions = GIVEN) -> str:
    return layer_problem("it", 0, module, value(), given)


def squeezed(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, N // 2)).flatten(0, 1)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Dropout(0.5), "draws random numbers"),
        (Called(lambda x: x * random.random()), "draws random numbers"),
        (nn.BatchNorm1d(6, track_running_stats=False), "cannot be called with one sample (ValueError: Expected more than 1"),
        (Gated(), "other samples"),
        (Called(lambda x: x - x.mean(0)), "other samples"),
        (Called(lambda x: x.softmax(0)), "other samples"),
        (Called(lambda x: (x, x.mean(0).detach())), "other samples"),
        (Called(lambda x: (x, x.square().mean())), "gradient that is not a sample's"),
        (Called(squeezed), "cannot be called with one sample"),
        (Counting(), "changes its buffers"),
        (iterating(), "changes its buffers"),
    ],
    ids=lambda of: of if isinstance(of, str) else type(of).__name__,
)
def test_a_layer_that_does_not_take_each_sample_by_itself_is_told(module: nn.Module, says: str) -> None:
    found = problem(module)
    assert found.startswith("layer it ") and says in found


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.Dropout(0.0),
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()),
        Called(lambda x: {"x": x, "constant": torch.ones(3)}),
        Called(lambda x: (x, x.argmax(-1))),
        Called(Tensor.detach),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [GIVEN, autocast()], ids=["float32", "bfloat16"])
def test_a_layer_that_does_may_be_cut(module: nn.Module, given: Conditions) -> None:
    assert problem(module, given) == ""


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_whole_model_is_what_its_layers_are(variant: str, dtype: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    data = models.data_for(variant, 96, dtype)
    value: Any = torch.stack([data[i][0] for i in range(N)])
    target = torch.stack([data[i][1] for i in range(N)])
    found = []
    for number, layer in enumerate(models.build_layers(variant, dropout=dropout, dtype=dtype)):
        found.append(layer_problem(str(number), number, layer, value, GIVEN))
        value = torch.utils._pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), layer(value))
    found.append(loss_problem(models.loss_for(variant), value, target, GIVEN))
    assert found == [f"layer {i} draws random numbers" if dropout and 0 < i < 5 else "" for i in range(6)] + [""]


class OfABatch(nn.Module):
    """The first layer of a job whose batches are of a form of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: Any) -> Tensor:
        return self.linear(batch["x"])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (None, ""),
        (torch.ones(()), ""),
        ("name", "str"),
        (["a", "b", "c", "d"], "str"),
        (3, "int"),
        (UserDict(y=torch.ones(N)), "UserDict"),
    ],
    ids=str,
)
def test_micro_batches_with_parts_that_are_no_tensors_stay_whole(other: Any, says: str) -> None:
    def loss(output: Tensor, target: Any) -> Tensor:
        return (output - target["x"]).square().mean()

    batch = {"x": value(), "other": other}
    found = layer_problem("it", 0, OfABatch(), batch, GIVEN), loss_problem(loss, value(), batch, GIVEN)
    behind = f"is given what is no tensor ({says})"
    assert found == ((f"layer it {behind}", f"the loss {behind}") if says else ("", ""))


@pytest.mark.parametrize("target", [None, torch.ones(N)], ids=["None", "a tensor"])
def test_a_loss_without_a_target_may_be_cut(target: Any) -> None:
    assert loss_problem(lambda output, target: output.square().mean(), value(), target, GIVEN) == ""


def test_looking_leaves_no_gradient_and_no_random_number_behind() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    leaf = value()
    layer_problem("it", 0, module, leaf, GIVEN)
    assert torch.equal(torch.rand(3), expected)
    assert leaf.grad is None and all(parameter.grad is None for parameter in module.parameters())


CLASSES = torch.tensor([1, 2, 3, -100])


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (nn.functional.cross_entropy, "other samples"),
        (lambda output, target: nn.functional.cross_entropy(output, target.clamp(min=0), reduction="sum"), "other samples"),
        (lambda output, target: (output @ output.T).logsumexp(1).mean(), "other samples"),
        (lambda output, target: nn.functional.dropout(output).mean(), "draws random numbers"),
        (lambda output, target: output.unflatten(0, (2, 2)).mean(), "cannot be called with one sample"),
        (lambda output, target: nn.functional.cross_entropy(output, target.clamp(min=0)), ""),
        (lambda output, target: output.square().mean(), ""),
    ],
    ids=["ignored targets", "a sum", "contrastive", "draws", "of one size", "mean", "squares"],
)
def test_a_loss_may_be_cut_if_it_is_the_mean_over_the_samples(loss: Any, says: str) -> None:
    found = loss_problem(loss, value(), CLASSES, GIVEN)
    assert (found.startswith("the loss ") and says in found) if says else found == ""


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda output, target: (output.argmax(1) == target).double().mean(), ""),
        (lambda output, target: output.amax(1).mean().item(), ""),
        (lambda output, target: output.amax(), "'it' gives a sample other numbers when other samples are with it"),
        (lambda output, target: (output.argmax(1) >= 0).sum(), "'it' gives a sample other numbers"),
    ],
    ids=["accuracy", "a number", "largest", "a count"],
)
def test_metrics_beside_the_loss_are_looked_at_as_well(metric: Any, says: str) -> None:
    """However small they are beside each other."""

    def loss(output: Any, target: Any) -> Any:
        return output.square().mean(), {"large": output.mean() * 1e9, "it": metric(output, target)}

    found = loss_problem(loss, value(), CLASSES, GIVEN)
    assert found.startswith(f"the metric {says}") if says else found == ""


@pytest.mark.parametrize("collating_draws", [False, True])
def test_micro_batches_stay_whole_where_collating_them_draws_random_numbers(collating_draws: bool) -> None:
    sizes: Any = SimpleNamespace(micro_batch=4, global_batch=8)
    job: Any = SimpleNamespace(independent_samples=True, autocast=None, spec=sizes, collating_draws=collating_draws)
    stage: Any = SimpleNamespace(layers=())
    model: Any = SimpleNamespace(dtypes=(), device=torch.device("cpu"))
    assert uncut(stage, model, [], None, job) == ("collate draws random numbers" if collating_draws else "")
