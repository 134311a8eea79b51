"""What a policy made of a trace: where the time went, and what was done at each change."""

from __future__ import annotations

import msgspec

from odyssey_cli.replay.ledger import Stretch, Totals, totals, useful_over_time


class Decision(msgspec.Struct, frozen=True):
    """`what` happened, and what was done `then`: `step_s` of a step from there on, None where none can be made.

    `n_ranks`: that train. `pause_s`: until the next step.
    """

    at_s: float
    what: str
    then: str
    n_ranks: int
    step_s: float | None
    pause_s: float


class Result(msgspec.Struct, frozen=True):
    """`n_returns`: to a checkpoint. `idle_node_s`: seconds that healthy nodes were idle, times their number."""

    stretches: tuple[Stretch, ...]
    decisions: tuple[Decision, ...]
    n_returns: int
    idle_node_s: float


class Outcome(msgspec.Struct, frozen=True):
    """The result of a policy, against all nodes without failures."""

    policy: str
    about: str
    length_s: float
    all_nodes_step_s: float
    result: Result

    @property
    def totals(self) -> Totals:
        return totals(self.result.stretches, self.all_nodes_step_s)

    @property
    def useful(self) -> float:
        """Share of the time: useful throughput over that of all nodes without failures."""
        return self.totals.useful_s / self.length_s

    def over_time(self, n_bins: int) -> list[float]:
        """The same share in each of equal parts of the trace."""
        return useful_over_time(self.result.stretches, self.all_nodes_step_s, self.length_s, n_bins)
