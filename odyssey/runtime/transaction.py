"""What ranks do together, as a rank's session runs it: a body, a commit point, a local effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple

from odyssey.plan.worker import Worker
from odyssey.runtime.agreed_numbers import N_RATE
from odyssey.runtime.groups import Groups
from odyssey.runtime.runner import R

N_VALUES = 3 + N_RATE
"""So many values a unit may give at no cost. More of them are another tiny reduction."""
N_HEARD = 3
"""What is summed before them: how many ranks have heard of a Drain, and the generations that they were told, all the same; and
to how many state has come lately."""
Values = tuple[float, ...]


class Transaction(NamedTuple, Generic[R]):
    """A unit.

    `body(runner)`: run it, give what this rank adds to the final sum, Cut may interrupt it; ranks that give more
    than N_VALUES give equally many. `conclude(sums)`: the result's values, the same on all ranks; `metrics(sums)`: its metrics.
    Sums of what nobody gives are 0.
    `take(runner, values)`: the local effect, which cannot be interrupted.
    `is_told`: the agent hears of each one that is final; of others, only when it asks ranks to pause.
    `began_s`: of time.monotonic, where what the unit ends began before it. `n_steps`: how many steps the script wants in all;
    None where it does not say.
    `receive`: None for a unit with a commit point. One that has none is final on a rank when its body is done, and who lacks it
    after a loss has it handed on: `receive(groups, giver)` gets what `take` needs. Raises Cut.
    """

    kind: str
    body: Callable[[R], Sequence[float]]
    conclude: Callable[[Sequence[float]], Values]
    take: Callable[[R, Values], None]
    n_samples: int = 0
    is_told: bool = True
    began_s: float | None = None
    metrics: Callable[[Sequence[float]], Mapping[str, float]] = lambda sums: {}
    n_steps: int | None = None
    receive: Callable[[Groups, Worker], None] | None = None
