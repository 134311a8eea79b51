"""A profile that learns: from real op times while the job runs, and from each real transition.

Every measurement moves an estimate by a stated part of the way (exponential smoothing), so that one odd sample does not
turn a decision, and a machine that has become slower is known after a few reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from odyssey.messages import OpTime
from odyssey.plan import Plan
from perfmodel.costs import Costs, has_input_gradient
from perfmodel.moving import moves_s
from perfmodel.profile import LayerProfile, Profile
from perfmodel.timeline import simulate
from perfmodel.transition import group_members

STEP_WEIGHT = 0.5
"""Part of the way that one report of op times moves the layers of its range: it is a mean over many ops."""
SCALE_WEIGHT = 0.7
"""Part of the way that one look at real step times moves `step_scale`: it is a median of many."""
TRANSITION_WEIGHT = 0.5
"""Part of the way that one transition moves the parts of Recovery: transitions are rare and vary less."""
FIELDS = {
    "F": ("forward_s",),
    "B": ("input_gradient_s", "weight_gradient_s"),
    "I": ("input_gradient_s",),
    "W": ("weight_gradient_s",),
    "S": ("optimizer_s",),
}


def rescale(profile: Profile, plan: Plan, measured_step_s: float, node_of: Mapping[int, int] | None = None) -> Profile:
    """The profile after `plan` has run for a while with this median step time."""
    modelled_s = simulate(plan, profile, node_of).step_s
    scale = profile.step_scale + SCALE_WEIGHT * (measured_step_s / modelled_s - profile.step_scale)
    return msgspec.structs.replace(profile, step_scale=scale)


def refresh(profile: Profile, op_times: Sequence[OpTime]) -> Profile:
    """The profile after a report of real op times over ranges of layers.

    The layers of a range keep their proportions; their sum moves towards what was measured (less the loss where the
    range ends the model): computation alone. Kind `O` moves `op_overhead_s`, which every op costs beside it.
    """
    layers = list(profile.layers)
    op_overhead_s = profile.op_overhead_s
    for time in op_times:
        kind = time.kind
        if time.n < 1:
            continue
        if kind == "O":
            op_overhead_s += STEP_WEIGHT * (max(time.mean_s, 0.0) - op_overhead_s)
            continue
        if time.first == 0 and kind in ("I", "W") and not has_input_gradient(profile):
            if kind == "I":
                continue
            kind = "B"
        fields = FIELDS[kind]
        known = sum(getattr(layer, field) for layer in layers[time.first : time.stop] for field in fields)
        known *= profile.halves_scale if kind in ("I", "W") else 1.0
        loss_s = profile.loss_s if time.kind == "F" and time.stop == len(layers) else 0.0
        measured = time.mean_s - loss_s
        if known <= 0 or measured <= 0:
            continue
        scale = 1 + STEP_WEIGHT * (measured / known - 1)
        for i in range(time.first, time.stop):
            layers[i] = _scaled(layers[i], fields, scale)
    return msgspec.structs.replace(profile, layers=tuple(layers), op_overhead_s=op_overhead_s)


def _scaled(layer: LayerProfile, fields: Sequence[str], scale: float) -> LayerProfile:
    changes: dict[str, Any] = {field: getattr(layer, field) * scale for field in fields}
    return msgspec.structs.replace(layer, **changes)


def calibrate(
    profile: Profile,
    plan: Plan,
    *,
    detect_s: float | None,
    pause_s: float | None,
    spawn_s: float | None,
    groups_s: float,
    moves_s: float,
) -> Profile:
    """The profile after a real transition to `plan` with these measured parts; None where a part did not take place."""
    recovery = profile.recovery
    members_s = max(0.0, groups_s - recovery.groups_base_s) / group_members(plan)
    expected_moves_s = _expected_moves_s(profile, plan)
    moves_scale = recovery.moves_scale
    if expected_moves_s > 0 and moves_s > 0:
        moves_scale = _towards(moves_scale, moves_s / expected_moves_s)
    refined = msgspec.structs.replace(
        recovery,
        detect_s=_towards(recovery.detect_s, detect_s),
        pause_s=_towards(recovery.pause_s, pause_s),
        spawn_s=_towards(recovery.spawn_s, spawn_s),
        groups_member_s=_towards(recovery.groups_member_s, members_s),
        moves_scale=moves_scale,
    )
    return msgspec.structs.replace(profile, recovery=refined)


def _towards(old: float, new: float | None) -> float:
    return old if new is None else old + TRANSITION_WEIGHT * (new - old)


def _expected_moves_s(profile: Profile, plan: Plan) -> float:
    return moves_s(plan.moves, Costs(profile))
