"""A minimal agent for tests of the rank's side: it starts real rank processes and says exactly the orders that a test wants."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from launcher.agent.introductions import Introductions
from launcher.coordinator.state import with_result
from launcher.host.kernel import set_subreaper
from launcher.processes import rank_process
from launcher.processes.environment import ADDRESS, AGENT_FD
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan, Schedule
from odyssey.plan.proof import prove
from odyssey.plan.rest import Rest
from odyssey.protocol.frames import Deframer, frame
from odyssey.protocol.model_spec import Boundary
from odyssey.protocol.orders import Command, Drain, Follow, Go, Measure, Pause, Ping, Prepare
from odyssey.protocol.reports import Committed, Finished, Hello, Measured, Offered, Paused, Pong, Ready, Report
from odyssey.protocol.units import Result, position_after
from odyssey.zygote import protocol
from perfmodel.profile.merge import merge
from perfmodel.profile.profile import Profile
from perfmodel.step.work import work_of
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Protect, Situation
from tests import ROOT
from tests.warm.start import IMPORTS

LIMIT_S = 60.0
N_RANKS = 4
"""As many as an agent of these tests has at most."""


class Forks:
    """Processes that a zygote forks, so that torch is imported once for all; they are children of this process."""

    def __init__(self, zygote: rank_process.Zygote) -> None:
        self._zygote = zygote
        self._n_requests = 0

    def rank(self, script: Path, arguments: tuple[str, ...], environment: dict[str, str], its: socket.socket) -> psutil.Process:
        """A process of `script` with the other end of its connection to the agent."""
        self._n_requests += 1
        request = protocol.ForkRank(
            self._n_requests,
            os.fsencode(script),
            tuple(map(os.fsencode, arguments)),
            os.fsencode(ROOT),
            {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            AGENT_FD,
            os.getpid(),
            "script",
        )
        with open(os.devnull, "rb") as nothing:
            return self._forked(request, [nothing.fileno(), 1, 2, its.fileno()])

    def _forked(self, request: protocol.Fork, descriptors: list[int]) -> psutil.Process:
        self._zygote.request(request, descriptors)
        answer = self._zygote.answer()
        assert isinstance(answer, protocol.Forked) and answer.number == request.number
        return psutil.Process(answer.pid)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """A zygote that has imported what ranks with a Job need."""
    was_subreaper = set_subreaper(True)
    made = rank_process.Zygote([name for more in IMPORTS for name in more], dict(os.environ), N_RANKS)
    try:
        assert isinstance(made.answer(), protocol.Imported)
        yield Forks(made)
    finally:
        made.socket.close()  # which ends it
        os.waitpid(made.pid, 0)
        set_subreaper(was_subreaper)


class MiniAgent:
    """Real processes of `script` as ranks 0..n-1, and the reports of each rank in order."""

    def __init__(self, forks: Forks, n_ranks: int, script: Path, *arguments: str) -> None:
        self.reports: dict[int, list[Any]] = {}
        self.heard: dict[int, list[Any]] = {}
        """All reports of each rank; those of `reports` are not yet read by `wait`."""
        self.results: tuple[Result, ...] = ()
        self.followers: tuple[int, ...] = ()
        """Idle ranks, which are told every result."""
        self.generation = self.n_pings = 0
        self.plan: Plan | None = None
        self._has_acted = False
        self.processes: dict[int, psutil.Process] = {}
        self._forks = forks
        self._n_ranks = n_ranks
        self._script = script
        self._arguments = arguments
        self._profile: Profile | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._deframers: dict[int, Deframer[Report]] = {}
        self._selector = selectors.DefaultSelector()
        self._introductions = Introductions(self._introduce)
        for rank in range(n_ranks):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        """Start a process as `rank`: at the start, instead of one that was killed, or in addition."""
        self._n_ranks = max(self._n_ranks, rank + 1)
        mine, its = socket.socketpair()
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._n_ranks),
            "LOCAL_WORLD_SIZE": str(self._n_ranks),
            ADDRESS: "127.0.0.1",
        }
        self.processes[rank] = self._forks.rank(self._script, self._arguments, environment, its)
        its.close()
        self.reports[rank], self.heard[rank] = [], []
        self._deframers[rank] = Deframer(Report)
        self._sockets[rank] = mine
        self._selector.register(mine, selectors.EVENT_READ, rank)

    # -- what the coordinator does, in its simplest form ----------------------------------------------------------------

    def start(self, layout: str) -> dict[int, Ready]:
        """Measure, plan `layout` over all ranks, prepare them: everything of the first generation but its Go."""
        self.measure()
        return self.prepare(self.first_plan(layout))

    def first_plan(self, layout: str) -> Plan:
        """In plain 1F1B."""
        table = initial_plan(self.situation({}, self.profile), layout)
        return next(c.plan for c in table if c.plan is not None and c.plan.schedule.rule == "1f1b")

    def split(self, plan: Plan, cap: float | None) -> Plan:
        """The plan with its backward split, whether that pays or not."""
        assert self._profile is not None
        return prove(msgspec.structs.replace(plan, schedule=Schedule("split", cap, work_of(self._profile))))

    def measure(self) -> None:
        """The profile, by all ranks."""
        hellos = self.wait(Hello)
        model = hellos[0].model
        workers = range(min(self._n_ranks, len(model.layers)))
        cuts = [len(model.layers) * i // len(workers) for i in range(len(workers) + 1)]
        self.order(Measure(0, tuple(Stage(i, cuts[i], cuts[i + 1]) for i in workers)))
        measured = self.wait(Measured, *workers)
        reports = [measured[i] for i in workers]
        places = {"ranks_per_node": 1, "nodes_per_host": 8}
        self._profile = merge(model, reports, [0] * len(reports), **places, cores=None, model_name="train")

    def pause(self) -> dict[int, Paused]:
        """The next generation: nobody communicates any more."""
        self.generation += 1
        self.order(Pause(self.generation))
        return self.paused()

    def ask_to_drain(self, *ranks: int) -> None:
        """The next generation, when the unit is final that comes next: `ranks`, by default all that have work, have heard of
        it. Idle ones are paused. Paused is the caller's to wait for."""
        assert self.plan is not None
        self.generation += 1
        ranks = ranks or self.plan.workers
        self.order(Drain(self.generation), *ranks)
        if self.plan.idle:
            self.order(Pause(self.generation), *self.plan.idle)
        self.ping(*ranks)

    def paused(self, *ranks: int) -> dict[int, Paused]:
        """What `ranks`, by default all, answer to what asked them to stop."""
        return self.wait(Paused, *ranks, when=lambda report: report.generation == self.generation)

    def ping(self, *ranks: int) -> dict[int, Pong]:
        """Where `ranks` are. They have heard all that they were told before."""
        self.n_pings += 1
        self.order(Ping(self.n_pings), *ranks)
        return self.wait(Pong, *ranks, when=lambda report: report.number == self.n_pings)

    def replan(self, strategy: str, paused: dict[int, Paused], respawnable: tuple[int, ...] = ()) -> Plan:
        """The best plan of `strategy` for the ranks that answered the pause."""
        held = {rank: frozenset(report.held) for rank, report in paused.items()}
        chosen = best(search(self.situation(held, self.profile, respawnable), strategy))
        assert chosen is not None and chosen.plan is not None, f"{strategy} has no plan"
        return prove(chosen.plan, held)

    def prepare(self, plan: Plan) -> dict[int, Ready]:
        """Everybody's answer to it. `go` is the caller's."""
        self.send_prepare(plan)
        return self.wait_ready()

    def send_prepare(self, plan: Plan, *ranks: int, rest: Rest | None = None) -> None:
        """To `ranks`, by default all."""
        self.generation, self.plan = max(plan.generation, self.generation), plan
        self.order(Prepare(plan.generation, plan, self.results, self.boundaries, rest), *ranks)

    def wait_ready(self) -> dict[int, Ready]:
        ready = self.wait(Ready, when=lambda report: report.generation == self.generation)
        self._has_acted = any(report.has_acted for report in ready.values())
        return ready

    def go(self) -> None:
        assert self.plan is not None
        self.followers = self.plan.idle
        self.order(Go(self.generation, self._has_acted))

    def finish(self) -> dict[int, Finished]:
        """Wait until all ranks have ended their scripts, and well."""
        finished = self.wait(Finished)
        for rank in self._sockets:
            assert self.processes[rank].wait(LIMIT_S) == 0, f"rank {rank}"
        return finished

    @property
    def living(self) -> set[int]:
        """Those that have not been killed."""
        return {*self._sockets}

    @property
    def profile(self) -> Profile:
        """What the ranks have measured."""
        assert self._profile is not None
        return self._profile

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return self.profile.boundaries

    def situation(self, held: dict[int, frozenset[int]], profile: Profile, respawnable: tuple[int, ...] = ()) -> Situation:
        """For a search: `held` by the ranks that live."""
        alive = tuple(sorted(held)) if self.plan is not None else tuple(range(self._n_ranks))
        return Situation(
            generation=self.generation if self.plan is not None else 1,
            step=position_after(self.results[-1])[0] if self.results else 0,
            plan=self.plan,
            alive=alive,
            lost=tuple(rank for rank in range(self._n_ranks) if rank not in alive),
            respawnable=respawnable,
            held=held,
            node_of={rank: rank for rank in range(self._n_ranks)},
            profile=profile,
            seconds_to_change=3600.0,
            aim=Aim(protect=Protect.NONE),
        )

    # -- orders and reports, one by one ---------------------------------------------------------------------------------

    def order(self, order: Command, *ranks: int) -> None:
        """Send to `ranks`, by default all that live."""
        for rank in ranks or tuple(self._sockets):
            self._sockets[rank].sendall(frame(order))

    def wait(self, kind: type, *ranks: int, when: Callable[[Any], bool] = lambda report: True) -> dict[int, Any]:
        """The next unread report of `kind` from each of `ranks` for which `when` holds; earlier ones are dropped."""
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + LIMIT_S
        wanted = set(ranks or self._sockets)
        while True:
            for rank in wanted - set(found):
                while self.reports[rank] and rank not in found:
                    report = self.reports[rank].pop(0)
                    if isinstance(report, kind) and when(report):
                        found[rank] = report
            if wanted == set(found):
                return found
            missing = wanted - set(found)
            assert time.monotonic() < deadline_s, f"no {kind.__name__} from ranks {sorted(missing)}"
            ended = self._read(deadline_s)
            assert not missing & ended, f"ranks {sorted(missing & ended)} ended while their {kind.__name__} was waited for"

    def until(self, what: Callable[[], bool]) -> None:
        """Hear what the ranks report until it is so. `wait` finds all of it."""
        deadline_s = time.monotonic() + LIMIT_S
        while not what():
            last = {rank: [type(report).__name__ for report in its[-5:]] for rank, its in self.heard.items()}
            assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s; the last reports: {last}"
            self._read(deadline_s)

    def _read(self, deadline_s: float) -> set[int]:
        """Wait until something comes, and take it in. Answers which ranks have ended."""
        ended = set()
        for key, _ in self._selector.select(max(0.0, deadline_s - time.monotonic())):
            if data := key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                self._note(key.data, list(self._deframers[key.data].feed(data)))
            else:
                self._selector.unregister(key.fileobj)
                ended.add(key.data)
        return ended

    def _note(self, rank: int, reports: list[Any]) -> None:
        self.reports[rank] += reports
        self.heard[rank] += reports
        for report in reports:
            if isinstance(report, Offered) and report.generation == self.generation:
                self._introductions.offered(rank, report)
            if isinstance(report, Committed):
                known, self.results = self.results, with_result(self.results, report.result)
                if self.followers and self.results is not known:
                    self.order(Follow(self.generation, report.result), *self.followers)

    def _introduce(self, rank: int, known: Command) -> None:
        if rank in self._sockets:
            self.order(known, rank)

    def kill(self, rank: int) -> None:
        """SIGKILL, and forget the rank."""
        self.processes[rank].kill()
        self.processes[rank].wait(LIMIT_S)
        self._forget(rank)

    def leave(self, rank: int) -> int | None:
        """End the connection to a rank without a word; returns what its process ended with."""
        self._forget(rank)
        return self.processes[rank].wait(LIMIT_S)

    def _forget(self, rank: int) -> None:
        sock = self._sockets.pop(rank)
        self.followers = tuple(follower for follower in self.followers if follower != rank)
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        """End everything."""
        for rank in list(self._sockets):
            self._forget(rank)  # its end ends the rank
        self._selector.close()
        _, alive = psutil.wait_procs([*self.processes.values()], LIMIT_S)
        for process in alive:
            process.kill()
            process.wait(LIMIT_S)
        assert not alive, f"{alive} outlived their agent"
