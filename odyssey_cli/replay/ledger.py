"""Where the time of a replayed job went: every second of the trace is in one stretch, and each stretch has one name.

What was trained since the last checkpoint becomes redone work when the job falls back to that. All totals are sums over the
stretches, so that useful and lost time are the whole.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Doing(enum.StrEnum):
    """What the job does. Training that is kept is useful, as far as its layout is as fast as that of all nodes."""

    TRAINING = "training"
    REDONE = "redone"
    """Training that did not count: what is not kept of a step that a loss cut off, steps since the last checkpoint."""
    TRANSITION = "transition"
    """From a loss to the next step, the state in memory."""
    RESTART = "restart"
    """From the end of all ranks to the next step, the state from a checkpoint."""
    CHECKPOINT = "checkpoint"
    """Steps wait for a checkpoint to be written."""
    WAITING = "waiting"
    """There are too few nodes."""


class Stretch(msgspec.Struct, gc=False):
    """Seconds `[start_s, end_s)`. `step_s`: of a step, where steps are made (of a redone one too), else 0."""

    start_s: float
    end_s: float
    doing: Doing
    step_s: float = 0.0


class Cut(NamedTuple):
    """A step that was cut off: the stretch that is lost of it, the part that was done before it, and the part that is done."""

    place: int
    ahead: float
    done: float


class Totals(msgspec.Struct, frozen=True):
    """Seconds, which together are the whole trace.
    `useful_s`: what the kept steps would have taken all nodes without failures; `slower_s`: what they took beyond that."""

    useful_s: float
    slower_s: float
    redone_s: float
    transition_s: float
    restart_s: float
    checkpoint_s: float
    waiting_s: float


class Ledger:
    """The stretches so far. `step_s`: of the layout that trains now; `interval_s`: of training between two checkpoints."""

    def __init__(self, save_s: float) -> None:
        """`save_s`: how long a checkpoint holds up training."""
        self.stretches: list[Stretch] = []
        self.step_s = 0.0
        self.interval_s = math.inf
        self._save_s = save_s
        self._since_save_s = 0.0
        self._n_saved = 0
        """Stretches up to the newest checkpoint."""
        self._ahead = 0.0
        """The part of the first step that is done when it begins."""
        self._cut: Cut | None = None

    @property
    def now_s(self) -> float:
        return self.stretches[-1].end_s if self.stretches else 0.0

    def pause(self, until_s: float, doing: Doing) -> None:
        """Nothing is trained until then."""
        self._spend(until_s, doing)

    def train(self, until_s: float) -> None:
        """Steps, and checkpoints when they are due, until then; part of the last step counts as that part."""
        doing = self._whole_steps(until_s)
        self._spend(until_s, doing)

    def cut_off(self, at_s: float) -> bool:
        """Train as `train` does, but lose the step that runs then, except what is kept of it. Whether any was done."""
        n_before = len(self.stretches)
        doing = self._whole_steps(at_s)
        if doing is Doing.TRAINING:
            ran_s = max(0.0, at_s - self.now_s)  # none, where ranks still warm up
            self._cut = Cut(len(self.stretches), self._ahead, self._ahead + ran_s / self.step_s)
            doing = Doing.REDONE
        self._spend(at_s, doing)
        return any(stretch.doing is Doing.TRAINING for stretch in self.stretches[n_before:])

    def keep(self, kept_s: float) -> None:
        """Steps of `step_s` begin. The first is shorter by what is kept of the one that was cut off last: by `kept_s` where
        half of that was done."""
        cut, self._cut, self._ahead = self._cut, None, 0.0
        if cut is None:
            return
        self._ahead = min(cut.done, 2 * cut.done * kept_s / self.step_s)
        if cut.place < len(self.stretches) and self._ahead > cut.ahead:
            lost = self.stretches[cut.place]
            until_s = lost.start_s + (self._ahead - cut.ahead) * lost.step_s
            if until_s < lost.end_s:
                self.stretches.insert(cut.place, Stretch(lost.start_s, until_s, Doing.TRAINING, lost.step_s))
                lost.start_s = until_s
            else:
                lost.doing = Doing.TRAINING

    def under_way_until(self, at_s: float) -> float:
        """Train until then; when the step ends, or the checkpoint, that is under way at that moment."""
        doing = self._whole_steps(at_s)
        if self.now_s >= at_s:
            return self.now_s
        return self.now_s + ((1 - self._ahead) * self.step_s if doing is Doing.TRAINING else self._save_s)

    def _whole_steps(self, until_s: float) -> Doing:
        """All steps and checkpoints that end by then; answers what is under way."""
        while True:
            now = self.now_s
            if self._since_save_s >= self.interval_s:
                if now + self._save_s > until_s:
                    return Doing.CHECKPOINT
                self._spend(now + self._save_s, Doing.CHECKPOINT)
                self.saved()
                continue
            n_steps = math.floor(((until_s - now) / self.step_s + self._ahead) * (1 + 1e-12))
            if n_steps < 1:
                return Doing.TRAINING
            if math.isfinite(self.interval_s):
                n_steps = min(n_steps, max(1, math.ceil((self.interval_s - self._since_save_s) / self.step_s)))
            self._spend(min(now + (n_steps - self._ahead) * self.step_s, until_s), Doing.TRAINING)
            self._ahead = 0.0
            self._since_save_s += self.now_s - now

    def close(self, at_s: float) -> None:
        """Nothing counts that is later."""
        while self.stretches and self.stretches[-1].start_s >= at_s:
            self.stretches.pop()
        if self.stretches:
            self.stretches[-1].end_s = min(self.stretches[-1].end_s, at_s)

    def saved(self) -> None:
        """What has been trained up to now is in a checkpoint."""
        self._since_save_s, self._n_saved = 0.0, len(self.stretches)

    def roll_back(self) -> None:
        """Training since the newest checkpoint was for nothing."""
        for stretch in self.stretches[self._n_saved :]:
            if stretch.doing is Doing.TRAINING:
                stretch.doing = Doing.REDONE
        self.saved()

    def _spend(self, until_s: float, doing: Doing) -> None:
        if until_s > self.now_s:
            step_s = self.step_s if doing in (Doing.TRAINING, Doing.REDONE) else 0.0
            self.stretches.append(Stretch(self.now_s, until_s, doing, step_s))


def totals(stretches: Sequence[Stretch], all_nodes_step_s: float) -> Totals:
    """What they come to, against steps of all nodes without failures."""
    seconds = dict.fromkeys(Doing, 0.0)
    useful_s = 0.0
    for stretch in stretches:
        took_s = stretch.end_s - stretch.start_s
        seconds[stretch.doing] += took_s
        if stretch.doing is Doing.TRAINING:
            useful_s += took_s / stretch.step_s * all_nodes_step_s
    return Totals(
        useful_s=useful_s,
        slower_s=seconds[Doing.TRAINING] - useful_s,
        redone_s=seconds[Doing.REDONE],
        transition_s=seconds[Doing.TRANSITION],
        restart_s=seconds[Doing.RESTART],
        checkpoint_s=seconds[Doing.CHECKPOINT],
        waiting_s=seconds[Doing.WAITING],
    )


def useful_over_time(stretches: Sequence[Stretch], all_nodes_step_s: float, length_s: float, n_bins: int) -> list[float]:
    """Useful time of each of `n_bins` equal parts of the trace, as a share of it: 1 is all nodes without failures."""
    width_s = length_s / n_bins
    useful_s = [0.0] * n_bins
    for stretch in stretches:
        if stretch.doing is not Doing.TRAINING:
            continue
        first = min(int(stretch.start_s / width_s), n_bins - 1)
        last = min(int(stretch.end_s / width_s), n_bins - 1)
        for i in range(first, last + 1):
            overlap_s = min(stretch.end_s, (i + 1) * width_s) - max(stretch.start_s, i * width_s)
            useful_s[i] += max(0.0, overlap_s) / stretch.step_s * all_nodes_step_s
    return [seconds / width_s for seconds in useful_s]
