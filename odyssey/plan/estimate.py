"""What the performance model says of a plan: its step, and the transition to it, part by part."""

from __future__ import annotations

import msgspec


class Transition(msgspec.Struct, frozen=True):
    """Seconds from the loss to the first op of the next generation, by part.
    `rest_s`: orders on their way, rolling forward, proofs."""

    detect_s: float = 0.0
    pause_s: float = 0.0
    search_s: float = 0.0
    spawn_s: float = 0.0
    groups_s: float = 0.0
    moves_s: float = 0.0
    warm_up_s: float = 0.0
    rest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, part) for part in self.__struct_fields__))


class Estimate(msgspec.Struct, frozen=True):
    """What the performance model says of a Plan. `objective` is useful samples per second, see perfmodel/goodput/objective.py.
    `beside_s`: what is done for it beside the training, before the transition: groups are built. `kept_s`: by which its first
    step is shorter than its others in the mean, as of the step that was cut something is kept."""

    step_s: float
    transition: Transition
    peak_bytes: int
    objective: float
    beside_s: float = 0.0
    kept_s: float = 0.0
