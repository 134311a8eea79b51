"""The picture of a step as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from odyssey_cli.display import quantities
from odyssey_cli.timeline.legend import REROUTED, has_rerouted, kinds_in, tick_label, ticks
from odyssey_cli.timeline.picture import COMPUTATIONS, Bar, OpKind, Panel, Picture, WorkerRow
from odyssey_cli.timeline.svg_frame import WIDTH, card, legend, text

_LEFT, _RIGHT = 128, 16
"""Beside the bars: labels, margin."""
_ROOM = WIDTH - _LEFT - _RIGHT
_ROW, _GAP = 15, 5
"""Pixels of a row, and between two pipelines."""
_BAR = 13
_DIGIT = 5.2
"""About the width of a digit of 8.5 px, to know whether a number fits its bar."""

_CLASSES: Mapping[OpKind, str] = {
    OpKind.FORWARD: "f",
    OpKind.BACKWARD: "b",
    OpKind.INPUT_GRADIENT: "i",
    OpKind.WEIGHT_GRADIENT: "w",
    OpKind.REDUCTION: "g",
    OpKind.OPTIMIZER: "s",
}
_STYLE = """
.n text { font-size: 8.5px; text-anchor: middle }
.label { text-anchor: end; font-size: 10px; fill: #59636e }
.mark { text-anchor: end; font-size: 10px; fill: #59636e }
.idle { fill: #eef0f3 }
.f { fill: #a9cdf5 } .b { fill: #f9cf94 } .i { fill: #f7bd6c } .w { fill: #b7dfb0 } .g { fill: #8e6bbf } .s { fill: #cdb9ea }
.r.f { fill: #0b5cad } .r.b { fill: #b3480a } .r.i { fill: #b3480a } .r.w { fill: #1a7535 }
.n text.r { fill: #ffffff; font-weight: 600 }
.lost { fill: #fbe4e4 } .gone { fill: #c1121f } .strike { stroke: #c1121f; stroke-width: 1.2 }
.grid { stroke: #d5dae0; stroke-width: 1 } .end { stroke: #1f2328; stroke-width: 1.4 }
.above { stroke: #1f2328; stroke-width: 1; stroke-dasharray: 3 3 }
""".strip()


def render(picture: Picture) -> str:
    """The whole file. Rows are groups of class `row`, one a worker."""
    scale = _ROOM / picture.longest_s
    y = 26.0
    parts = [text(16, y, picture.title, "title")]
    y += 22
    legend, y = _legend(picture, y)
    parts += legend
    for number, panel in enumerate(picture.panels):
        before = picture.panels[number - 1] if number else None
        drawn, y = _panel(panel, before, y + 10, scale, picture.longest_s)
        parts += drawn
    return card(picture.title, _STYLE, parts, round(y + 8))


def _panel(panel: Panel, before: Panel | None, top: float, scale: float, longest_s: float) -> tuple[list[str], float]:
    """Its parts, and where the next one may begin. `before`: the panel above, the end of whose step is marked in this one."""
    parts = [text(16, top + 12, f"{panel.title}, {quantities.seconds(panel.step_s)} a step", "head")]
    parts.append(text(16, top + 28, "pipeline.stage", "dim") + text(_LEFT - 6, top + 28, "rank", "label"))
    y = first = top + 34
    rows = []
    pipeline = panel.rows[0].pipeline if panel.rows else ""
    for row in panel.rows:
        if row.pipeline != pipeline:
            y += _GAP
            pipeline = row.pipeline
        rows.append(_row(row, y, panel.step_s, scale))
        y += _ROW
    marks = ticks(longest_s, 8)
    for at in marks:
        x = _LEFT + at * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{first - 2:.1f}" y2="{y + 3:.1f}"/>')
        if x < WIDTH - 40:
            parts.append(text(x + (2 if at else 0), y + 13, tick_label(at, marks), "dim"))
    parts += rows
    if before is not None and before.step_s != panel.step_s:
        parts.append(_end(before.step_s, "above", first, y, scale))
        parts.append(text(_LEFT + before.step_s * scale - 3, first - 6, "end of the step above", "mark"))
    parts.append(_end(panel.step_s, "end", first, y, scale))
    y += 18
    for note in panel.notes:
        y += 14
        parts.append(text(_LEFT, y, note, "dim"))
    return parts, y + 6


def _end(step_s: float, name: str, top: float, bottom: float, scale: float) -> str:
    x = _LEFT + step_s * scale
    return f'<line class="{name}" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2:.1f}" y2="{bottom + 3:.1f}"/>'


def _row(row: WorkerRow, y: float, step_s: float, scale: float) -> str:
    label = text(16, _BAR - 3, row.place, "gone" if row.lost else "dim")
    label += text(_LEFT - 6, _BAR - 3, str(row.rank), "label gone" if row.lost else "label")
    width = step_s * scale
    if row.lost:
        strike = f'<line class="strike" x1="14" x2="{_LEFT - 4}" y1="{_BAR / 2}" y2="{_BAR / 2}"/>'
        back = f'<rect class="lost" x="{_LEFT}" y="0" width="{width:.1f}" height="{_BAR}"/>'
        content = back + label + strike + text(_LEFT + 8, _BAR - 3, row.lost, "gone")
    else:
        back = f'<rect class="idle" x="{_LEFT}" y="0" width="{width:.1f}" height="{_BAR}"/>'
        content = back + label + "".join(_bars(row, scale))
    return f'<g class="row" transform="translate(0 {y:.1f})">{content}</g>'


def _bars(row: WorkerRow, scale: float) -> Iterator[str]:
    """Reductions as a thin line below, since they run beside computations; numbers above all."""
    numbers = []
    for bar in row.bars:
        width = (bar.end_s - bar.start_s) * scale
        if bar.kind not in _CLASSES or width <= 0:
            continue
        x, shown = _LEFT + bar.start_s * scale, width - min(0.8, width / 5)  # a slit between bars
        if bar.kind is OpKind.REDUCTION:
            yield f'<rect class="g" x="{x:.1f}" y="{_BAR - 2.5}" width="{width:.1f}" height="2.5"/>'
            continue
        yield f'<rect class="{_class(bar)}" x="{x:.1f}" y="0" width="{shown:.2f}" height="{_BAR}"/>'
        number = "" if bar.micro_batch is None else str(bar.micro_batch)
        if number and len(number) * _DIGIT + 1 < shown:
            numbers.append(text(x + shown / 2, _BAR - 3.5, number, "r" if bar.is_rerouted else ""))
    if numbers:
        yield f'<g class="n">{"".join(numbers)}</g>'


def _class(bar: Bar) -> str:
    return f"r {_CLASSES[bar.kind]}" if bar.is_rerouted else _CLASSES[bar.kind]


def _legend(picture: Picture, y: float) -> tuple[list[str], float]:
    entries = [([_CLASSES[kind]], str(kind)) for kind in kinds_in(picture)]
    if has_rerouted(picture):
        rerouted = {bar.kind for bar in picture.bars if bar.is_rerouted}
        entries.append(([f"r {_CLASSES[kind]}" for kind in COMPUTATIONS.values() if kind in rerouted], REROUTED))
    return legend([*entries, (["idle"], "waits")], y, "g")
