"""The loss curves of `benchmarks.loss_curve` as SVG: `python -m benchmarks.loss_picture docs/loss.svg`.

Seconds run from the kill on, which is one line for both jobs. What torchrun does again is drawn in a paler colour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.report import Report
from odyssey_cli.timeline.svg_frame import card, text

WIDTH, HEIGHT = 800, 356
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 24, 52, 290
"""Pixels to the edges of what is drawn."""
_TITLES = {"odyssey": "odyssey run", "torchrun": "torchrun"}
_STYLE = """
path { fill: none; stroke-width: 1.8; stroke-linejoin: round }
path.odyssey { stroke: #0b5cad } path.torchrun { stroke: #c2570c } .again { stroke: #f0b27f; stroke-width: 2.4 }
.span { stroke-width: 3 } .away { stroke-width: 1; stroke-dasharray: 3 3 }
.grid { stroke: #e6e9ed } path.kill { stroke: #c1121f; stroke-width: 1.4 }
text { font-size: 13px } text.odyssey { fill: #0b5cad } text.torchrun { fill: #a84300 } text.kill { fill: #c1121f }
text.head { font-size: 14px } .before { text-anchor: end } .axis { fill: #59636e; font-size: 12px; text-anchor: middle }
""".strip()


class Point(msgspec.Struct, frozen=True):
    """A step was done `s` after the kill. `is_again`: it had been done before."""

    s: float
    step: int
    loss: float
    is_again: bool


class Frame(msgspec.Struct, frozen=True):
    """Where a moment and a loss lie: the whole seconds and the whole losses at the edges."""

    first_s: int
    last_s: int
    least: int
    most: int

    def x(self, s: float) -> float:
        return _LEFT + (s - self.first_s) / (self.last_s - self.first_s) * (WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        return _BOTTOM - (loss - self.least) / (self.most - self.least) * (_BOTTOM - _TOP)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_picture", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    options.file.write_text(drawn(report.read(options.results / "loss_curve.json")))


def drawn(found: Report) -> str:
    """The whole file."""
    curves = {case: _points(found, case) for case in ("torchrun", "odyssey")}
    every = [point for points in curves.values() for point in points]
    frame = Frame(
        floor(min(point.s for point in every)),
        ceil(max(point.s for point in every)),
        floor(min(point.loss for point in every)),
        ceil(max(point.loss for point in every)),
    )
    title = "One of four ranks is killed: training loss, and seconds since the kill"
    parts = [text(16, 26, title, "title"), *_axes(frame)]
    for case, points in curves.items():
        parts += _curve(case, points, frame)
    kill = frame.x(0)
    parts.append(f'<path class="kill" d="M{kill:.1f},{_TOP}V{_BOTTOM}"/>')
    parts.append(text(kill - 8, _TOP + 14, "SIGKILL", "head kill before"))
    machine = found.machine
    beside = f"{machine.n_cores} cores; {machine.load_before:.1f} processes of other work wanted them in the minute before"
    parts.append(text(WIDTH - _RIGHT, HEIGHT - 8, beside, "before"))
    summary = found.summary
    ours_s, theirs_s = summary["loss_curve_new_step_s"], summary["loss_curve_new_step_s_torchrun"]
    parts += _span("odyssey", ours_s, "goes on in the same step", _TOP + 14, frame)
    n_again = round(summary["loss_curve_again_torchrun"])
    parts += _span("torchrun", theirs_s, f"starts again, repeats {n_again} steps", _TOP + 54, frame)
    return card(title, _STYLE, parts, HEIGHT, WIDTH)


def _points(found: Report, case: str) -> list[Point]:
    """Points that rank 0 has reached, by time."""
    done: set[int] = set()
    points = []
    for row in found.rows:
        if row["case"] == case:
            step = int(row["step"] or 0)
            points.append(Point(float(row["since the kill s"] or 0), step, float(row["loss"] or 0), step in done))
            done.add(step)
    return points


def _axes(frame: Frame) -> list[str]:
    parts = []
    for loss in range(frame.least, frame.most + 1):
        y = frame.y(loss)
        parts.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(text(_LEFT - 14, y + 4, str(loss), "axis"))
    for s in range(ceil(frame.first_s / 5) * 5, frame.last_s + 1, 5):
        parts.append(text(frame.x(s), _BOTTOM + 18, f"{s} s", "axis"))
    parts.append(text(_LEFT - 14, _TOP - 8, "loss", "axis"))
    parts.append(text((WIDTH + _LEFT - _RIGHT) / 2, _BOTTOM + 36, "wall time since the kill", "axis"))
    return parts


def _curve(case: str, points: Sequence[Point], frame: Frame) -> list[str]:
    """A line a run of steps, where it goes on behind a gap, and over it what is done again."""
    starts = [i for i in range(1, len(points)) if points[i].step != points[i - 1].step + 1]
    parts = [_line(case, points[first:stop], frame) for first, stop in pairwise([0, *starts, len(points)])]
    parts += [_line(f"away {case}", points[i - 1 : i + 1], frame) for i in starts]
    if again := [point for point in points if point.is_again]:
        parts.append(_line("again", again, frame))
    return parts


def _line(name: str, points: Sequence[Point], frame: Frame) -> str:
    places = "L".join(f"{frame.x(point.s):.1f},{frame.y(point.loss):.1f}" for point in points)
    return f'<path class="{name}" d="M{places}"/>'


def _span(case: str, new_step_s: float, words: str, y: float, frame: Frame) -> list[str]:
    """From the kill to the next new step, and how long that is."""
    end = frame.x(new_step_s)
    return [
        f'<path class="{case} span" d="M{frame.x(0):.1f},{y - 5}H{end:.1f}"/>',
        text(end + 8, y, f"{_TITLES[case]}: {new_step_s:.2f} s to the next new step", f"head {case}"),
        text(end + 8, y + 17, words, case),
    ]


if __name__ == "__main__":
    main()
