"""How long until the next loss: against the posterior by numeric integration, and over drawn losses."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from launcher.coordinator.state import World
from launcher.joblog.events import JobStarted
from launcher.planning.situations import expected_change
from perfmodel.goodput.reliability import N_RATES, PRIOR_PER_NODE_DAY, STEP, ExpectedChange, seconds_to_change

DAY_S = 86400.0


def density(rate: float, prior: float) -> float:
    """The density of the prior at a rate per node-second: exponentials whose means and weights are STEP apart, with the mean
    `prior`."""
    weights = [STEP**-k for k in range(N_RATES)]
    lowest = prior / DAY_S * sum(weights) / N_RATES
    means = [lowest * STEP**k for k in range(N_RATES)]
    return sum(w / mean * math.exp(-rate / mean) for w, mean in zip(weights, means, strict=True)) / sum(weights)


def moments(n: int, node_s: float, prior: float) -> tuple[float, float]:
    """Mean and variance of the rate's posterior, by quadrature in the logarithm of the rate."""
    low, high, cells = math.log(1e-14), math.log(10.0), 20_000
    total = first = second = 0.0
    for i in range(cells):
        rate = math.exp(low + (i + 0.5) * (high - low) / cells)
        weight = rate * density(rate, prior) * math.exp(n * math.log(rate) - rate * node_s)
        total, first, second = total + weight, first + weight * rate, second + weight * rate**2
    return first / total, second / total - (first / total) ** 2


@pytest.mark.parametrize(("n", "node_s"), [(0, 0.0), (0, 5e5), (1, 3e3), (3, 5.76e4), (12, 4e6)])
@pytest.mark.parametrize("prior", [PRIOR_PER_NODE_DAY, 2.0])
def test_d_and_its_gamma_have_the_moments_of_the_posterior(n: int, node_s: float, prior: float) -> None:
    mean, variance = moments(n, node_s, prior)

    got = seconds_to_change(n, node_s, 8, per_node_day=prior)

    assert got.seconds == pytest.approx(1 / (8 * mean), rel=1e-3)
    assert got.n_behind == pytest.approx(mean**2 / variance, rel=2e-3)


def test_the_rate_grows_with_the_nodes_and_the_prior_is_its_mean() -> None:
    for n_nodes in (1, 16, 2048):
        assert seconds_to_change(0, 0.0, n_nodes).seconds == pytest.approx(DAY_S / (PRIOR_PER_NODE_DAY * n_nodes))
        assert seconds_to_change(0, 0.0, n_nodes, per_node_day=0.5).seconds == pytest.approx(DAY_S / (0.5 * n_nodes))


def test_d_says_where_it_comes_from() -> None:
    assert seconds_to_change(5, 10.0, 4, mtbf_s=3600) == ExpectedChange(3600, "--mtbf 3600 s")
    assert seconds_to_change(2, 5400, 4).source == "2 losses in 1.5 node-h, prior 0.0065 per node-day"
    assert seconds_to_change(1, 36, 4, per_node_day=0.5).source == "1 loss in 0.01 node-h, prior 0.5 per node-day"


def test_survival_is_the_exponential_averaged_over_the_gamma_of_the_rate() -> None:
    draw = random.Random(3)
    for seconds, n_behind in ((600.0, 2.5), (3600.0, 0.7)):
        rates = [draw.gammavariate(n_behind, 1 / (n_behind * seconds)) for _ in range(40_000)]
        for t in (10.0, 600.0, 5000.0):
            drawn = sum(math.exp(-rate * t) for rate in rates) / len(rates)
            assert ExpectedChange(seconds, "", n_behind).survival(t) == pytest.approx(drawn, abs=0.01)
    assert ExpectedChange(600.0).survival(300.0) == pytest.approx(math.exp(-0.5))


# -- losses of a job -----------------------------------------------------------------------------------------------------


def after_losses(at_s: list[float], n_nodes: int, speed: float = 1.0) -> World:
    """What the coordinator knows of a job of one rank a node after losses at these times."""
    started = JobStarted("train.py", (), n_nodes, 1, 0, "auto", "auto", None, "0", 1, speed=speed)
    world = World(started)
    world.ranks.start_all(n_nodes)
    for rank, time in enumerate(at_s):
        world.pass_time(time)
        world.count_loss()
        world.ranks.end(rank)
    return world


@pytest.mark.parametrize("n_nodes", [4, 32, 2048])
def test_three_losses_ten_minutes_apart_tell_the_interval(n_nodes: int) -> None:
    world = after_losses([600.0, 1200.0, 1800.0], n_nodes)

    expected = expected_change(world, 1800.0, None, None)

    left = n_nodes - 3  # the rate is per node, and so the job's falls with each that is gone
    assert 300 < expected.seconds * left / (n_nodes - 1) < 1200


def test_three_drawn_losses_tell_the_interval_within_a_factor_of_two_more_often_than_not() -> None:
    found = []
    for seed in range(400):
        draw, at_s = random.Random(seed), [0.0]
        while len(at_s) < 4:
            at_s.append(at_s[-1] + draw.expovariate(1 / 600))
        found.append(seconds_to_change(3, at_s[-1] * 64, 64).seconds)
    assert 300 < median(found) < 1200
    assert sum(300 < seconds < 1200 for seconds in found) > 0.6 * len(found)  # three draws alone: 0.75 at best


def test_losses_within_a_window_of_each_other_are_one() -> None:
    burst = after_losses([600.0, 601.0, 640.0, 690.0], 32)
    assert burst.losses.n_events == 1
    assert after_losses([600.0, 661.0], 32).losses.n_events == 2
    assert after_losses([600.0, 609.0], 32, speed=10.0).losses.n_events == 2  # where ten seconds pass in one


def test_exposure_is_that_of_the_nodes_that_were_there() -> None:
    world = after_losses([100.0, 300.0], 4)

    assert world.exposure(400.0) == pytest.approx((4 * 100 + 3 * 200 + 2 * 100, 2))
