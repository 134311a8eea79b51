"""Pictures of what a change does to the layout: what they hold against the plans, and what can be read off them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey.plan.plan import Plan
from odyssey_cli.__main__ import main
from odyssey_cli.timeline.change import Look, Stand, layouts, sentences
from odyssey_cli.timeline.change_svg import render
from perfmodel.profile.profile import write
from strategies.search import initial_plan, search
from strategies.situation import Aim, Protect
from tests import job_events
from tests.planning import first_plan, profile, situation, without

SVG = "{http://www.w3.org/2000/svg}"


def after_loss(before: Plan, strategy: str, *lost: int, n_layers: int, respawns: bool = False) -> Plan:
    asked = situation(
        *(profile(n_layers, before.global_batch), before, without(before, *lost)),
        respawnable=lost if respawns else (),
        aim=Aim(protect=Protect.NONE),
    )
    return next(found.plan for found in search(asked, strategy) if found.plan is not None)


def two_by_two() -> Plan:
    return first_plan(profile(4, 8), "2x2", 4)


def test_rerouting_by_hand() -> None:
    before = two_by_two()
    after = after_loss(before, "reroute", 3, n_layers=4)

    first, second = layouts([Stand("now", before), Stand("then", after, (3,))])

    assert [[(cell.rank, cell.look) for cell in row.cells] for row in first.rows] == [
        [(0, Look.KEPT), (1, Look.KEPT)],
        [(2, Look.KEPT), (3, Look.DOOMED)],
    ]
    assert [[(cell.rank, cell.look, cell.runners) for cell in row.cells] for row in second.rows] == [
        [(0, Look.KEPT, ()), (1, Look.HELPS, ())],
        [(2, Look.KEPT, ()), (None, Look.HOLE, (1,))],
    ]
    assert (first.gone, second.gone, second.idle) == ((), (3,), ())
    assert second.told == (
        "rank 3 is lost: stage 1 of pipeline 1, layers 2-3",
        "rank 1 runs the micro-batches of stage 1 of pipeline 1",
        "no layer moves",
    )


def test_ranks_that_have_no_work_any_more_and_ranks_that_come_back_are_told() -> None:
    before = two_by_two()
    assert sentences(before, after_loss(before, "shrink", 3, n_layers=4), (3,)) == (
        "rank 3 is lost: stage 1 of pipeline 1, layers 2-3",
        "no layer moves",
        "rank 2 without work",
    )
    back = after_loss(before, "respawn", 3, n_layers=4, respawns=True)
    assert sentences(before, back, (3,))[1:] == ("rank 3 started again", "rank 3 takes layers 2-3 from rank 1")
    (_, panel) = layouts([Stand("", before), Stand("", back, (3,))])
    assert panel.rows[1].cells[1].look is Look.STARTED and panel.rows[1].cells[1].new == ((2, 4),)
    assert panel.gone == ()


def test_who_takes_over_what_it_kept_is_told() -> None:
    of = profile(6, 8)
    table = initial_plan(situation(of, None, range(3), aim=Aim(protect=Protect.STATE)), "1x3")
    before = next(row.plan for row in table if row.plan is not None and row.plan.keep_runs)
    after = after_loss(before, "redundant", 1, n_layers=6)
    assert sentences(before, after, (1,)) == (
        "rank 1 is lost: stage 1 of pipeline 0, layers 2-3",
        "rank 0 runs layers 2-3 as well, which it kept",
        "no layer moves",
    )
    _, second = layouts([Stand("", before), Stand("", after, (1,))])
    assert [(cell.rank, cell.look, cell.new) for cell in second.rows[0].cells] == [
        (0, Look.CHANGED, ()),
        (2, Look.KEPT, ()),
    ]


@given(st.sampled_from(["2x4", "4x2", "3+5", "2x3"]), st.data())
def test_marked_as_new_is_what_a_rank_did_not_hold(layout: str, data: st.DataObject) -> None:
    before = first_plan(profile(8, 16), layout, 6 if layout == "2x3" else 8)
    lost = data.draw(st.sampled_from(before.workers))
    after = after_loss(before, "repartition", lost, n_layers=8)

    (_, panel) = layouts([Stand("", before), Stand("", after, (lost,))])

    cells = [cell for row in panel.rows for cell in row.cells]
    assert {cell.rank for cell in cells} == set(after.workers)
    for cell in cells:
        assert cell.rank is not None
        marked = {layer for first, stop in cell.new for layer in range(first, stop)}
        assert marked == after.holds[cell.rank] - before.holds[cell.rank]
        assert (cell.look is Look.KEPT) == (after.holds[cell.rank] == before.holds[cell.rank])
    for row in panel.rows:
        assert [cell.first for cell in row.cells] + [8] == [0] + [cell.stop for cell in row.cells]
    taken = [told for told in panel.told if " takes " in told]
    assert len(taken) == len({move.target for move in after.moves}) or panel.told[-1].endswith("take layers over")


def test_of_many_pipelines_those_that_change_are_shown() -> None:
    before = first_plan(profile(2, 200), "100x2", 200)
    after = after_loss(before, "reroute", 150, n_layers=2)

    first, second = layouts([Stand("", before), Stand("", after, (150,))])

    for panel in (first, second):
        assert len(panel.rows) == 16 and panel.n_left_out == 84
        assert 75 in [row.pipeline for row in panel.rows], "where rank 150 was"
    assert "and 84 more pipelines" in texts_of(render("", (first, second)))


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_drawing_says_in_words_what_its_colours_do() -> None:
    before = two_by_two()
    after = after_loss(before, "reroute", 3, n_layers=4)
    drawn = render("a <job>", layouts([Stand("now", before), Stand("then", after, (3,))]))

    texts = texts_of(drawn)
    assert {"a <job>", "now", "then", "pipeline 0", "rank 0", "✕ rank 3", "run by rank 1", "lost: rank 3"} <= set(texts)
    assert {Look.KEPT, Look.HELPS, Look.DOOMED, Look.HOLE} <= set(texts) and Look.STARTED not in texts
    boxes = [group for group in ElementTree.fromstring(drawn).iter(f"{SVG}g") if group.get("class") == "box"]
    titles = [group.findtext(f"{SVG}title") for group in boxes]
    assert titles[-2:] == [f"rank 2, layers 0-1: {Look.KEPT}", f"run by rank 1, layers 2-3: {Look.HOLE}"]
    for left, right in pairwise([group.find(f"{SVG}rect") for group in boxes[:2]]):
        assert left is not None and right is not None
        assert float(left.attrib["x"]) + float(left.attrib["width"]) < float(right.attrib["x"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_plan_tells_and_draws_the_change(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    asked = ["plan", "--fail-ranks", "3", "--layout", "2x2", "--strategy", "reroute", "--protect", "none"]
    assert main([*asked, "--change", "a.svg"]) == 0

    out, err = capfd.readouterr()
    assert "rank 1 runs the micro-batches of stage 1 of pipeline 1\nno layer moves\n" in out
    assert "written to a.svg" in err
    assert "without rank 3: layout 2x2 -1, reroute" in texts_of((folder / "a.svg").read_text())
    assert main(["plan", "--change", "no/a.svg"]) == 2
    assert "--change: no directory no" in capfd.readouterr().err
