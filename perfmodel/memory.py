"""Peak bytes of a worker: what it holds, and the high-water mark of activations along its program.

    parameters + gradients + optimizer + buffers of held layers, run or kept, and their ties
    + activations that live at once, from F to the Drop behind B or W, by walking the program
    + messages of the largest size in each direction, as many as the engine has in flight
    + what the runtime itself takes (measured)

Conservative where the engine may do better: `I` releases nothing until its `W`, and keeps the gradients of the layers'
outputs alive until then.

Before the first step of a plan there are no activations and no old gradients, but what goes is held beside what has come. Not
counted are gradients that are kept of a step that was cut (odyssey/plan/rest.py), which have the place of its activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import N_GRADIENTS_IN_FLIGHT, N_RECEIVES_AHEAD, Drop, Op, Receive, Send
from odyssey.plan.worker import Worker
from perfmodel.costs import Costs
from perfmodel.profile import Profile

PROOF_BYTES = 32 << 20
"""Copied at once for a digest (odyssey/model/packing.py)."""


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

    def peak_of_move(self, own: frozenset[int], held: Collection[int], received: Iterable[int]) -> int:
        """On the way to holding `own`, for who holds `held` (until all are ready) and receives some layers: what has been
        received is held twice until it is taken over; later come gradients, and what a proof has of a state at once."""
        layers, sizes = self._costs.profile.layers, self._costs.move_bytes
        holds = {*held, *own}
        states: int = sum(layers[i].parameter_bytes + layers[i].optimizer_bytes + layers[i].buffer_bytes for i in holds)
        on_its_way = max((sizes[layer] for layer in received), default=0)
        gradients: int = sum(layers[i].gradient_bytes for i in own)
        proved = gradients + min(PROOF_BYTES, max(sizes[layer] for layer in holds))
        peak: int = self._costs.profile.runtime_bytes + states + self._ties(holds) + max(on_its_way, proved)
        return peak

    def peak(self, held: frozenset[int], live_bytes: float, received_bytes: int, sent_bytes: int) -> int:
        """`live_bytes`: of activations; `received_bytes`, `sent_bytes`: its largest message each way."""
        messages = N_RECEIVES_AHEAD * received_bytes + N_GRADIENTS_IN_FLIGHT * sent_bytes
        return self._costs.profile.runtime_bytes + self._state(held) + round(live_bytes) + messages


def peaks_of_moves(plan: Plan, held: Mapping[Worker, Collection[int]], costs: Costs) -> dict[Worker, int]:
    """Worker -> peak bytes before the plan's first step, for those that receive layers. `held`: by the survivors.

    Who receives none has less than in the steps before: its activations and old gradients go first.
    """
    memory = Memory(costs)
    received: dict[Worker, list[int]] = {}
    for move in plan.moves:
        received.setdefault(move.target, []).append(move.layer)
    return {
        worker: memory.peak_of_move(plan.holds[worker], held.get(worker, ()), layers) for worker, layers in received.items()
    }


def peaks(plan: Plan, costs: Costs, programs: Mapping[Worker, Sequence[Op]]) -> dict[Worker, int]:
    """Worker -> peak bytes, for the workers of these programs."""
    memory = Memory(costs)
    outputs = costs.sums(lambda layer: layer.output_bytes)
    result: dict[Worker, int] = {}
    for worker, ops in programs.items():
        activations = costs.by(plan, worker).activations
        live = live_bytes(plan, ops, activations, outputs, costs.profile.micro_batch)
        result[worker] = memory.peak(plan.holds[worker], live, *_messages(plan, ops, costs))
    return result


def live_bytes(plan: Plan, ops: Sequence[Op], activations: Sequence[int], outputs: Sequence[int], micro_batch: int) -> float:
    """High-water mark of activations along a program; `activations`, `outputs`: prefix sums over the layers."""
    live = peak = 0.0
    kept: dict[tuple[int, int], float] = {}
    sizes: dict[tuple[str, int, int, int], float] = {}
    home, n_samples = plan.home, plan.n_samples
    for op in ops:
        if isinstance(op, Compute) and op.kind in ("F", "I"):
            kind = (op.kind, home[op.micro_batch], op.stage, n_samples(op.micro_batch))
            size = sizes.get(kind)
            if size is None:
                stage = plan.layer_range(op.micro_batch, op.stage)
                sums = activations if op.kind == "F" else outputs
                size = sizes[kind] = (sums[stage.stop] - sums[stage.first]) * kind[3] / micro_batch
            key = (op.stage, op.micro_batch)
            kept[key] = kept.get(key, 0.0) + size
            live += size
            if live > peak:
                peak = live
        elif isinstance(op, Drop):
            live -= kept.pop((op.stage, op.micro_batch))
    return peak


def most_message_bytes(profile: Profile) -> int:
    """What messages in flight take at most, whatever a worker's stage."""
    return (N_RECEIVES_AHEAD + N_GRADIENTS_IN_FLIGHT) * max(layer.output_bytes for layer in profile.layers)


def _messages(plan: Plan, ops: Sequence[Op], costs: Costs) -> tuple[int, int]:
    """The largest that a program receives, and that it sends."""
    layers = costs.profile.layers
    kinds = {(op.kind, plan.home[op.micro_batch], op.stage, type(op)) for op in ops if isinstance(op, Send | Receive)}
    largest = {Send: 0, Receive: 0}
    for kind, p, s, way in kinds:
        stage = plan.pipelines[p].stages[s]
        largest[way] = max(largest[way], layers[stage.stop - 1 if kind == "F" else stage.first - 1].output_bytes)
    return largest[Receive], largest[Send]
