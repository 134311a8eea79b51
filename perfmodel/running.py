"""The programs of a step while they run: computations and messages, up to the commit point.

Where each worker has a device of its own; where they share a host's cores, see sharing.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from odyssey.errors import PlanError
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Commit, Op, Receive, Send
from odyssey.plan.worker import Worker
from perfmodel.costs import Costs
from perfmodel.profile import Link

Message = tuple[str, int, int, Worker, Worker]
"""(kind, stage, micro-batch, sender, receiver)."""


@dataclass
class Run:
    """What is known while the programs of a step run up to the commit point."""

    plan: Plan
    costs: Costs
    times: dict[Worker, list[tuple[float, float]]] = field(default_factory=dict)
    arrival: dict[Message, float] = field(default_factory=dict)
    channel_free: dict[tuple[Worker, Worker], float] = field(default_factory=dict)
    crowded: float = 1.0
    """See Timeline."""
    _compute: dict[tuple[str, int, int, int, float, bool], float] = field(default_factory=dict)
    _sizes: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    _links: dict[tuple[Worker, Worker], Link] = field(default_factory=dict)

    def compute_s(self, worker: Worker, op: Compute) -> float:
        """Seconds of work of a computation on a worker."""
        plan, factor = self.plan, self.costs.factor(worker)
        is_approximate = worker in plan.approximate
        key = (op.kind, plan.home[op.micro_batch], op.stage, plan.n_samples(op.micro_batch), factor, is_approximate)
        known = self._compute.get(key)
        if known is None:
            stage = plan.pipelines[key[1]].stages[op.stage]
            costs = self.costs.by(plan, worker)
            known = self._compute[key] = costs.compute_s(op.kind, stage.first, stage.stop, key[3]) * factor
        return known

    def send(self, worker: Worker, op: Send, now: float) -> Message:
        """Let a message leave at `now`; its time of arrival is then in `arrival`."""
        pair = (worker, op.peer)
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self.costs.channel(self.plan, worker, op.peer)
        plan = self.plan
        key = (op.kind, plan.home[op.micro_batch], op.stage, plan.n_samples(op.micro_batch))
        size = self._sizes.get(key)
        if size is None:
            stage = plan.pipelines[key[1]].stages[op.stage]
            boundary = self.costs.profile.layers[stage.stop - 1 if op.kind == "F" else stage.first - 1]
            size = self._sizes[key] = boundary.output_bytes * key[3] / self.costs.profile.micro_batch
        leaves = max(now, self.channel_free.get(pair, 0.0)) + size / link.bandwidth
        self.channel_free[pair] = leaves
        message = (op.kind, op.stage, op.micro_batch, worker, op.peer)
        self.arrival[message] = leaves + link.latency_s
        return message


def own_devices(run: Run, programs: Mapping[Worker, Sequence[Op]]) -> None:
    """Every worker computes on a device of its own: one pass over the ops in an order that respects the transfers."""
    position = dict.fromkeys(programs, 0)
    clock = dict.fromkeys(programs, 0.0)
    waiting: dict[Message, Worker] = {}
    ready = list(programs)
    arrival, compute_s, send = run.arrival, run.compute_s, run.send
    for worker in programs:
        run.times[worker] = []
    while ready:
        worker = ready.pop()
        ops, times, now, i = programs[worker], run.times[worker], clock[worker], position[worker]
        n_ops = len(ops)
        while i < n_ops:
            op = ops[i]
            kind = type(op)
            if kind is Compute:
                end = now + compute_s(worker, op)  # type: ignore[arg-type]
                times.append((now, end))
                now = end
            elif kind is Receive:
                message: Message = (op.kind, op.stage, op.micro_batch, op.peer, worker)  # type: ignore[union-attr]
                arrives = arrival.get(message)
                if arrives is None:
                    waiting[message] = worker
                    break
                end = max(now, arrives)
                times.append((now, end))
                now = end
            elif kind is Send:
                message = send(worker, op, now)  # type: ignore[arg-type]
                times.append((now, now))
                if message in waiting:
                    ready.append(waiting.pop(message))
            elif kind is Commit:
                break
            else:
                times.append((now, now))
            i += 1
        clock[worker], position[worker] = now, i
    if waiting:
        raise stuck(programs, position)


def stuck(programs: Mapping[Worker, Sequence[Op]], position: Mapping[Worker, int]) -> PlanError:
    """The error of programs that wait for messages that nobody will send."""
    waits = [(w, ops[position[w]]) for w, ops in programs.items() if isinstance(ops[position[w]], Receive)]
    return PlanError("the workers wait for each other: " + ", ".join(f"worker {worker} at {op}" for worker, op in waits))
