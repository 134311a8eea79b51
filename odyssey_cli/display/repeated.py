"""Tracebacks that ranks print alike are shown once.

What a rank prints from the first line of a traceback on is held back until the rank prints no more for a moment, so that its
whole end is compared: chained exceptions, messages of several lines. A rank that has caught its exception may go on printing:
it is not held back for long.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from launcher.joblog.wording import ranks_text
from odyssey.plan.worker import Rank

_FIRST = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""By which torch says whose traceback it is."""
_LONGEST = 2000
"""Lines that are held back."""
_MOST_LOOKS = 8
"""How often `release` finds that a rank goes on printing before that is shown."""
_KEPT = 64
"""Tracebacks that are known again."""

Line = tuple[Rank, str]


class Repeated:
    """Between the lines of standard error of all ranks and what is shown of them."""

    def __init__(self) -> None:
        self._held: dict[Rank, list[str]] = {}
        self._grew: set[Rank] = set()
        self._n_looks: Counter[Rank] = Counter()
        self._shown: dict[tuple[str, ...], Rank] = {}
        """The first rank that has printed this traceback."""

    def take(self, lines: Iterable[Line]) -> list[Line]:
        """Give those of `lines`, as (rank, text), that are to be shown at once."""
        shown = []
        for rank, text in lines:
            if rank not in self._held and _PREFIX.sub("", text) != _FIRST:
                shown.append((rank, text))
                continue
            held = self._held.setdefault(rank, [])
            held.append(text)
            self._grew.add(rank)
            if len(held) > _LONGEST:
                shown += [(rank, line) for line in self._let_go(rank)]
        return shown

    def release(self, *, all_of_them: bool = False) -> list[Line]:
        """Give what was held back of ranks that have printed nothing since the last time, what was for long, or all: each
        traceback once."""
        self._n_looks.update(self._held.keys())
        due = [r for r in self._held if all_of_them or r not in self._grew or self._n_looks[r] >= _MOST_LOOKS]
        self._grew.clear()
        lines: list[Line] = []
        alike: dict[Rank, list[Rank]] = {}
        for rank in due:
            held = self._let_go(rank)
            first = self._shown.setdefault(tuple(_PREFIX.sub("", text) for text in held), rank)
            if len(self._shown) > _KEPT:
                del self._shown[next(iter(self._shown))]
            if first == rank:
                lines += [(rank, text) for text in held]
            else:
                alike.setdefault(first, []).append(rank)
        return lines + [(min(ranks), _same(ranks, first)) for first, ranks in alike.items()]

    def _let_go(self, rank: Rank) -> list[str]:
        del self._n_looks[rank]
        return self._held.pop(rank)


def _same(ranks: list[Rank], first: Rank) -> str:
    told = f"the same traceback as rank {first}"
    return told if len(ranks) == 1 else f"{told}; {ranks_text(ranks)} alike"
