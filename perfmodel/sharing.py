"""Ranks that share the cores of a host: computation under processor sharing.

With n computations active on c cores each progresses at rate min(1, c / n), as the operating system's fair scheduler
makes it. A host's virtual time runs at that rate, so a computation that starts at virtual time v with w seconds of work
ends when virtual time is v + w, whatever else starts and ends meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from odyssey.schedule import Commit, Compute, Op, Receive, Send
from perfmodel.running import Message, Run, stuck


class _Host:
    """The computations active on one host. `version` outdates ends that were foretold before something changed."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.active: list[tuple[float, int]] = []
        self.virtual = 0.0
        self.now = 0.0
        self.version = 0

    def advance(self, now: float) -> None:
        if self.active:
            self.virtual += (now - self.now) * min(1.0, self.cores / len(self.active))
        self.now = now

    def next_end(self) -> float:
        return self.now + (self.active[0][0] - self.virtual) / min(1.0, self.cores / len(self.active))


def share_cores(run: Run, programs: Mapping[int, Sequence[Op]]) -> None:
    """Run the programs up to their commit points on hosts of `cluster.cores` cores; fills `run.times`."""
    cores = run.costs.profile.cluster.cores
    assert cores is not None
    host_of = {worker: run.costs.host(worker) for worker in programs}
    hosts = {host: _Host(cores) for host in set(host_of.values())}
    position = dict.fromkeys(programs, 0)
    began = dict.fromkeys(programs, 0.0)
    waiting: dict[Message, int] = {}
    events: list[tuple[float, int, int, int]] = []
    n_events = 0
    run.times.update({worker: [] for worker in programs})

    def push(time: float, worker: int, version: int) -> None:
        nonlocal n_events
        n_events += 1
        heapq.heappush(events, (time, n_events, worker, version))

    def foretell(host: int) -> None:
        hosts[host].version += 1
        if hosts[host].active:
            push(hosts[host].next_end(), -1 - host, hosts[host].version)

    def proceed(worker: int, now: float) -> None:
        ops, times, i = programs[worker], run.times[worker], position[worker]
        while i < len(ops):
            op = ops[i]
            if isinstance(op, Compute):
                host = hosts[host_of[worker]]
                host.advance(now)
                heapq.heappush(host.active, (host.virtual + run.compute_s(op), worker))
                began[worker] = now
                foretell(host_of[worker])
                break
            if isinstance(op, Receive):
                message: Message = (op.kind, op.stage, op.micro_batch, op.peer, worker)
                arrives = run.arrival.get(message)
                if arrives is None or arrives > now:
                    began[worker] = now
                    if arrives is None:
                        waiting[message] = worker
                    else:
                        push(arrives, worker, 0)
                    break
                times.append((now, now))
            elif isinstance(op, Send):
                message = run.send(worker, op, now)
                times.append((now, now))
                if message in waiting:
                    push(run.arrival[message], waiting.pop(message), 0)
            elif isinstance(op, Commit):
                break
            else:
                times.append((now, now))
            i += 1
        position[worker] = i

    def finish(worker: int, now: float) -> None:
        run.times[worker].append((began[worker], now))
        position[worker] += 1
        proceed(worker, now)

    for worker in programs:
        proceed(worker, 0.0)
    while events:
        now, _, target, version = heapq.heappop(events)
        if target >= 0:
            finish(target, now)
            continue
        host = hosts[-1 - target]
        if version != host.version:
            continue
        host.advance(now)
        ended = [heapq.heappop(host.active)[1]]
        while host.active and host.active[0][0] <= host.virtual + 1e-12:
            ended.append(heapq.heappop(host.active)[1])
        for worker in ended:
            finish(worker, now)
        foretell(-1 - target)
    if waiting:
        raise stuck(programs, position)


def share_equally(work: Mapping[int, float], cores: int) -> dict[int, float]:
    """When tasks that all start at 0 end: least work first, each at the rate that those still active leave it."""
    end: dict[int, float] = {}
    now, done, n_active = 0.0, 0.0, len(work)
    for task, seconds in sorted(work.items(), key=lambda item: (item[1], item[0])):
        now += (seconds - done) / min(1.0, cores / n_active)
        end[task], done, n_active = now, seconds, n_active - 1
    return end
