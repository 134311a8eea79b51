"""From a Plan to the list of ops of one worker: the single source of op order for engine and simulator.

    program(plan, worker) = compute order -> + transfers -> + reductions, commit, step -> + drops

Each pass is a pure function from list to richer list. What an op is as text:

    1F5    forward of micro-batch 5 at stage 1 of its home pipeline       1F5>3  send its output to worker 3
    1B5    full backward (1I5 input-gradient, 1W5 weight-gradient)        1B5>0  send its input-gradient to worker 0
    0F5<2  at stage 1: receive from worker 2 what 0F5 sent                2B5<3  at stage 1: receive what 2B5 sent
    1D5    free what micro-batch 5 keeps at stage 1
    G2     start what is left of group 2's gradient reduction      C  commit point      S  optimizer step

The gradient that an `I` produces is sent as `B` too: what travels is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from odyssey.errors import PlanError
from odyssey.kernel import KINDS
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.proof import schedule_problems
from odyssey.plan.sharded import together
from odyssey.plan.split import split_orders
from odyssey.plan.worker import Worker

TransferKind = Literal["F", "B"]
N_RECEIVES_AHEAD = 4
"""A worker has posted so many of its next receives, and so has room for them."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send what `kind` at `stage` gave for `micro_batch` to worker `peer`. An output stays until its Drop, without a wait; for
    gradients see `gradients_taken`."""

    kind: TransferKind
    stage: int
    micro_batch: int
    peer: Worker

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}>{self.peer}"


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Wait for what `kind` at `stage` gave for `micro_batch` on worker `peer`."""

    kind: TransferKind
    stage: int
    micro_batch: int
    peer: Worker

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}<{self.peer}"


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Free the activations that `micro_batch` keeps at `stage`."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}D{self.micro_batch}"


class Reduce(msgspec.Struct, frozen=True, gc=False):
    """Start what is left of the gradient reduction of `plan.reduce[group]`.
    Its first buckets have started within the computation before (odyssey/plan/buckets.py)."""

    group: int

    def __str__(self) -> str:
        return f"G{self.group}"


class Commit(msgspec.Struct, frozen=True):
    """Wait for all reductions, then the tiny global reduction that makes the step final."""

    def __str__(self) -> str:
        return "C"


class OptimizerStep(msgspec.Struct, frozen=True):
    """The optimizer step of all layers held."""

    def __str__(self) -> str:
        return "S"


Op = Compute | Send | Receive | Drop | Reduce | Commit | OptimizerStep


def program(plan: Plan, worker: Worker) -> list[Op]:
    """All ops of one step of `worker`, in the order in which it issues them.

    Raises PlanError if an explicit order leaves out or repeats a computation.
    """
    if plan.is_sharded:
        return add_drops(add_reductions(plan, worker, together(plan, worker)))
    ops = add_transfers(plan, worker, compute_order(plan, worker))
    return add_drops(add_reductions(plan, worker, ops))


# -- pass 1: the order of computations ---------------------------------------------------------------------------------


def compute_order(plan: Plan, worker: Worker) -> list[Compute]:
    """The explicit order of the plan where there is one, else the plan's rule over the worker's own pipeline; in the rest of a
    step, what of it is left."""
    known: dict[Worker, list[Compute]] = _memory(plan, "compute_order")
    if worker not in known:
        in_step = plan.samples.in_step
        known[worker] = [op for op in _ordered(plan, worker) if op.micro_batch in in_step]
    return known[worker]


def _memory(plan: Plan, name: str) -> dict[Any, Any]:
    """What was derived of this plan already: expanding one worker asks for the orders of all that send to it."""
    memory: dict[Any, Any] = plan.__dict__.setdefault(f"_{name}", {})
    return memory


def _ordered(plan: Plan, worker: Worker) -> list[Compute]:
    if worker in plan.schedule.order_of:
        return _explicit(plan, worker, plan.schedule.order_of[worker].ops)
    for problem in schedule_problems(plan.schedule, plan.n_layers):
        raise PlanError(problem)
    if worker in plan.routed_to:
        raise PlanError(f"worker {worker} runs micro-batches of other pipelines and has no explicit order")
    if worker not in plan.place:
        return []
    p, s = plan.place[worker]
    if plan.schedule.rule == "split":
        first = plan.pipelines[p].first_micro_batch
        n_stages = len(plan.pipelines[p].stages)
        return [Compute(KINDS[op & 3], s, first + (op >> 2) // n_stages) for op in split_orders(plan, p)[s]]
    own = [k for k in plan.pipelines[p].micro_batches if (k, s) not in plan.route_of]
    return one_forward_one_backward(s, len(plan.pipelines[p].stages), own)


def one_forward_one_backward(stage: int, n_stages: int, micro_batches: Sequence[int]) -> list[Compute]:
    """Warm-up of `n_stages - stage - 1` forwards, then one forward and one backward in turn, then the rest backward.

    PipeDream-Flush, 1F1B (Narayanan et al. 2021): at most `n_stages - stage` micro-batches are in flight.
    """
    n_warm_up = min(n_stages - stage - 1, len(micro_batches))
    warm_up = [Compute("F", stage, k) for k in micro_batches[:n_warm_up]]
    steady: list[Compute] = []
    for i in range(n_warm_up, len(micro_batches)):
        steady += [Compute("F", stage, micro_batches[i]), Compute("B", stage, micro_batches[i - n_warm_up])]
    cool_down = [Compute("B", stage, k) for k in micro_batches[len(micro_batches) - n_warm_up :]]
    return warm_up + steady + cool_down


def _explicit(plan: Plan, worker: Worker, ops: Sequence[Compute]) -> list[Compute]:
    done: dict[tuple[int, int], str] = {}
    for op in ops:
        key = (op.stage, op.micro_batch)
        done[key] = kinds = done.get(key, "") + op.kind
        if kinds not in ("F", "FB", "FI", "FIW"):
            raise PlanError(f"worker {worker}: {op} stands where micro-batch {op.micro_batch} has run {kinds[:-1]!r}")
    expected = set(plan.routed_to.get(worker, ()))
    if worker in plan.place:
        p, s = plan.place[worker]
        expected |= {(s, k) for k in plan.pipelines[p].micro_batches if (k, s) not in plan.route_of}
    unfinished = {key for key, kinds in done.items() if kinds not in ("FB", "FIW")}
    for what, keys in (("misses", expected - set(done)), ("has foreign", set(done) - expected), ("ends inside", unfinished)):
        if keys:
            stage, micro_batch = min(keys)
            raise PlanError(f"worker {worker}: its order {what} micro-batch {micro_batch} at stage {stage}")
    return list(ops)


# -- pass 2: transfers -------------------------------------------------------------------------------------------------


def add_transfers(plan: Plan, worker: Worker, ops: Sequence[Compute]) -> list[Op]:
    """Put a send behind each computation whose result is needed elsewhere, and a receive before each that needs one.

    Messages of one kind between two workers are received in the order in which they are sent, so a receive that is
    needed early brings those before it along. Transports without tags (NCCL) need this.
    """
    sent_by: dict[tuple[TransferKind, Worker], deque[Receive]] = {}
    arrived: set[Receive] = set()
    result: list[Op] = []
    for op in ops:
        needed = _needs(plan, worker, op)
        if needed is not None and needed not in arrived:
            channel = (needed.kind, needed.peer)
            if channel not in sent_by:
                sent_by[channel] = deque(_sent(plan, needed.peer, worker, needed.kind))
            queue = sent_by[channel]
            while needed not in arrived:
                if not queue:
                    raise PlanError(f"worker {worker}: {op} waits for {needed}, which worker {needed.peer} never sends")
                arrived.add(queue[0])
                result.append(queue.popleft())
        result.append(op)
        if (send := _gives(plan, worker, op)) is not None:
            result.append(send)
    return result


def _needs(plan: Plan, worker: Worker, op: Compute) -> Receive | None:
    n_stages = len(plan.pipelines[plan.home[op.micro_batch]].stages)
    if op.kind == "F" and op.stage > 0:
        peer, kind, stage = plan.runner(op.micro_batch, op.stage - 1), "F", op.stage - 1
    elif op.kind in ("B", "I") and op.stage < n_stages - 1:
        peer, kind, stage = plan.runner(op.micro_batch, op.stage + 1), "B", op.stage + 1
    else:
        return None
    return None if peer == worker else Receive(kind, stage, op.micro_batch, peer)  # type: ignore[arg-type]


def _gives(plan: Plan, worker: Worker, op: Compute) -> Send | None:
    n_stages = len(plan.pipelines[plan.home[op.micro_batch]].stages)
    if op.kind == "F" and op.stage < n_stages - 1:
        peer, kind = plan.runner(op.micro_batch, op.stage + 1), "F"
    elif op.kind in ("B", "I") and op.stage > 0:
        peer, kind = plan.runner(op.micro_batch, op.stage - 1), "B"
    else:
        return None
    return None if peer == worker else Send(kind, op.stage, op.micro_batch, peer)  # type: ignore[arg-type]


def _sent(plan: Plan, sender: Worker, receiver: Worker, kind: TransferKind) -> list[Receive]:
    """What `receiver` gets from `sender` on the channel of `kind`, in the sender's order."""
    known: dict[Worker, dict[tuple[TransferKind, Worker], list[Receive]]] = _memory(plan, "sent")
    if sender not in known:
        channels: dict[tuple[TransferKind, Worker], list[Receive]] = {}
        for op in compute_order(plan, sender):
            if (send := _gives(plan, sender, op)) is not None:
                receive = Receive(send.kind, send.stage, send.micro_batch, sender)
                channels.setdefault((send.kind, send.peer), []).append(receive)
        known[sender] = channels
    return known[sender].get((kind, receiver), [])


def gradients_taken(plan: Plan, worker: Worker) -> dict[Receive, list[Send]] | None:
    """The gradients that `worker` can let go of at each of its receives, as the peer had received them before it sent this.

    None where it may wait for the oldest gradient to be received: the workers of its pipeline run one stage each. So a receiver
    waits for stages before its own at most, and the first stage for nobody. Where micro-batches are routed a worker that waited
    could stand still for good: the peer may take a gradient only behind what this worker would compute next.
    """
    if worker not in plan.place or plan.place[worker][0] not in plan.routed:
        return None
    own: dict[Worker, deque[Send]] = {}
    for op in compute_order(plan, worker):
        send = _gives(plan, worker, op)
        if send is not None and send.kind == "B":
            own.setdefault(send.peer, deque()).append(send)
    found: dict[Receive, list[Send]] = {}
    for peer, given in own.items():
        taken: list[Send] = []
        for theirs in add_transfers(plan, peer, compute_order(plan, peer)):
            if isinstance(theirs, Receive) and theirs.kind == "B" and theirs.peer == worker:
                taken.append(given.popleft())
            elif isinstance(theirs, Send) and theirs.peer == worker and taken:
                found[Receive(theirs.kind, theirs.stage, theirs.micro_batch, peer)] = taken
                taken = []
    return found


# -- pass 3 and 4: reductions, commit, step, drops ---------------------------------------------------------------------


def add_reductions(plan: Plan, worker: Worker, ops: Sequence[Op]) -> list[Op]:
    """Behind the last computation that adds to a group's gradients, or to those of layers above, start what is not yet started
    of its reduction (odyssey/plan/buckets.py); then commit and step."""
    if worker not in plan.holds:
        return list(ops)
    complete = complete_at(plan, worker, ops)
    lowest = {g: _lowest_layer(plan, g) for g in plan.groups_of.get(worker, ())}
    behind: dict[int, list[Op]] = {}
    for g in sorted(lowest, key=lambda g: (-lowest[g], g)):
        behind.setdefault(complete[lowest_from(complete, lowest[g])][0], []).append(Reduce(g))
    result: list[Op] = []
    done = 0
    for i in sorted(behind):
        result += ops[done : i + 1]
        result += behind[i]
        done = i + 1
    return [*result, *ops[done:], Commit(), OptimizerStep()]


def complete_at(plan: Plan, worker: Worker, ops: Sequence[Op]) -> dict[int, tuple[int, int]]:
    """Layer held -> where in `ops` the gradients of it and of all held layers above are complete: the index of a computation,
    -1 for none, and the layer through which that must have gone back. Where `ops` add nothing to a layer, it waits for the next
    one below: a reduction that is begun long before others come to it takes up a part of a device."""
    held = sorted(plan.holds[worker])
    last: dict[int, int] = {}
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if isinstance(op, Compute) and op.kind in ("B", "W"):
            for layer in plan.layer_range(op.micro_batch, op.stage).layers:
                last.setdefault(layer, i)
            if len(last) == len(held):
                break
    found = {}
    at = (-1, held[-1] + 1)
    for layer in reversed(held):
        if last.get(layer, -2) >= at[0]:
            at = (last[layer], layer)
        found[layer] = at
    for below, layer in pairwise(held):
        if layer not in last:
            found[layer] = found[below]
    return found


def lowest_from(layers: Iterable[int], lowest: int) -> int:
    """The lowest of these layers that is not below `lowest`: with it all that a worker adds from there on is complete."""
    return min(layer for layer in layers if layer >= lowest)


def _lowest_layer(plan: Plan, group: int) -> int:
    its = plan.reduce[group]
    return min([*its.layers, *(layer for tie in its.ties for layer in plan.ties[tie])])


def add_drops(ops: Sequence[Op]) -> list[Op]:
    """Free a micro-batch's activations right behind its last computation (`B` or `W`) on this worker."""
    result: list[Op] = []
    for op in ops:
        result.append(op)
        if isinstance(op, Compute) and op.kind in ("B", "W"):
            result.append(Drop(op.stage, op.micro_batch))
    return result


# -- checks and pictures -----------------------------------------------------------------------------------------------


def dependency_order(programs: Mapping[Worker, Sequence[Op]]) -> list[tuple[Worker, Op]]:
    """All ops of all workers in one order that respects every program and every transfer.

    Raises PlanError naming the ops at which the workers wait for each other, with the grid of what has run, if the
    programs and transfers have a cycle, or a receive that nobody sends.
    """
    position = dict.fromkeys(programs, 0)
    sent: set[tuple[TransferKind, int, int, Worker, Worker]] = set()
    order: list[tuple[Worker, Op]] = []
    moving = True
    while moving:
        moving = False
        for worker, ops in programs.items():
            while position[worker] < len(ops):
                op = ops[position[worker]]
                if isinstance(op, Receive) and (op.kind, op.stage, op.micro_batch, op.peer, worker) not in sent:
                    break
                if isinstance(op, Send):
                    sent.add((op.kind, op.stage, op.micro_batch, worker, op.peer))
                order.append((worker, op))
                position[worker] += 1
                moving = True
    stuck = {worker: position[worker] for worker, ops in programs.items() if position[worker] < len(ops)}
    if stuck:
        waits = ", ".join(f"worker {worker} at {programs[worker][i]}" for worker, i in stuck.items())
        raise PlanError(f"the workers wait for each other: {waits}\n{grid(programs, stuck)}")
    return order


def grid(programs: Mapping[Worker, Sequence[Op]], marks: Mapping[Worker, int] | None = None) -> str:
    """Worker x time picture of the computations, one column a slot; `marks`: worker -> index of an op to point at."""
    marks = marks or {}
    lines = []
    width = max((len(str(op)) for ops in programs.values() for op in ops if isinstance(op, Compute)), default=1) + 1
    for worker, ops in programs.items():
        cells = []
        for i, op in enumerate(ops):
            if i == marks.get(worker):
                cells.append(f"{op} <-- here ")
            elif isinstance(op, Compute):
                cells.append(str(op).ljust(width))
        lines.append(f"worker {worker:<4} {''.join(cells)}".rstrip())
    return "\n".join(lines)


# -- evaluation -----------------------------------------------------------------------------------------------------------


def forward_route(plan: Plan, micro_batch: int) -> list[tuple[Worker, range]]:
    """The (worker, layers) that run micro-batch number `micro_batch` of an evaluation, stage by stage.

    Micro-batches go round the pipelines; where a stage has lost its worker, one of those that its routes name runs it.
    """
    p = micro_batch % len(plan.pipelines)
    route = []
    for s, stage in enumerate(plan.pipelines[p].stages):
        worker = stage.worker if stage.worker is not None else plan.runner(plan.pipelines[p].first_micro_batch, s)
        route.append((worker, stage.layers))
    return route
