"""The agents that vote, and which of them are enough."""

from __future__ import annotations

from collections.abc import Set

import msgspec

from odyssey.codec import Count


class Membership(msgspec.Struct, frozen=True):
    """The agents that vote, by their numbers.

    `tie_breaker`: the voter whose half of an even number is enough, None where no half is. Raises ValueError for one that
    does not vote.
    """

    voters: frozenset[Count]
    tie_breaker: Count | None = None

    def __post_init__(self) -> None:
        if self.tie_breaker is not None and self.tie_breaker not in self.voters:
            raise ValueError(f"agent {self.tie_breaker} is to break ties and does not vote")

    def is_quorum(self, agents: Set[int]) -> bool:
        """More than half of the voters, or half of them with the tie breaker. Any two quorums share an agent."""
        n_here = len(self.voters & agents)
        is_half = 2 * n_here == len(self.voters)
        return 2 * n_here > len(self.voters) or (is_half and self.tie_breaker in agents)


NOBODY = Membership(frozenset())
"""What an agent knows that has not heard yet who the members are: no quorum, so nothing is decided in it."""


class Configuration(msgspec.Struct, frozen=True):
    """The membership, or on the way from one to the next both: then it takes a quorum of either (joint consensus)."""

    new: Membership
    old: Membership | None = None

    @property
    def voters(self) -> frozenset[int]:
        """Those of both."""
        return self.new.voters if self.old is None else self.new.voters | self.old.voters

    def is_quorum(self, agents: Set[int]) -> bool:
        """A quorum of each."""
        return self.new.is_quorum(agents) and (self.old is None or self.old.is_quorum(agents))
