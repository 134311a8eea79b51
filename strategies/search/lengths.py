"""The layout that a user asks a job to start with."""

from __future__ import annotations

from odyssey.errors import UsageError
from odyssey.plan.layout import parse_layout
from strategies.building.compose import n_micro_batches_of
from strategies.situation import Situation


def lengths_of(situation: Situation, layout: str) -> tuple[int, ...] | None:
    """The lengths of the pipelines of `layout`; None for `auto`. Raises UsageError for one that cannot be meant."""
    n_workers, n_micro_batches = len(situation.at_work), n_micro_batches_of(situation)
    n_layers = len(situation.profile.layers)
    lengths = parse_layout(layout)
    if lengths is None:
        return None
    if sum(lengths) > n_workers:
        beside = f" beside {n_spares} that stand{'s' if n_spares == 1 else ''} by" if (n_spares := situation.n_spares) else ""
        raise UsageError(
            f"layout {layout} needs {sum(lengths)} workers, there are {n_workers}{beside}", "leave some idle, or use `auto`"
        )
    if max(lengths) > n_layers:
        raise UsageError(f"layout {layout} has more stages than the model has layers ({n_layers})", "use fewer stages")
    if len(lengths) > n_micro_batches:
        raise UsageError(
            f"layout {layout} has {len(lengths)} pipelines for {n_micro_batches} micro-batches",
            "use a smaller micro-batch, or fewer pipelines",
        )
    return lengths
