"""What pictures of a step have in common: which kinds of bars they name, and the marks of the time axis."""

from __future__ import annotations

import math
from collections.abc import Iterable

from odyssey_cli.timeline.picture import COMPUTATIONS, OpKind, Picture

DRAWN = (*COMPUTATIONS.values(), OpKind.REDUCTION, OpKind.OPTIMIZER)
"""In the order of a legend. Waiting is what is left empty, sends and drops take no time worth a bar."""
REROUTED = "the same in place of a lost rank"


def kinds_in(picture: Picture) -> list[OpKind]:
    """Those of a picture that are drawn, and wide enough to be seen."""
    found = {bar.kind for bar in picture.bars if bar.end_s - bar.start_s > picture.longest_s / 1000}
    return [kind for kind in DRAWN if kind in found]


def has_rerouted(picture: Picture) -> bool:
    return any(bar.is_rerouted for bar in picture.bars)


def ticks(longest_s: float, most: int) -> list[float]:
    """0 and at most `most` round times up to `longest_s`, equally far apart: 1, 2 or 5 times a power of ten."""
    least = longest_s / most
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    apart = next(step * power for step in (1, 2, 5, 10) if step * power >= least * 0.999999)
    return [i * apart for i in range(int(longest_s / apart * 1.000001) + 1)]


def tick_label(at_s: float, ticks_s: Iterable[float]) -> str:
    """`1.5 s`, `40 ms`, `250 µs`: in one unit for all marks, without noughts behind the point."""
    longest = max(ticks_s)
    unit, factor = ("s", 1.0) if longest >= 1 else ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)
    return f"{at_s * factor:.6g} {unit}"
