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

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

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

    `live`: the bytes that it keeps, `most`: at any time. `ends`: when it will have done what it is `busy` with.
    """

    cap: float
    order: list[tuple[Kind, int, int]] = field(default_factory=list)
    worked: float = 0.0
    live: float = 0.0
    most: float = 0.0
    busy: bool = False
    ends: float = 0.0
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
        self._row_of = [self.rows[worker] for worker in tasks.worker]
        self._is_first = [stage == 0 for stage, _ in tasks.name]
        self.now: float = 0
        self._events: list[tuple[float, int, str]] = []
        """When, of which task, and what: a computation ends, or an input (`>`) or a gradient (`<`) arrives."""

    def play(self) -> None:
        """Run to the end."""
        events, row_of, finish, ready = self._events, self._row_of, self._finish, self._ready
        for task, is_first in enumerate(self._is_first):
            if is_first:
                heappush(row_of[task].forwards, task)
        touched = list(self.rows.values())
        while True:
            for row in touched:
                if not row.busy:
                    self._start(row)
            if not events:
                if not self._overdraw():
                    return
                continue
            self.now = now = events[0][0]
            touched = []
            while events and events[0][0] <= now:
                _, task, what = heappop(events)
                touched.append(row_of[task])
                if what in KINDS:
                    finish(task, what, touched)
                else:
                    ready(task, what)

    def _start(self, row: Row) -> None:
        tasks, forwards = self.tasks, row.forwards
        has_room = forwards and row.live + tasks.keeps[forwards[0]] <= row.cap
        if row.backwards and not (self._forwards_first and has_room):
            task = row.backwards[0]
            if not tasks.splits[task]:
                self._run(row, row.backwards, "B")
            elif row.live + tasks.defers[task] <= row.cap:
                self._run(row, row.backwards, "I")
            elif row.deferred:
                self._run(row, row.deferred, "B" if self._is_first[row.deferred[0]] else "W")
            else:
                self._run(row, row.backwards, "B")
        elif has_room:
            self._run(row, forwards, "F")
        elif row.deferred:
            self._run(row, row.deferred, "B" if self._is_first[row.deferred[0]] else "W")

    def _run(self, row: Row, ready: list[int], kind: Kind) -> None:
        """Start `kind` of the most urgent task of `ready`."""
        tasks = self.tasks
        task = heappop(ready)
        row.order.append((kind, *tasks.name[task]))
        row.busy = True
        if kind == "F":
            row.live += tasks.keeps[task]
        elif kind == "I":
            row.live += tasks.defers[task]
        if row.live > row.most:
            row.most = row.live
        time = tasks.times[task][_INDEX[kind]]
        row.worked += time
        row.ends = self.now + time
        heappush(self._events, (row.ends, task, kind))

    def _finish(self, task: int, kind: str, touched: list[Row]) -> None:
        tasks, row = self.tasks, self._row_of[task]
        row.busy = False
        if kind == "F":
            if tasks.is_last[task]:
                self._ready(task, "<")
            else:
                self._send(task + 1, ">", tasks.way[task + 1], touched)
            return
        if kind != "W" and not self._is_first[task]:
            self._send(task - 1, "<", tasks.way[task], touched)
        if kind == "I":
            heappush(row.deferred, task)
        else:
            row.live -= tasks.keeps[task] + (tasks.defers[task] if kind == "W" else 0)

    def _send(self, task: int, what: str, delay: float, touched: list[Row]) -> None:
        row, arrives = self._row_of[task], self.now + delay
        if row.busy and arrives <= row.ends:
            self._ready(task, what)  # nobody looks before
        elif delay > 0:
            heappush(self._events, (arrives, task, what))
        else:
            touched.append(row)
            self._ready(task, what)

    def _ready(self, task: int, what: str) -> None:
        row = self._row_of[task]
        if what == ">":
            heappush(row.forwards, task)
        else:  # nobody waits for a first stage's
            heappush(row.deferred if self._is_first[task] else row.backwards, task)

    def _overdraw(self) -> bool:
        """Everybody waits for memory: let the forward run that needs the least above its cap. False if all is done."""
        keeps = self.tasks.keeps
        waiting = [(row.live + keeps[row.forwards[0]] - row.cap, w) for w, row in self.rows.items() if row.forwards]
        if not waiting:
            return False
        row = self.rows[min(waiting)[1]]
        self._run(row, row.forwards, "F")
        return True
