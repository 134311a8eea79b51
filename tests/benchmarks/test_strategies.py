"""The model's choice: for each strategy there is a loss, found by search, in which it is the best, and the model takes it."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

import strategies
from benchmarks import scenarios
from benchmarks import strategies as benchmark
from benchmarks.pace import CLOSE, is_right
from benchmarks.scenarios import Scenario, alone, margins, situation, started
from odyssey.plan.estimate import Estimate, Transition
from odyssey_cli.rehearsal.comparison import Generation, Rehearsal
from strategies.search import best, search
from strategies.situation import Candidate

FOUND = scenarios.read()
NOWHERE = {"redundant"}
"""What `repartition` makes of the layers that are kept is the same or better, in all that is searched."""


@pytest.mark.parametrize("scenario", FOUND.won, ids=lambda scenario: scenario.strategy)
def test_the_model_takes_the_strategy_that_is_the_best(scenario: Scenario) -> None:
    its = situation(scenario.loss, *started(scenario.loss))

    chosen = best(search(its))

    assert chosen is not None and chosen.strategy == scenario.strategy
    each = margins(filter(None, (alone(its, name) for name in strategies.names())))
    assert each[scenario.strategy] > 0, "better than any other; by how much, prices that are learnt anew may change"


def test_each_strategy_is_the_best_somewhere_or_is_known_not_to_be() -> None:
    assert {its.strategy for its in FOUND.won} == set(strategies.names()) - NOWHERE
    assert {its.strategy for its in FOUND.scenarios} == set(strategies.names())


def test_losses_are_drawn_by_the_seed() -> None:
    draws = [[loss for loss, _ in scenarios.losses(random.Random(0), 12)] for _ in range(2)]
    assert draws[0] == draws[1] != []


def test_margins_are_of_the_best_row_of_each_strategy() -> None:
    def row(strategy: str, worth: float) -> Candidate:
        plan = started(FOUND.won[0].loss)[1]
        return Candidate(strategy, plan, Estimate(1.0, Transition(), 1, worth), "")

    assert margins([row("a", 4.0), row("b", 3.0), row("b", 1.0)]) == pytest.approx({"a": 0.25, "b": -1 / 3})
    assert margins([row("a", 4.0)]) == {}


def test_a_choice_is_right_that_is_as_good_as_the_best() -> None:
    assert is_right({"a": [10.0], "b": [10.0 * (1 - CLOSE) + 0.01]}, "b")
    assert not is_right({"a": [10.0], "b": [10.0 * (1 - CLOSE) - 0.01]}, "b")
    assert is_right({"a": [10.0]}, "a") is is_right({"a": [10.0], "b": [1.0]}, None) is None


def generation(number: int, strategy: str, step_s: float | None) -> Generation:
    predicted = {"detect": 0.5, "groups": 0.5, "warm_up": 2.0}
    return Generation(number, strategy, "2x4", 7, 1.0, step_s, 5, predicted, {"detect": 0.5, "groups": 1.5}, ())


def test_the_plan_after_the_loss_is_the_last_one_that_a_strategy_has_made_of_it() -> None:
    ran = [
        generation(1, "initial", 1.0),
        generation(2, "reroute", None),
        generation(3, "shrink", 2.0),
        generation(4, "expand", 1.0),
    ]
    after = benchmark.after_loss(Rehearsal("auto", 0, 8, tuple(ran)))
    assert after is not None and after.number == 3
    assert benchmark.after_loss(Rehearsal("auto", 0, 8, (ran[0], ran[3]))) is None


def test_rehearsed_worth_is_that_of_the_plan_with_what_was_measured_and_the_rest_as_priced() -> None:
    loss = FOUND.won[0].loss
    its = best(search(situation(loss, *started(loss))))
    assert its is not None and its.estimate is not None
    as_priced = replace(
        generation(2, its.strategy, its.estimate.step_s),
        predicted_transition={"detect": 0.0, "warm_up": its.estimate.transition.total_s},
        transition={"detect": 0.0},
    )

    def worth(after: Generation, slower: float = 1.0) -> float:
        assert its is not None and after.step_s is not None
        return benchmark.worth_of(its, after, slower * after.step_s, loss.seconds_to_change)

    assert worth(as_priced) == pytest.approx(its.estimate.objective)
    assert worth(as_priced, 1.1) < worth(as_priced) > worth(replace(as_priced, transition={"detect": 5.0}))


def test_a_job_has_the_layout_that_its_strategy_needs() -> None:
    for n_ranks in benchmark.SIZES:
        for strategy in strategies.names():
            loss = benchmark.common(strategy, n_ranks)
            assert alone(situation(loss, *started(loss)), strategy) is not None, f"{strategy}, {n_ranks} ranks"
