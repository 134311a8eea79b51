"""Ranks that share the cores of a host: computation under processor sharing.

With n computations active on c cores each progresses at rate min(1, c / n), as the operating system's fair scheduler
makes it, over how much longer it takes while so many cores compute (`Cluster.crowded`). A host's virtual time runs at that
rate, so a computation that starts at virtual time v with w seconds of work ends when virtual time is v + w, whatever else
starts and ends meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from odyssey.plan.plan import Compute
from odyssey.plan.schedule import Commit, Op, Receive, Send
from odyssey.plan.worker import Worker
from perfmodel.profile import Cluster
from perfmodel.running import Message, Run, stuck


class _Host:
    """The computations active on one host. `rates`: how fast each of n is; `lasted_s`: for how long there were n. `version`
    outdates ends that were foretold before something changed."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = rates
        self.lasted_s = [0.0] * len(rates)
        self.active: list[tuple[float, Worker]] = []
        self.virtual = 0.0
        self.now = 0.0
        self.version = 0

    def advance(self, now: float) -> None:
        if self.active:
            self.lasted_s[len(self.active)] += now - self.now
            self.virtual += (now - self.now) * self.rates[len(self.active)]
        self.now = now

    def next_end(self) -> float:
        return self.now + (self.active[0][0] - self.virtual) / self.rates[len(self.active)]


def share_cores(run: Run, programs: Mapping[Worker, Sequence[Op]]) -> None:
    """Run the programs up to their commit points on hosts of `cluster.cores` cores; fills `run.times` and `run.crowded`."""
    _Shared(run, programs).play()


class _Shared:
    """Programs under way. An event is (time, number, worker, -1, 0), or (time, number, None, host, the host's version then)."""

    def __init__(self, run: Run, programs: Mapping[Worker, Sequence[Op]]) -> None:
        self.cluster = run.costs.profile.cluster
        rates = [self.cluster.rate(max(n, 1)) for n in range(len(programs) + 1)]
        self.run = run
        self.programs = programs
        self.host_of = {worker: run.costs.host(worker) for worker in programs}
        self.hosts = {host: _Host(rates) for host in set(self.host_of.values())}
        self.position = dict.fromkeys(programs, 0)
        self.began = dict.fromkeys(programs, 0.0)
        self.waiting: dict[Message, Worker] = {}
        self.events: list[tuple[float, int, Worker | None, int, int]] = []
        self.n_events = 0
        run.times.update({worker: [] for worker in programs})

    def play(self) -> None:
        """To the commit points. Raises PlanError for programs that wait for each other."""
        for worker in self.programs:
            self._proceed(worker, 0.0)
        while self.events:
            now, _, target, number, version = heapq.heappop(self.events)
            if target is not None:
                self._finish(target, now)
            elif version == self.hosts[number].version:
                self._ended(number, now)
        if self.waiting:
            raise stuck(self.programs, self.position)
        self.run.crowded = self._crowded()

    def _crowded(self) -> float:
        """What computations took of processors over what they would have taken alone."""
        work_s = processor_s = 0.0
        for host in self.hosts.values():
            for n, lasted_s in enumerate(host.lasted_s):
                work_s += n * lasted_s * host.rates[n]
                processor_s += n * lasted_s * host.rates[n] * self.cluster.crowded(n)
        return processor_s / work_s if work_s > 0 else 1.0

    def _ended(self, number: int, now: float) -> None:
        """A computation on this host has ended, or several at once."""
        host = self.hosts[number]
        host.advance(now)
        ended = [heapq.heappop(host.active)[1]]
        while host.active and host.active[0][0] <= host.virtual + 1e-12:
            ended.append(heapq.heappop(host.active)[1])
        for worker in ended:
            self._finish(worker, now)
        self._foretell(number)

    def _finish(self, worker: Worker, now: float) -> None:
        self.run.times[worker].append((self.began[worker], now))
        self.position[worker] += 1
        self._proceed(worker, now)

    def _proceed(self, worker: Worker, now: float) -> None:
        """All that takes no time, up to the next op that does or waits."""
        run, ops, times = self.run, self.programs[worker], self.run.times[worker]
        i = self.position[worker]
        while i < len(ops):
            op = ops[i]
            if isinstance(op, Compute):
                self._compute(worker, run.compute_s(worker, op), now)
                break
            if isinstance(op, Commit) or (isinstance(op, Receive) and not self._has_come(worker, op, now)):
                break
            if isinstance(op, Send):
                message = run.send(worker, op, now)
                if message in self.waiting:
                    self._push(run.arrival[message], self.waiting.pop(message))
            times.append((now, now))
            i += 1
        self.position[worker] = i

    def _compute(self, worker: Worker, seconds: float, now: float) -> None:
        number = self.host_of[worker]
        host = self.hosts[number]
        host.advance(now)
        heapq.heappush(host.active, (host.virtual + seconds, worker))
        self.began[worker] = now
        self._foretell(number)

    def _has_come(self, worker: Worker, op: Receive, now: float) -> bool:
        message: Message = (op.kind, op.stage, op.micro_batch, op.peer, worker)
        arrives = self.run.arrival.get(message)
        if arrives is not None and arrives <= now:
            return True
        self.began[worker] = now
        if arrives is None:
            self.waiting[message] = worker
        else:
            self._push(arrives, worker)
        return False

    def _foretell(self, number: int) -> None:
        """When the next computation on this host ends, as it is now."""
        host = self.hosts[number]
        host.version += 1
        if host.active:
            self._push(host.next_end(), None, number, host.version)

    def _push(self, time: float, worker: Worker | None, number: int = -1, version: int = 0) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (time, self.n_events, worker, number, version))


def share_equally(work: Mapping[Worker, float], cluster: Cluster) -> dict[Worker, float]:
    """When tasks that all start at 0 end: least work first, each at the rate that those still active leave it."""
    end: dict[Worker, float] = {}
    now, done, n_active = 0.0, 0.0, len(work)
    for worker, seconds in sorted(work.items(), key=lambda item: (item[1], item[0])):
        now += (seconds - done) / cluster.rate(n_active)
        end[worker], done, n_active = now, seconds, n_active - 1
    return end
