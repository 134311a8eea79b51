"""The life sign of a script without a Job: `odyssey.heartbeat()` in its loop tells the agent that this rank makes progress."""

from __future__ import annotations

import operator
import time
from typing import SupportsIndex

INTERVAL_S = 1.0
"""Beats within this time after one that was sent are not sent: a loop may call at each of its steps."""

_due = 0.0
_untold: SupportsIndex | None = None
"""The step of a beat that was not sent."""


def heartbeat(step: SupportsIndex | None = None) -> None:
    """Tell the agent that this rank makes progress, and at which `step` it is, as the script counts.

    For `odyssey run --stall-timeout TIME`: from the first call on, a rank that does not call for that time has stalled,
    however busy it looks; so call it in everything that lasts. It costs a look at the clock, and about once a second a
    small message. Does nothing where no agent listens, as under plain `python`, and in processes that the rank starts.
    Raises TypeError for a step that is no whole number.
    """
    global _due, _untold
    now = time.monotonic()
    if now < _due:
        _untold = step
        return
    number = operator.index(step) if step is not None else None
    _due, _untold = now + INTERVAL_S, None
    _send(number)


def tell_last_step() -> None:
    """Before this rank says that it has failed: the last step, even if it was not yet time to tell it."""
    global _untold
    if _untold is not None:
        number, _untold = operator.index(_untold), None
        _send(number)


def _send(step: int | None) -> None:
    from odyssey.protocol.link import connect
    from odyssey.protocol.reports import Beat

    link = connect()
    if link is not None:
        link.report(Beat(step))
