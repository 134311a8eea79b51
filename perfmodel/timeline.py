"""The exact time of a step: the longest path through the op graph of all workers' programs (Odyssey, eq. 11, with transfers).

A computation occupies its worker. A send does not: it leaves behind the computation and arrives `latency + bytes /
bandwidth` later, one message at a time for each pair of workers. A reduction starts when its last member has issued it and
no member is in another one; it overlaps with computation. Then come the commit point, which waits for everybody,
and the optimizer. Where ranks share the cores of a host, computation progresses by processor sharing (perfmodel/sharing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from odyssey.errors import PlanError
from odyssey.plan import Plan
from odyssey.schedule import Commit, Compute, Op, Receive, Reduce, Send, Step, program
from perfmodel.cells import Cell, cells
from perfmodel.costs import Costs
from perfmodel.profile import Link, Profile

Message = tuple[str, int, int, int, int]
"""(kind, stage, micro-batch, sender, receiver)."""


class Span(msgspec.Struct, frozen=True):
    """When an op ran, seconds since the start of the step."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """`step_s`, and the times of each op of one worker of each kind; `twin` says whose times hold for a worker."""

    step_s: float
    times: Mapping[int, Sequence[tuple[float, float]]]
    twin: Mapping[int, int]

    def spans(self, plan: Plan, worker: int) -> list[Span]:
        """The ops of `worker` with their times, in its program's order."""
        times = self.times[self.twin[worker]]
        return [Span(op, start, end) for op, (start, end) in zip(program(plan, worker), times, strict=True)]

    def busy_s(self, plan: Plan, worker: int) -> float:
        """Seconds that `worker` computes within the step."""
        return sum(span.end_s - span.start_s for span in self.spans(plan, worker) if isinstance(span.op, Compute))


def simulate(plan: Plan, profile: Profile, node_of: Mapping[int, int] | None = None) -> Timeline:
    """The timeline of one step of `plan` at the costs of `profile`. Raises PlanError for programs that wait for each other."""
    costs = Costs(profile, node_of)
    found = cells(plan, costs)
    run = Run(plan, costs)
    for cell in found:
        play(run, cell)
    return _timeline(plan, costs, run, found)


def play(run: Run, cell: Cell) -> None:
    """Run the programs of a cell up to their commit points; fills `run.times`."""
    from perfmodel.sharing import share_cores

    if run.costs.profile.cluster.cores is None:
        _own_devices(run, cell.programs)
    else:
        share_cores(run, cell.programs)


def twins(found: Sequence[Cell]) -> dict[int, int]:
    """Worker -> the worker whose times hold for it."""
    twin: dict[int, int] = {}
    for cell in found:
        for copy in cell.copies:
            twin.update(zip(copy, cell.copies[0], strict=True))
    return twin


@dataclass
class Run:
    """What is known while the programs of a step run up to the commit point."""

    plan: Plan
    costs: Costs
    times: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    arrival: dict[Message, float] = field(default_factory=dict)
    channel_free: dict[tuple[int, int], float] = field(default_factory=dict)
    _compute: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    _sizes: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    _links: dict[tuple[int, int], Link] = field(default_factory=dict)

    def compute_s(self, op: Compute) -> float:
        """Seconds of work of a computation."""
        plan = self.plan
        key = (op.kind, plan.home[op.micro_batch], op.stage, plan.n_samples(op.micro_batch))
        known = self._compute.get(key)
        if known is None:
            stage = plan.pipelines[key[1]].stages[op.stage]
            known = self._compute[key] = self.costs.compute_s(op.kind, stage.first, stage.stop, key[3])
        return known

    def send(self, worker: int, op: Send, now: float) -> Message:
        """Let a message leave at `now`; its time of arrival is then in `arrival`."""
        pair = (worker, op.peer)
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self.costs.link(worker, op.peer)
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


def _own_devices(run: Run, programs: Mapping[int, Sequence[Op]]) -> None:
    """Every worker computes on a device of its own: one pass over the ops in an order that respects the transfers."""
    position = dict.fromkeys(programs, 0)
    clock = dict.fromkeys(programs, 0.0)
    waiting: dict[Message, int] = {}
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
                end = now + compute_s(op)  # type: ignore[arg-type]
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


def stuck(programs: Mapping[int, Sequence[Op]], position: Mapping[int, int]) -> PlanError:
    """The error of programs that wait for messages that nobody will send."""
    waits = [(w, ops[position[w]]) for w, ops in programs.items() if isinstance(ops[position[w]], Receive)]
    return PlanError("the workers wait for each other: " + ", ".join(f"worker {worker} at {op}" for worker, op in waits))


def _timeline(plan: Plan, costs: Costs, run: Run, found: Sequence[Cell]) -> Timeline:
    """The times of all ops, those of reductions, commit and optimizer filled in."""
    twin = twins(found)
    programs = {worker: ops for cell in found for worker, ops in cell.programs.items()}
    issued = {worker: issues(ops, run.times[worker]) for worker, ops in programs.items()}
    end = finish(plan, costs, {w: times[-1][1] if times else 0.0 for w, times in run.times.items()}, issued, twin)
    for worker, ops in programs.items():
        times = run.times[worker]
        reached = times[-1][1] if times else 0.0
        for i, op in enumerate(ops[: len(times)]):
            if isinstance(op, Reduce):
                times[i] = (times[i][0], end.reduced_s[op.group])
        for op in ops[len(times) :]:
            if isinstance(op, Commit):
                times.append((reached, end.committed_s))
            elif isinstance(op, Step):
                times.append((end.committed_s, end.stepped_s[worker]))
    return Timeline(end.step_s, run.times, twin)


def issues(ops: Sequence[Op], times: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Reduce group -> when a worker has issued its reduction."""
    return {op.group: start for op, (start, _) in zip(ops, times, strict=False) if isinstance(op, Reduce)}


@dataclass(frozen=True)
class End:
    """Where all workers meet: when each group is reduced, the commit point passed, each worker's optimizer done."""

    reduced_s: Mapping[int, float]
    committed_s: float
    stepped_s: Mapping[int, float]

    @property
    def step_s(self) -> float:
        return max(self.stepped_s.values(), default=self.committed_s)


def finish(
    plan: Plan,
    costs: Costs,
    computed_s: Mapping[int, float],
    issued_s: Mapping[int, Mapping[int, float]],
    twin: Mapping[int, int],
) -> End:
    """The end of a step whose simulated workers reach the commit point, and issue reductions, at these times."""
    reduced = _reductions(plan, costs, issued_s, twin)
    committed = max(*computed_s.values(), *reduced.values(), 0.0)
    if len(twin) > 1:
        committed += costs.profile.commit_s
    return End(reduced, committed, _optimizer_end(plan, costs, committed, twin))


def _reductions(
    plan: Plan, costs: Costs, issued: Mapping[int, Mapping[int, float]], twin: Mapping[int, int]
) -> dict[int, float]:
    """When each group's reduction is done. Of those that share a worker, the one that is ready first goes first."""
    ready = []
    for g, group in enumerate(plan.reduce):
        kinds = {twin[worker] for worker in group.workers}
        ready.append((max(issued[kind][g] for kind in kinds), group.round, g))
    free: dict[int, float] = {}
    done: dict[int, float] = {}
    gradient_bytes = costs.gradient_bytes
    for at, _, g in sorted(ready):
        group = plan.reduce[g]
        if len(group.workers) < 2:
            done[g] = at
            continue
        size = sum(gradient_bytes[layer] for layer in group.layers)
        size += sum(costs.profile.tie_bytes[tie] for tie in group.ties)
        start = max(at, max(free.get(worker, 0.0) for worker in group.workers))
        done[g] = start + costs.ring_s(costs.link_of(group.workers), len(group.workers), size)
        free.update(dict.fromkeys(group.workers, done[g]))
    return done


def _optimizer_end(plan: Plan, costs: Costs, start: float, twin: Mapping[int, int]) -> dict[int, float]:
    """When each simulated worker's optimizer step is done."""
    from perfmodel.sharing import share_equally

    work = {}
    for worker in set(twin.values()):
        p, s = plan.place[worker]
        stage = plan.pipelines[p].stages[s]
        work[worker] = costs.optimizer_s(stage.first, stage.stop)
    cores = costs.profile.cluster.cores
    if cores is None:
        return {worker: start + seconds for worker, seconds in work.items()}
    end: dict[int, float] = {}
    by_host: dict[int, dict[int, float]] = {}
    for worker, seconds in work.items():
        by_host.setdefault(costs.host(worker), {})[worker] = seconds
    for tasks in by_host.values():
        end.update({worker: start + took for worker, took in share_equally(tasks, cores).items()})
    return end
