"""How long until the next loss: D and how sure it is, from what the user says or from the job's own losses.

Losses of a job are a Poisson process whose rate is proportional to its nodes. Rates differ fifty-fold between clusters
(0.0008 to 0.04 losses per node-day: TPUv4, NSDI 2024; Alibaba Aegis), and machines that may be taken away fail a
thousand times as often (14 per node-day: Parcae's p3 trace). So the prior is a mixture of exponential densities whose means
grow by `STEP` from one to the next and whose weights fall as much: its tail is that of a power law, the heaviest that has a
mean within its range, and a few losses outweigh it, however far off it was.

A Gamma is conjugate to Poisson losses: with n losses in T node-seconds the density with mean 1/b becomes Gamma(1 + n, b + T),
and its weight changes by the factor b n! / (b + T)^(n + 1). D is one over the mean rate of all of it, and the Gamma with the
same mean and variance stands for it where the chance to get through a time is asked for.

Losses that follow each other within `WINDOW_S` are one event: a node, a switch or a rack took several ranks.
"""

from __future__ import annotations

import math

import msgspec

PRIOR_PER_NODE_DAY = 0.0065
"""Losses per node-day: Meta RSC-1, 16,000 A100 (arXiv 2410.21680), in the middle of what is published (0.0008 to 0.04)."""
WINDOW_S = 60.0
"""A tenth of the gaps between the faults of a cluster is below 8 s, a quarter below 47 min (InfiniteHBD, arXiv 2502.03885)."""
STEP, N_RATES = 4.0, 10
"""The rates of the prior: up to 4^9 times the lowest rate, so that a loss a minute on one node is within it."""
_DAY_S = 86400.0


class ExpectedChange(msgspec.Struct, frozen=True):
    """D in seconds, and where it comes from, for people.

    `n_behind`: the shape of the Gamma that the rate is known by, as if from so many losses; infinite where the rate is given.
    """

    seconds: float
    source: str = ""
    n_behind: float = math.inf

    def survival(self, seconds: float) -> float:
        """The chance that nothing is lost for so long: exp(-T/D), or averaged over the Gamma(a, b) of the rate (b/(b + T))^a.

        b = a D, as D is one over the mean rate a/b.
        """
        if math.isinf(self.n_behind):
            return math.exp(-seconds / self.seconds)
        return math.exp(-self.n_behind * math.log1p(seconds / (self.n_behind * self.seconds)))


def seconds_to_change(
    n_events: int,
    node_s: float,
    n_nodes: float,
    *,
    mtbf_s: float | None = None,
    per_node_day: float | None = None,
) -> ExpectedChange:
    """D of `n_nodes` from `--mtbf` where it is given, else the posterior after `n_events` losses in `node_s` node-seconds.

    `per_node_day`: the mean of the prior, `PRIOR_PER_NODE_DAY` if None.
    """
    if mtbf_s is not None:
        return ExpectedChange(mtbf_s, f"--mtbf {mtbf_s:g} s")
    prior = PRIOR_PER_NODE_DAY if per_node_day is None else per_node_day
    weights = [STEP**-k for k in range(N_RATES)]
    lowest = prior / _DAY_S * sum(weights) / sum(weight * STEP**k for k, weight in enumerate(weights))
    means_s = [1 / (lowest * STEP**k) for k in range(N_RATES)]
    logs = [
        math.log(weight) + math.log(b) - (n_events + 1) * math.log(b + node_s)
        for weight, b in zip(weights, means_s, strict=True)
    ]
    likely = [math.exp(log - max(logs)) for log in logs]
    rates = [(n_events + 1) / (b + node_s) for b in means_s]
    squares = [(n_events + 2) * rate / (b + node_s) for rate, b in zip(rates, means_s, strict=True)]
    mean = sum(p * rate for p, rate in zip(likely, rates, strict=True)) / sum(likely)
    variance = sum(p * square for p, square in zip(likely, squares, strict=True)) / sum(likely) - mean * mean
    losses = "1 loss" if n_events == 1 else f"{n_events} losses"
    source = f"{losses} in {node_s / 3600:.3g} node-h, prior {prior:g} per node-day"
    return ExpectedChange(1 / (mean * max(n_nodes, 1e-9)), source, mean * mean / variance)
