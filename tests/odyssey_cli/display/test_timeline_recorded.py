"""Recorded steps: what ranks keep and tell, and how it is shown beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from launcher.coordinator.machine import step
from launcher.coordinator.state import PlainState
from launcher.joblog.events import Event, GenerationStarted, PlanChosen, RankStarted, encode
from launcher.options import RunOptions
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import program
from odyssey.protocol.reports import StepTimes
from odyssey.runtime.recorder import Recorder
from odyssey_cli.__main__ import main
from odyssey_cli.timeline.picture import OpKind
from odyssey_cli.timeline.recorded import generations, picture
from perfmodel.step.timeline import timeline_of
from strategies.search import search
from strategies.situation import Aim, Protect
from tests import job_events
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.planning import situation, without

__all__ = ["nothing_left"]

# -- what a rank keeps -------------------------------------------------------------------------------------------------


def test_the_third_step_of_a_generation_is_kept_and_told_once() -> None:
    recorder = Recorder(rank=0, generation=4)
    told = []
    for number in range(5):
        began_s = recorder.begin()
        began_s += [0.0, 0.1]
        began_s = recorder.begin()  # the step is redone from its beginning
        began_s += [10.0 * number + at for at in (1.0, 1.25, 1.5, 1.75)]
        recorder.applied(number + 20, 10.0 * number + 2.0, 10.0 * number + 2.5)
        told.append(recorder.take())

    times = StepTimes(0, 4, 22, 21.0, (0, 250_000, 500_000, 1_000_000, 1_500_000))
    assert told == [None, None, times, None, None]
    assert recorder.take() is None


# -- what is made of it ------------------------------------------------------------------------------------------------


def plan_of(generation: int) -> Plan:
    """As in tests/job_events.py, the second one with the orders that it needs to be run."""
    first = job_events.plan()
    if generation == 1:
        return first
    asked = situation(job_events.profile(), first, without(first, 3), aim=Aim(protect=Protect.NONE))
    return next(candidate.plan for candidate in search(asked, "reroute") if candidate.plan is not None)


def timed(generation: int, *, clocks: dict[int, float] | None = None, slower: float = 1.0) -> list[Event]:
    """What the ranks of a generation of tests/job_events.py tell if every op takes as long as predicted, or `slower`.

    `clocks`: rank -> what its clock shows when the step begins.
    """
    plan = plan_of(generation)
    timeline = timeline_of(plan, job_events.profile())
    events = []
    for rank in plan.workers:
        spans = timeline.spans(plan, rank)
        began = [max(span.start_s, before) for span, before in zip(spans, [0.0, *(s.start_s for s in spans)], strict=False)]
        moments = tuple(round(at * slower * 1e6) for at in (*began, spans[-1].end_s))
        body = StepTimes(rank, 1, 2, (clocks or {}).get(rank, 500.0), moments)
        events.append(Event(job_events.START + 2.5 + generation, generation, f"rank {rank}", body))
    return events


def job_with(*more: Event, hosts: dict[int, str] | None = None) -> list[Event]:
    """The job of tests/job_events.py, `more` behind the plan of its generation."""
    events = []
    for event in job_events.job():
        if isinstance(event.body, RankStarted) and hosts is not None:
            event = msgspec.structs.replace(event, body=msgspec.structs.replace(event.body, host=hosts[event.body.rank]))
        if isinstance(event.body, PlanChosen):
            event = msgspec.structs.replace(event, body=msgspec.structs.replace(event.body, plan=plan_of(event.generation)))
        events.append(event)
        if isinstance(event.body, GenerationStarted):
            events += [late for late in more if late.generation == event.generation]
    return events


def test_each_generation_has_its_prediction_and_below_it_what_was_measured() -> None:
    drawn = picture("job", generations(job_with(*timed(1, slower=1.25), *timed(2))))

    assert [panel.title for panel in drawn.panels] == [
        "generation 1, predicted: layout 2x2",
        "generation 1, measured at step 2: layout 2x2",
        "generation 2 after the loss of rank 3, predicted: layout 2x2 -1, reroute",
        "generation 2 after the loss of rank 3, measured at step 2: layout 2x2 -1, reroute",
    ]
    predicted, measured, _, after = drawn.panels
    assert measured.step_s == pytest.approx(1.25 * predicted.step_s, abs=1e-5)
    for mine, other in zip(predicted.rows, measured.rows, strict=True):
        assert (mine.rank, mine.place, [bar.op for bar in mine.bars]) == (other.rank, other.place, [b.op for b in other.bars])
        computed = [(bar, of) for bar, of in zip(mine.bars, other.bars, strict=True) if bar.kind is OpKind.FORWARD]
        assert computed and all(of.start_s == pytest.approx(1.25 * bar.start_s, abs=1e-5) for bar, of in computed)
    assert [(row.rank, row.lost) for row in after.rows if row.lost] == [(3, "lost: rank 1 runs its micro-batches")]


def test_a_rehearsal_at_another_speed_is_shown_in_the_time_of_its_cluster() -> None:
    ran = generations(job_with(*timed(1)))
    ours, its = picture("job", ran), picture("job", ran, "rehearsed", speed=0.25)

    assert its.panels[1].title == "generation 1, rehearsed at step 2: layout 2x2"
    for mine, other in zip(ours.panels, its.panels, strict=True):
        assert other.step_s == pytest.approx(mine.step_s / 4)
        ends = [[bar.end_s for row in panel.rows for bar in row.bars] for panel in (mine, other)]
        assert ends[1] == pytest.approx([end / 4 for end in ends[0]])


def test_clocks_of_different_hosts_are_aligned_at_the_commit_point() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    one = picture("job", generations(job_with(*timed(1), hosts=hosts))).panels[1]
    clocks = {0: 500.0, 1: 500.0, 2: 9000.0, 3: 9000.0}
    apart = picture("job", generations(job_with(*timed(1, clocks=clocks), hosts=hosts))).panels[1]

    assert apart.step_s == pytest.approx(one.step_s)
    for mine, other in zip(one.rows, apart.rows, strict=True):
        assert [bar.start_s for bar in mine.bars] == pytest.approx([bar.start_s for bar in other.bars])
    assert apart.notes == ("clocks of 2 hosts aligned at the end of the commit point",)


def test_a_rank_that_comes_back_is_lost_no_more() -> None:
    events = job_with()
    again = msgspec.structs.replace(plan_of(1), generation=3)
    events.append(Event(job_events.START + 5, 3, "agent", PlanChosen(again, "rank 3 is back", ())))
    events.append(Event(job_events.START + 6, 3, "agent", GenerationStarted(None, None, None, 0.0, 0.0, None)))
    drawn = picture("job", generations(events))

    assert [[row.rank for row in panel.rows if row.lost] for panel in drawn.panels] == [[], [3], []]
    assert drawn.panels[2].title == "generation 3 after a change, predicted: layout 2x2, start"


def test_a_rank_without_a_record_or_with_one_of_another_program_is_named() -> None:
    first, second, *rest = timed(1)
    short = msgspec.structs.replace(second.body, moments_us=second.body.moments_us[:-1])  # type: ignore[arg-type]
    measured = picture("job", generations(job_with(first, msgspec.structs.replace(second, body=short), *rest[:-1]))).panels[1]

    assert [row.rank for row in measured.rows if not row.bars] == [1, 3]
    assert measured.notes == ("not recorded: ranks 1, 3",)


def test_a_generation_that_recorded_nothing_has_its_prediction_only() -> None:
    drawn = picture("job", generations(job_with(*timed(2))))

    assert [panel.title.partition(":")[0] for panel in drawn.panels] == [
        "generation 1, predicted",
        "generation 2 after the loss of rank 3, predicted",
        "generation 2 after the loss of rank 3, measured at step 2",
    ]
    assert drawn.panels[0].notes == ("no step was recorded: it ran fewer than three",)


def test_a_record_changes_nothing_that_the_coordinator_knows() -> None:
    state = PlainState()
    for event in job_with():
        state, _ = step(state, event)
        if isinstance(event.body, GenerationStarted):
            before = repr(state)
            state, actions = step(state, timed(event.generation)[0])
            assert actions == () and repr(state) == before


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job with two recorded generations."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(encode, job_with(*timed(1), *timed(2)))))
    return tmp_path


def test_one_generation_can_be_asked_for(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(folder), "--generation", "2", "--no-prediction", "--svg", str(folder / "a.svg")]) == 0

    out, err = capfd.readouterr()
    assert "generation 2 after the loss of rank 3, measured at step 2" in out
    assert "generation 1" not in out and "predicted" not in out
    assert f"written to {folder}/a.svg" in err


def test_the_layouts_of_a_job_are_drawn_with_the_one_before(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(folder), "--generation", "2", "--change", str(folder / "a.svg")]) == 0

    capfd.readouterr()
    root = ElementTree.fromstring((folder / "a.svg").read_text())
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("generation ")] == [
        "generation 1: layout 2x2",
        "generation 2 after the loss of rank 3: layout 2x2 -1, reroute",
    ]
    assert "rank 3 is lost: stage 1 of pipeline 1, layers 4-7" in texts


def test_a_generation_that_did_not_run_is_one_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(folder), "--generation", "3"]) == 2

    assert capfd.readouterr().err.splitlines() == [
        f"error: --generation: {folder.name} has run no generation 3",
        "help: it has run 1, 2",
    ]


def test_a_script_without_a_job_has_no_timeline(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "events.jsonl").write_bytes(encode(job_events.job()[0]))

    assert main(["timeline", str(folder)]) == 2
    assert f"error: {folder.name} has run no plan\n" in capfd.readouterr().err


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_a_real_job_records_a_step_of_each_generation_and_shows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = RunOptions(
        script=TRAIN,
        arguments=("--steps", "60", "--pause", "0.05"),
        n_nodes=2,
        layout="2x1",
        log_dir=tmp_path / "logs",
        capture_output=True,
        drills=("step=4 kill=1",),
    )
    ran = Ran(options)

    assert ran.code == 0
    ran.assert_replays()
    plans = {event.generation: event.body.plan for event in ran.events if isinstance(event.body, PlanChosen)}
    told = [event for event in ran.events if isinstance(event.body, StepTimes)]
    assert sorted((event.generation, event.body.rank) for event in told) == [(1, 0), (1, 1), (2, 0)]
    for event in told:
        plan, body = plans[event.generation], event.body
        assert body.step == plan.step + 2
        assert len(body.moments_us) == len(program(plan, body.rank)) + 1
        assert body.moments_us[0] == 0 and list(body.moments_us) == sorted(body.moments_us)
    capfd.readouterr()
    assert main(["timeline", str(ran.folder)]) == 0
    out = capfd.readouterr().out
    assert "generation 1, predicted: layout 2x1" in out and "generation 1, measured at step 2" in out
    assert "generation 2 after the loss of rank 1, measured at step" in out and "1 ✕ lost" in out
