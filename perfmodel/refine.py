"""A profile that learns: from real op times while the job runs, and from each real transition.

Every measurement moves an estimate by a stated part of the way (exponential smoothing), so that one odd sample does not
turn a decision, and a machine that has become slower is known after a few reports. One cost stands for a layer on all workers:
what a slow worker reports counts as it would have taken on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Protocol

import msgspec

from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from odyssey.protocol.reports import Measured, OpTime, Trial
from perfmodel.profile.profile import LayerProfile, Profile, Recovery
from perfmodel.step.costs import Costs, has_input_gradient
from perfmodel.step.timeline import timeline_of
from perfmodel.transition.moving import moves_s
from perfmodel.transition.transition import group_members, left_of_op_s, proved_bytes

STEP_WEIGHT = 0.5
"""Part of the way that one report of op times moves the layers of its range: it is a mean over many ops."""
SCALE_WEIGHT = 0.7
"""Part of the way that one look at real step times moves `step_scale`: it is a median of many."""
TRANSITION_WEIGHT = 0.5
"""Part of the way that one transition moves the parts of Recovery: transitions are rare and vary less."""


class Went(Protocol):
    """Measured parts of a transition, seconds, None where one did not take place; `total_s` is None at a first start.

    `proof_s` is within `rest_s`. `stood_s`: None but where nobody was lost; then the groups had been built before.
    `kept_members`: of the groups that were there, and were not built within `groups_s`.
    """

    @property
    def detect_s(self) -> float | None: ...
    @property
    def pause_s(self) -> float | None: ...
    @property
    def spawn_s(self) -> float | None: ...
    @property
    def groups_s(self) -> float: ...
    @property
    def moves_s(self) -> float: ...
    @property
    def rest_s(self) -> float | None: ...
    @property
    def proof_s(self) -> float: ...
    @property
    def total_s(self) -> float | None: ...
    @property
    def stood_s(self) -> float | None: ...
    @property
    def kept_members(self) -> int: ...


FIELDS = {
    "F": ("forward_s",),
    "B": ("input_gradient_s", "weight_gradient_s"),
    "I": ("input_gradient_s",),
    "W": ("weight_gradient_s",),
    "S": ("optimizer_s",),
}


def tried(profile: Profile, plan: Plan, reports: Iterable[Measured], node_of: Mapping[Worker, int] | None = None) -> Profile:
    """The profile after the trial of `plan` at a job's start: what ops and the whole step took there counts in full."""
    tried = [(report, report.trial) for report in reports if report.trial is not None]
    if not tried:
        return profile
    times = [time for _, trial in tried for time in trial.times]
    beside_s = [time.mean_s for time in times if time.kind == "O"]
    computed = [time for time in times if time.kind != "O"]
    if beside_s:
        computed.append(OpTime("O", 0, 0, len(beside_s), fmean(beside_s)))
    step_s = median(trial.step_s for _, trial in tried)
    profile = _with_proofs(profile, tried)
    crowded = timeline_of(plan, profile, node_of).crowded
    return rescale(refresh(profile, computed, crowded, weight=1.0), plan, step_s, node_of, weight=1.0)


def _with_proofs(profile: Profile, tried: Iterable[tuple[Measured, Trial]]) -> Profile:
    """With what ranks took to digest the state that a trial left."""
    move_bytes = Costs(profile).move_bytes
    shown = [(trial.proof_s, sum(move_bytes[cost.layer] for cost in report.costs)) for report, trial in tried]
    byte_s = [proof_s / size_bytes for proof_s, size_bytes in shown if size_bytes]
    if not byte_s:
        return profile
    return msgspec.structs.replace(profile, recovery=msgspec.structs.replace(profile.recovery, proof_byte_s=median(byte_s)))


def rescale(
    profile: Profile,
    plan: Plan,
    measured_step_s: float,
    node_of: Mapping[Worker, int] | None = None,
    weight: float = SCALE_WEIGHT,
    slow: Mapping[Worker, float] | None = None,
) -> Profile:
    """The profile after `plan` has run for a while with this median step time; `slow`: see Costs."""
    modelled_s = timeline_of(plan, profile, node_of, slow).step_s
    scale = profile.step_scale + weight * (measured_step_s / modelled_s - profile.step_scale)
    return msgspec.structs.replace(profile, step_scale=scale)


def refresh(
    profile: Profile,
    op_times: Sequence[OpTime],
    crowded: float = 1.0,
    *,
    factor: float = 1.0,
    weight: float = STEP_WEIGHT,
) -> Profile:
    """The profile after a report of real op times over ranges of layers. `crowded`: of the plan that ran, see Timeline;
    `factor`: of the worker that reports, see Costs.

    The layers of a range keep their proportions; their sum moves towards what was measured (less the loss where the
    range ends the model): computation alone. Kind `O` moves `op_overhead_s`, which every op costs beside it.
    """
    layers = list(profile.layers)
    op_overhead_s = profile.op_overhead_s
    for time in op_times:
        if time.n < 1:
            continue
        mean_s = time.mean_s / factor
        if time.kind == "O":
            op_overhead_s += weight * (max(mean_s, 0.0) - op_overhead_s)
            continue
        fields, known = _known(profile, layers, time)
        measured = (mean_s - _loss_s(profile, time)) / crowded
        if known <= 0 or measured <= 0:
            continue
        scale = 1 + weight * (measured / known - 1)
        for i in range(time.first, time.stop):
            layers[i] = _scaled(layers[i], fields, scale)
    return msgspec.structs.replace(profile, layers=tuple(layers), op_overhead_s=op_overhead_s)


def expected_s(profile: Profile, time: OpTime, crowded: float = 1.0) -> float:
    """What the mean of a report should be on a worker like most; 0 for kind `O` and for what the profile says nothing of."""
    if time.kind == "O":
        return 0.0
    _, known = _known(profile, profile.layers, time)
    return known * crowded + _loss_s(profile, time) if known > 0 else 0.0


def _known(profile: Profile, layers: Sequence[LayerProfile], time: OpTime) -> tuple[Sequence[str], float]:
    """The fields of the layers that an op's time is the sum of, and that sum."""
    kind = time.kind
    if time.first == 0 and kind in ("I", "W") and not has_input_gradient(profile):
        if kind == "I":
            return (), 0.0
        kind = "B"
    fields = FIELDS[kind]
    known = sum(getattr(layer, field) for layer in layers[time.first : time.stop] for field in fields)
    return fields, known * (profile.halves_scale if kind in ("I", "W") else 1.0)


def _loss_s(profile: Profile, time: OpTime) -> float:
    return profile.loss_s if time.kind == "F" and time.stop == len(profile.layers) else 0.0


def _scaled(layer: LayerProfile, fields: Sequence[str], scale: float) -> LayerProfile:
    changes: dict[str, Any] = {field: getattr(layer, field) * scale for field in fields}
    return msgspec.structs.replace(layer, **changes)


def calibrate(profile: Profile, plan: Plan, went: Went) -> Profile:
    """The profile after a real transition to `plan`, or its first start, which shows what groups and proofs take.

    What had only a default counts in full the first time, moves in the first transition that has any. How long ranks take to
    pause depends on the moment: at a start it is at least what an op is expected to have left, however often a job starts, and
    transitions move it by a part.
    """
    recovery, costs = profile.recovery, Costs(profile)
    is_start = went.total_s is None and went.stood_s is None
    weight = 1.0 if is_start or recovery.n_seen == 0 else TRANSITION_WEIGHT

    def towards(old: float, new: float | None, weight: float = weight) -> float:
        return old if new is None else old + weight * (max(new, 0.0) - old)

    expected_moves_s = moves_s(plan.moves, costs)
    moves_scale = went.moves_s / expected_moves_s if expected_moves_s > 0 and went.moves_s > 0 and not is_start else None
    proved = float(proved_bytes(plan, costs))
    if is_start:
        # optimizers make their state when they step; a trial has shown what it takes with that
        proved = 0.0 if recovery.proof_byte_s else proved / costs.state_per_parameter
        recovery = msgspec.structs.replace(recovery, pause_s=max(recovery.pause_s, left_of_op_s(plan, costs)))
    n_members = group_members(plan) - went.kept_members
    member_s = (went.groups_s - recovery.groups_base_s) / n_members if went.stood_s is None and n_members > 0 else None
    refined = msgspec.structs.replace(
        recovery,
        pause_s=towards(recovery.pause_s, went.pause_s, TRANSITION_WEIGHT),
        detect_s=towards(recovery.detect_s, went.detect_s),
        spawn_s=towards(recovery.spawn_s, went.spawn_s, TRANSITION_WEIGHT),
        groups_member_s=towards(recovery.groups_member_s, member_s),
        moves_scale=towards(
            recovery.moves_scale, moves_scale, 1.0 if recovery.moves_scale == Recovery().moves_scale else TRANSITION_WEIGHT
        ),
        rest_s=towards(recovery.rest_s, None if went.rest_s is None else went.rest_s - went.proof_s),
        proof_byte_s=towards(recovery.proof_byte_s, went.proof_s / proved if proved else None),
        n_seen=recovery.n_seen + (went.total_s is not None),
    )
    return msgspec.structs.replace(profile, recovery=refined)
