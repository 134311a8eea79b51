"""The picture of a step as text: a line a worker, a character a moment; what it shows it shows without colour, too.

A bar begins with the number of its micro-batch where that leaves room for at least one sign of what is done with it, as in
`3░░6██████`: forward of micro-batch 3, then backward of 6. Where most bars lack that room no bar has a number.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from odyssey_cli.display import quantities
from odyssey_cli.display.page import page
from odyssey_cli.timeline.legend import REROUTED, has_rerouted, kinds_in, tick_label, ticks
from odyssey_cli.timeline.picture import Bar, OpKind, Panel, Picture, WorkerRow

LEAST_WIDTH = 60
_SIGNS: Mapping[OpKind, tuple[str, str]] = {
    OpKind.FORWARD: ("░", "-"),
    OpKind.BACKWARD: ("█", "="),
    OpKind.INPUT_GRADIENT: ("▓", "#"),
    OpKind.WEIGHT_GRADIENT: ("▒", "+"),
    OpKind.REDUCTION: ("≈", "~"),
    OpKind.OPTIMIZER: ("◆", "@"),
}
"""In Unicode, in ASCII."""
_IDLE = ("·", ".")
_REROUTED: Mapping[OpKind, str] = {
    OpKind.FORWARD: "F",
    OpKind.BACKWARD: "B",
    OpKind.INPUT_GRADIENT: "I",
    OpKind.WEIGHT_GRADIENT: "W",
}
_STYLES: Mapping[OpKind, str] = {
    OpKind.FORWARD: "blue",
    OpKind.BACKWARD: "yellow",
    OpKind.INPUT_GRADIENT: "yellow",
    OpKind.WEIGHT_GRADIENT: "green",
    OpKind.REDUCTION: "magenta",
    OpKind.OPTIMIZER: "magenta",
}
_REROUTED_STYLE = "bold red"
_N_TICKS = 6


def show(picture: Picture) -> None:
    """Print it on stdout."""
    console = page()
    text = render(picture, console.width, ascii_only=not console.encoding.lower().startswith("utf"))
    console.print(text, no_wrap=True, overflow="crop")


def render(picture: Picture, width: int, *, ascii_only: bool = False) -> Text:
    """The whole picture in lines of at most `width` characters (or LEAST_WIDTH, if that is more)."""
    labels = _Labels(picture)
    room = max(LEAST_WIDTH, width) - labels.width
    lines = [Text(picture.title, style="bold")]
    per_s = room / picture.longest_s
    for panel in picture.panels:
        numbered = _has_room_for_numbers(panel, per_s)
        lines += [Text(""), Text(f"{panel.title}, {quantities.seconds(panel.step_s)} a step")]
        lines.append(Text(labels.head, style="dim"))
        for row in panel.rows:
            label = Text(labels.of(row), style="red strike" if row.lost else "dim")
            lines.append(Text.assemble(label, " ", _moments(row, round(panel.step_s * per_s), per_s, numbered, ascii_only)))
        lines.append(Text(" " * labels.width + _axis(picture.longest_s, room), style="dim"))
        lines += [Text(note, style="dim") for note in panel.notes]
    lines += [Text(""), *_legend(picture, max(LEAST_WIDTH, width), ascii_only)]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


class _Labels:
    """The columns in front of the bars: `pipeline.stage`, and the rank."""

    def __init__(self, picture: Picture) -> None:
        rows = [row for panel in picture.panels for row in panel.rows]
        self._place = max(len("stage"), *(len(row.place) for row in rows))
        self._rank = max(len("rank"), *(len(str(row.rank)) for row in rows))
        self.head = f"{'stage':>{self._place}} {'rank':>{self._rank}}"
        self.width = len(self.head) + 1

    def of(self, row: WorkerRow) -> str:
        return f"{row.place:>{self._place}} {row.rank:>{self._rank}}"


def _has_room_for_numbers(panel: Panel, per_s: float) -> bool:
    computations = [bar for row in panel.rows for bar in row.bars if bar.kind in _REROUTED]
    n_with_room = sum(len(str(bar.micro_batch)) < (bar.end_s - bar.start_s) * per_s for bar in computations)
    return 2 * n_with_room >= len(computations)


def _moments(row: WorkerRow, n: int, per_s: float, numbered: bool, ascii_only: bool) -> Text:
    """What a worker does in `n` characters, `per_s` a second."""
    if row.lost:
        return Text(f"{'x' if ascii_only else '✕'} {row.lost}", style="red")
    cells = [(_IDLE[ascii_only], "dim")] * n
    drawn = sorted((bar for bar in row.bars if bar.kind in _SIGNS), key=lambda bar: bar.kind is not OpKind.REDUCTION)
    for bar in drawn:
        first, stop = min(n, round(bar.start_s * per_s)), min(n, round(bar.end_s * per_s))
        cells[first:stop] = _cells(bar, stop - first, numbered, ascii_only)
    text = Text()
    for character, style in cells:
        text.append(character, style=style)
    return text


def _cells(bar: Bar, length: int, numbered: bool, ascii_only: bool) -> list[tuple[str, str]]:
    sign = _REROUTED[bar.kind] if bar.is_rerouted else _SIGNS[bar.kind][ascii_only]
    style = _REROUTED_STYLE if bar.is_rerouted else _STYLES[bar.kind]
    number = str(bar.micro_batch) if numbered and bar.micro_batch is not None else ""
    number = number if len(number) < length else ""
    return [*((digit, f"bold {style}") for digit in number), *[(sign, style)] * (length - len(number))]


def _axis(longest_s: float, room: int) -> str:
    """The marks of the time axis, each label beginning at its time."""
    line = ""
    marks = ticks(longest_s, _N_TICKS)
    for at in marks:
        column = round(at / longest_s * room)
        label = ("|" if at else "") + tick_label(at, marks)
        if column >= len(line) and column + len(label) <= room:
            line = line.ljust(column) + label
    return line


def _legend(picture: Picture, width: int, ascii_only: bool) -> list[Text]:
    entries = [Text.assemble((_SIGNS[kind][ascii_only] * 2, _STYLES[kind]), f" {kind}") for kind in kinds_in(picture)]
    if has_rerouted(picture):
        letters = "".join(dict.fromkeys(_REROUTED[bar.kind] for bar in picture.bars if bar.is_rerouted))
        entries.append(Text.assemble((letters, _REROUTED_STYLE), f" {REROUTED}"))
    entries.append(Text(f"{_IDLE[ascii_only] * 2} waits"))
    lines = [Text("")]
    for entry in entries:
        if lines[-1].cell_len + entry.cell_len + 3 > width:
            lines.append(Text(""))
        lines[-1].append("   " if lines[-1].cell_len else "").append_text(entry)
    return lines
