"""Agents, links, clocks and faults drawn from seeds: nothing is decided twice, and it goes on when the faults stop."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.launcher.consensus.simulated import World

MET = {
    "partition", "one way", "heal", "die", "join", "joint", "membership", "half with the tie breaker", "snapshot installed",
    "RequestPreVote", "RequestVote", "Refused", "InstallSnapshot", "TimeoutNow", "a leader stepped down", "an entry replaced",
    "verdict True", "verdict False",
}  # fmt: skip
"""What the runs together must have come upon: otherwise they test little."""


def play(seeds: range) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, at {world.now:.3f} s: {error!r}") from error
        met.update(world.met.keys())
    return met


@pytest.mark.parametrize("first", [0, 50, *(pytest.param(n, marks=pytest.mark.soak) for n in (100, 150))])
def test_agents_agree_whatever_the_network_does_and_go_on_when_it_stops(first: int) -> None:
    met = play(range(first, first + 50))

    assert MET - met.keys() == set()
    assert met["verdict True"] >= 20, "hardly any run that must go on"
    assert met["verdict False"] >= 5, "hardly any run without a quorum"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_agents_agree_in_thousands_of_runs(first: int) -> None:
    play(range(first, first + 500))
