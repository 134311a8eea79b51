"""The spread of prices: how far off the price of a plan may be beside the prices of other plans in the same table.

An error that all prices of a table have in common cancels when they are compared: `step_scale`, and with it whoever else uses
the machine; detection, pause, search and warm-up; what the best layout of those that the next loss leaves will take. What does
not is counted here: of a step time, how far a plan that has not run yet is from the scale that another one has shown; of a
transition, the parts that are the plan's own: spawn, groups, moves, rest.

A spread is relative: the median of |predicted / measured - 1|, so half of all prices are nearer. It begins at a stated default,
and the job's own n errors (`Errors` of its profile) take over, the more of them there are:

    spread = (N_DEFAULT * default + n * median of the job's own) / (N_DEFAULT + n)

The median of a few is not moved by one plan that was far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from odyssey.plan.estimate import Transition
from perfmodel.profile.profile import Errors, Profile

STEP = 0.05
"""benchmarks/accuracy.py at f9018ee, 22 November 2026. Off by 0.040 in the median: 41 plans after the first loss of a job, real
jobs on two cores and rehearsed ones of up to 32 ranks, at the scale that the plan before had shown. Off beside each other by
0.049 (84 pairs, real) and 0.057 (13, rehearsed): first plans of one model in several layouts."""
TRANSITION = 0.18
"""`transition_median_error` of the same run, 0.177 of 57: of whole transitions, as their parts are not recorded one by one."""
N_DEFAULT = 4
"""A default counts as if so many errors had been seen. A choice: after as many of its own a job believes both alike."""
N_NEWEST = 16
"""So many of a job's newest errors count: a machine that others come to use is known after a while."""


class Spread(msgspec.Struct, frozen=True):
    """Relative spreads of step times and of transitions' own parts."""

    step: float
    transition: float


def spread_of(errors: Errors) -> Spread:
    """In a job that has seen these."""
    return Spread(_spread(STEP, errors.steps), _spread(TRANSITION, errors.transitions))


def _spread(default: float, errors: Sequence[float]) -> float:
    if not errors:
        return default
    return (N_DEFAULT * default + len(errors) * median(map(abs, errors))) / (N_DEFAULT + len(errors))


def own_s(parts: Transition) -> float:
    """Seconds of a transition in the parts that are not the same whatever plan is taken."""
    return parts.spawn_s + parts.groups_s + parts.moves_s + parts.rest_s


def with_step(profile: Profile, predicted_s: float, measured_s: float, *, again: bool) -> Profile:
    """The profile when a plan that was priced like this has run for a while. `again`: it had before, and has run on since."""
    steps = profile.errors.steps[:-1] if again else profile.errors.steps
    return replace(profile, errors=replace(profile.errors, steps=_newest(steps, predicted_s / measured_s - 1)))


def with_transition(profile: Profile, predicted_s: float, measured_s: float) -> Profile:
    """The profile after a transition whose own parts were priced like this."""
    transitions = _newest(profile.errors.transitions, predicted_s / measured_s - 1)
    return replace(profile, errors=replace(profile.errors, transitions=transitions))


def _newest(errors: tuple[float, ...], error: float) -> tuple[float, ...]:
    return (*errors, error)[-N_NEWEST:]
