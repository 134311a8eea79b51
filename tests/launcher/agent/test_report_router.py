"""What ranks tell of units: who hears of it when, what the agents have to agree upon; and what is said of states that moved."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.agent import units
from launcher.agent.coordination import Coordination
from launcher.agent.introductions import Introductions
from launcher.agent.job_log import JobLog
from launcher.agent.report_router import ReportRouter
from launcher.agent.units import Units
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, Status, World
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import Body, Event, UnitFinal
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from odyssey.protocol.orders import Command, Follow
from odyssey.protocol.reports import Committed, Ready, Report
from odyssey.protocol.units import Position, Result, position_after
from tests.fake_loop import FakeLoop
from tests.launcher.coordinator.talk import make_plan


class Leading:
    """The parts of an agent that leads which hear of units, of a job whose rank 2 has no work."""

    def __init__(self) -> None:
        options = RunOptions("train.py", log_dir=Path(os.devnull))
        self.coordination = Coordination(options)
        self.coordination.state = self.job = JobState(World())
        self.job.plan = make_plan([[(0, 0, 4)], [(1, 0, 4)]], {0: frozenset(range(4)), 1: frozenset(range(4))}, idle=(2,))
        self.job.status = Status.RUNNING
        for rank in range(3):
            for state in (RankState.STARTING, RankState.JOINED, RankState.MEMBER):
                self.job.ranks.enter(rank, state)
        self.agreed: list[Result] = []
        """Told to the agents, who have not decided yet."""
        self.written: list[Result] = []
        self.sent: list[tuple[int, Command]] = []
        self.ready: list[Ready] = []
        self.explained: list[str] = []
        sink = EventSink()
        sink.read_by(self)
        quiet: Any = SimpleNamespace(made=lambda s: None, on_step=lambda *step: None, watch=lambda event: None)
        orders: Any = SimpleNamespace(send=lambda rank, order: self.sent.append((rank, order)))
        log = JobLog(JobFolder(options, 0.0, self.say), self.watch, self.coordination, lambda: 0.0)
        self.units = Units(sink, self.coordination, quiet, quiet, quiet, log, orders)
        introductions = Introductions(orders.send)
        self.router = ReportRouter(
            FakeLoop(),
            sink,
            self.coordination,
            quiet,
            quiet,
            quiet,
            quiet,
            self.units,
            introductions,
            self.explained.append,
        )

    def watch(self, event: Event) -> None:
        if isinstance(event.body, Committed):
            self.written.append(event.body.result)

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        if isinstance(body, Ready):
            self.ready.append(body)
            return
        assert isinstance(body, UnitFinal)
        if (unit := self.units.untold()) is not None:
            self.agreed.append(unit.result)
        self.agreed.append(body.result)

    def heard(self, sender: Any, report: Report) -> None: ...

    def say(self, text: str) -> None: ...

    def hear(self, *units: Result, ranks: tuple[int, ...] = (0, 1)) -> None:
        """Hear of each unit, from these ranks."""
        for unit in units:
            for rank in ranks:
                sender: Any = SimpleNamespace(rank=rank, has_finished=False, has_failed=False)
                self.router.heard(sender, Committed(rank, 0, unit, 8, 0.1))


STEPS = [Result(Position(step, 0), "step", (0.0, 0.0)) for step in range(4)]
SAVE = Result(Position(2, 0), "save", (0.0,))


def test_steps_are_written_at_once_and_told_to_the_agents_when_something_is_decided() -> None:
    agent = Leading()
    agent.hear(*STEPS[:3])
    assert agent.written == STEPS[:3] and agent.agreed == []
    told = agent.units.untold()
    assert told is not None and told.result == STEPS[2], "the newest stands for all"
    assert agent.units.untold() is None
    agent.hear(STEPS[2], STEPS[3])
    assert agent.written == STEPS and agent.agreed == []


def test_what_is_no_step_is_told_to_the_agents_at_once_behind_the_steps_before() -> None:
    agent = Leading()
    agent.hear(*STEPS[:2], SAVE)
    assert agent.agreed == [STEPS[1], SAVE]


def test_a_step_that_somebody_waits_for_is_told_to_the_agents_at_once() -> None:
    agent = Leading()
    agent.job.status = Status.FINISHING
    agent.hear(*STEPS[:2])
    assert agent.agreed == STEPS[:2]


def test_the_agents_need_not_keep_more_than_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "STEPS_OF_AN_ENTRY", 2)
    agent = Leading()
    agent.hear(*STEPS)
    assert agent.agreed == [STEPS[1], STEPS[3]]


def test_an_idle_rank_hears_of_each_unit_once() -> None:
    agent = Leading()
    agent.hear(*STEPS[:2], SAVE)
    assert agent.sent == [(2, Follow(0, unit)) for unit in (*STEPS[:2], SAVE)]


def test_what_is_told_late_is_no_news_when_a_load_has_led_back_to_before_it() -> None:
    """Rank 1 tells of a step, and of the load behind it that goes back by just that step, when rank 0 has told of both."""
    rejected = Result(position_after(SAVE), "step", (9.0, 0.0))
    load = Result(position_after(rejected), "load", (2.0,))
    again = Result(position_after(load), "step", (0.0, 0.0))
    units = (*STEPS[:2], SAVE, rejected, load)
    agent = Leading()
    agent.hear(*units, ranks=(0,))
    agent.hear(*units, ranks=(1,))
    agent.hear(again)
    assert agent.written == [*units, again]
    assert agent.sent == [(2, Follow(0, unit)) for unit in (*units, again)]


def test_who_leads_after_another_one_goes_on_from_what_the_agents_know() -> None:
    """Members tell again, each from the newest entry on."""
    agent = Leading()
    agent.job.results = (STEPS[0],)
    agent.hear(STEPS[3], ranks=(1,))  # it cannot be told what was before
    assert agent.written == []
    agent.hear(*STEPS[1:3], ranks=(0,))
    agent.hear(*STEPS[1:], ranks=(1,))
    assert agent.written == STEPS[1:]


def test_who_leads_after_another_one_tells_idle_ranks_of_units_that_are_in_the_log_already() -> None:
    """What the one before had sent them may not have come; they take what is next for them."""
    agent = Leading()
    agent.job.results = (STEPS[2],)
    agent.hear(*STEPS[1:], ranks=(0,))
    agent.hear(*STEPS[1:], ranks=(1,))
    assert agent.sent == [(2, Follow(0, unit)) for unit in STEPS[1:]]
    assert agent.written == STEPS[3:]


def test_a_unit_that_was_lost_with_all_who_knew_of_it_is_heard_of_again() -> None:
    """It is run again in the next generation, and that is what counts."""
    agent = Leading()
    agent.hear(*STEPS[:2])
    agent.job.results = (STEPS[0],)
    assert agent.job.plan is not None
    agent.job.plan = replace(agent.job.plan, generation=2)
    agent.hear(STEPS[1], ranks=(0,))
    told = agent.units.untold()
    assert told is not None and told.result == STEPS[1]


@pytest.mark.parametrize(
    ("read_bytes", "said"),
    [
        (3_000_000, "3.0 MB read from the memory of ranks of its host"),
        (0, "3.0 MB sent over connections"),
        (1_000_000, "1.0 MB read from the memory of ranks of its host, 2.0 MB sent over connections"),
    ],
)
def test_who_wants_to_know_hears_which_way_states_have_come(read_bytes: int, said: str) -> None:
    agent = Leading()
    sender: Any = SimpleNamespace(rank=2, has_finished=False, has_failed=False)
    for moved_bytes in (3_000_000, 0):
        ready = Ready(2, 1, Position(0, 0), (), (), 8, 0.0, 0.0, moved_bytes, read_bytes=min(read_bytes, moved_bytes))
        agent.router.heard(sender, ready)
    assert agent.explained == [f"rank 2 has got its layers: {said}"]
    assert [body.moved_bytes for body in agent.ready] == [3_000_000, 0]
