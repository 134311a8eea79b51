"""The loss over time: what is read off a job's marks, what is drawn, and two whole jobs that lose a rank."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import loss_curve, loss_picture, report, trial
from benchmarks.loss_curve import Curve, Point, Sizes
from benchmarks.run import MEMORY
from tests import ROOT

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = report.Machine("cpu", 2, 2**33, "Linux", "3.12", "2.13", "2026-01-01", "abc", 0.1)
OURS = Curve(4.0, 3, [Point(2.0, 0, 5.0), Point(2.5, 1, 4.0), Point(3.0, 2, 3.5), Point(4.5, 3, 3.0), Point(5.0, 4, 2.5)])
THEIRS = Curve(4.0, 3, [*OURS.points[:3], Point(9.0, 1, 4.0), Point(9.5, 2, 3.5), Point(10.0, 3, 3.0), Point(10.5, 4, 2.5)])


def test_a_curve_is_rank_0s_and_a_new_step_is_one_that_nobody_had_finished():
    def marks(pid: int, rank: int, *done: tuple[int, float]) -> list[trial.Mark]:
        return [trial.Mark(pid, rank, step, at, 5.0 - step) for step, at in done]

    found = [*marks(1, 0, (0, 11.0)), *marks(2, 1, (0, 11.0), (1, 12.0)), *marks(3, 0, (0, 17.0), (1, 18.0), (2, 19.0))]
    curve = loss_curve.curve(sorted(found, key=lambda mark: mark.time), started_at=10.0, killed_at=12.5)
    assert curve.points == [Point(1.0, 0, 5.0), Point(7.0, 0, 5.0), Point(8.0, 1, 4.0), Point(9.0, 2, 3.0)]
    assert (curve.kill_s, curve.n_finished, curve.new_step_s, curve.n_again) == (2.5, 2, 6.5, 1)


def test_losses_of_both_are_compared_step_by_step():
    summary = loss_curve.summarise(OURS, THEIRS)
    assert (summary["loss_curve_new_step_s"], summary["loss_curve_new_step_s_torchrun"]) == (0.5, 6.0)
    assert (summary["loss_curve_again"], summary["loss_curve_again_torchrun"], summary["loss_curve_most_off"]) == (0, 2, 0)
    drifted = Curve(4.0, 3, [*OURS.points[:4], Point(5.0, 4, 2.75)])
    assert loss_curve.summarise(drifted, THEIRS)["loss_curve_most_off"] == pytest.approx(0.1)


def test_the_picture_has_a_gap_where_torchrun_starts_again_and_none_where_ours_goes_on():
    curves = {"odyssey": OURS, "torchrun": THEIRS}
    found = report.Report("loss_curve", "", MACHINE, loss_curve.summarise(OURS, THEIRS), loss_curve.rows(curves))
    svg = ElementTree.fromstring(loss_picture.drawn(found))
    paths = [(path.get("class"), (path.get("d") or "").count(",")) for path in svg.iter(f"{SVG}path")]
    assert [path for path in paths if path[0] not in ("grid", "kill")] == [
        ("torchrun", 3), ("torchrun", 4), ("away torchrun", 2), ("again", 2), ("odyssey", 5),
        ("odyssey span", 1), ("torchrun span", 1),
    ]  # fmt: skip
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "odyssey run: 0.50 s to the next new step" in texts and "torchrun: 6.00 s to the next new step" in texts
    assert "starts again, repeats 2 steps" in texts


def test_the_picture_in_the_docs_is_of_what_was_recorded():
    found = report.read(report.RESULTS / "loss_curve.json")
    assert (ROOT / "docs" / "loss.svg").read_text() == loss_picture.drawn(found)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_both_launchers_train_the_same_and_only_torchrun_repeats_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MEMORY, str(tmp_path))
    sizes = Sizes(n_steps=60, n_before=35, n_between=30)
    curves = {case: loss_curve.measure(case, sizes) for case in ("odyssey", "torchrun")}
    assert [point.step for point in curves["odyssey"].points] == [*range(60)]
    finished = curves["torchrun"].n_finished
    assert finished >= 35
    assert [point.step for point in curves["torchrun"].points[-30:]] == [*range(30, 60)]
    assert curves["torchrun"].n_again >= 5
    assert loss_curve.summarise(curves["odyssey"], curves["torchrun"])["loss_curve_most_off"] < 1e-4
