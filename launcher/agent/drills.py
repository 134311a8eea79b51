"""`--drill 'step=20 kill=2'` makes faults on purpose, so that recovery is seen before it is needed.
They come at a random moment of a step; returns of ranks are among them."""

from __future__ import annotations

import random
import re
import signal
from functools import partial

import msgspec

from launcher.cluster.leading.cluster import Cluster
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import NoticeGiven, SlotsReturned
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank, numbers_from

HELP = "for example: --drill 'step=20 kill=2', 'after=30s lose=node1', 'step=9 hang=3', 'step=40 join=node1'"
_WORDS = "step=, after=, kill=, lose=, hang=, leave=, join="
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "m": 60.0, "h": 3600.0}


class Drill(msgspec.Struct, frozen=True):
    """One fault, or return.
    When: within `step`, or `after_s` seconds from the start. What: `kill`, `lose` (the slot, too), `hang`, `leave`, or
    `join` (a lost slot is there again)."""

    text: str
    step: int | None
    after_s: float | None
    action: str
    ranks: tuple[Rank, ...]


def parse(text: str, *, n_nodes: int, n_ranks_per_node: int) -> tuple[Drill, ...]:
    """All faults of one `--drill`: one moment, then one or more actions. Raises UsageError naming the part that is wrong.

    `n_nodes`: as many as the job may have, those of other agents too, each taken to have as many ranks.
    """
    step: int | None = None
    after_s: float | None = None
    drills: list[Drill] = []
    for part in text.replace(",", " ").split():
        key, _, value = part.partition("=")
        if key == "step":
            if not value.isdecimal():
                raise UsageError(f"--drill {text!r}: step: expected a number, got {value!r}", HELP)
            step, after_s = int(value), None
        elif key == "after":
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|)", value)
            if match is None:
                raise UsageError(f"--drill {text!r}: after: expected a duration, got {value!r}", HELP)
            step, after_s = None, float(match[1]) * _UNITS[match[2]]
        elif key in ("kill", "lose", "hang", "leave", "join"):
            if step is None and after_s is None:
                raise UsageError(f"--drill {text!r}: {part}: says not when", HELP)
            ranks = _ranks(text, part, value, n_nodes, n_ranks_per_node)
            drills.append(Drill(text, step, after_s, key, ranks))
        else:
            raise UsageError(f"--drill {text!r}: {part!r} is none of {_WORDS}", HELP)
    if not drills:
        raise UsageError(f"--drill {text!r}: says not what to do", HELP)
    return tuple(drills)


def _ranks(text: str, part: str, value: str, n_nodes: int, n_ranks_per_node: int) -> tuple[Rank, ...]:
    match = re.fullmatch(r"(node)?(\d+)", value)
    if match is None:
        raise UsageError(f"--drill {text!r}: {part}: expected a rank or node<number>", HELP)
    number, n_ranks = int(match[2]), n_nodes * n_ranks_per_node
    if match[1]:
        if number >= n_nodes:
            raise UsageError(f"--drill {text!r}: {part}: there are nodes 0 to {n_nodes - 1}", HELP)
        return tuple(numbers_from(Rank(number * n_ranks_per_node), n_ranks_per_node))
    if number >= n_ranks:
        raise UsageError(f"--drill {text!r}: {part}: there are ranks 0 to {n_ranks - 1}", HELP)
    return (Rank(number),)


class DrillSchedule:
    """The faults that are still to come. The agent tells what has passed, and is told what to do in how many seconds."""

    def __init__(self, drills: tuple[Drill, ...], moments: random.Random) -> None:
        self._waiting = list(drills)
        self._random = moments

    def at_start(self) -> list[tuple[float, Drill]]:
        """(seconds from now, drill) of those that wait for a time."""
        return self._take([(drill.after_s, drill) for drill in self._waiting if drill.after_s is not None])

    def on_step(self, next_step: int, step_s: float) -> list[tuple[float, Drill]]:
        """`next_step` begins now and is expected to take `step_s`: what falls into it, each at a random moment."""
        due = [drill for drill in self._waiting if drill.step is not None and drill.step <= next_step]
        return self._take([(self._random.uniform(0.0, step_s), drill) for drill in due])

    def _take(self, due: list[tuple[float, Drill]]) -> list[tuple[float, Drill]]:
        self._waiting = [drill for drill in self._waiting if all(drill is not taken for _, taken in due)]
        return due

    @property
    def never_fired(self) -> tuple[Drill, ...]:
        return tuple(self._waiting)


class Faults:
    """Fires the drills of a job at its ranks."""

    def __init__(self, drills: tuple[Drill, ...], loop: Loop, cluster: Cluster, sink: EventSink) -> None:
        self._schedule = DrillSchedule(drills, random.Random())
        self._loop = loop
        self._cluster = cluster
        self._sink = sink
        self._has_ended = False

    def at_start(self) -> None:
        """Arm those that wait for a time."""
        for seconds, fault in self._schedule.at_start():
            self._loop.later(seconds, partial(self._fire, fault))

    def on_step(self, next_step: int, step_s: float) -> None:
        """Arm those that are due in `next_step`, which begins now and is expected to take `step_s`."""
        for seconds, fault in self._schedule.on_step(next_step, step_s):
            self._loop.later(seconds, partial(self._fire, fault))

    def tell_never_fired(self) -> None:
        """At the end of the job."""
        for fault in self._schedule.never_fired:
            self._say(f"drill {fault.text!r} never fired: the job ended before")

    def end(self) -> None:
        """From here on the ranks are as good as gone."""
        self._has_ended = True

    def _say(self, text: str) -> None:
        self._sink.say(text)

    def _fire(self, fault: Drill) -> None:
        if fault.action == "leave":
            self._sink.event(NoticeGiven(fault.ranks, f"drill {fault.text!r}"))
            return
        if fault.action == "join":
            self._sink.event(SlotsReturned(fault.ranks, f"drill {fault.text!r}"))
            return
        number = signal.SIGSTOP if fault.action == "hang" else signal.SIGKILL
        for rank in fault.ranks:
            if self._has_ended or not self._cluster.is_there(rank):
                self._say(f"drill {fault.text!r}: rank {rank} is gone already")
                continue
            self._cluster.drill(rank, number, fault.action == "lose")
            self._say(f"drill {fault.text!r}: {number.name} to rank {rank}")
