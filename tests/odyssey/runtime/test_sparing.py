"""A backward that is to add nothing to some parameters, whatever their layers do within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from odyssey.runtime.gradients import backward, sparing


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.how = how

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return self.inner(value)
        result: torch.Tensor = checkpoint(self.inner, value, use_reentrant=self.how == "reentrant")
        return result


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_spared_parameters_keep_what_they_have_and_all_else_gets_its_own(how: str) -> None:
    torch.manual_seed(0)
    spared, other = Checkpointed(how), Checkpointed(how)
    value = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    output = other(spared(value))
    expected = torch.autograd.grad(other.inner(spared.inner(value)).sum(), [value, *other.parameters()])
    kept = [torch.full_like(parameter, 7.0) for parameter in spared.parameters()]
    for parameter, gradient in zip(spared.parameters(), kept, strict=True):
        parameter.grad = gradient

    with sparing(spared.parameters()):
        backward([output], [torch.ones_like(output)])

    assert all(parameter.grad is gradient for parameter, gradient in zip(spared.parameters(), kept, strict=True))
    assert all(bool((gradient == 7.0).all()) for gradient in kept)
    found = [value.grad, *(parameter.grad for parameter in other.parameters())]
    for mine, right in zip(found, expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-14)
    backward([other(spared(value))], [torch.ones_like(output)])
    assert not any(bool((gradient == 7.0).all()) for gradient in kept), "from now on they are added to again"


def test_an_exception_within_it_leaves_them_as_they_were() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient = torch.full((2,), 3.0)
    with pytest.raises(KeyError), sparing([parameter]):
        raise KeyError
    assert parameter.grad is gradient
