"""List scheduling: a simulation in which every free worker starts the most urgent thing that is ready.

Backwards go first (they free memory and the stages before wait for them), then forwards as long as the worker's
activations stay under its cap, then deferred weight-gradients and, whole, backwards of a first stage, for which nobody waits.
The orders are the ones of a run that came to its end, so the workers can never wait for each other in a circle. Where caps
would stop everybody, the least overdraft is allowed and the memory model judges the result.

A backward is split in I and a deferred W where there is room for what the W needs; where there is none a deferred W goes
first, or else B runs whole. At the cap of 1F1B this comes to 1F1B; with memory to spare the W fill the bubbles (zero bubble,
Qi et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FINISH, ARRIVE = 0, 1
Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_INDEX = {kind: i for i, kind in enumerate(KINDS)}


@dataclass
class Tasks:
    """What is to be done: a task is one micro-batch at one stage of its home pipeline.

    The most urgent micro-batch comes first, and the tasks of each follow each other, stage by stage. By task: its worker, its
    (stage, micro-batch); whether its B may be split; the time of F, B, I and W, how long its input, and the gradient by it, are
    on their way; the bytes that it keeps from F on, and those that an I adds until its W.
    """

    worker: list[int] = field(default_factory=list)
    name: list[tuple[int, int]] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    splits: list[bool] = field(default_factory=list)
    times: list[tuple[float, float, float, float]] = field(default_factory=list)
    way: list[float] = field(default_factory=list)
    keeps: list[float] = field(default_factory=list)
    defers: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Row:
    """A worker of the simulation: what it has done, in order, and for how long; what is ready.

    `live`: the bytes that it keeps, `most`: at any time.
    """

    cap: float
    order: list[tuple[Kind, int, int]] = field(default_factory=list)
    worked: float = 0.0
    live: float = 0.0
    most: float = 0.0
    busy: bool = False
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)


class Run:
    """One simulation. `rows`: by worker. `now`: when it has played, the makespan.

    `caps`: by worker, the most bytes that it may keep. `forwards_first`: as long as there is room for them they go before
    backwards, so that no stage behind runs out of work.
    """

    def __init__(self, tasks: Tasks, caps: Mapping[int, float], *, forwards_first: bool = False) -> None:
        self.tasks = tasks
        self._forwards_first = forwards_first
        self.rows = {worker: Row(caps[worker]) for worker in sorted(set(tasks.worker))}
        self.now: float = 0
        self._events: list[tuple[float, int, int, str]] = []

    def play(self) -> None:
        """Run to the end."""
        tasks, events = self.tasks, self._events
        for task, (stage, _) in enumerate(tasks.name):
            if stage == 0:
                heapq.heappush(self.rows[tasks.worker[task]].forwards, task)
        touched = set(self.rows)
        while True:
            for worker in touched:
                if not self.rows[worker].busy:
                    self._start(worker)
            if not events:
                if not self._overdraw():
                    return
                continue
            self.now = events[0][0]
            touched = set()
            while events and events[0][0] <= self.now:
                _, event, task, kind = heapq.heappop(events)
                touched.add(tasks.worker[task])
                if event == ARRIVE:
                    self._ready(task, kind)
                else:
                    self._finish(task, kind, touched)

    def _start(self, worker: int) -> None:
        row, tasks = self.rows[worker], self.tasks
        if row.backwards and not (self._forwards_first and self._has_room(row)):
            task = row.backwards[0]
            if not tasks.splits[task]:
                self._run(row, row.backwards, "B")
            elif row.live + tasks.defers[task] <= row.cap:
                self._run(row, row.backwards, "I")
            elif row.deferred:
                self._run(row, row.deferred, self._deferred_kind(row.deferred[0]))
            else:
                self._run(row, row.backwards, "B")
        elif self._has_room(row):
            self._run(row, row.forwards, "F")
        elif row.deferred:
            self._run(row, row.deferred, self._deferred_kind(row.deferred[0]))

    def _deferred_kind(self, task: int) -> Kind:
        return "W" if self.tasks.name[task][0] > 0 else "B"

    def _has_room(self, row: Row) -> bool:
        """For the most urgent forward, if there is one."""
        return bool(row.forwards) and row.live + self.tasks.keeps[row.forwards[0]] <= row.cap

    def _run(self, row: Row, ready: list[int], kind: Kind) -> None:
        """Start `kind` of the most urgent task of `ready`."""
        tasks = self.tasks
        task = heapq.heappop(ready)
        stage, micro_batch = tasks.name[task]
        row.order.append((kind, stage, micro_batch))
        row.busy = True
        if kind == "F":
            row.live += tasks.keeps[task]
        elif kind == "I":
            row.live += tasks.defers[task]
        if row.live > row.most:
            row.most = row.live
        time = tasks.times[task][_INDEX[kind]]
        row.worked += time
        heapq.heappush(self._events, (self.now + time, FINISH, task, kind))

    def _finish(self, task: int, kind: str, touched: set[int]) -> None:
        tasks = self.tasks
        row = self.rows[tasks.worker[task]]
        row.busy = False
        if kind == "F":
            if tasks.is_last[task]:
                self._ready(task, "B")
            else:
                self._arrive(task + 1, "F", tasks.way[task + 1], touched)
            return
        if kind != "W" and tasks.name[task][0] > 0:
            self._arrive(task - 1, "B", tasks.way[task], touched)
        if kind == "I":
            heapq.heappush(row.deferred, task)
        else:
            row.live -= tasks.keeps[task] + (tasks.defers[task] if kind == "W" else 0)

    def _arrive(self, task: int, kind: str, delay: float, touched: set[int]) -> None:
        if delay > 0:
            heapq.heappush(self._events, (self.now + delay, ARRIVE, task, kind))
            return
        touched.add(self.tasks.worker[task])
        self._ready(task, kind)

    def _ready(self, task: int, kind: str) -> None:
        row = self.rows[self.tasks.worker[task]]
        back = row.backwards if self.tasks.name[task][0] > 0 else row.deferred  # nobody waits for a first stage's
        heapq.heappush(row.forwards if kind == "F" else back, task)

    def _overdraw(self) -> bool:
        """Everybody waits for memory: let the forward run that needs the least above its cap. False if all is done."""
        keeps = self.tasks.keeps
        waiting = [(row.live + keeps[row.forwards[0]] - row.cap, w) for w, row in self.rows.items() if row.forwards]
        if not waiting:
            return False
        row = self.rows[min(waiting)[1]]
        self._run(row, row.forwards, "F")
        return True
