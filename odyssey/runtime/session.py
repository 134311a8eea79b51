"""A rank's life between units: transactions, and recovery when one of them is interrupted.

Everything that ranks do together is a *unit*: a body (compute, communicate), a commit point (one tiny reduction over all
workers), and a local effect. A rank passes the commit point only if every rank contributed, and contributes only when its
own part is complete. So after a loss either some rank has the unit's result, and then all others hold all they need to
take it over (roll forward), or none has, and all redo the body under the next plan.

Two threads: the script's main thread owns model, engine and position; the link's thread receives orders, cuts
communication at once on Pause, and answers for a main thread that is in the script's own code.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch

from odyssey.errors import JobError, OdysseyError
from odyssey.link import AgentLink
from odyssey.messages import (
    SAME_CALLS,
    Broken,
    Command,
    Committed,
    Finish,
    Finished,
    Follow,
    Go,
    Hello,
    Measure,
    OpTimes,
    Pause,
    Paused,
    Ping,
    Pong,
    Position,
    Prepare,
    Result,
    Stop,
    position_after,
)
from odyssey.model.model import Model
from odyssey.plan import Plan, StateFrom
from odyssey.runtime.data import Prefetcher
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import NO_LIMIT, Cut, Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.measure import measure
from odyssey.runtime.proof import problem, ready
from odyssey.runtime.transfer import move_layers
from odyssey.schedule import Commit, Receive, Reduce

OP_TIMES_EVERY_S = 0.5
N_VALUES = 2
"""The most values that a unit ends in."""
Values = tuple[float, ...]


class Transaction(NamedTuple):
    """A unit. `body(engine)`: run it, give what this rank adds to the final sum, Cut may interrupt it. `conclude(sums)`:
    the result's values, the same on all ranks. `take(engine, values)`: the local effect, which cannot be interrupted."""

    kind: str
    body: Callable[[Engine], Sequence[float]]
    conclude: Callable[[Sequence[float]], Values]
    take: Callable[[Engine, Values], None]
    n_samples: int = 0


class Session:
    """One rank's part in the job. `plan` is the one in force, `position` that of the next unit.

    `replaying`: on a rank that has joined, the results of the units that its script has still to pass. `place`: where the
    script stands, which is `position` unless it replays. `leader`: who speaks for the last unit. `joined_step`: where this
    rank came in.
    """

    def __init__(self, link: AgentLink, rank: int, model: Model, job_spec: JobSpec, before: Session | None) -> None:
        """`before`: of the Job that the script made before this one, which is over."""
        self.rank = rank
        self._job: int = 1 if before is None else before._job + 1
        self._is_over = False
        self.model = model
        self.plan: Plan | None = None
        self.position: Position = (0, 0)
        self.replaying: deque[Result] = deque()
        self.joined_step = 0
        self._replayed: Position = (0, 0)
        self._job_spec = job_spec
        self._link = link
        self._engine: Engine | None = None
        self._data: Prefetcher | None = None
        self._transaction: Transaction | None = None
        self._taken_over: Values | None = None
        self._leader_of_unit: int | None = None
        self._has_joined = False  # in a job that had units before this rank came
        self._finished = False
        self._prepared = 0  # the newest generation that this rank is ready for
        self._times_sent_s = time.monotonic()
        self._orders: SimpleQueue[Command] = SimpleQueue()
        # Shared with the link's thread, under the lock:
        self._lock = threading.Lock()
        self._phase = "compute"
        self._groups: Groups | None = None
        self._inside = True  # the main thread is in a unit, or starting: it answers Pause itself
        self._running: int | None = None  # the generation that runs; None until the next Go
        # The newest generation that a Pause announced, and the newest one for which Paused was reported. Orders of an earlier
        # Job may still be on their way: they are of generations that it knew.
        self._paused_for: int = 0 if before is None else max(before._paused_for, before._prepared) + 1
        self._answered_for = self._paused_for

    def finish(self) -> None:
        """The script has come to its end, or makes another Job: say so if it is a good one, and let go of the groups."""
        if self._is_over:
            return
        self._is_over = True
        if not self._link.has_failed:
            self._link.report(Finished(self.position))
        if self._groups is not None:
            self._groups.close()

    @property
    def is_idle(self) -> bool:
        """Whether the plan has no work for this rank."""
        return self.plan is not None and self.rank not in self.plan.held

    @property
    def leader(self) -> int | None:
        """Who speaks for the last unit: the leader of the plan that it ran under, even if that rank is lost meanwhile.

        So no two ranks ever speak for one unit. None after a unit that this rank has only replayed.
        """
        if self._leader_of_unit is None and not self._has_joined:
            return self.plan.leader if self.plan is not None else None
        return self._leader_of_unit

    @property
    def place(self) -> Position:
        """Where the script stands: what it sees of the job there is what the scripts of the others saw."""
        return self._replayed if self.replaying else self.position

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around the script's own code inside a unit: a Pause does not wait for it, the link's thread answers."""
        with self._lock:
            self._inside, self._phase = False, "between"
            self._answer_pause()
        try:
            yield
        finally:
            with self._lock:
                self._inside, self._phase = True, "compute"

    def start(self) -> None:
        """Report to the agent, and wait until a generation runs."""
        self._link.listen(self._handle)
        self._link.report(Hello(self.rank, os.getpid(), self._job_spec.spec, self._job))
        self._obey()
        self._leave()

    # -- units --------------------------------------------------------------------------------------------------------

    def run(self, transaction: Transaction) -> Values:
        """Run one unit to its end, through any number of losses, and return its result's values.

        On a rank that rejoins, the units that others did meanwhile are not run again: their results are returned.
        """
        if self._is_over:
            raise JobError(
                f"{transaction.kind}: this Job is over, the script has made another one since", "use one Job after another"
            )
        if self.replaying:
            return self._replay(transaction.kind)
        if self._finished:
            raise JobError(f"{transaction.kind}: another rank has already ended its script", SAME_CALLS)
        with self._lock:
            self._inside, self._transaction, self._phase = True, transaction, "compute"
        self._taken_over = None
        # That all ranks end the same unit is checked by the commit point itself: what they add must be equal.
        unit = [float(part) for part in (*self.position, zlib.crc32(transaction.kind.encode()) >> 8)]
        started_s = time.monotonic()
        try:
            while True:
                if self._running is None or self._paused_for > self._running or self.is_idle:
                    self._obey()
                    if self._taken_over is not None:
                        return self._taken_over
                    continue
                try:
                    values = self._transact(transaction, unit)
                except Cut as cut:
                    self._stand_still(str(cut))
                    continue
                self._commit(transaction, values, started_s)
                return values
        finally:
            self._leave()

    def _transact(self, transaction: Transaction, unit: list[float]) -> Values:
        engine = self._engine
        assert engine is not None
        self._phase = "compute"
        values = list(transaction.body(engine))
        padding = [0.0] * (N_VALUES - len(values))  # of one size, whatever the other ranks are at
        sums = torch.tensor([*values, *padding, *unit], dtype=torch.float64)
        self._phase = "contributed"
        engine.now = ("commit", time.monotonic())
        n_members = len(engine.groups.members)
        if n_members > 1:
            # As long as it takes: another rank may be in the script's own code. Who hangs is the agent's to find.
            engine.groups.wait(engine.groups.all_reduce(sums, limit=NO_LIMIT).wait)
        if sums[N_VALUES:].tolist() != [part * n_members for part in unit]:
            raise JobError(f"other ranks ended another unit than this one's {self._unit}", SAME_CALLS)
        return transaction.conclude(sums[: len(values)].tolist())

    def _commit(self, transaction: Transaction, values: Values, started_s: float) -> None:
        """The unit is final: tell the agent before anything else, so that its result outlives this rank."""
        result = Result(self.position, transaction.kind, values)
        done_s = time.monotonic()
        self._link.report(Committed(self._running or 0, result, transaction.n_samples, done_s - started_s, done_s))
        self._leader_of_unit = self.plan.leader if self.plan is not None else None
        self._take(transaction, result)

    def _take(self, transaction: Transaction, result: Result) -> None:
        """Give a final unit its effect here. Nothing interrupts this."""
        if self._engine is not None and not self.is_idle:
            transaction.take(self._engine, result.values)
        with self._lock:
            self.position, self._phase = position_after(result), "compute"
        self._report_times()

    def _roll_forward(self, results: Sequence[Result]) -> None:
        """Take over the unit at hand if it is among `results`: others passed its commit point, and we had contributed.

        From then on the unit is done, whatever happens before the next generation runs: `_taken_over` says so.
        """
        for result in results:
            if result.position == self.position and self._transaction is not None and self._taken_over is None:
                self._leader_of_unit = self.plan.leader if self.plan is not None else None
                self._take(self._transaction, result)
                self._taken_over = result.values

    def _replay(self, kind: str) -> Values:
        result = self.replaying.popleft()
        if result.kind != kind:
            what = f"after rejoining, the script calls {kind} where the other ranks called {result.kind}"
            if "load" in (kind, result.kind):  # it depends on the files that are there, which were others at the job's start
                raise JobError(what, "use odyssey.Job(..., resume=folder), which decides once for all ranks")
            raise JobError(what, "let the script's course depend on the step only")
        self._replayed = position_after(result)
        return result.values

    def _leave(self) -> None:
        with self._lock:
            self._inside, self._transaction, self._phase = False, None, "between"
            self._answer_pause()

    def _stand_still(self, reason: str) -> None:
        """Communication has ended. If no Pause says why, the agent should know."""
        with self._lock:
            self._running = None
            unexplained = self._paused_for <= self._prepared
        if unexplained:
            self._link.report(Broken(self._prepared, reason))

    # -- orders, as the main thread obeys them ------------------------------------------------------------------------

    def _obey(self) -> None:
        """Obey orders until a generation runs in which this rank has work, or the unit at hand was taken over."""
        while True:
            with self._lock:
                self._answer_pause()
            order = self._orders.get()  # ended by the agent's next order; without an agent the link ends the process
            try:
                if isinstance(order, Follow):
                    self._roll_forward((order.result,))
                    if self._taken_over is not None:
                        return
                elif isinstance(order, Finish) and self._job > 1 and not self._prepared:
                    pass  # it was for the Job before
                elif isinstance(order, Finish):
                    self._finished = True
                    self._roll_forward(order.results)
                    if self._taken_over is None and self._transaction is not None:
                        what = f"the other ranks ended their script while this one was in {self._transaction.kind}"
                        raise JobError(what, SAME_CALLS)
                    return
                elif isinstance(order, Measure) and order.generation >= self._paused_for:
                    self._measure(order)
                elif isinstance(order, Prepare) and order.generation >= self._paused_for:
                    self._prepare(order)
                elif isinstance(order, Go) and order.generation == self._prepared and order.generation >= self._paused_for:
                    self._go(order.generation)
                    if self._taken_over is not None or self._transaction is None or not self.is_idle:
                        return
            except Cut as cut:
                self._stand_still(str(cut))

    def _new_groups(self, groups: Groups, generation: int) -> None:
        """Make `groups` the ones that a Pause cuts. Raises Cut if it has come already."""
        with self._lock:
            old, self._groups = self._groups, groups
            too_late = self._paused_for > generation
        if old is not None:
            old.release()
        if too_late:
            raise Cut("a newer generation")

    def _measure(self, order: Measure) -> None:
        members = [stage.worker for stage in order.chain if stage.worker is not None]
        groups = Groups(order.store, order.generation, members, (), (), self.rank, self.model.device)
        self._prepared = order.generation
        self._new_groups(groups, order.generation)
        if self.rank in members:
            self._link.report(measure(order, self.rank, self.model, self._job_spec, groups))

    def _prepare(self, order: Prepare) -> None:
        plan, me = order.plan, self.rank
        if self.plan is None and order.results:
            self.replaying = deque(order.results)
            self.position = position_after(order.results[-1])
            self._has_joined, self.joined_step = True, self.position[0]
        else:
            self._roll_forward(order.results)
        started_s = time.monotonic()
        movers = sorted({*plan.workers, *(move.source for move in plan.moves)})
        subsets = [group.workers for group in plan.reduce]
        groups = Groups(order.store, order.generation, plan.workers, subsets, movers, me, self.model.device)
        self._prepared = order.generation
        self._new_groups(groups, order.generation)
        if me in movers:
            groups.build()
        built_s = time.monotonic()
        needed = plan.held.get(me, frozenset())
        if plan.state_from is StateFrom.SCRIPT:
            self.model.hold_built(needed)
        elif self.model.is_as_built:
            self.model.hold_built(())  # its state comes from others, if it has work at all
        moved_bytes = move_layers(plan.moves, me, self.model, groups) if me in movers else 0
        moved_s = time.monotonic()
        self.plan = plan
        if self._data is None:
            self._data = self._job_spec.prefetcher(plan)
        self._engine = Engine(plan, me, self.model, self._job_spec, self._data, groups, order.boundaries)
        self._link.report(
            ready(
                self._engine,
                self.model,
                self._job_spec,
                self._data,
                self.position,
                groups_s=built_s - started_s,
                moves_s=moved_s - built_s,
                moved_bytes=moved_bytes,
            )
        )

    def _go(self, generation: int) -> None:
        with self._lock:
            self._running = generation
        assert self.plan is not None and self._engine is not None
        self.model.keep_only(self.plan.held.get(self.rank, ()))
        if what := problem(self._engine, self.model):
            raise OdysseyError(f"what the gate has seen is not what is left to train: {what}", "please report this bug")

    def _report_times(self) -> None:
        now_s = time.monotonic()
        if self._engine is not None and now_s - self._times_sent_s >= OP_TIMES_EVERY_S:
            self._times_sent_s = now_s
            times = self._engine.clock.take(self._engine.plan.micro_batch)
            if times:
                self._link.report(OpTimes(self._running or 0, times))

    # -- orders, as the link's thread handles them --------------------------------------------------------------------

    def _handle(self, order: Command) -> None:
        if isinstance(order, Ping):
            self._link.report(Pong(order.number, *self._where()))
        elif isinstance(order, Stop):
            if order.reason:
                print(order.reason, file=sys.stderr, flush=True)
            os._exit(order.exit_code)
        else:
            if isinstance(order, Pause):
                with self._lock:
                    self._paused_for = max(self._paused_for, order.generation)
                    if self._groups is not None:
                        self._groups.cut(f"paused for generation {order.generation}")
                    if not self._inside:
                        self._answer_pause()
            self._orders.put(order)

    def _answer_pause(self) -> None:
        """Report Paused if a Pause is unanswered. Under the lock; by the main thread, or while that is not inside."""
        if self._paused_for > self._answered_for:
            self._answered_for = self._paused_for
            phase = "idle" if self.is_idle else self._phase
            held = tuple(sorted(self.model.held))
            self._link.report(Paused(self._paused_for, self.position, phase, held))

    @property
    def _unit(self) -> str:
        """The unit at hand, for people."""
        if self._transaction is None or self.is_idle:
            return ""
        step = self.position[0]
        return f"step {step}" if self._transaction.kind == "step" else f"{self._transaction.kind} before step {step}"

    def _where(self) -> tuple[str, str, bool, float]:
        """The unit at hand; what the main thread does, for people; whether it waits for others; for how long, seconds."""
        engine = self._engine
        if engine is None:
            return ("", "building the job", False, 0.0)
        what, since_s = engine.now
        for_s = time.monotonic() - since_s
        if not self._inside:
            return ("", "in the script's own code", False, for_s)
        if self.is_idle:
            return ("", "idle", True, for_s)
        waiting = isinstance(what, Receive | Commit | Reduce) or what == "commit" or self._running is None
        return (self._unit, str(what), waiting, for_s)
