"""Where a search spends its time: list scheduling, the walk of a step, and the queue of its reductions.

Plain Python on lists of numbers that imports nothing but the standard library, so that mypyc can compile it as it is: this file
is both what runs where there is no compiler and the oracle of what runs where there is one. Both do the same arithmetic in the
same order, so they agree to the last bit: an agent that has one and a rank that has the other order a pipeline alike.

A task is one micro-batch at one stage; the tasks of a micro-batch follow each other. An op is `4 * task + kind`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

F: Final = 0
B: Final = 1
I: Final = 2  # noqa: E741
W: Final = 3
INPUT: Final = 4
GRADIENT: Final = 5
"""Kinds of ops; in the events of list scheduling also that an input, or a gradient, arrives."""
N_GRADIENTS_SENT: Final = 4
"""A worker has room for so many gradients that it has sent. Where it may not wait until they have come it keeps more."""


class Tasks:
    """What is to be done, by task: the row (a worker) that does it, and whether it is of a first stage, or of a last one."""

    def __init__(self, row: list[int], is_first: list[bool], is_last: list[bool]) -> None:
        self.row = row
        self.is_first = is_first
        self.is_last = is_last


# -- list scheduling ---------------------------------------------------------------------------------------------------


class Part:
    """What a micro-batch costs at a stage, in whole numbers: the time of F, B, I and W, what it keeps from F on, and what an I
    adds until its W. `splits`: whether its B may be split."""

    def __init__(self, splits: bool, times: tuple[int, int, int, int], keeps: int, defers: int) -> None:
        self.splits = splits
        self.forward, self.backward, self.of_input, self.of_weight = times
        self.keeps = keeps
        self.defers = defers


class Row:
    """A worker of list scheduling: for how long it has worked, and what is ready, as heaps of tasks.

    `live`: what it keeps, `most`: at any time. `ends`: when it will have done what it is `busy` with.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.worked = 0
        self.live = 0
        self.most = 0
        self.ends = 0
        self.busy = False
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.deferred: list[int] = []


class Scheduler:
    """A simulation in which every free row starts the most urgent thing that is ready; of equals the lowest task.

    Backwards go first (they free memory and the stages before wait for them), then forwards as long as the row keeps less than
    its cap, then deferred weight-gradients and, whole, backwards of a first stage, for which nobody waits. The orders are those
    of a run that came to its end, so the rows can never wait for each other in a circle. Where caps would stop everybody, the
    least overdraft is allowed and the memory model judges the result.

    A backward is split in I and a deferred W where there is room for what the W needs; where there is none a deferred W goes
    first, or else B runs whole. At the cap of 1F1B this comes to 1F1B; with memory to spare the W fill the bubbles (zero
    bubble, Qi et al. 2024).
    """

    def __init__(self, tasks: Tasks, parts: list[Part], way: list[int], caps: list[int], forwards_first: bool) -> None:
        """`way`: by task, how long its input, and the gradient by it, are on their way. `caps`: by row. `forwards_first`: as
        long as there is room for them they go before backwards, so that no stage behind runs out of work."""
        self.tasks = tasks
        self.parts = parts
        self.way = way
        self.forwards_first = forwards_first
        self.rows = [Row(cap) for cap in caps]
        self.now = 0
        self.started: list[int] = []
        """Ops."""
        self.events: list[int] = []
        """When, and in the last bits which `8 * task + what`: a computation ends, or something arrives."""
        self.bits = len(tasks.row).bit_length() + 3

    def play(self) -> None:
        """Run to the end: `now` is the makespan then."""
        rows, events, row_of, is_first = self.rows, self.events, self.tasks.row, self.tasks.is_first
        for task in range(len(row_of)):
            if is_first[task]:
                rows[row_of[task]].forwards.append(task)  # in their order, so it is a heap
        touched = list(range(len(rows)))
        mask = (1 << (self.bits - 3)) - 1
        while True:
            for number in touched:
                row = rows[number]
                if not row.busy:
                    self._start(row)
            if not events:
                if not self._overdraw():
                    return
                continue
            touched = []
            now = events[0] >> self.bits
            self.now = now
            after = (now + 1) << self.bits
            while events and events[0] < after:
                code = heappop(events)
                task = (code >> 3) & mask
                touched.append(row_of[task])
                what = code & 7
                if what < INPUT:
                    self._finish(task, what, touched)
                else:
                    self._ready(task, what)

    def _start(self, row: Row) -> None:
        part, forwards, backwards = self.parts, row.forwards, row.backwards
        if self.forwards_first and forwards and row.live + part[forwards[0]].keeps <= row.cap:
            self._run(row, forwards, F)
        elif backwards:
            its = part[backwards[0]]
            if its.splits and row.live + its.defers <= row.cap:
                self._run(row, backwards, I)
            elif its.splits and row.deferred:
                self._run_deferred(row)
            else:
                self._run(row, backwards, B)
        elif forwards and row.live + part[forwards[0]].keeps <= row.cap:
            self._run(row, forwards, F)
        elif row.deferred:
            self._run_deferred(row)

    def _run_deferred(self, row: Row) -> None:
        self._run(row, row.deferred, B if self.tasks.is_first[row.deferred[0]] else W)

    def _run(self, row: Row, ready: list[int], kind: int) -> None:
        """Start `kind` of the most urgent task of `ready`."""
        task = heappop(ready)
        part = self.parts[task]
        if kind == F:
            row.live += part.keeps
            time = part.forward
        elif kind == B:
            time = part.backward
        elif kind == I:
            row.live += part.defers
            time = part.of_input
        else:
            time = part.of_weight
        if row.live > row.most:
            row.most = row.live
        row.busy = True
        row.worked += time
        row.ends = self.now + time
        self.started.append(4 * task + kind)
        heappush(self.events, row.ends << self.bits | task << 3 | kind)

    def _finish(self, task: int, kind: int, touched: list[int]) -> None:
        tasks = self.tasks
        row, part = self.rows[tasks.row[task]], self.parts[task]
        row.busy = False
        if kind == F:
            if tasks.is_last[task]:
                self._ready(task, GRADIENT)
            else:
                self._send(task + 1, INPUT, self.way[task + 1], touched)
            return
        if kind != W and not tasks.is_first[task]:
            self._send(task - 1, GRADIENT, self.way[task], touched)
        if kind == I:
            heappush(row.deferred, task)
        elif kind == W:
            row.live -= part.keeps + part.defers
        else:
            row.live -= part.keeps

    def _send(self, task: int, what: int, delay: int, touched: list[int]) -> None:
        number = self.tasks.row[task]
        row, arrives = self.rows[number], self.now + delay
        if row.busy and arrives <= row.ends:
            self._ready(task, what)  # nobody looks before
        elif delay > 0:
            heappush(self.events, arrives << self.bits | task << 3 | what)
        else:
            touched.append(number)
            self._ready(task, what)

    def _ready(self, task: int, what: int) -> None:
        row = self.rows[self.tasks.row[task]]
        if what == INPUT:
            heappush(row.forwards, task)
        elif self.tasks.is_first[task]:  # nobody waits for it
            heappush(row.deferred, task)
        else:
            heappush(row.backwards, task)

    def _overdraw(self) -> bool:
        """All wait for memory: let the forward run that needs the least above its cap. False if all is done."""
        part = self.parts
        shortest: Row | None = None
        least = 0
        for row in self.rows:
            if row.forwards:
                lacks = row.live + part[row.forwards[0]].keeps - row.cap
                if shortest is None or lacks < least:
                    shortest, least = row, lacks
        if shortest is None:
            return False
        self._run(shortest, shortest.forwards, F)
        return True


# -- the walk of a step ------------------------------------------------------------------------------------------------


class Cost:
    """What a micro-batch costs at a stage: seconds of F, B, I and W, the bytes that it keeps from F on, and those that an I
    adds until its W."""

    def __init__(
        self, forward_s: float, backward_s: float, of_input_s: float, of_weight_s: float, keeps: float, defers: float
    ) -> None:
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.of_input_s = of_input_s
        self.of_weight_s = of_weight_s
        self.keeps = keeps
        self.defers = defers


class Messages:
    """What tasks send each other. By task: the channel on which its input comes, and the one on which the gradient by it goes
    back, -1 where its own row has them; how large they are, and the largest that they ever are. By channel: its link."""

    def __init__(
        self,
        there: list[int],
        back: list[int],
        size: list[float],
        largest: list[int],
        bandwidth: list[float],
        latency_s: list[float],
    ) -> None:
        self.there = there
        self.back = back
        self.size = size
        self.largest = largest
        self.bandwidth = bandwidth
        self.latency_s = latency_s


class Walker:
    """A row of a walk. `ended`: layers that it runs, by number -> when their gradients were added to last, and by which op.

    `live`: the bytes of activations that it keeps, `most`: at any time, with gradients that it has sent and keeps beyond
    `N_GRADIENTS_SENT`: `n_sent` of `gradient_bytes` at most, none where it `waits` for the oldest to have come.
    `message_bytes`: its largest message, in either direction.
    """

    def __init__(self, order: list[int], waits: bool) -> None:
        self.order = order
        self.waits = waits
        self.position = 0
        self.now = 0.0
        self.live = 0.0
        self.most = 0.0
        self.message_bytes = 0
        self.gradient_bytes = 0
        self.n_sent = 0
        self.ended: dict[int, tuple[float, int]] = {}


class Sent:
    """Gradients that rows keep until they know that these have come (odyssey/plan/schedule.py, `gradients_taken`).

    By channel: how many were `given`, how many of these its receiver has `taken`, and of how many its sender has `known` that.
    By task, of what comes to it: the `number` of a gradient on its channel, and how many gradients its sender had taken on the
    channel back when it sent an input, or a gradient.
    """

    def __init__(self, n_tasks: int, n_channels: int) -> None:
        self.given = [0] * n_channels
        self.taken = [0] * n_channels
        self.known = [0] * n_channels
        self.number = [0] * n_tasks
        self.told_by_input = [0] * n_tasks
        self.told_by_gradient = [0] * n_tasks

    def give(self, task: int, channel: int, back: int) -> None:
        """Send the gradient that `task` waits for."""
        self.number[task] = self.given[channel]
        self.given[channel] += 1
        self.told_by_gradient[task] = self.taken[back]

    def take(self, task: int, channel: int) -> None:
        """Receive it. Those that were sent before have come along."""
        if self.number[task] >= self.taken[channel]:
            self.taken[channel] = self.number[task] + 1

    def n_come(self, channel: int, told: int) -> int:
        """How many more have come for all that the sender knows, who is told of so many."""
        more = told - self.known[channel]
        if more <= 0:
            return 0
        self.known[channel] = told
        return more


class Walk:
    """The computations of rows with a device each, every row in its order of ops."""

    def __init__(
        self,
        tasks: Tasks,
        costs: list[Cost],
        layers: list[int],
        messages: Messages,
        orders: list[list[int]],
        waits: list[bool],
    ) -> None:
        """`costs`, `layers`: by task; `layers` are the number of its stage's. `orders`, `waits`: by row."""
        n_tasks = len(tasks.row)
        self.row_of, self.is_first, self.is_last = tasks.row, tasks.is_first, tasks.is_last
        self.costs = costs
        self.layers = layers
        self.there, self.back, self.messages = messages.there, messages.back, messages
        self.rows = [Walker(order, waits[i]) for i, order in enumerate(orders)]
        self.inputs = [-1.0] * n_tasks
        """When each is there; -1 until it is sent, -2 if its row waits for it."""
        self.gradients = [-1.0] * n_tasks
        self.free = [0.0] * len(messages.bandwidth)
        self.sent = Sent(n_tasks, len(messages.bandwidth))

    def play(self) -> bool:
        """Run to the end, each row on a device of its own; False if rows wait for each other."""
        ready = list(range(len(self.rows)))
        while ready:
            row = self.rows[ready.pop()]
            order, now = row.order, row.now
            n_ops = len(order)
            while row.position < n_ops:
                op = order[row.position]
                arrives = self.arrives_s(op)
                if arrives < 0.0:
                    break
                now = (now if now > arrives else arrives) + self.seconds(op)
                self.finish(row, op, now, ready)
        return self.is_done()

    def is_done(self) -> bool:
        """Whether all rows are at their end."""
        return all(row.position == len(row.order) for row in self.rows)

    def arrives_s(self, op: int) -> float:
        """When there is what an op waits for: 0 where that is nothing, -1 if it has not been sent. Its row is told then."""
        task, kind = op >> 2, op & 3
        if kind == F:
            if self.there[task] < 0:
                return 0.0
            arrivals = self.inputs
        else:
            if kind == W or self.is_last[task] or self.back[task + 1] < 0:
                return 0.0
            arrivals = self.gradients
        arrives = arrivals[task]
        if arrives < 0.0:
            arrivals[task] = -2.0
            return -1.0
        return arrives

    def seconds(self, op: int) -> float:
        """How long an op takes alone."""
        cost, kind = self.costs[op >> 2], op & 3
        if kind == F:
            return cost.forward_s
        if kind == B:
            return cost.backward_s
        return cost.of_input_s if kind == I else cost.of_weight_s

    def finish(self, row: Walker, op: int, now: float, ready: list[int]) -> None:
        """The next op of a row ends: count what it keeps and frees, send what it gives. What waits for that becomes ready."""
        task, kind = op >> 2, op & 3
        cost = self.costs[task]
        row.position += 1
        row.now = now
        if kind == F:
            if not row.waits and self.back[task] >= 0:
                row.n_sent -= self.sent.n_come(self.back[task], self.sent.told_by_input[task])
            row.live += cost.keeps
            if not self.is_last[task] and self.there[task + 1] >= 0:
                if not row.waits:
                    self.sent.told_by_input[task + 1] = self.sent.taken[self.back[task + 1]]
                self._send(row, now, task + 1, self.there[task + 1], self.inputs, task + 1, ready)
        elif kind == W:
            row.live -= cost.keeps + cost.defers
            row.ended[self.layers[task]] = (now, op)
        else:
            if not row.waits and not self.is_last[task] and self.back[task + 1] >= 0:
                self.sent.take(task, self.back[task + 1])
                row.n_sent -= self.sent.n_come(self.there[task + 1], self.sent.told_by_gradient[task])
            if kind == I:
                row.live += cost.defers
            else:
                row.live -= cost.keeps
                row.ended[self.layers[task]] = (now, op)
            if not self.is_first[task] and self.back[task] >= 0:
                if not row.waits:
                    self._give(row, task)
                self._send(row, now, task, self.back[task], self.gradients, task - 1, ready)
        live = row.live
        if row.n_sent > N_GRADIENTS_SENT:
            live += (row.n_sent - N_GRADIENTS_SENT) * row.gradient_bytes
        if live > row.most:
            row.most = live

    def _give(self, row: Walker, task: int) -> None:
        """The gradient by the input of `task`, which the row keeps."""
        self.sent.give(task - 1, self.back[task], self.there[task])
        row.n_sent += 1
        largest = self.messages.largest[task]
        if largest > row.gradient_bytes:
            row.gradient_bytes = largest

    def _send(
        self, row: Walker, now: float, cut: int, channel: int, arrivals: list[float], task: int, ready: list[int]
    ) -> None:
        """A message at the cut before task `cut` that may leave now, for `task`: one after the other on each channel."""
        messages, number = self.messages, self.row_of[task]
        to, largest = self.rows[number], messages.largest[cut]
        if largest > row.message_bytes:
            row.message_bytes = largest
        if largest > to.message_bytes:
            to.message_bytes = largest
        free = self.free[channel]
        leaves = (now if now > free else free) + messages.size[cut] / messages.bandwidth[channel]
        self.free[channel] = leaves
        if arrivals[task] < -1.0:
            ready.append(number)
        arrivals[task] = leaves + messages.latency_s[channel]


# -- reductions --------------------------------------------------------------------------------------------------------


class Group:
    """The buckets of a group of workers, in the order in which they start: when each is ready, its lowest layer, the seconds of
    its reduction, and those that it occupies the interfaces of its hosts for.

    `sharing`: groups that share a worker with it, itself among them. `hosts`: by number; none where interfaces do not matter.
    `ends_s`: of those that are done.
    """

    def __init__(
        self,
        ready_s: list[float],
        lowest: list[int],
        seconds: list[float],
        interface_s: list[float],
        sharing: list[int],
        hosts: list[int],
    ) -> None:
        self.ready_s = ready_s
        self.lowest = lowest
        self.seconds = seconds
        self.interface_s = interface_s
        self.sharing = sharing
        self.hosts = hosts
        self.free_s = 0.0
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []


def reduced_s(groups: list[Group], n_hosts: int) -> float:
    """When the last bucket is reduced: each starts when it is ready and none of its workers is in another one; of those that
    share a worker the one that can start first goes first."""
    busy = [0.0] * n_hosts
    last = 0.0
    waiting = [(its.ready_s[0], its.ready_s[0], -its.lowest[0], g) for g, its in enumerate(groups) if its.ready_s]
    heapify(waiting)
    while waiting:
        start, ready, minus_lowest, g = heappop(waiting)
        its = groups[g]
        if its.free_s > start:  # something else was first
            heappush(waiting, (its.free_s, ready, minus_lowest, g))
            continue
        i = len(its.ends_s)
        end = start + its.seconds[i]
        if its.hosts:
            free = start
            for host in its.hosts:
                if busy[host] > free:
                    free = busy[host]
            free += its.interface_s[i]
            for host in its.hosts:
                busy[host] = free
            if free > end:
                end = free
        for other in its.sharing:
            if end > groups[other].free_s:
                groups[other].free_s = end
        its.starts_s.append(start)
        its.ends_s.append(end)
        if end > last:
            last = end
        i += 1
        if i < len(its.ready_s):
            ready = its.ready_s[i]
            heappush(waiting, (ready if ready > its.free_s else its.free_s, ready, -its.lowest[i], g))
    return last
