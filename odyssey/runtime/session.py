"""A rank's life between units: transactions, and recovery when one of them is interrupted. This is the script's thread.

Everything that ranks do together is a *unit*: a body (compute, communicate), a commit point (one tiny reduction over all
workers), and a local effect. A rank passes the commit point only if every rank contributed, and contributes only when its
own part is complete. So after a loss either some rank has the unit's result, and then all others hold all they need to
take it over (roll forward), or none has, and all redo the body under the next plan.

A unit whose body gives all ranks the same needs no commit point: who has its result hands on to the others all they lack.
Nobody gets further than the next unit before all have it, see docs/internals/recovery.md.

The commit point also says whether any rank has heard of a Drain by then. If so, all stop behind this unit, each by the same
number: nothing is in flight there, as every rank has waited for what it was sent before it contributed. The groups stay as they
are until those of the next generation take their place, since another rank may not have its result yet. And it says whether
state has come to any rank lately: then all compare what they have before the next unit (comparison.py).

Where this rank stands is one value, a Phase (phase.py), and all that the link's thread has to do with it is in control.py.
What is here beside, the state, its runner (runner.py) and the replay, is the script's thread's alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn

import torch
from msgspec.structs import replace

from odyssey.errors import JobError, OdysseyError
from odyssey.plan.needs import Needs
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.worker import Rank, Worker, all_ranks_of, ranks_of, worker_of
from odyssey.protocol.calls import CALLS
from odyssey.protocol.link import AgentLink
from odyssey.protocol.orders import Command, Connect, Finish, Follow, Go, Measure, Prepare
from odyssey.protocol.reports import Broken, CannotGoOn, Committed, Finished, HandOn, Hello
from odyssey.protocol.units import OF_REPLICAS, SAME_CALLS, STEPS, Position, Result, position_after
from odyssey.runtime import nccl
from odyssey.runtime.agreement import agree
from odyssey.runtime.control import COMMIT, START, Control
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.passed_units import PassedUnits
from odyssey.runtime.phase import Activity, Phase
from odyssey.runtime.runner import R, State
from odyssey.runtime.sum_group import SumGroup
from odyssey.runtime.transaction import Transaction


class Building:
    """How a rank begins to build groups, by what its agent orders."""

    def __init__(self, link: AgentLink, worker: Worker, device: torch.device) -> None:
        self._link = link
        self._worker = worker
        self._device = device

    def groups_for(self, order: Connect | HandOn) -> Groups:
        """Those of a plan that may come, or of those who hand a unit on."""
        if isinstance(order, Connect):
            return self.groups(order.generation, Needs.of(order.plan, self._worker), order.number)
        # The Prepare of this generation builds others: a number tells these apart.
        return self.groups(order.generation, Needs.of_sums(map(worker_of, (order.giver, *order.takers))), 1)

    def groups(self, generation: int, needs: Needs, attempt: int = 0, kept: Iterable[SumGroup] = ()) -> Groups:
        """See Groups."""
        return Groups(self._link.report, generation, needs, self._worker, self._device, self._link.reached_at, attempt, kept)


class Session(Generic[R]):
    """One rank's part in the job, as its script calls it."""

    def __init__(self, link: AgentLink, rank: Rank, state: State[R], before: Session[Any] | None) -> None:
        """`before`: of the Job that the script made before this one, which is over."""
        self.rank, self.worker = rank, worker_of(rank)
        self._process = os.getpid()
        self._job: int = 1 if before is None else before._job + 1
        self._state = state
        self._link = link
        # Orders of an earlier Job may still be on their way: they are of generations that it knew.
        phase = Phase() if before is None else Phase(generation=before._control.phase.generation + 1)
        self._building = Building(link, self.worker, state.device)
        self.runner: R | None = None
        """That of the newest generation; None before the first."""
        self._control: Control = Control(
            link, phase, state, lambda: None if self.runner is None else self.runner.now, self._building.groups_for
        )
        self.replay = PassedUnits()
        """What the script of a rank that has joined has still to pass."""
        self._leader_of_unit: Rank | None = None
        self.has_acted = False
        """Whether the unit at hand is an action that has been completed, here or elsewhere, see run_once.py."""
        self._compares = False
        """Whether ranks compare what they have before the next unit."""

    def start(self) -> None:
        """Report to the agent, and wait until a generation runs."""
        if self._state.device.type != "cpu":
            nccl.outlive_peers()
        self._link.listen(self._control.handle)
        self._link.report(Hello(self.rank, self._state.spec, self._job))
        self._obey(None)
        self._control.change(Phase.left)

    def finish(self) -> None:
        """The script has come to its end, or makes another Job: say so if it is a good one, and let go of the groups. A fork of
        this process that comes to its end is not the rank."""
        if self._control.phase.activity is Activity.OVER or os.getpid() != self._process:
            return
        self._control.change(Phase.over)
        if not self._link.has_failed:
            self._link.report(Finished(self.rank, self.position))
        self._control.close()
        self._state.close()

    # -- what a script sees -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first."""
        return None if self.runner is None else self.runner.plan

    @property
    def position(self) -> Position:
        """The position of the next unit that is run, or of the one at hand."""
        return self._control.phase.position

    @property
    def lost(self) -> frozenset[Rank]:
        """Ranks that are, as this one has been told, though units may have been made with them since."""
        return self._control.lost

    @property
    def place(self) -> Position:
        """Where the script stands: what it sees of the job there is what the scripts of the others saw."""
        return self.replay.place if self.replay.results else self.position

    @property
    def leader(self) -> Rank | None:
        """The rank that speaks for the last unit: the leader of the plan that it ran under, even if that rank is lost
        meanwhile.

        So no two ranks ever speak for one unit. None after a unit that this rank has only replayed.
        """
        if self._leader_of_unit is None and not self.replay.has_joined:
            return self._speaker
        return self._leader_of_unit

    @property
    def _speaker(self) -> Rank | None:
        return ranks_of(self.plan.leader)[0] if self.plan is not None else None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around the script's own code inside a unit: a Pause does not wait for it, the link's thread answers."""
        kind = self._control.phase.kind
        self._control.change(Phase.acting)
        try:
            yield
        finally:
            self._control.change(lambda phase: phase.entered(kind))

    # -- units --------------------------------------------------------------------------------------------------------

    def run(self, transaction: Transaction[R]) -> Result:
        """Run one unit to its end, through any number of losses, and return its result.

        On a rank that rejoins, the units that others did meanwhile are not run again: their results are returned.
        """
        self._control.phase.check_open(transaction.kind)
        if self.replay.results:
            self._state.replaying()
            return self.replay.next(transaction.kind)
        self._state.replayed()
        started_s = time.monotonic() if transaction.began_s is None else transaction.began_s
        try:
            self._control.change(lambda phase: phase.entered(transaction.kind))
            if self._control.phase.abandoned:
                # Others hold what this rank has sent of it: nobody can tell that from what comes now.
                self._stand_still(f"an exception has ended {CALLS[transaction.kind]}, and the script calls it again")
            while (phase := self._control.phase).activity is not Activity.DONE:
                if phase.has_work:
                    self._attempt(transaction, started_s)
                else:
                    self._obey(transaction)
            assert phase.passed is not None
            return phase.passed
        finally:
            self._state.forget_unit()
            self._control.change(Phase.left)

    def _attempt(self, transaction: Transaction[R], started_s: float) -> None:
        """Once through the unit, to its end or to that of the generation."""
        try:
            result, drained_for = self._transact(transaction)
        except Cut as cut:
            if self.runner is not None and (told := self._state.interrupted(self.runner, cut)) is not None:
                self._link.report(told)
            self._stand_still(str(cut))
            return
        # The unit is final: tell the agent before anything else, so that its result outlives this rank.
        done_s = time.monotonic()
        generation = self.runner.plan.generation if self.runner is not None else 0
        if transaction.is_told:
            n_samples, unit_s = transaction.n_samples, done_s - started_s
            self._link.report(Committed(self.rank, generation, result, n_samples, unit_s, transaction.n_steps))
        if drained_for is not None:
            # Before its effect, which may raise: nobody else goes on in this generation.
            self._control.change(lambda phase: phase.paused(drained_for))
        self._take(transaction, result)

    def _transact(self, transaction: Transaction[R]) -> tuple[Result, int | None]:
        """Body and commit point (I1): the result, and the generation that all stop for behind this unit, if they do (I12).

        Raises Cut.
        """
        runner = self.runner
        assert runner is not None
        if self._compares or transaction.kind not in (*STEPS, *OF_REPLICAS):
            # What bodies of different kinds send each other would not fit; a step meets nobody on its way to its commit point,
            # and collectives of a script's own loop are as torch has them.
            agree(runner, self._control.phase.unit, START, ())
            if self._compares and (what := self._state.difference(runner, transaction.kind)):
                _give_up(self._link, what)
            runner.now = (CALLS[transaction.kind], time.monotonic())
        values = transaction.body(runner)
        runner.groups.waiter.check()  # on a device, what a cut has ended looks like what has come to its end
        if (phase := self._control.change(Phase.contributed)) is None:
            raise Cut("paused in the script's own code")
        if transaction.receive is not None:
            return Result(self.position, transaction.kind, transaction.conclude(())), None
        heard = (0.0, 0.0) if phase.drain is None else (1.0, float(phase.drain))
        has_adopted = float(self._state.has_adopted)
        n_heard, generations, n_adopted, *sums = agree(runner, phase.unit, COMMIT, (*heard, has_adopted, *values))
        self._compares = n_adopted > 0
        result = Result(self.position, transaction.kind, transaction.conclude(sums), dict(transaction.metrics(sums)))
        return result, int(generations / n_heard) if n_heard else None

    def _take(self, transaction: Transaction[R], result: Result) -> None:
        """Give a final unit its effect here. Nothing interrupts this, and it needs nobody else (I5)."""
        self._leader_of_unit = self._speaker
        if self.runner is not None and self._control.phase.is_idle:
            self._state.run_only(self.runner)  # others run, though Go may not have come here
        elif self.runner is not None:
            transaction.take(self.runner, result.values)
        self._state.forget_unit()  # a Pause that comes before the script goes on asks for what there is of the next one
        self.has_acted = False
        self._control.change(lambda phase: phase.done(result))
        for report in self._state.reports(self.runner) if self.runner is not None else ():
            self._link.report(report)

    def _roll_forward(self, transaction: Transaction[R] | None, results: Sequence[Result]) -> None:
        """Take over the unit at hand if it is among `results` (I2): others passed its commit point, and we had contributed.

        From then on the unit is done, whatever happens before the next generation runs. An idle rank whose script has not begun
        yet, as it was paused before it obeyed Go, has it replayed. Layers that an idle rank has from before Go are not what
        others have behind the unit: they go with it.
        """
        for result in results:
            if transaction is not None and self._control.phase.may_take(result):
                self._take(transaction, result)
            elif transaction is None and self.runner is not None and result.position == self.position:
                self._state.run_only(self.runner)
                self._join((*self.replay.results, result))

    def _join(self, results: Sequence[Result]) -> None:
        """The script will pass the units that others have run without this rank."""
        self._state.joining()
        self.replay = PassedUnits(results)
        self._control.change(lambda phase: phase.joined(position_after(results[-1])))

    def _stand_still(self, reason: str) -> None:
        """Communication has ended. If no Pause says why, the agent should know."""
        if (phase := self._control.change(Phase.broken)) is not None:
            self._link.report(Broken(self.rank, phase.generation, phase.position, reason))

    # -- orders -------------------------------------------------------------------------------------------------------

    def _obey(self, transaction: Transaction[R] | None) -> None:
        """Obey orders until a generation runs in which this rank has work, or the unit at hand is done."""
        while True:
            order = self._control.next_order()
            try:
                if self._is_way_on(order, transaction):
                    return
            except Cut as cut:
                self._stand_still(str(cut))

    def _is_way_on(self, order: Command, transaction: Transaction[R] | None) -> bool:
        """Obey one order; whether the script's thread can go on. Raises Cut."""
        match order:
            case Follow(result=result):
                self._check_same(result, transaction)
                self._roll_forward(transaction, (result,))
                return self._is_done
            case Finish() if self._job > 1 and self.runner is None:
                return False  # it was for the Job before
            case Finish(results=results):
                self._control.change(Phase.ended)
                self._roll_forward(transaction, results)
                if transaction is not None and not self._is_done:
                    if transaction.receive is not None and any(result.position == self.position for result in results):
                        self._link.report(CannotGoOn(self.rank, "it lacks what others have ended their scripts with"))
                        return False  # ended by the agent
                    what = f"the other ranks ended their script while this one was in {CALLS[transaction.kind]}"
                    raise JobError(what, SAME_CALLS)
                return True
            case Measure(generation=generation):
                if self._control.change(lambda phase: phase.preparing(generation)):
                    self._measure(order)
            case HandOn(generation=generation):
                if self._control.change(lambda phase: phase.preparing(generation)):
                    self._receive(order, transaction)
                return self._is_done
            case Prepare(results=results) if self._takes_then_leaves(transaction, results):
                self._control.put_back(order)
                return True
            case Prepare(generation=generation):
                if self._control.change(lambda phase: phase.preparing(generation)):
                    self._prepare(order, transaction)
            case Go(generation=generation, has_acted=has_acted):
                if self._control.change(lambda phase: phase.running(generation)):
                    assert self.runner is not None
                    self.has_acted = has_acted
                    self._state.run_only(self.runner)
                    return self._is_done or transaction is None or not self._control.phase.is_idle
        return False

    def _check_same(self, result: Result, transaction: Transaction[R] | None) -> None:
        if transaction is not None and result.position == self.position and result.kind != transaction.kind:
            mine, theirs = CALLS[transaction.kind], CALLS[result.kind]
            raise JobError(f"rank {self.rank} called {mine}, the others {theirs}: all ranks must call it", SAME_CALLS)

    def _takes_then_leaves(self, transaction: Transaction[R] | None, results: Sequence[Result]) -> bool:
        """Whether the unit at hand is done by others' word, and the script has something to do behind it before the gate."""
        if transaction is not None and self._state.changes_between_units and not self._is_done:
            self._roll_forward(transaction, results)
            return self._is_done
        return False

    @property
    def _is_done(self) -> bool:
        return self._control.phase.activity is Activity.DONE

    def _measure(self, order: Measure) -> None:
        needs = Needs.of_chain(order.chain, self.worker, is_sharded=self._state.spec.n_shards > 1)
        groups = self._building.groups(order.generation, needs)
        self._control.use(groups)
        if self.worker in groups.needs.members:
            self._link.report(self._state.measure(order, self.worker, groups))
        self._control.change(Phase.served)

    def _receive(self, order: HandOn, transaction: Transaction[R] | None) -> None:
        """Take the unit at hand over from the rank that has its result. Raises Cut."""
        self._check_same(order.result, transaction)
        if transaction is None or transaction.receive is None or self.runner is None:
            raise OdysseyError(f"rank {self.rank} was handed a unit that it is not in", "please report this bug")
        self.runner.stop()
        groups = self._building.groups_for(order)
        self._control.use(groups)
        groups.build()
        transaction.receive(groups, worker_of(order.giver))
        self._control.change(Phase.served)
        self._take(transaction, order.result)

    def _prepare(self, order: Prepare, transaction: Transaction[R] | None) -> None:
        plan, me = order.plan, self.worker
        if plan.state_from is StateFrom.SCRIPT and order.results:
            raise OdysseyError("the plan builds layers anew that have been trained", "please report this bug")
        if self.runner is None and order.results:
            self._join(order.results)
        else:
            self._roll_forward(transaction, order.results)
        if self.runner is not None:
            self.runner.stop()
            gone = {*all_ranks_of(self.runner.plan.workers)}.difference(all_ranks_of(plan.workers))
            if why := self._state.why_not(gone):  # before groups are built, in which another rank may be waited for in vain
                self._link.report(CannotGoOn(self.rank, why))
                return
        started_s = time.monotonic()
        needs = Needs.of(plan, me)
        ahead = self._control.use_ahead(needs, order.generation)
        groups = ahead or self._building.groups(order.generation, needs, kept=self._control.hand_over(order.kept, needs))
        self._control.use(groups)
        groups.build()
        if ahead is None and me in needs.movers:
            self._state.built(plan, started_s, groups.kept_members)
        if self.runner is not None:
            # What survivors know has been taken over.
            self._control.change(Phase.given_up)
            self._state.let_go(self.runner, plan, order.rest)
        built_s = time.monotonic()
        moved = self._state.take_on(plan, me, groups)
        moved_s = time.monotonic()
        self.runner = runner = self._state.runner(plan, me, groups, order.boundaries, order.rest)
        self._compares = False  # the gate does
        self._control.change(lambda phase: phase.rebuilt(me not in plan.holds))
        report = self._state.ready(runner, self.position, groups_s=built_s - started_s, moves_s=moved_s - built_s, moved=moved)
        self._control.change(Phase.ready)
        self._link.report(replace(report, has_acted=self.has_acted))


def _give_up(link: AgentLink, what: str) -> NoReturn:
    """Tell that ranks differ. All of them come here, and one decision is taken for all: none trains on."""
    link.report(CannotGoOn(link.rank, f"{what} {_SINCE}", _IN_EXTRA))
    threading.Event().wait()  # ended by the agent
    raise AssertionError("nobody sets it")


_SINCE = "since state came to a rank: what the loop keeps across a call of odyssey belongs into extra"
_IN_EXTRA = "give what the loop keeps in extra=[...], and other weights to evaluate with as run.evaluate(data, weights=...)"
