"""What the two threads of a rank share: the Phase, the groups that a Pause cuts, and the agent's orders.

The link's thread hears the agent. It obeys at once what cannot wait, a Pause above all, and passes every order on to the
script's thread, which takes them one by one. Whichever changes the Phase does it here, under the lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

from odyssey.plan.needs import Needs
from odyssey.plan.schedule import Op
from odyssey.plan.worker import Rank
from odyssey.protocol.link import AgentLink
from odyssey.protocol.orders import Command, Connect, Drain, Go, Known, Pause, Ping, Stop
from odyssey.protocol.reports import Broken, Connected, HandOn, Paused, Pong
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.phase import Communication, Phase, word_of
from odyssey.runtime.runner import State
from odyssey.runtime.sum_group import SumGroup

_WORDS = {
    Communication.STOPPED: "stands still",
    Communication.PREPARING: "prepares a generation",
    Communication.READY: "waits for the others to be ready",
    Communication.RUNNING: "runs",
    Communication.BROKEN: "has lost its connections",
    Communication.CUT: "is about to pause",
}

START, COMMIT = "start of the call", "commit"
"""What a rank is at where a unit begins or ends, and waits for the others to come to the same."""


class Control:
    """`at`: what the script's thread does, and since when (`Engine.now`); None while it has built nothing to do it with.
    `groups_for`: makes groups that are to be built beside what runs, or what the script does."""

    def __init__(
        self,
        link: AgentLink,
        phase: Phase,
        state: State[Any],
        at: Callable[[], tuple[Op | str, float] | None],
        groups_for: Callable[[Connect | HandOn], Groups],
    ) -> None:
        self._link = link
        self._state = state
        self._at = at
        self._groups_for = groups_for
        self._orders: SimpleQueue[Command] = SimpleQueue()
        self._put_back: Command | None = None
        self._lock = threading.Lock()
        self._phase = phase
        self._since_s = time.monotonic()
        self._groups: Groups | None = None
        self._ahead: Groups | None = None
        """Groups of a generation that may come, built beside the one that runs."""
        self._giving: Groups | None = None
        """Those in which this rank hands a unit on, whatever its script does meanwhile."""
        self._is_over = False
        self.lost: frozenset[Rank] = frozenset()
        """Every Pause tells a replica of some more."""

    @property
    def phase(self) -> Phase:
        """Tell it as it is now. Between two steps of the script's thread, only a Pause or a Drain changes it, and the answer to
        that."""
        return self._phase

    # -- the script's thread --------------------------------------------------------------------------------------------

    def change(self, step: Callable[[Phase], Phase]) -> Phase | None:
        """Take one step; the new Phase, or None if it is the same."""
        with self._lock:
            before = self._phase
            self._set(step(before))
            return None if self._phase is before else self._phase

    def next_order(self) -> Command:
        """Answer a Pause that waits for it, then wait for an order."""
        with self._lock:
            self._answer()
        order, self._put_back = self._put_back, None
        return order or self._orders.get()  # ended by the agent's next order; without an agent the link ends the process

    def put_back(self, order: Command) -> None:
        """Have it come once more, next."""
        self._put_back = order

    def use_ahead(self, needs: Needs, generation: int) -> Groups | None:
        """Groups that are built already, or nearly, if they are what `generation` needs. What was built in vain is let go."""
        with self._lock:
            ahead = self._ahead
            if ahead is not None and ahead.needs == needs:
                self._ahead = None
                ahead.introductions.generation = generation
                return ahead
            self._forget_ahead()
            return None

    def hand_over(self, names: Collection[str], needs: Needs) -> list[SumGroup]:
        """Groups with these names that are needed, out of the ones that a Pause cuts."""
        return [] if self._groups is None else self._groups.hand_over(names, needs)

    def use(self, groups: Groups) -> None:
        """Make `groups` the ones that a Pause cuts. Raises Cut if it has come already."""
        with self._lock:
            old, self._groups = self._groups, groups
            is_wanted = self._phase.communication is Communication.PREPARING
        if old is not None:
            old.release()
        if not is_wanted:
            raise Cut("a newer generation")

    def close(self) -> None:
        """Let go of the groups. None are built any more: the end of the interpreter must meet no thread that is at it."""
        with self._lock:
            self._is_over = True
            self._forget_ahead()
            self._forget_giving()
        if self._groups is not None:
            self._groups.close()

    # -- the link's thread ----------------------------------------------------------------------------------------------

    def handle(self, order: Command) -> None:
        """An order has come."""
        match order:
            case Ping(number=number):
                self._link.report(self._pong(number))
            case Stop(reason=reason, exit_code=exit_code):
                if reason:
                    print(reason, file=sys.stderr, flush=True)
                os._exit(exit_code)
            case Pause(generation=generation, lost=lost):
                self.lost |= frozenset(lost)  # before the answer: what the script begins from now on meets it
                self._hear(lambda phase: phase.paused(generation))
                self._orders.put(order)
            case Drain(generation=generation):
                self._hear(lambda phase: phase.draining(generation), keeps_ahead=True)
                self._orders.put(order)
            case Connect() as connect:
                self._connect(connect)
            case HandOn(giver=giver) as hand_on if giver == self._link.rank:
                self._hand_on(hand_on)
            case Go():
                with self._lock:
                    self._forget_giving()  # at the gate all have it
                self._orders.put(order)
            case Known() as known:
                self._learn(known)
            case _:
                self._orders.put(order)

    def _hear(self, step: Callable[[Phase], Phase], *, keeps_ahead: bool = False) -> None:
        """Take a Pause or a Drain: what it ends is ended now."""
        with self._lock:
            heard = step(self._phase)
            if heard.generation != self._phase.generation:
                if self._groups is not None:
                    self._groups.cut(f"paused for generation {heard.generation}")
                self._forget_giving()
                if not keeps_ahead:
                    self._forget_ahead()
            self._set(heard)

    def _connect(self, order: Connect) -> None:
        rank = self._link.rank
        with self._lock:
            self._forget_ahead()
            if self._is_over or order.generation < self._phase.generation:
                return
            self._ahead = self._groups_for(order)
            began_s = time.monotonic()
            self._ahead.build_beside(
                lambda: self._state.built(order.plan, began_s),
                lambda problem: self._link.report(Connected(rank, order.generation, order.number, problem)),
            )

    def _hand_on(self, order: HandOn) -> None:
        """On a thread beside: the script may come to its next unit only when others have theirs."""
        rank = self._link.rank

        def done(problem: str) -> None:
            if problem:
                self._link.report(Broken(rank, order.generation, self._phase.position, problem))

        with self._lock:
            self._forget_giving()
            if self._is_over or order.generation < self._phase.generation:
                return
            self._giving = giving = self._groups_for(order)
            giving.build_beside(lambda: self._state.hand_on(giving), done)

    def _learn(self, known: Known) -> None:
        with self._lock:
            for groups in (self._groups, self._ahead, self._giving):
                if groups is not None:
                    groups.introductions.learn(known)

    def _pong(self, number: int) -> Pong:
        phase, at = self._phase, self._at()
        what, since_s = _WORDS[phase.communication], self._since_s
        if at is not None and phase.communication in (Communication.RUNNING, Communication.CUT):
            what, since_s = str(at[0]), at[1]
        waiting = False
        if phase.is_away:
            what = "in the script's own code"
        elif phase.is_idle:
            what, waiting = "idle", True
        else:
            takes_orders = phase.communication in (Communication.STOPPED, Communication.READY, Communication.BROKEN)
            waiting = takes_orders or (self._groups is not None and self._groups.waiter.waits_for_others)
        return Pong(number, phase.position, phase.kind, what, waiting, time.monotonic() - since_s)

    # -- under the lock -------------------------------------------------------------------------------------------------

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.release()
            self._ahead = None

    def _forget_giving(self) -> None:
        if self._giving is not None:
            self._giving.release()
            self._giving = None

    def _set(self, phase: Phase) -> None:
        if phase.communication is not self._phase.communication:
            self._since_s = time.monotonic()
        self._phase = phase
        if phase.is_away:
            self._answer()

    def _answer(self) -> None:
        """Report Paused if that is due: the script's thread does nothing for the job meanwhile."""
        phase = self._phase
        if phase.communication is Communication.CUT:
            self._phase = phase.answered()
            held, summed = tuple(sorted(self._state.held)), self._state.summed()
            whole = () if self._groups is None else self._groups.whole()
            at, of_passed = (phase.position, word_of(phase)), (phase.passed, self._state.hands_on)
            why_not = self._state.why_not(self.lost)
            self._link.report(Paused(self._link.rank, phase.generation, *at, held, summed, whole, *of_passed, why_not))
