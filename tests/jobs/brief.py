"""Jobs of tests measure their layers and links in fewer rounds than those of users."""

from __future__ import annotations

from odyssey.profiling import beside_reduction, measure, trial_run


def measure_briefly() -> None:
    """In this process, by all ways that a measurement goes. That is most of what a rank of a small job does, while nothing here
    depends on how well it does it: what layers take is still a median, as plans are chosen by it."""
    measure.N_REPEATS = 3
    measure.N_HALVES = measure.N_ALONE = measure.N_STATES = trial_run.N_STEPS = beside_reduction.N_TIMES = 1
    measure.STATE_BYTES = 1 << 20
