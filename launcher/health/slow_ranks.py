"""Which ranks compute slowly, by the op times that they report: slow against their peers and against their own past.

A report comes to one number, the logarithm of what its ops took over what is expected of these ops, so ranks with different
layers compare. It is weighed against

    level  the lower quartile of all others that are not known to be slow: what slows down all ranks is the profile's to learn
    past   the rank's mean since the generation began, of the number and of what it is above the level: what is expected of some
           layers may be wrong. A rank that begins slower than others with the same layers has their past: it was slow from the
           start

What a rank's number is above the level, less what that was in the past, is its *excess*. With one rank there is no level: it is
what the number is above the past.

Whether the excess has risen is for Page's CUSUM to say (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954): the
sum of what is above the threshold, kept from falling below nothing. From a report on, a sum of noise with standard deviation s
reaches h with a chance of about exp(-2 k h / s^2), k being what the threshold is above the mean (D. Siegmund, Sequential
Analysis, 1985, ch. II). So h follows from the noise of the rank and from how rare a false alarm is to be. The alarm is an
occasion for a second look, later, when a burst is over: the median of some more reports decides, and is the factor; it has to
last, so each half of them must show it, and it must be the rank that became slower and not the others that became faster, so
the number itself must have risen as well. So it goes in Greyhound (FALCON, arXiv 2410.12588), which takes a change point of
more than 10 % for an alarm and then verifies it.

Time is an argument and decides nothing: all that counts is reports.

Op times are the processor's, so a rank that is kept from its processor (throttled, stopped now and then, next to somebody who
computes) is not slow by them. `KeptRanks` judges likewise what ops took on the wall over what they took on the processor. Where
ranks share processors that differs by what they do: those of a first stage wait for a processor half of their time, those of
the last one, who wake when a message comes, hardly ever; and it differs with whatever else runs there. So ranks are compared
with those only that have the same layers, and only a rank that stands out by half is called slow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple, TypeVar

from odyssey.plan.worker import Rank
from odyssey.protocol.reports import OpTime

SLOW = math.log(1.1)
"""Excess from which on a rank is slow; below half of it, it no longer is. Changes of more than 10 % raise Greyhound's alarm."""
KEPT = math.log(1.5)
"""Excess from which on a rank is kept from its processor: with 8 ranks on two processors, and twenty more processes that wanted
them, the median of a look strayed by 1.2 at most."""
ONE_IN = 1e7
"""Reports of a rank for one false alarm: two months at two a second."""
MOST = math.log(2)
"""Excess that a single report counts as at most; an alarm takes at least two of these."""
N_FIRST = 40
"""Reports of a generation that only show what is usual."""
N_PASS, N_LOOK = 20, 40
"""Reports that are let pass after an alarm, and reports of a look."""
N_RECENT = 8
"""Reports of a rank that its part of the level is the median of."""
N_NOISE = 64
"""Reports that the noise is estimated by, about."""
MEDIAN_VARIANCE = math.pi / 2
"""The variance of the median of many normal numbers is so many times that of their mean."""


class Slow(NamedTuple):
    """How many times as long a rank computes as it should, and since when."""

    factor: float
    since: float


class _Seen(NamedTuple):
    """The number of a report less the level, and as it is."""

    above_level: float
    own: float


@dataclass
class _Rank:
    layers: frozenset[tuple[int, int]] = frozenset()
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=N_RECENT))
    usual: float = 0.0
    """The median of the recent ones."""
    level: float = 0.0
    """This is the level of the others; with none, the last one."""
    first: list[_Seen] = field(default_factory=list)
    past: _Seen | None = None
    n: float = 0.0
    """Reports that the past is the mean of."""
    is_compared: bool = False
    """With the pasts of ranks that have the same layers."""
    noise: float = 0.0
    """Variance of the excess from report to report."""
    last: float = 0.0
    total: float = 0.0
    """The CUSUM."""
    since: float = 0.0
    """When it was last nothing: Page's estimate of when the change was."""
    look: list[_Seen] | None = None
    """What is above the past."""
    slow: Slow | None = None
    before: float | None = None
    """The excess of a slow rank at the look before."""


class SlowRanks:
    """What is known of the ranks of a job. `begin` a generation, `take` its reports; `slow` is the answer."""

    def __init__(self, threshold: float = SLOW) -> None:
        """`threshold`: excess from which on a rank is slow."""
        self._ranks: dict[Rank, _Rank] = {}
        self._slow = threshold
        self._expected_s: Callable[[OpTime], float] = lambda _: 0.0
        self._n_healthy: dict[Hashable, int] = {}
        self._n_since = 0

    def begin(self, ranks: Collection[Rank], expected_s: Callable[[OpTime], float]) -> None:
        """A generation begins: who is slow stays so, all else is seen anew.

        `expected_s`: what the mean of an op should be, the same for all ranks and as long as the generation lasts (a profile
        that learns from the reports would follow them); 0 for an op of which nothing is known.
        """
        self._ranks = {rank: _Rank(slow=its.slow if (its := self._ranks.get(rank)) else None) for rank in ranks}
        self._expected_s = expected_s
        self._n_healthy, self._n_since = {}, 0

    @property
    def slow(self) -> Mapping[Rank, Slow]:
        """The ranks that are slow."""
        return {rank: its.slow for rank, its in self._ranks.items() if its.slow is not None}

    def take(self, now: float, rank: Rank, times: Sequence[OpTime]) -> bool:
        """A rank reports. True if it is now slow and was not, or the reverse, or slow by another factor.

        `now` is only what `since` counts in. Reports of ranks that are not of the generation say nothing.
        """
        its = self._ranks.get(rank)
        known = [(time, *self._seconds(time)) for time in times if time.n > 0]
        known = [(time, took_s, should_s) for time, took_s, should_s in known if took_s > 0 and should_s > 0]
        if its is None or not known:
            return False
        all_took_s = sum(time.n * took_s for time, took_s, _ in known)
        own = math.log(all_took_s / sum(time.n * should_s for time, _, should_s in known))
        its.layers = frozenset((time.first, time.stop) for time, *_ in known)
        its.recent.append(own)
        self._n_since += 1
        if self._n_since >= len(self._ranks):
            self._survey()
        seen = _Seen(own - its.level, own)
        if its.slow is not None:
            return self._look_again(its, seen)
        if its.past is None:
            _learn_first(its, seen)
        elif its.is_compared and self._n_others(its) >= self._n_others_needed:
            return self._judge(its, its.past, seen, now)
        return False

    _n_others_needed = 0
    """Without so many that it is compared with a rank is not judged."""

    def _seconds(self, time: OpTime) -> tuple[float, float]:
        """What is judged of an op, and what that should be."""
        return time.mean_s, self._expected_s(time)

    def _peers(self, its: _Rank) -> Hashable:
        """Tell ranks apart that are not compared with each other."""
        return None

    def _survey(self) -> None:
        """The level for each rank: once in as many reports as there are ranks."""
        self._n_since = 0
        healthy = [its for its in self._ranks.values() if its.slow is None and its.recent]
        for its in healthy:
            its.usual = median(its.recent)
        by_peers = _grouped((self._peers(its), its.usual) for its in healthy)
        self._n_healthy = {peers: len(of) for peers, of in by_peers.items()}
        same = _grouped((its.layers, its.usual) for its in healthy)
        for its in self._ranks.values():
            everyone = sorted(by_peers.get(self._peers(its), ()))
            if its.slow is None:
                its.level = _quartile_of_others(everyone, its.usual, its.level)
            elif its.past is not None:
                its.level = everyone[(len(everyone) - 1) // 4] if everyone else its.level
            else:
                its.level = median_low(same.get(its.layers, everyone or [its.level]))
        self._compare([its for its in healthy if its.past is not None])

    def _compare(self, known: Sequence[_Rank]) -> None:
        """Give ranks that began slower than others with the same layers the past of these."""
        if all(its.is_compared for its in known):
            return
        usual = _grouped((its.layers, its.past.own) for its in known if its.past is not None)
        for its in known:
            if not its.is_compared and its.past is not None:
                above = its.past.own - median_low(usual[its.layers])
                if above > self._threshold(its):
                    its.past = _Seen(its.past.above_level - above, its.past.own - above)
                its.is_compared = True

    def _judge(self, its: _Rank, past: _Seen, seen: _Seen, now: float) -> bool:
        excess = seen.above_level - past.above_level
        if its.look is not None:
            its.look.append(_Seen(excess, seen.own - past.own))
            return len(its.look) == N_PASS + N_LOOK and self._is_slow(its)
        counted = max(-MOST, min(MOST, excess))
        its.noise += ((counted - its.last) ** 2 / 2 - its.noise) / N_NOISE
        its.last = counted
        noise, above = self._noise(its), self._threshold(its)
        its.total = max(0.0, its.total + counted - above)
        if its.total == 0:
            its.since = now
        limit = max(2 * MOST, noise * math.log(ONE_IN) / (2 * above))
        if its.total >= limit:
            its.look = []
        elif its.total < limit / 2:
            _learn(its, seen)
        return False

    def _noise(self, its: _Rank) -> float:
        """Variance that counts in a sum: that of the report and, as it follows slowly, that of the level."""
        n_others = self._n_others(its)
        return its.noise * (1 + MEDIAN_VARIANCE / n_others if n_others > 0 else 1.0)

    def _n_others(self, its: _Rank) -> int:
        """Healthy ones that a healthy rank is compared with."""
        return self._n_healthy.get(self._peers(its), 0) - 1

    def _threshold(self, its: _Rank) -> float:
        """That of a slow rank, and two standard errors of what is usual for it."""
        return self._slow + 2 * math.sqrt(self._noise(its) / its.n)

    def _is_slow(self, its: _Rank) -> bool:
        """What the second look shows."""
        assert its.look is not None
        above, own = (list(of) for of in zip(*its.look[N_PASS:], strict=True))
        its.look, its.total = None, 0.0
        excess, half = median(above), N_LOOK // 2
        lasts = min(median(above[:half]), median(above[half:])) > self._slow / 2
        if min(excess, median(own)) > self._threshold(its) and lasts:
            its.slow, its.before = Slow(math.exp(excess), its.since), None
        return its.slow is not None

    def _look_again(self, its: _Rank, seen: _Seen) -> bool:
        """At a slow rank, all the time. What two looks show that follow each other is so."""
        assert its.slow is not None
        its.look = its.look or []
        usual = its.past or _Seen(0.0, 0.0)
        its.look.append(_Seen(seen.above_level - usual.above_level, seen.own - usual.own))
        if len(its.look) < N_LOOK:
            return False
        excess, before = median(of.above_level for of in its.look), its.before
        its.look, its.before = None, excess
        if before is None:
            return False
        if max(excess, before) < self._slow / 2:
            its.slow = None
            return True
        known = math.log(its.slow.factor)
        if min(excess, before) - known <= self._slow and known - max(excess, before) <= self._slow:
            return False
        its.slow = its.slow._replace(factor=math.exp((excess + before) / 2))
        return True


class KeptRanks(SlowRanks):
    """Which ranks are kept from their processors: an op should take on the wall what it takes on the processor."""

    _n_others_needed = 1

    def __init__(self) -> None:
        super().__init__(KEPT)

    def _seconds(self, time: OpTime) -> tuple[float, float]:
        return time.wall_s, time.mean_s

    def _peers(self, its: _Rank) -> Hashable:
        return its.layers


_Key = TypeVar("_Key", bound=Hashable)


def _grouped(of: Iterable[tuple[_Key, float]]) -> dict[_Key, list[float]]:
    found: dict[_Key, list[float]] = {}
    for key, number in of:
        found.setdefault(key, []).append(number)
    return found


def _quartile_of_others(ascending: Sequence[float], one: float, otherwise: float) -> float:
    """The lower quartile of all but one of these numbers; `otherwise` where it is the only one."""
    if len(ascending) < 2:
        return otherwise
    at = (len(ascending) - 2) // 4
    return ascending[at if at < bisect_left(ascending, one) else at + 1]


def _learn_first(its: _Rank, seen: _Seen) -> None:
    its.first.append(seen)
    if len(its.first) < N_FIRST:
        return
    above, own = (list(of) for of in zip(*its.first, strict=True))
    its.past = _Seen(median(above), median(own))
    its.n = N_FIRST / MEDIAN_VARIANCE
    steps = [min(abs(b - a), 2 * MOST) ** 2 / 2 for a, b in pairwise(above)]
    its.noise, its.last = sum(steps) / len(steps), 0.0
    its.first = []


def _learn(its: _Rank, seen: _Seen) -> None:
    """One more report of the past, in which none counts for more than it may."""
    assert its.past is not None
    its.n += 1
    its.past = _Seen(*(past + max(-MOST, min(MOST, now - past)) / its.n for past, now in zip(its.past, seen, strict=True)))
