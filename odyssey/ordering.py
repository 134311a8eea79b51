"""List scheduling: a simulation in which every free worker starts the most urgent thing that is ready.

Backwards go first (they free memory and the stages before wait for them), then forwards as long as the worker's
activations stay under its cap, then deferred weight-gradients. 1F1B is what this gives where nothing is lost. The orders are
the ones of a run that came to its end, so the workers can never wait for each other in a circle. Where caps would
stop everybody, the least overdraft is allowed and the memory model judges the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FINISH, ARRIVE = 0, 1
Kind = Literal["F", "B", "I", "W"]


@dataclass
class Tasks:
    """What is to be done: a task is one micro-batch at one stage of its home pipeline.

    The tasks of a micro-batch follow each other, stage by stage. `split`: B as I and a deferred W. By task: its worker, its
    (stage, micro-batch), its urgency, less is sooner; the seconds of its computations by kind (`FB`, or `FIW`), how long its
    input, and the gradient by it, are on their way; the bytes that it keeps from F on, and those that it defers from I to W.
    """

    split: bool
    worker: list[int] = field(default_factory=list)
    name: list[tuple[int, int]] = field(default_factory=list)
    urgency: list[tuple[int, int]] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    way_s: list[float] = field(default_factory=list)
    keeps: list[float] = field(default_factory=list)
    defers: list[float] = field(default_factory=list)


@dataclass
class Row:
    """A worker of the simulation: what it has done, in order, and for how long; what it keeps; what is ready."""

    order: list[tuple[Kind, int, int]] = field(default_factory=list)
    worked_s: float = 0.0
    live: float = 0.0
    busy: bool = False
    forwards: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    backwards: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    deferred: list[tuple[tuple[int, int], int]] = field(default_factory=list)


class Run:
    """One simulation. `rows`: by worker. `now`: seconds; when it has played, the makespan."""

    def __init__(self, tasks: Tasks, caps: Mapping[int, float]) -> None:
        self.tasks, self.caps = tasks, caps
        self.rows = {worker: Row() for worker in sorted(set(tasks.worker))}
        self.now = 0.0
        self._events: list[tuple[float, int, int, str]] = []
        self._kinds: tuple[Kind, ...] = ("F", "I", "W") if tasks.split else ("F", "B")

    def play(self) -> None:
        """Run to the end."""
        tasks, events = self.tasks, self._events
        for task, (stage, _) in enumerate(tasks.name):
            if stage == 0:
                heapq.heappush(self.rows[tasks.worker[task]].forwards, (tasks.urgency[task], task))
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
        row = self.rows[worker]
        if row.backwards:
            self._run(row, heapq.heappop(row.backwards)[1], self._kinds[1])
        elif row.forwards and row.live + self.tasks.keeps[row.forwards[0][1]] <= self.caps[worker]:
            self._run(row, heapq.heappop(row.forwards)[1], "F")
        elif row.deferred:
            self._run(row, heapq.heappop(row.deferred)[1], "W")

    def _run(self, row: Row, task: int, kind: Kind) -> None:
        tasks = self.tasks
        row.order.append((kind, *tasks.name[task]))
        row.busy = True
        if kind == "F":
            row.live += tasks.keeps[task]
        elif kind == "I":
            row.live += tasks.defers[task]
        seconds = tasks.seconds[task][self._kinds.index(kind)]
        row.worked_s += seconds
        heapq.heappush(self._events, (self.now + seconds, FINISH, task, kind))

    def _finish(self, task: int, kind: str, touched: set[int]) -> None:
        tasks = self.tasks
        row = self.rows[tasks.worker[task]]
        row.busy = False
        if kind == "F":
            if tasks.is_last[task]:
                self._ready(task, "B")
            else:
                self._arrive(task + 1, "F", tasks.way_s[task + 1], touched)
            return
        if kind != "W" and tasks.name[task][0] > 0:
            self._arrive(task - 1, "B", tasks.way_s[task], touched)
        if kind == "I":
            heapq.heappush(row.deferred, (tasks.urgency[task], task))
        elif kind == "B":
            row.live -= tasks.keeps[task]
        else:
            row.live -= tasks.keeps[task] + tasks.defers[task]

    def _arrive(self, task: int, kind: str, delay_s: float, touched: set[int]) -> None:
        if delay_s > 0:
            heapq.heappush(self._events, (self.now + delay_s, ARRIVE, task, kind))
            return
        touched.add(self.tasks.worker[task])
        self._ready(task, kind)

    def _ready(self, task: int, kind: str) -> None:
        row = self.rows[self.tasks.worker[task]]
        heapq.heappush(row.forwards if kind == "F" else row.backwards, (self.tasks.urgency[task], task))

    def _overdraw(self) -> bool:
        """Everybody waits for memory: let the forward run that needs the least above its cap. False if all is done."""
        keeps = self.tasks.keeps
        waiting = [(row.live + keeps[row.forwards[0][1]] - self.caps[w], w) for w, row in self.rows.items() if row.forwards]
        if not waiting:
            return False
        row = self.rows[min(waiting)[1]]
        self._run(row, heapq.heappop(row.forwards)[1], "F")
        return True
