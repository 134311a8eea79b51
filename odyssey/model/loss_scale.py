"""The scale of a loss whose gradients are computed in float16: a script's own torch.amp.GradScaler, alike on all ranks.

Gradients are summed as they are scaled, so what overflows on one rank is no number on any. The scale is state of the script:
it is moved, compared and saved with what is in `extra`.
"""

from __future__ import annotations

import math

import torch
from torch.amp import GradScaler

from odyssey.errors import JobError


class LossScale:
    """There is none. `value`: what a loss is multiplied by before its backward."""

    value = 1.0

    def begin(self) -> None:
        """A step begins."""

    def update(self, is_finite: bool) -> bool:
        """A step is over. `is_finite`: whether its gradients are. Returns whether optimizers are to be stepped by them."""
        return True


class ScalersScale(LossScale):
    """That of `scaler`, as it was when the step began."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.begin()

    def begin(self) -> None:
        """The script may have set it."""
        self.value = self._scaler.get_scale()

    def update(self, is_finite: bool) -> bool:
        """Change it as `torch.amp.GradScaler.update` does, which wants to have looked at the gradients itself."""
        state = self._scaler.state_dict()
        scale, n_steps = state["scale"], state["_growth_tracker"] + 1
        if not is_finite:
            scale, n_steps = _rounded(scale * state["backoff_factor"]), 0
        elif n_steps == state["growth_interval"]:
            grown = _rounded(scale * state["growth_factor"])
            scale, n_steps = grown if math.isfinite(grown) else scale, 0
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": n_steps})
        return is_finite


def _rounded(scale: float) -> float:
    """To float32, which a GradScaler keeps it in."""
    return torch.tensor(scale, dtype=torch.float32).item()


def enabled(scaler: object) -> GradScaler | None:
    """The same if it scales anything. Raises JobError for what is no GradScaler."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise JobError(f"scaler is a {type(scaler).__name__}", "give a torch.amp.GradScaler, or leave it out")
    return scaler if scaler is not None and scaler.is_enabled() else None
