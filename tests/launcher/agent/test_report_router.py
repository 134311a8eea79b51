"""Which reports of units are news, while others are still being agreed upon; and what is said of states that have moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent.coordination import Coordination
from launcher.agent.report_router import ReportRouter
from launcher.coordinator.state import JobState, World
from launcher.joblog.events import Body, UnitCommitted
from launcher.joblog.news import News
from launcher.options import RunOptions
from odyssey.messages import Committed, Ready, Report, Result
from tests.fake_loop import FakeLoop


class Undecided:
    """What is told, and decided by nobody yet."""

    def __init__(self) -> None:
        self.told: list[Result] = []

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        assert isinstance(body, UnitCommitted)
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
    router = ReportRouter(FakeLoop(), news, coordination, quiet, quiet, quiet, quiet, quiet, quiet, quiet)
    units = [Result((step, 0), "step", (0.0, 0.0)) for step in range(4)]
    for unit in units[:3]:
        for rank in (0, 1):
            sender = quiet_sender(rank)
            router.heard(sender, Committed(1, unit, 8, 0.1, 0.0))
    assert reader.told == units[:3]
    for unit in units[:3]:
        state.results = (unit,)
        router.decided(unit)
    router.heard(sender, Committed(1, units[2], 8, 0.1, 0.0))
    router.heard(sender, Committed(1, units[3], 8, 0.1, 0.0))
    assert reader.told == units


@pytest.mark.parametrize(
    ("read_bytes", "said"),
    [
        (3_000_000, "3.0 MB read from the memory of ranks of its host"),
        (0, "3.0 MB sent over connections"),
        (1_000_000, "1.0 MB read from the memory of ranks of its host, 2.0 MB sent over connections"),
    ],
)
def test_who_wants_to_know_hears_which_way_states_have_come(read_bytes: int, said: str) -> None:
    explained: list[str] = []
    told: list[Any] = []
    reader: Any = SimpleNamespace(take=lambda body, origin, generation: told.append(body))
    news, quiet = News(), SimpleNamespace()
    news.read_by(reader)
    watchers: Any = (quiet, quiet, quiet, quiet, quiet, quiet)
    router = ReportRouter(FakeLoop(), news, Coordination(RunOptions("train.py")), *watchers, explained.append)
    for moved_bytes in (3_000_000, 0):
        ready = Ready(1, (0, 0), (), (), 8, 0.0, 0.0, moved_bytes, read_bytes=min(read_bytes, moved_bytes))
        router.heard(quiet_sender(2), ready)
    assert explained == [f"rank 2 has got its layers: {said}"]
    assert [body.moved_bytes for body in told] == [3_000_000, 0]


def quiet_sender(rank: int) -> Any:
    return SimpleNamespace(rank=rank, has_finished=False, has_failed=False)
