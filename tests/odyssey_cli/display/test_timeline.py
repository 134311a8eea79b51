"""Pictures of a step: what they hold against the plan and its simulation, how they look, and the files they make."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey.plan.plan import Plan
from odyssey.plan.schedule import program
from odyssey_cli.__main__ import main
from odyssey_cli.timeline import svg, terminal, trace
from odyssey_cli.timeline.legend import tick_label, ticks
from odyssey_cli.timeline.picture import OpKind, Picture, headline, places_left, predicted
from perfmodel.profile.profile import Link, Profile, write
from perfmodel.step.timeline import timeline_of
from strategies.search import search
from strategies.situation import Aim, Protect
from tests import job_events
from tests.odyssey.plan.test_schedule import plans
from tests.planning import FREE, first_plan, profile, situation, without

SVG = "{http://www.w3.org/2000/svg}"


def costs_of(plan: Plan, cores: int | None = None, link: Link = FREE) -> Profile:
    return profile(plan.n_layers, plan.global_batch, plan.micro_batch, cores=cores, intra=link, inter=link, commit_s=0.5)


def lost_of_two_by_two() -> Picture:
    """Two pipelines of two stages, four micro-batches each; rank 3 is lost, rank 1 runs all of its stage."""
    of = profile(2, 8)
    before = first_plan(of, "2x2", 4)
    after = next(
        c.plan
        for c in search(situation(of, before, without(before, 3), aim=Aim(protect=Protect.NONE)), "reroute")
        if c.plan is not None
    )
    lost = places_left((3,), before, after)
    panels = (
        predicted(headline("before", before), before, of),
        predicted(headline("after", after, "reroute"), after, of, lost=lost),
    )
    return Picture("toy", panels)


# -- what a picture holds ----------------------------------------------------------------------------------------------


@given(plans(), st.sampled_from([None, 2]), st.sampled_from([FREE, Link(0.25, 1e9)]))
def test_every_op_of_every_worker_is_there_once_and_those_of_a_worker_never_overlap(
    plan: Plan, cores: int | None, link: Link
) -> None:
    of = costs_of(plan, cores, link)

    drawn = predicted("", plan, of, all_rows=1000)

    assert sorted(row.rank for row in drawn.rows) == list(plan.workers)
    for row in drawn.rows:
        assert [bar.op for bar in row.bars] == [str(op) for op in program(plan, row.rank)]
        busy = [bar for bar in row.bars if bar.kind is not OpKind.REDUCTION]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(busy))
        assert all(0 <= bar.start_s <= bar.end_s for bar in row.bars)
    assert drawn.step_s == timeline_of(plan, of).step_s == max(bar.end_s for row in drawn.rows for bar in row.bars)


@given(plans())
def test_what_a_hole_in_the_plan_left_to_others_is_marked_there(plan: Plan) -> None:
    drawn = predicted("", plan, costs_of(plan), all_rows=1000)

    marked = Counter(
        (row.rank, bar.micro_batch) for row in drawn.rows for bar in row.bars if bar.is_rerouted and bar.kind is OpKind.FORWARD
    )
    assert marked == Counter((route.worker, route.micro_batch) for route in plan.routes)


def test_a_profile_that_real_steps_have_scaled_scales_the_picture() -> None:
    of = msgspec.structs.replace(profile(2, 8), step_scale=1.5)
    drawn = predicted("", first_plan(of, "2x2", 4), of)

    assert drawn.step_s == pytest.approx(1.5 * (2 + 4 - 1) * 3.0)
    assert max(bar.end_s for row in drawn.rows for bar in row.bars) == pytest.approx(drawn.step_s)


def test_of_a_large_layout_one_pipeline_of_each_kind_is_shown_and_the_rest_counted() -> None:
    of = profile(4, 65)
    drawn = predicted("", first_plan(of, "16x4", 64), of)

    assert [row.place for row in drawn.rows] == [
        f"{p}.{s}" for p in sorted({row.pipeline for row in drawn.rows}) for s in range(4)
    ]
    assert len(drawn.rows) == 8, "one pipeline with five micro-batches, and one with four"
    assert drawn.notes == ("left out: 14 pipelines (56 ranks) that do the same",)


def test_where_even_kinds_are_too_many_the_pipelines_that_a_loss_has_changed_come_first() -> None:
    of = profile(4, 128, cores=2)
    before = first_plan(of, "16x4", 64)
    after = next(c.plan for c in search(situation(of, before, without(before, 50)), "reroute") if c.plan is not None)
    drawn = predicted("", after, of, lost=places_left((50,), before, after))

    assert len(drawn.rows) == 40
    assert [row.rank for row in drawn.rows if row.lost] == [50]
    assert drawn.notes == ("left out: 6 pipelines (24 ranks) for want of room",)


def test_a_lost_rank_without_a_place_in_the_new_layout_has_a_row_at_the_end() -> None:
    of = profile(4, 8)
    before = first_plan(of, "2x2", 4)
    after = next(c.plan for c in search(situation(of, before, without(before, 1)), "repartition") if c.plan is not None)
    drawn = predicted("", after, of, lost=places_left((1,), before, after))

    assert (drawn.rows[-1].rank, drawn.rows[-1].place, drawn.rows[-1].lost) == (1, "", "lost")
    assert [row.rank for row in drawn.rows[:-1]] == [stage.worker for p in after.pipelines for stage in p.stages]


# -- how it looks ------------------------------------------------------------------------------------------------------


def test_in_a_terminal_the_step_reads_without_colour() -> None:
    assert terminal.render(lost_of_two_by_two(), 60).plain == GOLDEN
    plain = terminal.render(lost_of_two_by_two(), 60, ascii_only=True).plain
    assert plain.isascii() and len(plain) == len(GOLDEN)


GOLDEN = """\
toy

before: layout 2x2, 15 s a step
stage rank
  0.0    0 0░1░····0███2░1███3░2███·3███
  0.1    1 ··0░0███1░1███2░2███3░3██····
  1.0    2 4░5░····4███6░5███7░6███·7███
  1.1    3 ··4░4███5░5███6░6███7░7██····
           0 s       |5 s      |10 s    |15 s     |20 s

after: layout 2x2 -1, reroute, 25 s a step
stage rank
  0.0    0 0░1░2░3░··0███····1███···2███····3███············
  0.1    1 ··4F4I0░0▓5F5I1░1▓6F6I2░▓7F7I3░3▓4W0▒5W1▒6W2▒7W3▒
  1.0    2 4░5░6░7░4███··5███····6██····7███≈≈≈≈············
  1.1    3 ✕ lost: rank 1 runs its micro-batches
           0 s       |5 s      |10 s    |15 s     |20 s

░░ forward   ██ backward   ▓▓ input gradient
▒▒ weight gradient   ≈≈ gradient reduction
FIW the same in place of a lost rank   ·· waits"""


def test_a_terminal_too_narrow_for_numbers_shows_none() -> None:
    of = profile(4, 400)
    drawn = Picture("toy", (predicted("layout 4x4", first_plan(of, "4x4", 16), of),))
    lines = terminal.render(drawn, 100).plain.splitlines()

    rows = [line[10:] for line in lines if line.startswith("  0.")]
    assert len(rows) == 4 and not any(c.isdigit() for row in rows for c in row)
    assert max(map(len, lines)) <= 100


def test_an_svg_is_one_card_with_a_row_for_each_worker() -> None:
    picture = lost_of_two_by_two()
    root = ElementTree.fromstring(svg.render(msgspec.structs.replace(picture, title="a <b> & \x1b[31m")))

    rows = [group for group in root.iter(f"{SVG}g") if group.get("class") == "row"]
    assert len(rows) == 8
    assert [len([r for r in row if r.get("class") == "strike"]) for row in rows] == [0] * 7 + [1]
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "style", "rect", "text", "g", "line")
    }
    assert "a <b> & \\x1b[31m" in [text.text for text in root.iter(f"{SVG}text")]
    assert root[2].tag == f"{SVG}rect" and root[2].get("fill") == "#ffffff"
    n_forwards = sum(rect.get("class") == "f" for row in rows for rect in row)
    assert n_forwards == sum(bar.kind is OpKind.FORWARD and not bar.is_rerouted for bar in picture.bars)


def test_a_trace_has_a_thread_for_each_worker_and_an_event_for_each_span() -> None:
    picture = lost_of_two_by_two()
    events = json.loads(trace.encode(picture))["traceEvents"]

    for pid, panel in enumerate(picture.panels, 1):
        mine = [event for event in events if event["pid"] == pid]
        threads = {event["tid"] for event in mine if event["name"] == "thread_name"}
        assert threads == {row.rank for row in panel.rows}
        spans = [(row.rank, bar.op, round(bar.start_s, 9), round(bar.end_s, 9)) for row in panel.rows for bar in row.bars]
        complete = [(e["tid"], e["args"]["op"], e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X"]
        ended = {(e["tid"], e["id2"]["local"]): e["ts"] for e in mine if e["ph"] == "e"}
        begun = [e for e in mine if e["ph"] == "b"]
        reductions = [(e["tid"], e["args"]["op"], e["ts"], ended[e["tid"], e["id2"]["local"]]) for e in begun]
        found = [(tid, op, round(start / 1e6, 9), round(end / 1e6, 9)) for tid, op, start, end in complete + reductions]
        assert sorted(found) == sorted(spans)


@given(st.floats(1e-7, 1e6), st.integers(1, 10))
def test_the_marks_of_a_time_axis_are_round_and_neither_few_nor_many(longest_s: float, most: int) -> None:
    marks = ticks(longest_s, most)

    assert marks[0] == 0 and marks[-1] <= longest_s * 1.001
    assert int(most / 2.5 * 0.999) <= len(marks) - 1 <= most
    assert all(f"{apart:.3e}"[:5] in ("1.000", "2.000", "5.000") for apart in marks[1:2])
    assert len({tick_label(at, marks) for at in marks}) == len(marks)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a profile of four ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write(job_events.profile(), tmp_path / "profile.json")
    return tmp_path


def test_plan_shows_the_step_before_and_after_a_loss(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--fail-ranks", "3", "--strategy", "reroute", "--protect", "none", "--layout", "2x2", "--timeline"]
    assert main([*command, "--svg", "step.svg", "--trace", "step.json"]) == 0

    out, err = capfd.readouterr()
    assert "profile.json: one training step before and after the loss of rank 3" in out
    assert "before: layout 2x2" in out and "after: layout 2x2 -1, reroute" in out
    assert "✕ lost: rank 1 runs its micro-batches" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "written to step.svg" in err and "written to step.json" in err
    assert ElementTree.parse("step.svg").getroot().tag == f"{SVG}svg"
    assert {event["pid"] for event in json.loads(Path("step.json").read_text())["traceEvents"]} == {1, 2}


def test_plan_without_a_loss_shows_the_step_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--timeline", "--layout", "2x2"]) == 0

    _, _, shown = capfd.readouterr().out.partition("profile.json: one training step\n")
    assert "layout 2x2" in shown and "before" not in shown


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--svg", "missing/step.svg"], "--svg: no directory missing"),
        (["--trace", "."], "--trace: . is a directory"),
        (["--json", "--timeline"], "--json and --timeline exclude each other"),
        (["--strategy", "rerout"], "--strategy: unknown strategy 'rerout'"),
    ],
)
def test_what_cannot_be_meant_is_one_error(
    folder: Path, capfd: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    assert main(["plan", *options]) == 2

    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"error: {what}") and "\nhelp: " in err


def test_a_file_that_cannot_be_written_is_one_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--svg", "/dev/full"]) == 1

    assert "error: /dev/full: no space left on device" in capfd.readouterr().err
