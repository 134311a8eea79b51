"""Faults come true: beside the agent that leads, in its process, at the moments that the job's events give.

A kill is a real SIGKILL to a real process, a cut a real shutdown of its socket. What did not strike, because its moment
never came or nobody was there, is not told. When another agent leads, the striker in its process goes on with the chains.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from launcher.agent import notice_socket
from launcher.cluster.questions import AskLeave
from launcher.failures.history import RETOLD
from launcher.joblog import reader
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Draining,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    LeaderChanged,
    Note,
    Pausing,
    PlanChosen,
    RankLost,
    RankStarted,
)
from odyssey.plan.plan import Plan
from odyssey.protocol.reports import Committed, Finished, Hello, Paused, Ready
from tests.soak import strangers
from tests.soak.case import SLOW_RANK, Case, Fault

MOMENTS = {
    "said": Note,
    "begun": JobStarted,
    "started": RankStarted,
    "joined": Hello,
    "pausing": Pausing,
    "draining": Draining,
    "paused": Paused,
    "plan": PlanChosen,
    "ready": Ready,
    "go": GenerationStarted,
    "finished": Finished,
    "leads": LeaderChanged,
    "unit": Committed,
}
"""And `receiving`: ranks are about to receive what a plan moves to them."""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


class Striker:
    """Watches the job's events. `tell(**what)`: what has come true, and what somebody else has to do.

    `start`: number of this start of the job. `folder`: with a file for each fault of it that has struck, whoever led then.
    `logs`: of this agent.
    """

    def __init__(self, case: Case, start: int, folder: Path, logs: Path, tell: Callable[..., None]) -> None:
        self._case = case
        self._folder = folder
        self._logs = logs
        self._chains: list[tuple[list[tuple[str, Fault]], dict[str, int]]] = []
        """The faults that are still to come, with names of their own, and the events since the one before."""
        for i, chain in enumerate(case.chains_of(start)):
            self._chains.append(([(f"struck-{start}-{i}-{k}", fault) for k, fault in enumerate(chain)], {}))
        self._tell = tell
        self._ranks: dict[int, int] = {}
        """Pidfds of the living."""
        self._pids: dict[int, int] = {}
        self._agents: dict[int, int] = {}
        """Pids of the members by number."""
        self._agent_of: dict[int, int] = {}
        """A rank's, by pid."""
        self._held: dict[int, frozenset[int]] = {}
        """What a rank holds since the last Go, unless something has struck it."""
        self._has_run = False
        self._plan: Plan | None = None
        self._joined: set[int] = set()
        self._arriving: set[int] = set()
        """Ranks of the plan that have to join."""
        self._frozen: set[int] = set()
        """Pidfds of processes that are to go on."""
        self._calls: list[socket.socket] = []
        """A stranger's connections."""
        self._silence_s = 0.3 * case.agents.detect_s if case.agents is not None else math.inf
        """For so long an agent may stand still, and must not be lost by it."""
        self._has_ended = False
        self._lock = threading.RLock()
        """Timers strike from threads of their own."""
        self._timers: list[threading.Timer] = []

    # -- moments -------------------------------------------------------------------------------------------------------

    def watch(self, event: Event) -> None:
        """One event of the job, from the agent's loop."""
        with self._lock:
            body = event.body
            rank = getattr(body, "rank", None)
            if event.origin == RETOLD:
                return  # it is in this agent's log
            if isinstance(body, LeaderChanged):
                self._catch_up()
            else:
                self._keep(event)
            if isinstance(body, Committed) and body.result.kind == "step":
                self._moment("step", body.result.position[0] + 1, None)
            for name, kind in MOMENTS.items():
                if isinstance(body, kind):
                    self._moment(name, None, rank)
            if self._plan is not None and self._plan.moves and isinstance(body, PlanChosen | Hello) and not self._arriving:
                targets = sorted({move.target for move in self._plan.moves})
                self._moment("receiving", None, targets[event.generation % len(targets)])

    def _catch_up(self) -> None:
        """This agent leads from now on: what has happened so far is in its log."""
        for log in self._logs.glob(f"*/{reader.NAME}"):
            for event in reader.events(log):
                self._keep(event)

    def _keep(self, event: Event) -> None:
        body = event.body
        match body:
            case JobStarted():
                self._agents = {agent.number: agent.pid for agent in body.agents}
            case AgentJoined():
                self._agents[body.agent.number] = body.agent.pid
            case AgentLost():
                self._agents.pop(body.agent.number, None)
            case RankStarted():
                self._forget(body.rank)
                with suppress(ProcessLookupError, psutil.NoSuchProcess):
                    self._ranks[body.rank] = os.pidfd_open(body.pid)
                    self._pids[body.rank] = body.pid
                    self._agent_of[body.rank] = psutil.Process(body.pid).ppid()
            case RankLost():
                self._forget(body.rank)
            case Hello():
                self._joined.add(body.rank)
                self._arriving.discard(body.rank)
            case Pausing() | Draining():
                self._plan = None
            case PlanChosen():
                self._plan = body.plan
                self._arriving = set(body.plan.spawned) - self._joined
            case GenerationStarted() if self._plan is not None:
                self._held = {rank: self._plan.holds.get(rank, frozenset()) for rank in self._ranks}
                self._has_run, self._plan = True, None
            case JobEnded():
                self._has_ended = True

    def _forget(self, rank: int) -> None:
        self._held.pop(rank, None)
        self._joined.discard(rank)
        self._pids.pop(rank, None)
        descriptor = self._ranks.pop(rank, None)
        if descriptor is not None:
            os.close(descriptor)

    def _moment(self, name: str, number: int | None, rank: int | None) -> None:
        for faults, counts in self._chains:
            counts[name] = counts.get(name, 0) + 1
            while faults and (self._folder / faults[0][0]).exists():
                del faults[0]  # it has struck while another agent led
            if faults and _is_due(faults[0][1], name, number, counts):
                strike = partial(self._strike, faults.pop(0), faults, counts, rank)
                if strike.args[0][1].delay_s:
                    self._later(strike.args[0][1].delay_s, strike)
                else:
                    strike()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def close(self) -> None:
        """Nothing strikes any more, and whatever was frozen is let go."""
        for timer in self._timers:
            timer.cancel()
        with self._lock:
            self._has_ended = True
            for descriptor in list(self._frozen):
                self._let_go(descriptor)
            for rank in list(self._ranks):
                self._forget(rank)
            for connection in self._calls:
                connection.close()

    # -- strikes -------------------------------------------------------------------------------------------------------

    def _strike(
        self, named: tuple[str, Fault], behind: list[tuple[str, Fault]], counts: dict[str, int], about: int | None
    ) -> None:
        name, fault = named
        with self._lock:
            counts.clear()
            if self._has_ended:
                return
            if fault.n_units and not self._can_strike(fault):
                behind.insert(0, named)
                return
            (self._folder / name).touch()
            match fault.target:
                case "agent" | "member":
                    self._strike_agent(fault)
                case "late agent" | "job":
                    self._struck(fault, None)
                    self._tell(do=fault.kind)
                case "store" if fault.kind == "overwrite":
                    self._overwrite_store(fault)
                case "ports":
                    children = [child.pid for child in psutil.Process().children(recursive=True)]
                    ports = strangers.ports_of([os.getpid(), *self._agents.values(), *children])
                    self._calls += strangers.call_at(ports, says_nothing=fault.kind == "silence")
                    self._struck(fault, None)
                case "rank" if fault.kind == "slow":
                    (self._folder / SLOW_RANK).write_text(str(fault.rank))
                    self._struck(fault, fault.rank)
                case "rank":
                    rank = self._victim(fault, about if fault.rank is None or fault.on == "receiving" else fault.rank)
                    if rank is not None and self._hit(fault, self._ranks[rank], self._pids[rank]):
                        if fault.may_lose_a_rank:
                            self._held.pop(rank, None)
                        self._struck(fault, rank)
                case helper:
                    self._strike_helper(fault, helper)

    def _can_strike(self, fault: Fault) -> bool:
        if fault.target in ("agent", "member"):
            return self._agent_victim(fault) is not None
        return fault.target != "rank" or fault.kind == "slow" or self._victim(fault, fault.rank) is not None

    def _struck(self, fault: Fault, rank: int | None, agent: int | None = None) -> None:
        self._tell(struck=fault.label, on=fault.on, rank=rank, agent=agent, innocent=not fault.may_lose_a_rank)

    def _strike_agent(self, fault: Fault) -> None:
        """This process leads. A signal that is passed on ends nothing. One that stands still before the job begins is
        looked for until it is back (docs/hosts.md): for good nobody may."""
        if fault.kind == "stop" and not self._agents:
            return
        pid = self._agent_victim(fault)
        if pid is None:
            return
        is_short = self._is_short(fault)
        if not is_short:
            for rank in [rank for rank, its in self._agent_of.items() if its == pid]:
                self._held.pop(rank, None)
        self._struck(fault, None, None if is_short else pid)
        if fault.kind == "freeze":
            self._tell(do="freeze", pid=pid, seconds=fault.seconds)
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, fault.signal or signal.SIGSTOP)

    def _is_short(self, fault: Fault) -> bool:
        return fault.kind == "signal" or (fault.kind == "freeze" and fault.seconds < self._silence_s)

    def _agent_victim(self, fault: Fault) -> int | None:
        """Its pid; None if nobody may be struck."""
        pid = os.getpid()
        if fault.target == "member":
            others = sorted(set(self._agents.values()) - {pid})
            if not others:
                return None
            pid = others[(fault.rank or 0) % len(others)]
        may_be = self._is_short(fault) or not self._case.spares or self._agent_can_be_spared(pid)
        return pid if may_be else None

    def _agent_can_be_spared(self, pid: int) -> bool:
        """The others are more than half of the members, and hold all layers; or the half with the leading agent."""
        if not self._agents:
            return True  # the job has not begun, and may without it
        n_left = len(set(self._agents.values()) - {pid})
        if 2 * n_left < len(self._agents) or (2 * n_left == len(self._agents) and pid == os.getpid()):
            return False
        return self._can_be_spared(*(rank for rank, its in self._agent_of.items() if its == pid))

    def _overwrite_store(self, fault: Fault) -> None:
        ports = strangers.ports_of(helpers(frozenset(self._pids.values())).get("store", ()))
        if ports:
            self._struck(fault, None)
        for host, port in ports:
            self._tell(do="overwrite", host=host, port=port)

    def _strike_helper(self, fault: Fault, helper: str) -> None:
        for pid in helpers(frozenset(self._pids.values())).get(helper, ())[:1]:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            try:
                if self._hit(fault, descriptor, pid):
                    self._struck(fault, None)
            finally:
                os.close(descriptor)

    def _victim(self, fault: Fault, wanted: int | None) -> int | None:
        """The rank that was meant, or the next one that can be hit; None if nobody may be."""
        living = sorted(self._ranks)
        wanted = wanted or 0
        for rank in sorted(living, key=lambda rank: (rank < wanted, rank)):
            if not fault.may_lose_a_rank or not self._case.spares or self._can_be_spared(rank):
                return rank
        return None

    def _can_be_spared(self, *ranks: int) -> bool:
        if not self._has_run:
            return len(self._ranks) > 1 + len(ranks)
        needed = frozenset().union(*self._held.values())
        rest = frozenset().union(*(held for other, held in self._held.items() if other not in ranks))
        return rest == needed == frozenset(range(len(needed)))

    def _hit(self, fault: Fault, descriptor: int, pid: int) -> bool:
        if fault.kind == "cut":
            return cut(descriptor, pid, fault.n_cut) > 0
        if fault.kind == "leave":
            (folder,) = (path.parent for path in self._logs.glob(f"*/{notice_socket.NAME}"))
            notice_socket.give(folder, AskLeave((next(rank for rank, its in self._pids.items() if its == pid),)))
            return True
        number = fault.signal or signal.SIGSTOP
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        if fault.kind == "freeze":
            copy = os.dup(descriptor)
            self._frozen.add(copy)
            self._later(fault.seconds, partial(self._let_go, copy))
        return True

    def _let_go(self, descriptor: int) -> None:
        with self._lock:
            if descriptor not in self._frozen:
                return
            self._frozen.remove(descriptor)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            except ProcessLookupError:
                pass
            os.close(descriptor)


def _is_due(fault: Fault, name: str, number: int | None, counts: dict[str, int]) -> bool:
    if fault.n_units and counts.get("unit", 0) >= fault.n_units:
        return True
    return fault.on == name and fault.number == (number or counts[name])


def helpers(ranks: frozenset[int]) -> dict[str, list[int]]:
    """Pids of this agent's processes that are not `ranks`, by what they are for."""
    found: dict[str, list[int]] = {}
    for child in psutil.Process().children():
        if child.pid in ranks:
            continue
        try:
            command = " ".join(child.cmdline())
            listens = any(each.status == psutil.CONN_LISTEN for each in child.net_connections("tcp"))
        except psutil.Error:
            continue
        if "zygote/server.py" in command:
            found.setdefault("store" if listens else "zygote", []).append(child.pid)
        elif "launcher.planning.precompute" in command:
            found.setdefault("planner", []).append(child.pid)
        elif "tests.soak.drive" in command:
            found.setdefault("guard", []).append(child.pid)
    return found


def cut(descriptor: int, pid: int, n_cut: int) -> int:
    """Shut so many of the process's TCP connections down, as a network would, without its help. Answers how many it were."""
    n_done = 0
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return 0
    for connection in connections:
        if connection.status != psutil.CONN_ESTABLISHED or n_done == n_cut:
            continue
        ours = _libc.syscall(_PIDFD_GETFD, descriptor, connection.fd, 0)
        if ours < 0:
            continue  # closed in the meantime, or the process has ended
        with socket.socket(fileno=ours) as its:
            if its.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue  # the number has another socket by now, and a network shuts no listening one
            try:
                its.shutdown(socket.SHUT_RDWR)
                n_done += 1
            except OSError:
                pass  # the other end was quicker
    return n_done
