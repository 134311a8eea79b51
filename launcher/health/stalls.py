"""Ranks of plain scripts that make no progress: told with the stacks of all, the one that holds up the others named.

    samples of each rank ─► Stalls.look ─► Verdict ─► stacks of all (stacks.py) ─► to_blame, story

Busy is not dead: a rank that writes, uses its processor or has something to say to other ranks, lives, and
those that wait for it are not ended. Only a rank that calls `odyssey.heartbeat()` is held to calling it again. Ranks that
have built an `odyssey.Job` are watched by job_hangs.py, which knows what they should be doing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping

import msgspec

from launcher.health import stacks
from launcher.health.life import is_a_sign
from launcher.health.stacks import Group
from launcher.host import proc
from launcher.host.proc import Vitals
from launcher.joblog.wording import seconds_text
from odyssey.plan.worker import Rank
from odyssey.runtime.heartbeat import INTERVAL_S

MAX_HOSTS = 4
"""Named in a warning."""
TRANSPORT = "gloo_tcp_loop"
"""Gloo's thread that reads and writes. What it does for a rank is seen in what is exchanged; where somebody else stands in for
one it turns without end."""
# -- who has stalled, pure ---------------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True):
    """What a rank and all that it has started have done: processor seconds so far, bytes written where we see them.
    `is_stopped`: by a signal; `is_held_up`: it waits for a disk, or for a processor. `exchanged`: bytes of the rank itself with
    other ranks (traffic.py)."""

    processor_s: float
    written: int
    is_stopped: bool = False
    is_held_up: bool = False
    exchanged: int = 0

    @property
    def vitals(self) -> Vitals:
        """What a single process would show."""
        return Vitals("T" if self.is_stopped else "D" if self.is_held_up else "S", self.processor_s)


class Verdict(msgspec.Struct, frozen=True):
    """`stalled`: ranks and when they last gave a sign of life. `busy`: the others. `stopped`: of the stalled, by a signal.

    `is_open`: others have been silent for a while, so that it is soon to be seen whether they are busy or have stalled too.
    """

    stalled: dict[Rank, float]
    busy: frozenset[Rank]
    stopped: frozenset[Rank] = frozenset()
    is_open: bool = False


class _Life:
    """`used_s`: the processor seconds from which those since the last sign are counted."""

    def __init__(self, now: float) -> None:
        self.last_sign = now
        self.sample: Sample | None = None
        self.used_s = 0.0
        self.last_beat: float | None = None

    def take(self, sample: Sample, now: float) -> None:
        """Processes that have ended take their seconds with them, so a sum may sink."""
        before, self.sample = self.sample, sample
        self.used_s = min(self.used_s, sample.processor_s)
        has_spoken = before is None or (before.written, before.exchanged) != (sample.written, sample.exchanged)
        if has_spoken or is_a_sign(sample.processor_s - self.used_s, now - self.last_sign):
            self.last_sign, self.used_s = now, sample.processor_s

    def pass_over(self, sample: Sample) -> None:
        if self.sample is not None:
            self.used_s += sample.processor_s - self.sample.processor_s
            self.sample = sample


class Stalls:
    """Takes samples in, gives verdicts out. Times are seconds of any one clock. Ranks that are not sampled are forgotten."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lives: dict[Rank, _Life] = {}

    def forget(self, rank: Rank) -> None:
        """Its process is another one now."""
        self._lives.pop(rank, None)

    def beat(self, rank: Rank, now: float) -> None:
        """The rank called `odyssey.heartbeat()`: from now on only that counts."""
        self._lives.setdefault(rank, _Life(now)).last_beat = now

    def uses_heartbeats(self, rank: Rank) -> bool:
        return rank in self._lives and self._lives[rank].last_beat is not None

    def has_beaten_since(self, rank: Rank, at: float) -> bool:
        return self.uses_heartbeats(rank) and self._lives[rank].last_beat != at

    def look(self, now: float, samples: Mapping[Rank, Sample]) -> Verdict:
        """What these samples, and all before, say."""
        for rank in set(self._lives) - set(samples):
            del self._lives[rank]
        stalled = {}
        silent = False
        for rank, sample in sorted(samples.items()):
            life = self._lives.setdefault(rank, _Life(now))
            life.take(sample, now)
            last, timeout_s = life.last_sign, self._timeout_s
            if life.last_beat is not None:  # the next one may have come too soon after it to be sent
                last, timeout_s = life.last_beat, self._timeout_s + INTERVAL_S
            if now - last >= timeout_s:
                stalled[rank] = last
            else:
                silent |= now - last >= timeout_s / 2
        is_open = silent and bool(stalled) and now - min(stalled.values()) < 2 * self._timeout_s
        stopped = frozenset(rank for rank in stalled if samples[rank].is_stopped)
        return Verdict(stalled, frozenset(samples) - frozenset(stalled), stopped, is_open)

    def excuse(self, rank: Rank, now: float) -> None:
        """Nobody has seen what it did until now."""
        if rank in self._lives:
            life = self._lives[rank]
            life.last_sign = now
            life.last_beat = now if life.last_beat is not None else None

    def pass_over(self, samples: Mapping[Rank, Sample]) -> None:
        """What ranks did since the last look was our doing, no sign of life."""
        for rank, sample in samples.items():
            if rank in self._lives:
                self._lives[rank].pass_over(sample)


def to_blame(verdict: Verdict, groups: list[Group]) -> tuple[frozenset[Rank], frozenset[Rank]]:
    """(ranks to end, ranks that the others wait for and that are busy). A rank that waits for a busy one is not to blame, nor
    one that may do so for all that can be read of it."""
    if verdict.stopped:
        return verdict.stopped, frozenset()
    apart = stacks.outliers(groups)
    stalled = frozenset(verdict.stalled)
    if apart and not apart & stalled:
        return frozenset(), apart
    waiting = frozenset(rank for group in groups if group.waits or not group.readable for rank in group.ranks)
    if not apart and verdict.busy and stalled <= waiting:
        return frozenset(), verdict.busy
    return apart & stalled or stalled, frozenset()


def story(
    verdict: Verdict,
    groups: list[Group],
    now: float,
    clock_of: Callable[[float], str],
    silent: str,
    steps: Mapping[Rank, int],
    hosts: Mapping[Rank, str],
) -> str:
    """The warning, a line each: who and since when, where all are, who it is that the others wait for. `hosts`: where there are
    several, those of the ranks that it is about."""
    blamed, waited_for = to_blame(verdict, groups)
    since = min(verdict.stalled[rank] for rank in blamed or verdict.stalled)
    ranks = sorted(blamed or verdict.stalled)
    one = len(ranks) == 1
    name = f"{'rank' if one else 'ranks'} {stacks.ranges(ranks)}"
    told = [steps[rank] for rank in ranks if rank in steps]
    at = f", at step {min(told)}" if told else ""
    where = sorted({hosts[rank] for rank in ranks if rank in hosts})
    on = f" (on {', '.join(where[:MAX_HOSTS])}{', …' if len(where) > MAX_HOSTS else ''})" if where else ""
    when = f"since {clock_of(since)} ({seconds_text(now - since)}{at})"
    head = f"{name}{on} {'makes' if one else 'make'} no progress {when}: {silent}"
    text = [head, *(f"  {line}" for line in stacks.lines(groups))]
    if verdict.stopped:
        text.append(f"  {name} {'was' if one else 'were'} stopped by a signal")
    elif waited_for:
        busy = f"{'rank' if len(waited_for) == 1 else 'ranks'} {stacks.ranges(sorted(waited_for))}"
        text.append(f"  the others wait for {busy}, which is busy: nothing is ended")
    elif len(blamed) < len(verdict.stalled) or stacks.outliers(groups):
        text.append(f"  {name} {'does' if one else 'do'} not wait with the others")
    return "\n".join(text)


# -- samples -----------------------------------------------------------------------------------------------------------


def sample(pids: Mapping[Rank, int], written: Callable[[Rank], int], exchanged: Mapping[Rank, int]) -> dict[Rank, Sample]:
    """A sample of each rank's process, its session and its descendants, as /proc has it; `exchanged`: as far as it is known."""
    table = dict(proc.processes())
    children: dict[int, list[int]] = {}
    for pid, found in table.items():
        children.setdefault(found.parent, []).append(pid)
        children.setdefault(found.session, []).append(pid)
    samples = {}
    for rank, pid in pids.items():
        if pid not in table:
            continue
        seen: set[int] = set()
        rest = [pid]
        while rest:
            current = rest.pop()
            if current not in seen:
                seen.add(current)
                rest += children.get(current, [])
        processor_s = sum(table[p].processor_s + table[p].waited_for_s for p in seen if p in table)
        if rank in exchanged:
            processor_s -= proc.thread_processor_s(pid, TRANSPORT)
        of = table[pid]
        n_written = written(rank) + _file_bytes(pid)
        samples[rank] = Sample(processor_s, n_written, of.is_stopped, of.is_held_up, exchanged.get(rank, 0))
    return samples


def _file_bytes(pid: int) -> int:
    """Size of the files that its standard output and error go to, those aside that are the launcher's own."""
    n_bytes = 0
    for fd in (1, 2):
        try:
            theirs, ours = os.stat(proc.descriptor(pid, fd)), os.fstat(fd)
        except OSError:
            continue
        if stat.S_ISREG(theirs.st_mode) and (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
            n_bytes += theirs.st_size
    return n_bytes
