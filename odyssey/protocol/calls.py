"""The calls of a Job that all ranks make together, and what is said of ranks that make different ones.

What a script's next unit is depends on its course alone: ranks that are in units of different kinds at one position can
never meet, however long they wait. A rank that is in no unit may be on its way to any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from odyssey.plan.worker import Rank
from odyssey.protocol.units import Position

CALLS = {
    "step": "steps()",
    "evaluate": "evaluate()",
    "once": "once()",
    "once_with_state": "once_with_state()",
    "state_dict": "state_dict()",
    "load_state_dict": "load_state_dict()",
    "save": "save()",
    "load": "load()",
    "resume": "Job(resume=...)",
    "backward": "backward()",
    "collective": "a collective",
}
"""kind of a unit -> the call that runs it."""
_KINDS = tuple(CALLS)


class Unit(msgspec.Struct, frozen=True):
    """The unit that a rank is in."""

    position: Position
    kind: str

    @property
    def code(self) -> tuple[float, ...]:
        """In numbers, such that only equal ones have equal means: of kinds, their squares have to agree as well."""
        kind = _KINDS.index(self.kind)
        return (*map(float, self.position), float(kind), float(kind * kind))

    @staticmethod
    def from_code(code: Iterable[float]) -> Unit:
        """What `code` gives."""
        *position, kind, _ = map(int, code)
        return Unit(Position(*position), _KINDS[kind])


N_CODE = 5


def difference(units: Mapping[Rank, Unit]) -> str | None:
    """Say which of the ranks' units cannot meet: `rank 0 called save(), rank 1 steps(): all ranks must call it`."""
    by_position: dict[Position, dict[str, list[Rank]]] = {}
    for rank, unit in sorted(units.items()):
        by_position.setdefault(unit.position, {}).setdefault(unit.kind, []).append(rank)
    for ranks_of in by_position.values():
        if len(ranks_of) > 1:
            first, *rest = ((ranks, CALLS.get(kind, kind)) for kind, ranks in ranks_of.items())
            said = [f"{ranks_alike(first[0])} called {first[1]}", *(f"{ranks_alike(ranks)} {call}" for ranks, call in rest)]
            return f"{', '.join(said)}: all ranks must call it"
    return None


def ranks_alike(ranks: Iterable[Rank]) -> str:
    """`rank 3`, `ranks 0-7`, `ranks 0, 2-4`."""
    runs: list[list[Rank]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
