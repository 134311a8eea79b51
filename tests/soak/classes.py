"""The classes of a soak's table: of each kind of fault, and of what jobs went through it in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.soak.case import Case, Slow

SURROUNDINGS = (
    "one agent",
    "several agents",
    "an endpoint of IPv6",
    "slow ops: milliseconds",
    "slow ops: seconds",
    "slow disk",
    "slow data",
    "a rank that computes without Python",
)
"""What a job ran in, beside the faults that struck it: each job is of one or the other of the first two, and of others."""


def classes(case: Case, struck: Iterable[str]) -> dict[str, int]:
    """Those of a job, and how many faults struck in it: of that kind, or in these surroundings."""
    found = Counter(struck)
    n_faults = found.total()
    return dict(found) | dict.fromkeys(surroundings(case), n_faults)


def surroundings(case: Case) -> set[str]:
    found = {"one agent" if case.agents is None else "several agents"}
    if case.agents is not None and ":" in case.agents.host:
        found.add("an endpoint of IPv6")
    return found | {_of(slow) for slow in case.slow}


def _of(slow: Slow) -> str:
    if slow.how == "deaf":
        return "a rank that computes without Python"
    if slow.where in ("fsync", "rename"):
        return "slow disk"
    if slow.where == "data":
        return "slow data"
    return "slow ops: milliseconds" if slow.seconds < 1 else "slow ops: seconds"


COLUMNS = {
    "exact": "exact",
    "stopped": "stopped rightly",
    "wrong": "wrong",
    "hang": "hung",
    "wrongly stopped": "stopped wrongly",
    "wrongly lost": "healthy taken for lost",
}
"""By verdict, in the order of the table; any other is counted as `broken otherwise`."""


def row(name: str, n_faults: int, verdicts: Counter[str]) -> dict[str, str | int]:
    """A row of the table."""
    counted = {COLUMNS[verdict]: verdicts[verdict] for verdict in COLUMNS}
    others = verdicts.total() - sum(counted.values())
    return {"class": name, "faults": n_faults, "jobs": verdicts.total(), **counted, "broken otherwise": others}
