"""The layouts before and after a change as SVG: a row a pipeline, a box a stage, as wide as it has layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.joblog.wording import ranks_text
from odyssey.protocol.calls import ranks_alike
from odyssey_cli.display import quantities
from odyssey_cli.timeline.change import Cell, ChangeRow, Layout, Look
from odyssey_cli.timeline.svg_frame import WIDTH, card, escaped, legend, text

_LEFT, _RIGHT = 148, 16
_ROOM = WIDTH - _LEFT - _RIGHT
_BOX, _GAP = 30, 5
"""Pixels: height of a box, and between two pipelines."""
_NEW = 5
"""Height of the mark below layers that a rank did not hold before."""
_LETTER = 6.1
"""About the width of a letter of 11 px."""
_TAKEN = "layers that it did not hold before"

_CLASSES: Mapping[Look, str] = {
    Look.KEPT: "kept",
    Look.CHANGED: "changed",
    Look.STARTED: "started",
    Look.HELPS: "helps",
    Look.DOOMED: "doomed",
    Look.HOLE: "hole",
}
_STYLE = """
.small { font-size: 9px; fill: #59636e }
.box text { text-anchor: middle }
.kept { fill: #eef0f3; stroke: #b6bec8 } .changed { fill: #d6e8fb; stroke: #5b8fc7 }
.started { fill: #d9f0d6; stroke: #4f9a4a } .helps { fill: #fbe3c2; stroke: #c98a2b }
.doomed { fill: #fbe4e4; stroke: #c1121f } .hole { fill: #ffffff; stroke: #c1121f; stroke-dasharray: 4 3 }
.new { fill: #0b5cad; stroke: none } .gone { fill: #c1121f }
""".strip()


def render(title: str, panels: Sequence[Layout]) -> str:
    """The whole file. Boxes are groups of class `box`, one a stage; texts say everything that colours do."""
    parts = [text(16, 26, title, "title")]
    legend, y = _legend(panels, 48.0)
    parts += legend
    for panel in panels:
        drawn, y = _panel(panel, y + 14)
        parts += drawn
    return card(title, _STYLE, parts, round(y + 10))


def _panel(panel: Layout, top: float) -> tuple[list[str], float]:
    """Its parts, and where the next one may begin."""
    parts = [text(16, top + 12, panel.title, "head")]
    y = top + 18
    for told in panel.told:
        y += 14
        parts.append(text(16, y, told))
    y += 8 if panel.told else 4
    parts.append(text(_LEFT, y + 9, f"layers 0 to {panel.n_layers - 1}, from left to right", "small"))
    y += 14
    for row in panel.rows:
        parts.append(_row(row, y, _ROOM / panel.n_layers))
        y += _BOX + _GAP
    if panel.n_left_out:
        y += 12
        parts.append(text(16, y, f"and {quantities.plural(panel.n_left_out, 'more pipeline')}", "dim"))
        y += 4
    for ranks, what, name in ((panel.gone, "lost", "gone"), (panel.idle, "without work", "dim")):
        if ranks:
            y += 14
            parts.append(text(16, y, f"{what}: {ranks_alike(ranks)}", name))
    return parts, y + 6


def _row(row: ChangeRow, y: float, per_layer: float) -> str:
    count = quantities.plural(row.n_micro_batches, "micro-batch", "micro-batches")
    label = text(16, 13, f"pipeline {row.pipeline}") + text(16, 25, count, "small")
    boxes = "".join(_box(cell, per_layer) for cell in row.cells)
    return f'<g transform="translate(0 {y:.1f})">{label}{boxes}</g>'


def _box(cell: Cell, per_layer: float) -> str:
    x, width = _LEFT + cell.first * per_layer, (cell.stop - cell.first) * per_layer - 2
    parts = [f'<rect class="{_CLASSES[cell.look]}" x="{x:.1f}" y="0.5" width="{width:.1f}" height="{_BOX - 1}" rx="3"/>']
    for first, stop in cell.new:
        left, long = _LEFT + first * per_layer, (stop - first) * per_layer - 2
        parts.append(f'<rect class="new" x="{left:.1f}" y="{_BOX - _NEW}" width="{long:.1f}" height="{_NEW - 1}"/>')
    middle = x + width / 2
    parts.append(text(middle, 13, _fitting(_names(cell), width), "gone" if cell.look in (Look.DOOMED, Look.HOLE) else ""))
    parts.append(text(middle, 23, _fitting((f"layers {_layers(cell)}", _layers(cell)), width * 1.2), "small"))
    told = f"<title>{escaped(f'{_names(cell)[0]}, layers {_layers(cell)}: {cell.look}')}</title>"
    return f'<g class="box">{told}{"".join(parts)}</g>'


def _names(cell: Cell) -> tuple[str, ...]:
    """From the most talkative one to the shortest."""
    if cell.rank is None:
        ranks = ranks_text(cell.runners)
        return f"run by {ranks}", f"→ {', '.join(map(str, cell.runners))}", f"→ {cell.runners[0]} …"
    mark = "✕ " if cell.look is Look.DOOMED else ""
    return f"{mark}rank {cell.rank}", f"{mark}{cell.rank}", str(cell.rank)


def _layers(cell: Cell) -> str:
    return quantities.layers(cell.first, cell.stop)


def _fitting(texts: Sequence[str], width: float) -> str:
    """The first one that is not wider than so many pixels; else nothing."""
    return next((words for words in texts if len(words) * _LETTER <= width), "")


def _legend(panels: Sequence[Layout], y: float) -> tuple[list[str], float]:
    cells = [cell for panel in panels for row in panel.rows for cell in row.cells]
    entries = [([_CLASSES[look]], str(look)) for look in Look if any(cell.look is look for cell in cells)]
    if any(cell.new for cell in cells):
        entries.append((["new"], _TAKEN))
    return legend(entries, y, "new")
