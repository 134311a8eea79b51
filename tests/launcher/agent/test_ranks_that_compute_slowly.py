"""A rank that computes slowly, from op times to another plan, with real ranks: what is trained is what one process trains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from launcher.health import slow_ranks
from launcher.joblog.events import Draining, Event, PlanChosen, RankLost, RankSlowed
from launcher.options import RunOptions
from odyssey.plan.plan import Plan
from odyssey.protocol.reports import Committed
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.held import Held

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
SLOW_FROM = 45
"""What is usual is known by then: it is the median of the first forty reports."""
N_STEPS = 140
"""After some sixty with the slow rank an alarm has been confirmed, and another plan is taken."""


@pytest.fixture(autouse=True)
def _by_processor_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks report after each step here: by the wall a moment of waiting for a processor would count as half a minute."""
    monkeypatch.setattr(slow_ranks, "KEPT", math.inf)


class Paced(Ran):
    """Two ranks that have all layers each, of which rank 1 is slow from a step on until another one, or for good."""

    def __init__(self, folder: Path, slow_until: int | None = None) -> None:
        self._pace, self._slow_until, self._out = folder / "pace", slow_until, folder / "out.pt"
        self._held = Held(folder / "held", SLOW_FROM)  # so that rank 1 is slow from there on, and not when we are told
        arguments = ("--model", "mlp", "--global-batch", "8", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
        arguments += ("--pace", str(self._pace), "--out", str(self._out))
        arguments += self._held.arguments
        options = RunOptions(TRAIN, arguments, n_nodes=2, layout="2x1", log_dir=folder / "logs", capture_output=True)
        try:
            super().__init__(options)
        finally:
            self._held.release()

    def _watch(self, event: Event) -> None:
        super()._watch(event)
        if isinstance(event.body, Committed):
            match event.body.result.position[0]:
                case step if step == SLOW_FROM:
                    self._pace.write_text("1")
                    self._held.release()
                case step if step == self._slow_until:
                    self._pace.unlink()

    def assert_exact(self) -> None:
        assert self.code == 0, (self.events[-1], self.text("stderr")[-2000:])
        assert not self.all(RankLost)
        _, expected = exactness.expected_of("mlp", N_STEPS, 8, 2)
        state = torch.load(self._out)["state"]["model"]
        assert reference.largest_difference(expected, state) < exactness.TOLERANCE
        assert self.steps() == list(range(N_STEPS)), "each step is told once"
        self.assert_replays()


def test_a_rank_that_becomes_slow_gets_less_to_do(tmp_path: Path) -> None:
    ran = Paced(tmp_path)
    ran.assert_exact()
    (slowed, *_) = ran.all(RankSlowed)
    assert slowed.rank == 1 and slowed.factor > 1.1
    (draining, *_) = ran.all(Draining)
    assert draining.reason == "rank 1 is slow" and not draining.joined
    before, after, *_ = ran.all(PlanChosen)
    assert work_of(after.plan, 1) < work_of(before.plan, 1)


def test_a_rank_that_is_slow_for_a_moment_is_left_alone(tmp_path: Path) -> None:
    """As long as it is enough for an alarm, and less than what confirms it."""
    ran = Paced(tmp_path, slow_until=SLOW_FROM + 15)
    ran.assert_exact()
    assert not ran.all(RankSlowed) and len(ran.all(PlanChosen)) == 1


def work_of(plan: Plan, worker: int) -> int:
    """Micro-batches times layers."""
    found = 0
    for micro_batch in range(plan.n_micro_batches):
        for number, stage in enumerate(plan.pipelines[plan.home[micro_batch]].stages):
            found += (stage.stop - stage.first) * (plan.runner(micro_batch, number) == worker)
    return found
