"""examples/train_gpt.py: its data and its layers."""

from __future__ import annotations

import pytest
import torch

from examples import train_gpt


def test_windows_follow_each_other_and_targets_are_the_next_bytes():
    data = train_gpt.SourceCode(64, validation=True)
    (first, first_target), (second, _) = data[0], data[1]
    assert torch.equal(first[1:], first_target[:-1])
    assert first_target[-1] == second[0]
    assert len(data[len(data) - 1][1]) == 64


def test_validation_shares_no_file_with_training():
    training, validation = (train_gpt.SourceCode(64, validation=part) for part in (False, True))
    assert len(training) > 4 * len(validation) > 0
    assert bytes(validation.bytes[:2000].tolist()) not in bytes(training.bytes.tolist())


def test_head_uses_the_embeddings_own_weight():
    layers = train_gpt.build_layers(1, 16, 2, 8)
    assert layers[-1].weight is layers[0].token.weight
    assert torch.nn.Sequential(*layers)(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 256)


def test_learning_rate_warms_up_and_ends_at_a_tenth():
    factors = [train_gpt.warm_up_then_cosine(step, 100) for step in range(101)]
    assert factors[:2] == pytest.approx([0.1, 0.2])
    assert max(factors) == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.1)
