"""A loss's scale changes as torch's own GradScaler changes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from odyssey.errors import JobError
from odyssey.model.loss_scale import ScalersScale, enabled

GIVEN = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 2.0**16, 2.0**127]),
        "growth_factor": st.sampled_from([2.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.7]),
        "growth_interval": st.integers(1, 4),
    }
)


@given(GIVEN, st.lists(st.booleans(), max_size=20))
def test_the_scale_is_that_of_torch(given: dict[str, float], overflows: list[bool]) -> None:
    """Which looks at gradients for what is no number."""
    torchs, ours = (torch.amp.GradScaler("cpu", **given) for _ in range(2))
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scale = ScalersScale(ours)
    for overflowed in overflows:
        torchs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([float("inf") if overflowed else 0.0])
        torchs.step(optimizer)
        torchs.update()
        assert scale.update(not overflowed) is not overflowed
        assert ours.state_dict() == torchs.state_dict()


def test_what_is_given() -> None:
    assert enabled(None) is None
    assert enabled(torch.amp.GradScaler("cpu", enabled=False)) is None
    scaler = torch.amp.GradScaler("cpu", 8.0)
    assert enabled(scaler) is scaler
    assert ScalersScale(scaler).value == 8.0
    with pytest.raises(JobError, match="scaler is a float"):
        enabled(2.0)
