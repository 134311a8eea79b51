"""What is told of samples beside the loss: names and sums over several ranks, and what does not go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import pytest
import torch

from odyssey.errors import JobError
from odyssey.model.given import metric, with_metrics
from odyssey.runtime.metrics import means, summed, total


def reduced(each: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip_longest(*each, fillvalue=0.0)]


def test_all_know_names_and_means_that_some_have_computed() -> None:
    ranks = [summed({"größe": 3.0, "accuracy": 2.5}, 4), summed({}, 0), summed({"accuracy": 1.0, "größe": 9.0}, 2)]
    assert ranks[1] == []
    assert means(reduced(ranks), 6, 8.0) == {"accuracy": 3.5 / 8, "größe": 1.5}
    assert means(reduced([[], []]), 6, 6.0) == {}


@pytest.mark.parametrize("other", [{"accurary": 1.0}, {"a": 1.0, "b": 1.0}, {}])
def test_ranks_with_other_names_are_refused(other: Mapping[str, float]) -> None:
    """They have as many letters, others, and none at all for some samples."""
    with pytest.raises(JobError, match="not the same names"):
        means(reduced([summed({"accuracy": 1.0}, 3), summed(other, 3)]), 6, 6.0)


def test_micro_batches_with_other_names_are_refused_by_name() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    assert total([{"a": one}, {"a": 2 * one}]) == {"a": 3.0}
    with pytest.raises(JobError, match=r"a, and a, b"):
        total([{"a": one}, {"a": one, "b": one}])


def test_a_metric_is_a_scalar_of_any_kind_without_a_gradient() -> None:
    numpy = pytest.importorskip("numpy")
    parameter = torch.ones((), requires_grad=True)
    for value in (1, 1.0, True, numpy.float32(1), torch.tensor(1), parameter * 1):
        assert float(metric("it", value)) == 1.0 and not metric("it", value).requires_grad
    loss, metrics = with_metrics((parameter, {"it": parameter * 2}))
    assert loss is parameter and float(metrics["it"]) == 2.0
    assert with_metrics(parameter) == (parameter, {})


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [("it", torch.ones(2), r"'it' has shape \(2,\)"), ("it", "1", "'it' is a str"), (3, 1.0, "a metric is called 3")],
)
def test_what_is_no_scalar_is_refused(name: str, value: object, what: str) -> None:
    with pytest.raises(JobError, match=what):
        metric(name, value)
    with pytest.raises(JobError, match="the loss is a tuple"):
        with_metrics((torch.ones(()), value))
