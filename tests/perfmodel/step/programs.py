"""A second, dumb simulation of a step: the whole programs of all workers, op by op, each worker on a device of its own."""

from __future__ import annotations

from odyssey.kernel import N_GRADIENTS_SENT
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import N_RECEIVES_AHEAD, Commit, Drop, Op, Receive, Send, program
from perfmodel.step.costs import Costs
from perfmodel.step.memory import Memory

Message = tuple[str, int, int, int, int]
"""(kind, stage, micro-batch, sender, receiver)."""


def programs_of(plan: Plan) -> dict[int, list[Op]]:
    return {worker: program(plan, worker) for worker in plan.workers}


def computations_of(plan: Plan, costs: Costs) -> dict[int, list[tuple[float, float]]]:
    """Worker -> start and end of each of its computations. Round and round, until nobody gets any further."""
    programs = programs_of(plan)
    position, clock = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0.0)
    times: dict[int, list[tuple[float, float]]] = {worker: [] for worker in programs}
    arrival: dict[Message, float] = {}
    free: dict[tuple[int, int], float] = {}
    moving = True
    while moving:
        moving = False
        for worker, ops in programs.items():
            while not isinstance(op := ops[position[worker]], Commit):
                if isinstance(op, Compute):
                    stage = plan.layer_range(op.micro_batch, op.stage)
                    alone_s = costs.by(plan, worker).compute_s(
                        op.kind, stage.first, stage.stop, plan.samples.n_of(op.micro_batch)
                    )
                    start = clock[worker]
                    clock[worker] += alone_s * costs.factor(worker)
                    times[worker].append((start, clock[worker]))
                elif isinstance(op, Send):
                    pair, link = (worker, op.peer), costs.channel(plan, worker, op.peer)
                    size = _message_bytes(plan, costs, op) * plan.samples.n_of(op.micro_batch) / costs.profile.micro_batch
                    free[pair] = max(clock[worker], free.get(pair, 0.0)) + size / link.bandwidth
                    arrival[op.kind, op.stage, op.micro_batch, *pair] = free[pair] + link.latency_s
                elif isinstance(op, Receive):
                    message = (op.kind, op.stage, op.micro_batch, op.peer, worker)
                    if message not in arrival:
                        break
                    clock[worker] = max(clock[worker], arrival[message])
                position[worker] += 1
                moving = True
    assert all(isinstance(programs[worker][i], Commit) for worker, i in position.items()), "they wait for each other"
    return times


def peaks_of(plan: Plan, costs: Costs) -> dict[int, int]:
    """Worker -> peak bytes."""
    peaks = {}
    programs = programs_of(plan)
    for worker, ops in programs.items():
        largest = {Send: 0, Receive: 0}
        for op in ops:
            if isinstance(op, Send | Receive):
                largest[type(op)] = max(largest[type(op)], _message_bytes(plan, costs, op))
        messages = N_RECEIVES_AHEAD * largest[Receive] + N_GRADIENTS_SENT * largest[Send]
        peaks[worker] = Memory(costs).peak(plan.holds[worker], _live_bytes(plan, worker, programs, costs), 0) + messages
    return peaks


def kept_gradients(programs: dict[int, list[Op]], worker: int) -> list[int]:
    """Behind each op of its program: how many gradients that `worker` has sent may not have come, as far as it can tell. What
    it has from a peer tells of all that this one had received before it sent that."""
    ops, taken, sent = programs[worker], dict[int, int](), 0
    counts = []
    for op in ops:
        if isinstance(op, Send) and op.kind == "B":
            sent += 1
        elif isinstance(op, Receive):
            theirs = programs[op.peer]
            at = theirs.index(Send(op.kind, op.stage, op.micro_batch, worker))
            n = sum(isinstance(it, Receive) and it.kind == "B" and it.peer == worker for it in theirs[:at])
            taken[op.peer] = max(n, taken.get(op.peer, 0))
        counts.append(sent - sum(taken.values()))
    return counts


def _live_bytes(plan: Plan, worker: int, programs: dict[int, list[Op]], costs: Costs) -> float:
    """High-water mark along a program of activations, and of gradients sent beyond those that there is always room for."""
    live = most = 0.0
    largest = 0
    kept: dict[tuple[int, int], float] = {}
    outputs = costs.sums(lambda layer: layer.output_bytes)
    p = plan.place[worker][0]
    waits = not any(p in (plan.home[route.micro_batch], plan.place[route.worker][0]) for route in plan.routes)
    for op, n in zip(programs[worker], kept_gradients(programs, worker), strict=True):
        if isinstance(op, Send) and op.kind == "B":
            largest = max(largest, _message_bytes(plan, costs, op))
        elif isinstance(op, Compute) and op.kind in ("F", "I"):
            sums = costs.by(plan, worker).activations if op.kind == "F" else outputs
            stage, key = plan.layer_range(op.micro_batch, op.stage), (op.stage, op.micro_batch)
            size = (sums[stage.stop] - sums[stage.first]) * plan.samples.n_of(op.micro_batch) / costs.profile.micro_batch
            kept[key] = kept.get(key, 0.0) + size
            live += size
        elif isinstance(op, Drop):
            live -= kept.pop((op.stage, op.micro_batch))
        most = max(most, live + (0 if waits else max(0, n - N_GRADIENTS_SENT) * largest))
    return most


def _message_bytes(plan: Plan, costs: Costs, op: Send | Receive) -> int:
    stage = plan.layer_range(op.micro_batch, op.stage)
    return costs.profile.layers[stage.stop - 1 if op.kind == "F" else stage.first - 1].output_bytes
