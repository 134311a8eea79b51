"""What ranks do, wherever they are, for the watch over those that make no progress: each agent looks at its own when asked.

ask ─► here: at once, or beside the loop ─┬─► all have answered, or are gone ─► done(…)
    └► other agents: TakeSamples, ReadStacks ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.remote_agent import RemoteRank
from launcher.health.stacks import Stack
from launcher.health.stalls import Sample
from launcher.processes.own_ranks import OwnRanks
from launcher.processes.rank_process import RankProcess
from odyssey.plan.worker import Rank

Found = TypeVar("Found")
Done = Callable[[dict[Rank, Found]], None]


class Inspection:
    """`watched`: the ranks to be looked at."""

    def __init__(self, cluster: Cluster, own: OwnRanks, watched: Callable[[], list[Rank]]) -> None:
        self._cluster = cluster
        self._own = own
        self._watched = watched

    def processes(self) -> dict[Rank, RankProcess | RemoteRank]:
        """The present process of each of them that has one."""
        return {rank: self._cluster.process(rank) for rank in self._watched() if self._cluster.is_there(rank)}

    def hosts(self, ranks: Iterable[Rank]) -> dict[Rank, str]:
        """Where they are; empty for a job of one agent."""
        return {rank: self._cluster.host_of(rank) for rank in ranks} if self._cluster.has_others else {}

    def sample(self, ranks: Iterable[Rank], done: Done[Sample]) -> None:
        """`done(samples)`: of those that live."""
        addresses = self._cluster.addresses_of_others
        here, elsewhere = self._cluster.homes_of(ranks)

        def own(answered: Done[Sample]) -> None:
            answered(self._own.samples(here, addresses.values()))

        asks = [partial(agent.sample, its, _but(agent.info.number, addresses)) for agent, its in elsewhere]
        _gather([own, *asks], done)

    def read_stacks(self, ranks: Iterable[Rank], done: Done[Stack]) -> None:
        """`done(stacks)`: of those that live."""
        here, elsewhere = self._cluster.homes_of(ranks)
        _gather([partial(self._own.read_stacks, here), *(partial(agent.read_stacks, its) for agent, its in elsewhere)], done)

    def close(self) -> None:
        self._own.close()


def _but(number: int, addresses: dict[int, str]) -> tuple[str, ...]:
    """Those of all other agents than this one."""
    return tuple(dict.fromkeys(address for its, address in addresses.items() if its != number))


def _gather(asks: list[Callable[[Done[Found]], None]], done: Done[Found]) -> None:
    """Ask all, and be done when all have answered."""
    found: dict[Rank, Found] = {}
    n_left = len(asks)

    def answered(answer: dict[Rank, Found]) -> None:
        nonlocal n_left
        found.update(answer)
        n_left -= 1
        if n_left == 0:
            done(found)

    for ask in asks:
        ask(answered)
