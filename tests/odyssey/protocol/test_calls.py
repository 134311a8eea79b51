"""All ranks make the same calls: where they do not, the job ends and says who called what, and nobody waits for ever."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from launcher.joblog.events import JobEnded, RankLost
from launcher.options import RunOptions
from odyssey.errors import JobError
from odyssey.protocol.calls import CALLS, Unit, difference
from odyssey.protocol.reports import Broken
from odyssey.protocol.units import SAME_CALLS, Position, Result
from odyssey.runtime.phase import Activity, Communication, Phase
from tests import ROOT, exactness, reference
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
APART = str(ROOT / "tests" / "jobs" / "apart.py")


def test_units_differ_if_they_are_of_different_kinds_at_one_position() -> None:
    save, step = Unit(Position(3, 0), "save"), Unit(Position(3, 0), "step")
    assert difference({0: save, 1: step}) == "rank 0 called save(), rank 1 steps(): all ranks must call it"
    assert difference({0: step, 1: save, 2: step, 3: step}) == (
        "ranks 0, 2-3 called steps(), rank 1 save(): all ranks must call it"
    )
    assert difference({0: save, 1: Unit(Position(3, 1), "step")}) is None
    assert difference({0: save, 1: save}) is None


def test_the_sum_of_different_units_is_that_of_no_unit() -> None:
    """Whatever ranks are in at a position: no rank takes the sum for that of ranks which are all where it is."""
    units = [Unit(Position(3, 0), kind) for kind in CALLS]
    assert [Unit.from_code(unit.code) for unit in units] == units
    for n in (2, 3, 4):
        for some in itertools.combinations_with_replacement(units, n):
            sums = [sum(parts) for parts in zip(*(unit.code for unit in some), strict=True)]
            fits = {unit for unit in units if sums == [part * n for part in unit.code]}
            assert fits == (set(some) if len(set(some)) == 1 else set())


def in_unit(kind: str) -> Phase:
    return Phase(1, Activity.COMPUTING, Communication.RUNNING, Position(3, 0), kind)


def test_a_unit_that_an_exception_has_ended_can_only_be_begun_again() -> None:
    left = in_unit("step").left()
    with pytest.raises(JobError, match=r"save\(\): an exception has ended steps\(\) on this rank") as told:
        left.entered("save")
    assert "call steps() again" in told.value.help
    again = left.entered("step")
    assert again.abandoned == "step"
    done = again.contributed().done(Result(Position(3, 0), "step", (1.0, 1.0))).left()
    assert done.entered("save").kind == "save"


def test_a_rank_takes_no_result_of_another_kind() -> None:
    assert not in_unit("save").contributed().may_take(Result(Position(3, 0), "step", (1.0, 1.0)))


def run(tmp_path: Path, *arguments: str, layout: str, n_nodes: int = 2) -> Ran:
    return Ran(RunOptions(APART, arguments, n_nodes=n_nodes, layout=layout, log_dir=tmp_path / "logs", capture_output=True))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("zero", "others", "layout"),
    [
        pytest.param("save", "step", "1x2", id="who computes waits for an output", marks=pytest.mark.soak),
        pytest.param("step", "save", "2x1", id="who computes waits for a reduction"),
        pytest.param("once", "evaluate", "2x1", id="reductions of different sizes would meet"),
        pytest.param("once_with_state", "once", "1x2", id="one of them moves the state", marks=pytest.mark.soak),
        pytest.param("load_state_dict", "load", "2x1", id="nobody would notice", marks=pytest.mark.soak),
        pytest.param("state_dict", "save", "2x1", id="messages of different form would meet", marks=pytest.mark.soak),
        pytest.param("evaluate", "step", "1x2", id="outputs of both pass", marks=pytest.mark.soak),
        pytest.param("resume", "nothing", "2x1", id="at the start"),
    ],
)
def test_ranks_that_call_differently_end_the_job_with_both_named(zero: str, others: str, layout: str, tmp_path: Path) -> None:
    ran = run(tmp_path, zero, others, str(tmp_path / "state"), layout=layout)
    ended = ran.events[-1].body
    assert isinstance(ended, JobEnded) and ended.code == ran.code == 1
    said = f"rank 0 called {CALLS[zero]}, rank 1 {CALLS['step' if others == 'nothing' else others]}: all ranks must call it"
    assert ended.reason.endswith(said) and ended.help == SAME_CALLS
    assert not [lost for lost in ran.all(RankLost) if lost.cause.text == "SIGABRT"]
    ran.assert_replays()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_an_idle_rank_that_calls_differently_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "step", "step", str(tmp_path / "state"), "save", layout="1x2", n_nodes=3)
    assert ran.code == 1
    assert "rank 2" in ran.events[-1].body.reason and "save()" in ran.events[-1].body.reason


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_a_step_that_the_script_begins_again_after_an_exception_is_exact(tmp_path: Path) -> None:
    """Rank 0 has sent the first outputs of the step when the second sample fails: they must not count for the next one."""
    out = tmp_path / "out"
    ran = run(tmp_path, "again", "again", str(out), layout="1x2")
    assert ran.code == 0, ran.text("stderr")
    (broken,) = ran.all(Broken)
    assert "an exception has ended steps()" in broken.what
    _, expected = exactness.expected_of("gpt", 8, 16, 2)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["model"]) < exactness.TOLERANCE
    ran.assert_replays()
