"""The backward in two halves gives what the whole one gives, whatever the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from odyssey.runtime.gradients import backward
from odyssey.runtime.halves import backward_input, backward_weight
from tests import models

LEFT = 0.25
"""By earlier micro-batches."""


def both(forward: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor], weights: list[nn.Parameter]) -> None:
    """Hold one way against the other."""
    found = []
    for split in (False, True):
        leaves = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in inputs]
        for weight in weights:
            weight.grad = torch.full_like(weight, LEFT)
        outputs = forward(leaves)
        gradients: list[Tensor | None] = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view_as(o) for o in outputs]
        if split:
            work = backward_input(outputs, gradients, leaves, weights)
            assert all(bool((weight.grad == LEFT).all()) for weight in weights), "the first half leaves weights alone"
            del outputs
            backward_weight(work)
        else:
            backward(outputs, gradients)
        found.append([leaf.grad for leaf in leaves] + [weight.grad.clone() for weight in weights])
    for full, halves in zip(*found, strict=True):
        assert (full is None) == (halves is None)
        torch.testing.assert_close(halves, full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ["gpt", "frozen", "mlp", "shared"])
def test_the_split_backward_gives_the_gradients_of_the_full_one(variant: str) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*models.build_layers(variant, n_blocks=2)[1:3])
    weights = [p for p in layers.parameters() if p.requires_grad]
    sample = torch.stack([models.data_for(variant, 4, torch.float64)[i][0] for i in range(4)])
    with torch.no_grad():
        value = models.build_layers(variant, n_blocks=2)[0](sample)
    both(lambda leaves: [layers(leaves[0])], [value.requires_grad_()], weights)


def test_the_backward_is_split_behind_a_layer_that_puts_out_a_view() -> None:
    """As a Linear on sequences does in torch 2.13: autograd lets nobody detach its output in place."""
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)
    linear.weight.grad, linear.bias.grad = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    leaf = torch.ones(2, 4, 3, dtype=torch.float64, requires_grad=True)
    output = linear(leaf.view(8, 3)).view(2, 4, 3)
    assert output._is_view()
    work = backward_input([output], [torch.ones_like(output)], [leaf], list(linear.parameters()))
    assert torch.equal(leaf.grad, linear.weight.detach().sum(0).expand(2, 4, 3))
    backward_weight(work)
    assert torch.equal(linear.weight.grad, torch.full((3, 3), 8.0, dtype=torch.float64))


class Twice(nn.Module):
    """Uses one weight at two depths, another at two places of which neither is above the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.gain
        return torch.tanh(self.linear(y)) + torch.sin(x * self.gain)


def test_a_weight_may_be_used_more_than_once() -> None:
    """As where layers share it, or a block is gone through again."""
    torch.manual_seed(0)
    module = Twice()
    leaf = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    both(lambda leaves: [module(leaves[0])], [leaf], list(module.parameters()))


def test_a_weight_may_reach_an_output_past_all_inputs() -> None:
    """As what a layer learns and hands on beside what it computes."""
    torch.manual_seed(0)
    gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    leaf = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    both(lambda leaves: [leaves[0] * 2.0, torch.sin(gain)], [leaf], [gain])
    both(lambda leaves: [leaves[0] * gain.sin(), gain.sin(), leaves[0]], [leaf], [gain])


def test_nodes_with_several_outputs_hand_on_the_gradient_of_each() -> None:
    torch.manual_seed(0)
    cell = nn.LSTM(6, 6, dtype=torch.float64)
    leaf = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)

    def forward(leaves: list[Tensor]) -> list[Tensor]:
        every, (last, state) = cell(leaves[0])
        first, second = (every + last).chunk(2, dim=-1)
        return [first * second, state]

    both(forward, [leaf], list(cell.parameters()))


@pytest.mark.parametrize("is_once", [True, False])
def test_a_hook_on_an_activation_changes_its_gradient_once(is_once: bool) -> None:
    """Of a module that is used once the activation is the only place where the paths part."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 6, dtype=torch.float64)
    leaf = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def hooked(value: Tensor) -> Tensor:
        activation = linear(value)
        activation.register_hook(lambda gradient: gradient * 0.5 + 1)
        return torch.tanh(activation)

    both(lambda leaves: [hooked(leaves[0]) if is_once else hooked(hooked(leaves[0]))], [leaf], list(linear.parameters()))


@given(st.data())
def test_any_graph(data: st.DataObject) -> None:
    """Values that are put together at random from two inputs and three weights, any of which may be used anywhere, or not."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(3)]
    inputs = [torch.randn(4, 4, dtype=torch.float64).requires_grad_(data.draw(st.booleans())) for _ in range(2)]
    n_leaves = len(weights) + len(inputs)
    ops = []
    for n in range(n_leaves, n_leaves + data.draw(st.integers(1, 8))):
        value = st.integers(0, n - 1)
        ops.append(data.draw(st.tuples(st.sampled_from(["add", "mul", "sin", "product", "parts"]), value, value)))
    n_values = n_leaves + len(ops)
    chosen = data.draw(st.lists(st.integers(0, n_values - 1), min_size=1, max_size=3, unique=True))

    def forward(leaves: list[Tensor]) -> list[Tensor]:
        values = [*weights, *leaves]
        for op, i, j in ops:
            one, other = values[i], values[j]
            match op:
                case "add":
                    values.append(one + other)
                case "mul":
                    values.append(one * other)
                case "sin":
                    values.append(one.sin())
                case "product":
                    values.append(one @ other)
                case _:
                    first, second = one.chunk(2)
                    values.append(torch.cat([second * other[:2], first]))
        return [values[i] for i in chosen if i >= len(weights)] or [values[-1]]

    both(forward, inputs, weights)
