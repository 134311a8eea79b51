"""A rank's Phase under all orders of what its script, its agent and a lost peer do: one thread each, one step at a time."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from odyssey.errors import JobError, OdysseyError
from odyssey.protocol.orders import Drain, Go, Pause, Prepare
from odyssey.protocol.units import Position, Result
from odyssey.runtime.phase import NEXT_ACTIVITY, NEXT_COMMUNICATION, Activity, Communication, Phase, word_of
from tests.examples import examples

PHASES = [Phase(1, activity, communication) for activity in Activity for communication in Communication]


class Rank(RuleBasedStateMachine):
    """The link's thread, the script's thread, and an agent that knows no more than what it was told.

    `told`: where the agent believes this rank to be. `passed`: the newest unit that peers have the result of, which they
    can have only if this rank has contributed. `asked`: the generation of a Drain that is to be honoured, `contributed`:
    what this rank told of it at the commit point, `drained_for`: what all learn there. `buffers`: which gradient buffers
    there are; `full`: those with the unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase()
        self.queue: deque[tuple[type, int]] = deque()
        self.generation = 0
        self.told: tuple[int, Position, str] | None = None
        self.answers: list[int] = []
        self.is_prepared = self.has_ready = False
        self.passed: Result | None = None
        self.runs = False
        """Whether the agent has said Go in the newest generation."""
        self.asked: int | None = None
        self.contributed: int | None = None
        self.drained_for: int | None = None
        self.buffers = self.full = 0
        self.step: str = "waits"
        """What the script's thread does next: `waits` for an order, `builds`, is in its `unit`, or in the `script`."""

    def change(self, phase: Phase) -> bool:
        """As Control does it."""
        changed, self.phase = phase is not self.phase, phase
        assert phase.generation >= 0
        if phase.is_away:
            self.answer()
        return changed

    def answer(self) -> None:
        if self.phase.communication is Communication.CUT:
            self.told = (self.phase.generation, self.phase.position, word_of(self.phase))
            self.answers.append(self.phase.generation)
            self.phase = self.phase.answered()
            self.is_prepared = self.has_ready = False
            self.asked = None

    # -- the agent and the link's thread ----------------------------------------------------------------------------------

    @rule()
    def a_peer_is_lost(self) -> None:
        self.generation += 1
        self.runs, self.asked = False, None
        self.change(self.phase.paused(self.generation))
        self.queue.append((Pause, self.generation))

    @rule()
    @precondition(lambda self: self.runs)
    def the_agent_asks_for_a_stop_between_units(self) -> None:
        self.generation += 1
        self.runs, self.asked = False, self.generation
        self.change(self.phase.draining(self.generation))
        self.queue.append((Drain, self.generation))

    @rule(generation=st.integers(0, 3))
    def a_drain_of_an_old_generation_changes_nothing(self, generation: int) -> None:
        assert self.phase.draining(min(generation, self.phase.generation)) is self.phase

    @rule(old=st.integers(0, 3))
    def an_old_pause_changes_nothing(self, old: int) -> None:
        assert self.phase.paused(min(old, self.phase.generation)) is self.phase

    @rule()
    @precondition(lambda self: not self.is_prepared and (not self.generation or self.answers[-1:] == [self.generation]))
    def all_have_answered(self) -> None:
        self.queue.append((Prepare, self.generation))
        self.is_prepared = True

    @rule()
    @precondition(lambda self: self.has_ready)
    def all_are_ready(self) -> None:
        self.queue.append((Go, self.generation))
        self.has_ready, self.runs = False, True

    @rule(others_heard=st.booleans())
    @precondition(lambda self: self.phase.activity is Activity.CONTRIBUTED and self.passed is None)
    def a_peer_gets_the_result(self, others_heard: bool) -> None:
        if self.phase.communication is Communication.RUNNING:
            self.passed = Result(self.phase.position, "step", (1.0, 1.0))
            self.drained_for = self.asked if others_heard else self.contributed

    # -- the script's thread ------------------------------------------------------------------------------------------------

    @rule(asked=st.booleans())
    def all_goes_well(self, asked: bool) -> None:
        """Until the script's thread is in a unit of a generation that runs, or about to call one. The agent may have asked for
        a stop at once."""
        for _ in range(20):
            if self.step == "waits" and not self.queue and not self.is_prepared:
                self.answer()
                self.all_have_answered()
            elif self.step == "waits" and self.has_ready:
                self.all_are_ready()
                if asked:
                    self.the_agent_asks_for_a_stop_between_units()
            if self.step == "waits":
                self.the_script_takes_an_order()
            elif self.step == "builds":
                self.all_is_built(False)
            else:
                return

    @rule()
    @precondition(lambda self: self.step == "waits")
    def the_script_takes_an_order(self) -> None:
        self.answer()
        if not self.queue:
            return
        kind, generation = self.queue.popleft()
        if kind is Prepare and self.change(self.phase.preparing(generation)):
            if self.passed is not None and self.phase.may_take(self.passed):
                self.take(self.passed)
            self.step = "builds"
        elif kind is Go and self.change(self.phase.running(generation)):
            assert generation == self.generation or {(Pause, self.generation), (Drain, self.generation)} & {*self.queue}
            if self.phase.activity is Activity.STARTING or self.phase.activity is Activity.DONE:
                self.leave()
            elif self.phase.has_work:
                self.step = "unit"

    @rule(idle=st.booleans())
    @precondition(lambda self: self.step == "builds")
    def all_is_built(self, idle: bool) -> None:
        if self.phase.communication is not Communication.PREPARING:
            assert not self.change(self.phase.broken()), "a Pause explains it"
        else:
            self.buffers += 1
            self.change(self.phase.rebuilt(idle))
            self.change(self.phase.ready())
            self.has_ready = True
        self.step = "waits"

    @rule()
    @precondition(lambda self: self.step in ("builds", "unit") and self.phase.activity is not Activity.ACTING)
    def the_connection_ends(self) -> None:
        """Whoever is paused is not to say more; anybody else tells, and is paused for it."""
        was_cut = self.phase.communication in (Communication.CUT, Communication.STOPPED)
        assert self.change(self.phase.broken()) != was_cut
        self.step = "waits"

    @rule()
    @precondition(lambda self: self.step == "script")
    def the_script_calls_a_unit(self) -> None:
        self.change(self.phase.entered("step"))
        self.step = "unit" if self.phase.has_work else "waits"

    @rule()
    @precondition(lambda self: self.step == "unit" and self.phase.activity is Activity.COMPUTING)
    def the_unit_acts(self) -> None:
        self.change(self.phase.acting())

    @rule()
    @precondition(lambda self: self.phase.activity is Activity.ACTING)
    def the_action_is_done(self) -> None:
        self.change(self.phase.entered("step"))

    @rule()
    @precondition(lambda self: self.step == "unit" and self.phase.activity is Activity.COMPUTING)
    def all_is_computed(self) -> None:
        if self.change(self.phase.contributed()):
            self.full, self.contributed = self.buffers, self.phase.drain
        else:
            assert self.told is not None and self.told[0] == self.phase.generation
            self.step = "waits"

    @rule()
    @precondition(lambda self: self.step == "unit" and self.phase.activity is Activity.CONTRIBUTED)
    def the_result_comes(self) -> None:
        if self.passed is None:
            self.passed, self.drained_for = Result(self.phase.position, "step", (1.0, 1.0)), self.contributed
        generation, position, drained_for = self.phase.generation, self.phase.position, self.drained_for
        if drained_for is not None:
            self.change(self.phase.paused(drained_for))
        assert self.phase.may_take(self.passed)
        self.take(self.passed)
        self.leave()
        if drained_for is not None and drained_for > generation:
            assert self.told == (drained_for, Position(position.step + 1, 0), "between")
            assert self.phase.communication is Communication.STOPPED

    def take(self, result: Result) -> None:
        if not self.phase.is_idle:
            assert self.full == self.buffers, "the gradients that are applied are those that were contributed"
        self.change(self.phase.done(result))
        self.passed = None

    def leave(self) -> None:
        self.change(self.phase.left())
        self.step = "script"

    # -- what must hold -----------------------------------------------------------------------------------------------------

    @invariant()
    def every_pause_is_answered_once_in_order(self) -> None:
        assert self.answers == sorted(set(self.answers))
        if self.phase.is_away:
            assert self.phase.communication is not Communication.CUT, "nobody would answer"

    @invariant()
    def a_drain_is_honoured_or_overtaken(self) -> None:
        """What was asked for is either kept, or the next generation that it was for has begun, or a loss is on its way."""
        if self.asked is not None and self.phase.communication is not Communication.BROKEN:
            assert self.phase.drain == self.asked or self.phase.generation >= self.asked

    @invariant()
    def what_was_told_stays_true_until_the_next_plan(self) -> None:
        if self.told is not None and self.phase.communication is Communication.STOPPED:
            assert self.phase.position == self.told[1]

    @invariant()
    def what_a_peer_has_passed_can_be_taken_over(self) -> None:
        if self.passed is not None and not self.is_prepared:
            assert self.phase.may_take(self.passed) or self.phase.position > self.passed.position

    @invariant()
    def a_quiet_agent_gets_it_running(self) -> None:
        """From wherever it is: the next generation is answered, built and run."""
        phase = self.phase.paused(self.generation + 1).answered().preparing(self.generation + 1).rebuilt(False).ready()
        assert phase.running(self.generation + 1).has_work


Rank.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
test_a_rank_under_any_order_of_things = Rank.TestCase


STEPS = {
    "paused": lambda phase: phase.paused(2),
    "draining": lambda phase: phase.draining(2),
    "answered": Phase.answered,
    "entered": lambda phase: phase.entered("step"),
    "acting": Phase.acting,
    "contributed": Phase.contributed,
    "done": lambda phase: phase.done(Result(Position(0, 0), "step", (0.0, 0.0))),
    "left": Phase.left,
    "over": Phase.over,
    "preparing": lambda phase: phase.preparing(1),
    "served": Phase.served,
    "rebuilt": lambda phase: phase.rebuilt(False),
    "ready": Phase.ready,
    "running": lambda phase: phase.running(1),
    "broken": Phase.broken,
}


@pytest.mark.parametrize("name", STEPS)
def test_each_step_goes_where_the_tables_allow_or_nowhere(name: str) -> None:
    for before in PHASES:
        try:
            after = STEPS[name](before)
        except (OdysseyError, JobError):
            continue
        assert after.activity is before.activity or after.activity in NEXT_ACTIVITY[before.activity]
        communications = NEXT_COMMUNICATION[before.communication]
        assert after.communication is before.communication or after.communication in communications
        moved = (after.activity is not before.activity, after.communication is not before.communication)
        assert moved != (True, True), "one step changes one part"


def test_a_pause_may_come_at_any_moment() -> None:
    for before in PHASES:
        after = before.paused(2)
        assert (after.generation, after.communication) == (2, Communication.CUT)
        assert (after.activity, after.position, word_of(after)) == (before.activity, before.position, word_of(before))


@pytest.mark.parametrize(
    ("activity", "word"),
    [
        (Activity.STARTING, "compute"),
        (Activity.IN_SCRIPT, "between"),
        (Activity.COMPUTING, "compute"),
        (Activity.ACTING, "between"),
        (Activity.CONTRIBUTED, "contributed"),
        (Activity.DONE, "compute"),
        (Activity.OVER, "between"),
    ],
)
def test_the_agent_is_told_what_the_script_was_at(activity: Activity, word: str) -> None:
    assert word_of(Phase(activity=activity)) == word
    assert word_of(Phase(activity=activity, is_idle=True)) == ("between" if word == "between" else "idle")


def test_who_has_told_from_an_action_that_it_lacks_the_unit_does_not_pass_it() -> None:
    """I3."""
    acting = Phase(1, Activity.ACTING, Communication.RUNNING, kind="once")
    told = acting.paused(2).answered().entered("once")

    assert told.contributed() is told
    assert told.broken() is told, "the agent knows why"
    assert acting.paused(2).entered("once").contributed().activity is Activity.CONTRIBUTED


def test_orders_of_an_older_generation_change_nothing() -> None:
    """I4."""
    ready = Phase().preparing(3).ready()

    assert ready.running(2) is ready.preparing(2) is ready.paused(3) is ready
    assert ready.paused(4).running(3) == ready.paused(4).ready() == ready.paused(4)


def test_with_new_gradient_buffers_what_was_contributed_is_gone() -> None:
    again = Phase(2, Activity.CONTRIBUTED, Communication.PREPARING, Position(4, 0), "step").rebuilt(False)

    assert again.activity is Activity.COMPUTING and word_of(again) == "compute"
    assert not again.may_take(Result(Position(4, 0), "step", (0.1, 1.0)))


def test_a_result_is_not_taken_over_by_who_has_not_contributed() -> None:
    """I1."""
    result = Result(Position(4, 0), "step", (0.1, 1.0))
    computing = Phase(1, Activity.COMPUTING, Communication.STOPPED, Position(4, 0), "step")

    assert not computing.may_take(result)
    assert Phase(1, Activity.COMPUTING, Communication.STOPPED, Position(4, 0), "step", is_idle=True).may_take(result)
    assert Phase(1, Activity.CONTRIBUTED, Communication.STOPPED, Position(4, 0), "step").may_take(result)
    assert not Phase(1, Activity.CONTRIBUTED, Communication.STOPPED, Position(4, 1), "evaluate").may_take(result)


def test_a_drain_that_comes_before_go_is_obeyed_holds_in_the_generation_that_runs() -> None:
    running = Phase().preparing(3).rebuilt(False).ready().draining(4).running(3)

    assert running.has_work
    assert (running.generation, running.drain) == (3, 4)


def test_a_drain_is_a_pause_to_who_has_no_plan_yet() -> None:
    newcomer = Phase().draining(4)

    assert (newcomer.generation, newcomer.communication) == (4, Communication.CUT)


_OTHERS = {*Communication} - {Communication.READY, Communication.RUNNING, Communication.STOPPED}


@pytest.mark.parametrize("communication", sorted(_OTHERS, key=str))
def test_a_drain_says_nothing_to_who_does_not_run(communication: Communication) -> None:
    phase = Phase(1, Activity.COMPUTING, communication)

    assert phase.draining(2) is phase


def test_whatever_ends_a_generation_ends_the_drain_that_was_asked_of_it() -> None:
    draining = Phase(1, Activity.CONTRIBUTED, Communication.RUNNING, Position(4, 0), "step").draining(2)

    assert draining.drain == 2
    assert draining.paused(3).drain is draining.paused(2).drain is draining.broken().drain is None
    assert draining.paused(3).paused(2) == draining.paused(3), (
        "the unit that the Drain waited for is final, and a Pause has come"
    )


def test_the_first_drain_counts() -> None:
    draining = Phase(1, Activity.IN_SCRIPT, Communication.RUNNING).draining(2)

    assert draining.draining(2) is draining.draining(3) is draining


@pytest.mark.parametrize("communication", [Communication.READY, Communication.RUNNING])
def test_a_rank_without_work_takes_a_drain_for_a_pause(communication: Communication) -> None:
    idle = Phase(1, Activity.COMPUTING, communication, is_idle=True)

    assert idle.draining(2) == idle.paused(2)


def test_a_script_that_ends_before_another_unit_answers_no_drain() -> None:
    ended = Phase(1, Activity.IN_SCRIPT, Communication.RUNNING, Position(4, 0)).draining(2).over()

    assert (ended.generation, ended.communication) == (1, Communication.RUNNING)
    assert ended.paused(2).answered().generation == 2
