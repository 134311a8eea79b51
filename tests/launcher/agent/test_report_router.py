"""Which reports of units are news, while others are still being agreed upon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from launcher.agent.coordination import Coordination
from launcher.agent.report_router import ReportRouter
from launcher.coordinator.state import JobState, World
from launcher.joblog.events import Body
from launcher.joblog.news import News
from launcher.options import RunOptions
from odyssey.messages import Committed, Report, Result
from tests.fake_loop import FakeLoop


class Undecided:
    """What is told, and decided by nobody yet."""

    def __init__(self) -> None:
        self.told: list[Result] = []

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        assert isinstance(body, Committed)
        self.told.append(body.result)

    def heard(self, sender: Any, report: Report) -> None: ...

    def say(self, text: str) -> None: ...


def test_units_that_follow_each_other_closely_are_all_told_once() -> None:
    """However long it takes to agree upon the first."""
    coordination = Coordination(RunOptions("train.py"))
    coordination.state = state = JobState(World())
    news, reader = News(), Undecided()
    news.read_by(reader)
    quiet: Any = SimpleNamespace(made=lambda s: None, on_step=lambda *step: None)
    router = ReportRouter(FakeLoop(), news, coordination, quiet, quiet, quiet, quiet, quiet, quiet)
    units = [Result((step, 0), "step", (0.0, 0.0)) for step in range(4)]
    for unit in units[:3]:
        for rank in (0, 1):
            sender: Any = SimpleNamespace(rank=rank, has_finished=False, has_failed=False)
            router.heard(sender, Committed(rank, 1, unit, 8, 0.1))
    assert reader.told == units[:3]
    for unit in units[:3]:
        state.results = (unit,)
        router.decided(unit)
    router.heard(sender, Committed(1, 1, units[2], 8, 0.1))
    router.heard(sender, Committed(1, 1, units[3], 8, 0.1))
    assert reader.told == units
