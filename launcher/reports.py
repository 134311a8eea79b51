"""From what ranks say to events of the log: the reports that the coordinator decides on, field by field."""

from __future__ import annotations

from typing import Any

from launcher.events import Body, RankFailed, RankFinished, RankJoined, RankPaused, RankReady, UnitCommitted
from odyssey.messages import Committed, Failed, Finished, Hello, Paused, Ready


def event_of(rank: int, report: Any) -> Body | None:
    """None for a report that is no event: times, measurements, life signs."""
    match report:
        case Committed(result=result, n_samples=n_samples, unit_s=unit_s):
            return UnitCommitted(rank, result, n_samples, unit_s)
        case Paused(position=position, phase=phase, held=held):
            return RankPaused(rank, position, phase, held)
        case Ready() as ready:
            return RankReady(rank, **{name: getattr(ready, name) for name in RankReady.__struct_fields__ if name != "rank"})
        case Hello(model=model, job=job):
            return RankJoined(rank, model, job)
        case Failed(error=error, help=help, traceback=traceback, is_final=is_final):
            return RankFailed(rank, error, help, traceback, is_final)
        case Finished():
            return RankFinished(rank)
    return None
