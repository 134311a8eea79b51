"""A job over a given time, as losses take it from one layout to another: how long it is in each of them, and trains there.

Losses strike at random, one in D seconds of all ranks that are there at first, and nothing that is lost comes back. One that
strikes what is gone already changes nothing, so fewer ranks lose less often: of the losses that strike, the part `hit` ends a
stay. Until a time x the last of j losses is behind it and the next one ahead for (1/r) P(N(x) > j) seconds in the mean, with
r = 1/D and N(x) Poisson of mean r x. With p_j the chance to be in a stay after j losses have struck, a job is in it for

    S(x) = 1/r sum over j of P(N(x) > j) p_j

seconds. It trains in a stay from `pause_s` after its beginning on. At a moment s it does so if it was there at s - pause_s and
nothing has ended the stay since, which comes to exp(-r hit pause_s) S(x - pause_s) seconds until x.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
MOST_LOSSES = 10_000
"""That a time may have in the mean; each of them is gone through."""
_NOTHING = 1e-12
"""A chance that makes no difference."""
_MOST_EXPONENT = 700.0
"""Its power of e is a number still."""


class Stay(NamedTuple):
    """A stay in one layout.
    `pause_s`: until the job trains, less than 0 where more is kept than a change takes; of the losses that strike, the part
    `hit` ends it."""

    pause_s: float
    hit: float


class Spent(NamedTuple):
    """Expected seconds in a stay, and of them those in which the job trains."""

    there_s: float
    training_s: float


def spent(
    start: T,
    stay: Callable[[T], Stay],
    after: Callable[[T], Iterable[tuple[float, T]]],
    change_s: float,
    horizon_s: float,
) -> dict[T, Spent]:
    """How a job spends its time that begins with `start`, over so many seconds with a loss in every `change_s`.

    `after`: where a loss that ends a stay leads, and with which chance; the job is over where nothing follows. Raises
    ValueError for more than `MOST_LOSSES`.
    """
    if horizon_s > MOST_LOSSES * change_s:
        raise ValueError(f"{horizon_s / change_s:.3g} losses, expected at most {MOST_LOSSES}")
    found: dict[T, tuple[float, float]] = {}
    chances, n_struck = {start: 1.0}, 0
    while chances and (more := _chance_of_more(n_struck, horizon_s / change_s)) > _NOTHING:
        later: defaultdict[T, float] = defaultdict(float)
        for state, chance in chances.items():
            pause_s, hit = stay(state)
            there, training = found.get(state, (0.0, 0.0))
            unhit = chance * math.exp(min(_MOST_EXPONENT, -hit * pause_s / change_s))
            more_then = _chance_of_more(n_struck, max(0.0, horizon_s - pause_s) / change_s)
            found[state] = there + chance * more, training + unhit * more_then
            later[state] += chance * (1 - hit)
            for part, following in after(state):
                later[following] += chance * hit * part
        chances = {state: chance for state, chance in later.items() if chance > _NOTHING}
        n_struck += 1
    return {state: Spent(change_s * there, change_s * training) for state, (there, training) in found.items()}


def _chance_of_more(n: int, mean: float) -> float:
    """P(N > n), N Poisson of this mean: that the (n + 1)-th of events, one in a unit of time, comes before `mean`."""
    from scipy.special import gammainc

    return float(gammainc(n + 1, mean))
