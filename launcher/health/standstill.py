"""Whether all ranks of a Job only wait for each other: then what they wait for was lost on its way, and nothing will come.

Every rank that takes part waits for others, at the same place as before, and neither exchanges anything with them nor uses a
processor for what is on its way. As long as a single one computes, reads a file or runs the script's own code, the others wait
for that one, however long it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from launcher.health.life import IDLE_S, is_a_sign
from launcher.health.stalls import Sample
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Pong


class _Standing(NamedTuple):
    """Where a rank waits, the bytes that it has exchanged with others, and what it has used."""

    where: str
    exchanged: int
    processor_s: float


class Standstill:
    """What was seen when ranks first stood as they still do."""

    def __init__(self) -> None:
        self._since: tuple[float, dict[Rank, _Standing]] | None = None

    def forget(self) -> None:
        """Something has moved."""
        self._since = None

    def lasts_s(self, asked: Collection[Rank], answers: Mapping[Rank, Pong], found: Mapping[Rank, Sample], now: float) -> float:
        """For how long all who were `asked` have stood still, by their answers and by what they use."""
        waiting = [rank for rank, pong in answers.items() if pong.waiting and rank in found]
        here = {rank: _Standing(answers[rank].where, found[rank].exchanged, found[rank].processor_s) for rank in waiting}
        if not here or here.keys() != set(asked):
            self.forget()
        elif self._since is None or not _is_same(*self._since, here, now):
            self._since = now, here
        return now - self._since[0] if self._since is not None else 0.0


def is_for_good(lasted_s: float, patience_s: float) -> bool:
    """Whether it has lasted for too long, with `patience_s` for what was expected."""
    return lasted_s >= max(IDLE_S, patience_s)


def _is_same(since: float, before: Mapping[Rank, _Standing], here: Mapping[Rank, _Standing], now: float) -> bool:
    return before.keys() == here.keys() and not any(
        (its.where, its.exchanged) != (before[rank].where, before[rank].exchanged)
        or is_a_sign(its.processor_s - before[rank].processor_s, now - since)
        for rank, its in here.items()
    )
