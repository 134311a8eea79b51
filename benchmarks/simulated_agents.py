"""Agents of one job whose ranks are simulated: processes, loops, sockets, links, consensus and logs are real.

Each agent is a fork of this process, whose ranks are not: they live in this one, at the other end of real sockets, answer
orders as ranks do, and commit a unit together every so often. So what an agent does is what it does in a job of that size.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.coordinator import N_STAGES, model, profile
from launcher.agent.leading import founding, leading
from launcher.agent.member import Member
from launcher.agent.part import Part
from launcher.cluster import endpoint
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import Session
from launcher.cluster.mesh import Mesh
from launcher.cluster.wire import FromRank
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.signals import Signals
from launcher.joblog.events import Event, RankStarted
from launcher.options import Rendezvous, RunOptions
from launcher.processes.local_agent import LocalAgent
from launcher.processes.rank_process import RankProcess
from launcher.processes.ranks import Processes
from odyssey.plan.plan import Plan
from odyssey.protocol.frames import frame
from odyssey.protocol.orders import Command, Go, Pause, Ping, Prepare
from odyssey.protocol.reports import Committed, Hello, Paused, Pong, Ready, Report
from odyssey.protocol.units import Result

KINDS = ("frames", "bytes", "links", "AppendEntries", "heartbeat", "Appended", "Committed", "FromRank", "beat", "other")
"""What agents send, at their links: frames of any kind, their bytes, connections as each side has them; and messages."""
STEP_S = 0.25
"""Every so often all ranks have committed the next unit."""
KEY = b"k" * 32
DETECT_S = 5.0
SAY_S = 60
"""For an agent to read what a rank says."""


class Agents:
    """`n` of them with `n_ranks_each`; `turn` until what is wanted has come about."""

    def __init__(self, n: int, n_ranks_each: int, folder: Path, port: int) -> None:
        self.n_ranks = n * n_ranks_each
        self.counts: Any = RawArray("Q", n * len(KINDS))
        self._joined: Any = RawArray("d", 2)
        """How many ranks have joined, and when the last of them has: CLOCK_MONOTONIC seconds."""
        self._ranks: dict[int, _Rank] = {}
        self._decoded: dict[bytes, Any] = {}
        self._selector = selectors.DefaultSelector()
        self.step = 0
        self._next_at = 0.0
        self.pids: list[int] = []
        self.began = time.monotonic()
        layout = f"{self.n_ranks // N_STAGES}x{N_STAGES}"
        options = RunOptions(
            script=__file__, n_ranks_per_node=n_ranks_each, min_agents=n, max_agents=n, rendezvous=Rendezvous.C10D,
            master_addr="127.0.0.1", master_port=port, run_id="simulated", detect_s=DETECT_S, layout=layout,
        )  # fmt: skip
        for i in range(n):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                self._be_agent(i, msgspec.structs.replace(options, log_dir=folder / str(i)), theirs)
            theirs.close()
            self.pids.append(pid)
            self._selector.register(ours, selectors.EVENT_READ, self._asked)

    # -- an agent ----------------------------------------------------------------------------------------------------------

    def _be_agent(self, i: int, options: RunOptions, asked: socket.socket) -> None:
        code = 1
        try:
            with open(options.log_dir.parent / f"{i}.out", "wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            self._selector.close()
            self._count(i)
            listener = endpoint.host_or_join(options) if i == 0 else None
            local, signals = _SimulatedAgent(options, listener, asked), Signals(options)
            signals.watch()
            if listener is not None:
                part = Part(local, self._watch, profile=_profile(self.n_ranks))
                code = local.run(leading(founding(part, listener, KEY)), signals)
            else:
                code = local.run(Member(Part(local, lambda event: None), KEY), signals)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            raise
        finally:
            os._exit(code)

    def _watch(self, event: Event) -> None:
        if isinstance(event.body, Hello):
            self._joined[0] += 1
            self._joined[1] = time.monotonic()

    def _count(self, i: int) -> None:
        """From now on, what this process sends."""
        counts, first, number = self.counts, i * len(KINDS), {kind: k for k, kind in enumerate(KINDS)}

        def add(kind: str, n: int = 1) -> None:
            counts[first + number.get(kind, number["other"])] += n

        def kind_of(message: Any) -> str:
            if isinstance(message, FromRank):
                return "Committed" if isinstance(message.report, Committed) else "FromRank"
            return "heartbeat" if getattr(message, "entries", None) == () else type(message).__name__

        def tell(owner: type, name: str, seen: Callable[..., None]) -> None:
            does = getattr(owner, name)

            def counted(*arguments: Any) -> Any:
                seen(*arguments[1:])
                return does(*arguments)

            setattr(owner, name, counted)

        tell(Link, "__init__", lambda *arguments: add("links"))
        tell(Link, "_add", lambda body: (add("frames"), add("bytes", len(body))))
        tell(Session, "send", lambda message: add(kind_of(message)))
        tell(Session, "_beat", lambda: add("beat"))
        tell(Mesh, "send", lambda number, message: add(kind_of(message)))

    # -- their ranks -------------------------------------------------------------------------------------------------------

    def _asked(self, connection: socket.socket) -> None:
        """An agent has started a rank."""
        data, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            return
        (number,) = struct.unpack("<I", data)
        rank = self._ranks[number] = _Rank(number, socket.socket(fileno=descriptors[0]))
        self._selector.register(rank.connection, selectors.EVENT_READ, lambda _: self._heard(rank))
        rank.say(Hello(number, model(self.n_ranks)))

    def _heard(self, rank: _Rank) -> None:
        try:
            data = rank.connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(rank.connection)
            rank.connection.close()
            return
        rank.unread += data
        while len(rank.unread) >= 4:
            length = 4 + int.from_bytes(rank.unread[:4], "little")
            if len(rank.unread) < length:
                return
            body = bytes(rank.unread[4:length])
            del rank.unread[:length]
            if body not in self._decoded:  # all ranks get the same
                self._decoded[body] = msgspec.msgpack.decode(body, type=Command)
            self._obey(rank, self._decoded[body])

    def _obey(self, rank: _Rank, order: Any) -> None:
        match order:
            case Prepare(generation=generation, plan=plan):
                rank.plan, rank.is_running = plan, False
                rank.say(_ready(plan, rank.number, generation, (self.step, 0)))
            case Go(generation=generation):
                rank.generation, rank.is_running = generation, True
            case Pause(generation=generation):
                rank.is_running = False
                held = tuple(sorted(rank.plan.holds[rank.number])) if rank.plan is not None else ()
                rank.say(Paused(rank.number, generation, (self.step, 0), "compute", held))
            case Ping(number=number):
                rank.say(Pong(number, (self.step, 0), "step", "", False, time.monotonic()))

    def turn(self) -> None:
        """Wait for what comes next; all ranks commit a unit when it is time to."""
        are_running = len(self._ranks) == self.n_ranks and all(rank.is_running for rank in self._ranks.values())
        if are_running and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + STEP_S
            result = Result((self.step, 0), "step", (1.0, 1.0))
            self.step += 1
            for rank in self._ranks.values():
                rank.say(Committed(rank.number, rank.generation, result, self.n_ranks // N_STAGES, STEP_S))
        wait_s = max(0.0, self._next_at - time.monotonic()) if are_running else 1.0
        for key, _ in self._selector.select(wait_s):
            key.data(key.fileobj)

    def until(self, what: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._joined[0]:.0f} of {self.n_ranks} ranks have joined, step {self.step}")
            self.turn()

    @property
    def have_joined(self) -> bool:
        return bool(self._joined[0] >= self.n_ranks)

    @property
    def start_s(self) -> float:
        """From the first agent's start until the last rank has joined."""
        return float(self._joined[1]) - self.began

    def cpu_s(self, i: int) -> float:
        """The processor time of all threads of an agent so far."""
        return time.clock_gettime((~self.pids[i] << 3) | 2)  # clock_getcpuclockid(3)

    def sent(self, i: int) -> dict[str, int]:
        """By an agent so far."""
        return dict(zip(KINDS, self.counts[i * len(KINDS) : (i + 1) * len(KINDS)], strict=True))

    def close(self) -> None:
        """No process is left."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)  # SIGKILL ends the wait
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class _Rank:
    """A simulated rank."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SAY_S, 0))
        self.unread = bytearray()
        self.plan: Plan | None = None
        self.generation = 0
        self.is_running = False

    def say(self, report: Report) -> None:
        self.connection.sendall(frame(report))


class _SimulatedAgent(LocalAgent):
    """`asked`: to whoever simulates ranks."""

    def __init__(self, options: RunOptions, listener: socket.socket | None, asked: socket.socket) -> None:
        super().__init__(options, listener, lambda rank, stream, data: None)
        self.processes = _SimulatedProcesses(options, self.loop, self.folder, listener, self.sink, lambda *arguments: None)
        self.processes.asked = asked


class _SimulatedProcesses(Processes):
    """There are none: a rank is the other end of its socket."""

    asked: socket.socket

    def start(self) -> None:
        pass

    def spawn(self, assignment: RankAssignment, number: int) -> None:
        process = self.ranks[assignment.rank] = RankProcess(assignment, number)
        process.socket, theirs = socket.socketpair()
        process.socket.setblocking(False)
        self._reports.watch(process)
        socket.send_fds(self.asked, [struct.pack("<I", assignment.rank)], [theirs.fileno()])
        theirs.close()
        pid = (1 << 22) - assignment.rank
        self._sink.event(RankStarted(assignment.rank, pid, assignment.node, assignment.local_rank, socket.gethostname()))

    def witnessed(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        self.waits.close()
        self.streams.close()
        for process in self.ranks.values():
            process.close(self._loop)


def _profile(n_ranks: int) -> Any:
    """At which a step takes about as long as it does here."""
    found = profile(n_ranks)
    slow = STEP_S / N_STAGES / 4
    layers = (
        msgspec.structs.replace(its, forward_s=slow, input_gradient_s=slow, weight_gradient_s=slow) for its in found.layers
    )
    return msgspec.structs.replace(found, layers=tuple(layers))


def _ready(plan: Plan, rank: int, generation: int, position: tuple[int, int]) -> Ready:
    p, s = plan.place[rank]
    pipeline, contracts = plan.pipelines[p], tuple((g, "same") for g in plan.groups_of.get(rank, ()))
    is_last = s == len(pipeline.stages) - 1
    samples = tuple((k, plan.samples.n_of(k)) for k in pipeline.micro_batches) if is_last else ()
    digests = tuple((layer, "digest") for layer in sorted(plan.holds[rank]))
    stream = "same" if s == 0 or is_last else None
    return Ready(
        rank, generation, position, digests, samples, plan.global_batch, 0.01, 0.0, 0, contracts=contracts, stream=stream
    )


@contextmanager
def simulated(n: int, n_ranks_each: int, folder: Path, port: int) -> Iterator[Agents]:
    """Afterwards no process is left."""
    its = Agents(n, n_ranks_each, folder, port)
    try:
        yield its
    finally:
        its.close()
