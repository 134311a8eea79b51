"""Peak bytes of a worker: what it holds, and the high-water mark of activations along its program.

    parameters + gradients + optimizer + buffers of held layers, run or kept, and their ties
    + activations that live at once, from F to the Drop behind B or W, by walking the program
    + messages of the largest size in each direction: receives posted ahead, and gradients sent that may not have come
    + what the runtime itself takes (measured)

Conservative where the engine may do better: `I` releases nothing until its `W`, and keeps the gradients of the layers'
outputs alive until then.

Not counted are gradients that are kept of a step that was cut (odyssey/plan/rest.py), which have the place of its activations.
"""

from __future__ import annotations

from collections.abc import Collection

from odyssey.kernel import N_GRADIENTS_SENT
from odyssey.plan.schedule import N_RECEIVES_AHEAD
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs

N_MESSAGES = N_RECEIVES_AHEAD + N_GRADIENTS_SENT
"""That a worker has room for at once. What a walk finds beyond that is in its activations."""


class Memory:
    """What a worker takes, of its parts."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._states: dict[frozenset[int], int] = {}
        """By the layers that are held."""

    def _state(self, held: frozenset[int]) -> int:
        known = self._states.get(held)
        if known is None:
            its = [self._costs.profile.layers[layer] for layer in held]
            sizes = (it.parameter_bytes + it.gradient_bytes + it.optimizer_bytes + it.buffer_bytes for it in its)
            known = self._states[held] = sum(sizes) + self._ties(held)
        return known

    def _ties(self, held: Collection[int]) -> int:
        profile = self._costs.profile
        return sum(
            round(size * (1 + self._costs.state_per_parameter))
            for tie, size in zip(profile.ties, profile.tie_bytes, strict=True)
            if any(layer in held for layer in tie)
        )

    def peak(self, held: frozenset[int], live_bytes: float, message_bytes: int) -> int:
        """`live_bytes`: of activations; `message_bytes`: its largest message. At either end of a stage outputs and their
        gradients go opposite ways and have one size, so that is the largest each way."""
        return self._costs.profile.runtime_bytes + self._state(held) + round(live_bytes) + N_MESSAGES * message_bytes


def most_message_bytes(profile: Profile) -> int:
    """What messages in flight take at most, whatever a worker's stage. The last layer's output is sent to nobody."""
    return N_MESSAGES * max((layer.output_bytes for layer in profile.layers[:-1]), default=0)
