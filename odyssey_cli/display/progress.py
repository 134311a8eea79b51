"""How far a job is: a bar of its steps, and the times of the last ones as a row of columns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.text import Text

from odyssey_cli.display import quantities

FEWEST_TIMES = 3
"""Fewer say nothing of how steps differ."""
_COLUMNS, _ASCII_COLUMNS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_LONGEST_BAR = 30
_MOST_TIMES = 30
_LONGEST_TEXT = len(" 0.02 ms to 99.9 ms a step")


def progress(
    n_done: int, n_steps: int | None, times_s: Sequence[float], width: int, *, ascii_only: bool = False
) -> Text | None:
    """The line that shows both, as far as they are known and `width` has room for them."""
    line = Text(no_wrap=True)
    if n_steps:
        line.append_text(_bar(min(1.0, n_done / n_steps), min(_LONGEST_BAR, width - 6), ascii_only))
    gap = "   " if line else ""
    n_shown = min(len(times_s), _MOST_TIMES, width - line.cell_len - len(gap) - _LONGEST_TEXT)
    if n_shown >= FEWEST_TIMES:
        shown = times_s[-n_shown:]
        least, most = quantities.seconds(min(shown)), quantities.seconds(max(shown))
        told = f" {least} a step" if least == most else f" {least} to {most} a step"
        line.append(gap).append(columns(shown, ascii_only=ascii_only), style="cyan").append(told, style="dim")
    return line if line else None


def columns(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """A character each, as high as the value; the median is at half the height, where none is more than twice that."""
    levels = _ASCII_COLUMNS if ascii_only else _COLUMNS
    top = max(*values, 2 * median(values))
    return "".join(levels[round(max(0.0, value) / top * (len(levels) - 1)) if top > 0 else 0] for value in values)


def _bar(share: float, width: int, ascii_only: bool) -> Text:
    n_full = int(share * width)
    full, rest = ("=", "-") if ascii_only else ("━", "─")
    return Text.assemble((full * n_full, "green"), (rest * (width - n_full), "bright_black"), f" {int(share * 100):3} %")
