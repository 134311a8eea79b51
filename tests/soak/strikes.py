"""Faults come true: beside the agent, in its process, at the moments that the job's events give.

A kill is a real SIGKILL to a real process, a cut a real shutdown of its socket. What did not strike, because its moment
never came or nobody was there, is not told.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial

import psutil

from launcher.joblog.events import (
    Event,
    GenerationStarted,
    JobEnded,
    Pausing,
    PlanChosen,
    RankFinished,
    RankJoined,
    RankLost,
    RankPaused,
    RankReady,
    RankStarted,
    UnitCommitted,
)
from odyssey.plan import Plan
from tests.soak.case import Case, Fault

MOMENTS = {
    "started": RankStarted,
    "joined": RankJoined,
    "pausing": Pausing,
    "paused": RankPaused,
    "plan": PlanChosen,
    "ready": RankReady,
    "go": GenerationStarted,
    "finished": RankFinished,
}
"""And `receiving`: ranks are about to receive what a plan moves to them."""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


class Striker:
    """Watches the job's events. `struck(fault, rank)`: it has come true; `freeze_agent`: somebody else has to."""

    def __init__(self, case: Case, struck: Callable[[Fault, int | None], None], freeze_agent: Callable[[float], None]) -> None:
        self._case = case
        self._chains = [[list(chain), {}] for chain in case.chains]
        """The faults that are still to come, and the events since the one before."""
        self._struck = struck
        self._freeze_agent = freeze_agent
        self._ranks: dict[int, int] = {}
        """Pidfds of the living."""
        self._pids: dict[int, int] = {}
        self._held: dict[int, frozenset[int]] = {}
        """What a rank holds since the last Go, unless something has struck it."""
        self._has_run = False
        self._plan: Plan | None = None
        self._joined: set[int] = set()
        self._arriving: set[int] = set()
        """Ranks of the plan that have to join."""
        self._frozen: set[int] = set()
        """Pidfds of processes that are to go on."""
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
            self._keep(event)
            if isinstance(body, UnitCommitted) and body.result.kind == "step":
                self._moment("step", body.result.position[0] + 1, None)
            for name, kind in MOMENTS.items():
                if isinstance(body, kind):
                    self._moment(name, None, rank)
            if self._plan is not None and self._plan.moves and isinstance(body, PlanChosen | RankJoined) and not self._arriving:
                targets = sorted({move.target for move in self._plan.moves})
                self._moment("receiving", None, targets[event.generation % len(targets)])

    def _keep(self, event: Event) -> None:
        body = event.body
        match body:
            case RankStarted():
                self._forget(body.rank)
                try:
                    self._ranks[body.rank] = os.pidfd_open(body.pid)
                    self._pids[body.rank] = body.pid
                except ProcessLookupError:
                    pass
            case RankLost():
                self._forget(body.rank)
            case RankJoined():
                self._joined.add(body.rank)
                self._arriving.discard(body.rank)
            case Pausing():
                self._plan = None
            case PlanChosen():
                self._plan = body.plan
                self._arriving = set(body.plan.spawned) - self._joined
            case GenerationStarted():
                assert self._plan is not None
                self._held = {rank: self._plan.held.get(rank, frozenset()) for rank in self._ranks}
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
        for chain in self._chains:
            faults, counts = chain
            counts[name] = counts.get(name, 0) + 1
            if faults and faults[0].on == name and faults[0].number == (number or counts[name]):
                fault = faults.pop(0)
                if fault.delay_s:
                    self._later(fault.delay_s, partial(self._strike, chain, fault, rank))
                else:
                    self._strike(chain, fault, rank)

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

    # -- strikes -------------------------------------------------------------------------------------------------------

    def _strike(self, chain: list, fault: Fault, about: int | None) -> None:
        with self._lock:
            chain[1] = {}
            if self._has_ended:
                return
            if fault.target == "agent":
                self._struck(fault, None)
                if fault.kind == "signal":
                    os.kill(os.getpid(), fault.signal)
                else:
                    self._freeze_agent(fault.seconds)
            elif fault.target == "rank":
                rank = self._victim(fault, about if fault.rank is None or fault.on == "receiving" else fault.rank)
                if rank is not None and self._hit(fault, self._ranks[rank], self._pids[rank]):
                    if fault.may_lose_a_rank:
                        self._held.pop(rank, None)
                    self._struck(fault, rank)
            else:
                for pid in helpers(frozenset(self._pids.values())).get(fault.target, ())[:1]:
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

    def _can_be_spared(self, rank: int) -> bool:
        if not self._has_run:
            return len(self._ranks) > 2
        needed = frozenset().union(*self._held.values())
        rest = frozenset().union(*(held for other, held in self._held.items() if other != rank))
        return rest == needed == frozenset(range(len(needed)))

    def _hit(self, fault: Fault, descriptor: int, pid: int) -> bool:
        if fault.kind == "cut":
            return cut(descriptor, pid, fault.n_cut) > 0
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
        elif "drive.py" in command:
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
            try:
                its.shutdown(socket.SHUT_RDWR)
                n_done += 1
            except OSError:
                pass  # the other end was quicker
    return n_done
