"""A table that drops columns where there is too little room, and never a digit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_WIDE = 10_000


class FittedTable(Table):
    """As all of ours look: no box, dim names, numbers on the right.

    `least`: names of columns that go first, in this order, where the table is wider than the page; then go the others, the last
    one first. The first two stay.
    """

    def __init__(self, *, least: Sequence[str] = (), **options: Any) -> None:
        options = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "dim", **options}
        super().__init__(**options)
        self._least = tuple(least)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = copy.copy(self)
        shown.columns = list(self.columns)
        while len(shown.columns) > 2 and shown._width(console, options) > options.max_width:
            droppable = shown.columns[2:]
            found = [column for name in self._least for column in droppable if column.header == name]
            shown.columns.remove((found or droppable[::-1])[0])
        shown.columns = [replace(column, _index=i) for i, column in enumerate(shown.columns)]  # rich pads by the place
        yield from Table.__rich_console__(shown, console, options)

    def _width(self, console: Console, options: ConsoleOptions) -> int:
        """That it needs to show all that does not wrap."""
        return sum(_column_width(column, console, options) + 2 for column in self.columns)


def _column_width(column: Column, console: Console, options: ConsoleOptions) -> int:
    wide = options.update(width=_WIDE)
    found = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    return max(its.maximum if column.no_wrap else its.minimum for its in found)
