"""A rank that has joined a job under way: its script passes the units that the others ran before, and gets their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from odyssey.errors import JobError
from odyssey.protocol.calls import CALLS
from odyssey.protocol.units import FIRST, Result, position_after


class PassedUnits:
    """The units that this rank has to catch up with.
    `results`: of the units that the script has still to pass; `place`: where it stands meanwhile. `joined_step`: the step
    that this rank has joined at; `has_joined`: whether the job had units before."""

    def __init__(self, results: Sequence[Result] = ()) -> None:
        self.results = deque(results)
        self.place = FIRST
        self.has_joined = bool(results)
        self.joined_step = position_after(results[-1])[0] if results else 0

    def next(self, kind: str) -> Result:
        """The result of the next unit. Raises JobError if it was of another kind than the one that the script calls."""
        result = self.results.popleft()
        if result.kind != kind:
            theirs = CALLS.get(result.kind, result.kind)
            what = f"after rejoining, the script calls {CALLS[kind]} where the other ranks called {theirs}"
            if {"load", "load_state_dict"} & {
                kind,
                result.kind,
            }:  # it depends on the files that are there, which were others at the job's start
                raise JobError(what, "use odyssey.Job(..., resume=folder), which decides once for all ranks")
            raise JobError(what, "let the script's course depend on the step only")
        self.place = position_after(result)
        return result
