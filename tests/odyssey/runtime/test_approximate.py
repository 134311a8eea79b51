"""The approximate backward against its formulas, written a second time: MeCeFO (arXiv 2510.16415, section 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from odyssey.errors import JobError
from odyssey.model.model import Model
from odyssey.model.sublayers import Names, sublayers
from odyssey.plan.approximation import ApproximateCost, Approximation, LowRank, Without
from odyssey.profiling.approximate_cost import NO_EFFECT, NO_RESIDUAL, NO_SUBLAYERS, SHARED, approximate_cost
from odyssey.runtime.approximate import Approximately, Healthy
from odyssey.runtime.job_spec import JobSpec
from tests import models
from tests.planning import first_plan, profile

WIDTH, HEADS = 16, 2
NAMES = Names()
SPEC = JobSpec(None, None, None, None, None, 0, None)


def block(dropout: float = 0.0) -> models.PartsBlock:
    torch.manual_seed(5)
    return models.PartsBlock(WIDTH, HEADS, dropout).double()


def given() -> tuple[Tensor, Tensor]:
    """An input, and a gradient of the output."""
    generator = torch.Generator().manual_seed(7)
    shape = (3, 8, WIDTH)
    value = torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
    return value, torch.randn(shape, dtype=torch.float64, generator=generator)


def projection(weight: Tensor, rank: int) -> Tensor:
    """On the span of the first right singular vectors."""
    leading = torch.linalg.svd(weight.detach())[2][:rank]
    return leading.T @ leading


def by_formulas(its: models.PartsBlock, value: Tensor, gradient: Tensor, rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and of the parameters that have one. What is exact comes of autograd, of small pieces."""
    with torch.no_grad():
        middle = value + its.attention(its.norm1(value))
    middle = middle.detach().requires_grad_()
    normed = its.norm2(middle)
    inner = normed.detach().requires_grad_()
    hidden = its.feed_forward.up(inner)
    active = torch.tanh(hidden)
    output = its.feed_forward.down(active)
    up, down = its.feed_forward.up, its.feed_forward.down
    of_active = gradient @ down.weight
    of_hidden = of_active * (1 - active**2)
    found = {
        "feed_forward.down.weight": gradient.flatten(0, 1).T @ active.flatten(0, 1) @ projection(down.weight, rank),
        "feed_forward.down.bias": gradient.sum((0, 1)),
        "feed_forward.up.weight": of_hidden.flatten(0, 1).T @ inner.flatten(0, 1) @ projection(up.weight, rank),
        "feed_forward.up.bias": of_hidden.sum((0, 1)),
    }
    through, weight, bias = torch.autograd.grad(
        normed, [middle, its.norm2.weight, its.norm2.bias], (of_hidden @ up.weight).detach()
    )
    found |= {"norm2.weight": weight, "norm2.bias": bias}
    return (middle + output).detach(), (gradient + through).detach(), {name: its.detach() for name, its in found.items()}


def approximately(its: nn.Module, value: Tensor, rank: int, passes: Approximately | None = None) -> Tensor:
    passes = passes or Approximately(NAMES, LowRank(rank))
    with passes.passing(its):
        return its(value)


def gradients(its: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in its.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("rank", [1, 4, WIDTH])
def test_a_block_goes_back_as_the_formulas_say(rank: int) -> None:
    its = block()
    value, gradient = given()
    output, of_value, of_parameters = by_formulas(its, value, gradient, rank)

    found = approximately(its, value, rank)
    found.backward(gradient)

    torch.testing.assert_close(found.detach(), its(value).detach(), rtol=0, atol=0)
    torch.testing.assert_close(found.detach(), output, rtol=0, atol=1e-13)
    torch.testing.assert_close(value.grad, of_value, rtol=0, atol=1e-12)
    assert gradients(its).keys() == of_parameters.keys()
    for name, expected in of_parameters.items():
        torch.testing.assert_close(gradients(its)[name], expected, rtol=0, atol=1e-11)


def test_a_forward_behind_it_is_as_ever() -> None:
    its, exact = block(), block()
    value, gradient = given()
    approximately(its, value, 2).backward(gradient)
    its.zero_grad()
    for one in (its, exact):
        one(value).backward(gradient)
    assert all(torch.equal(gradients(its)[name], its_grad) for name, its_grad in gradients(exact).items())
    assert gradients(exact).keys() == dict(exact.named_parameters()).keys()


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    """With all singular vectors: then the gradients are exact up to a projection, if the dropout is the same."""
    its, exact = block(0.5), block(0.5)
    value, gradient = given()
    torch.manual_seed(3)
    approximately(its, value, WIDTH).backward(gradient)
    torch.manual_seed(3)
    with torch.no_grad():
        middle = value + exact.attention(exact.norm1(value))
    (middle + exact.feed_forward(exact.norm2(middle))).backward(gradient)
    for name, expected in gradients(exact).items():
        torch.testing.assert_close(gradients(its)[name], projected(exact, name, expected), rtol=0, atol=1e-11)


def projected(its: nn.Module, name: str, gradient: Tensor) -> Tensor:
    """The gradient of the weight that has more inputs than outputs: on what it lets through."""
    return gradient @ projection(its.feed_forward.down.weight, WIDTH) if name == "feed_forward.down.weight" else gradient


def test_singular_vectors_stay_for_as_many_steps_as_was_asked_for() -> None:
    its, (value, gradient) = block(), given()
    passes = Approximately(NAMES, LowRank(1, 3))
    spans = []
    for step in range(5):
        passes.begin(step)
        its.zero_grad()
        approximately(its, value, 1, passes).backward(gradient)
        spans.append(torch.linalg.svd(its.feed_forward.down.weight.grad)[2][0].abs())
        with torch.no_grad():
            its.feed_forward.down.weight.mul_(torch.linspace(0.5, 2.0, 2 * WIDTH, dtype=torch.float64))
    assert torch.allclose(spans[0], spans[1]) and torch.allclose(spans[0], spans[2]) and torch.allclose(spans[3], spans[4])
    assert not torch.allclose(spans[2], spans[3])


def test_less_is_kept_from_forward_to_backward() -> None:
    value, _ = given()
    cost = approximate_cost(block(), value, LowRank(4), SPEC)
    assert isinstance(cost, ApproximateCost)
    row_bytes = 3 * 8 * 8  # of one number for each token
    norm_bytes = row_bytes * (WIDTH + 2)  # its input, mean and deviation
    assert norm_bytes + row_bytes * WIDTH <= cost.activation_bytes <= 2 * norm_bytes + 2 * row_bytes * WIDTH


def test_attention_and_its_norm_get_no_gradient_and_the_cost_says_so() -> None:
    cost = approximate_cost(block(), given()[0], LowRank(), SPEC)
    assert isinstance(cost, ApproximateCost)
    assert set(cost.without) == {
        *("norm1.weight", "norm1.bias"),
        *(f"attention.{name}.{kind}" for name in ("qkv", "out") for kind in ("weight", "bias")),
    }


class PostNorm(nn.Module):
    """As BERT's: what is called attention has the residual connection within."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return self.mlp(x)


class Within(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Alike(models.PartsBlock):
    """It cannot do without the graph of its attention."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        return super().forward(x) / (1 if attended.requires_grad else 1 / 0)


def frozen_attention() -> nn.Module:
    its = models.PartsBlock(WIDTH, HEADS, 0.0)
    its.attention.requires_grad_(False)
    its.norm1.requires_grad_(False)
    return its


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), NO_SUBLAYERS),
        (lambda: models.Block(WIDTH, HEADS, 8, 0.0), NO_SUBLAYERS),
        (Within, NO_RESIDUAL),
        (lambda: frozen_attention(), NO_EFFECT),
        (Alike, "its approximate passes fail: ZeroDivisionError: division by zero"),
    ],
)
def test_what_has_no_approximate_backward_says_why(build: Callable[[], nn.Module], why: str) -> None:
    assert approximate_cost(build().double(), given()[0], LowRank(), SPEC) == why


class First(nn.Module):
    """A block that is given a batch of the script's own form."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, batch: Any) -> Tensor:
        return self.block(batch["x"])


def test_a_first_layer_has_one_whatever_is_in_its_batch_beside_tensors() -> None:
    batch = {"x": given()[0], "names": ["a", "b"], "none": None}
    assert isinstance(approximate_cost(First(), batch, LowRank(), SPEC), ApproximateCost)


def test_attention_that_layers_share_has_none() -> None:
    its = block()
    assert approximate_cost(its, given()[0], LowRank(), SPEC, [its.attention.out.weight]) == SHARED
    assert isinstance(approximate_cost(its, given()[0], LowRank(), SPEC, [its.feed_forward.up.weight]), ApproximateCost)


def test_modules_are_found_by_the_names_that_the_script_gives() -> None:
    its = models.Block(WIDTH, HEADS, 8, 0.0)
    found = sublayers(its, Names(("qkv", "out"), ("up", "down")))
    assert found.attention == (its.qkv, its.out) and found.feed_forward == (its.up, its.down)


def test_the_encoder_layer_of_torch_is_known() -> None:
    torch.manual_seed(0)
    its = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=True).double()
    cost = approximate_cost(its, given()[0], LowRank(), SPEC)
    assert isinstance(cost, ApproximateCost)
    assert {name.partition(".")[0] for name in cost.without} == {"self_attn", "norm1"}


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: the weight is [inputs, outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.detach().T.clone()), nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def test_weights_that_lie_the_other_way_have_the_same_gradients() -> None:
    plain = block()
    turned = copy.deepcopy(plain)
    for name in ("up", "down"):
        linear = getattr(plain.feed_forward, name)
        setattr(turned.feed_forward, name, Conv1D(linear.weight, linear.bias))
    value, gradient = given()
    for its in (plain, turned):
        approximately(its, value, 3).backward(gradient)
    for name in ("up", "down"):
        one, other = (getattr(its.feed_forward, name).weight.grad for its in (plain, turned))
        torch.testing.assert_close(other.T, one, rtol=0, atol=1e-12)


def test_under_autocast_gradients_have_the_precision_of_parameters() -> None:
    its = block().float()
    value, gradient = (tensor.detach().float().requires_grad_() for tensor in given())
    with torch.autocast("cpu", torch.bfloat16):
        found = approximately(its, value, WIDTH)
    found.float().backward(gradient)
    assert all(its_grad.dtype == torch.float32 for its_grad in gradients(its).values())
    exact = block().float()
    middle = (value + exact.attention(exact.norm1(value))).detach()
    (middle + exact.feed_forward(exact.norm2(middle))).backward(gradient)
    for name, expected in gradients(exact).items():
        torch.testing.assert_close(gradients(its)[name], projected(exact, name, expected), rtol=0.05, atol=0.2)


def test_a_profile_that_names_a_parameter_that_is_not_there_is_told_of() -> None:
    held = Model(
        lambda: models.build_layers("parts"), lambda its: torch.optim.SGD(its, lr=0.1), None, torch.device("cpu"), seed=0
    )
    held.hold_built(range(6))
    plan = first_plan(profile(6, 8), "2x1", 2)
    wrong = replace(plan, approximation=Approximation((0,), LowRank(), (Without(1, 2, ("attention.missing",)),)))
    with pytest.raises(JobError, match=r"lacks 'attention\.missing', which it has not"):
        Healthy(wrong, held)
