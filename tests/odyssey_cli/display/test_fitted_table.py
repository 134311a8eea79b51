"""Tables lose columns where there is too little room, and never a digit."""

from __future__ import annotations

import io
import re

import hypothesis.strategies as st
from hypothesis import given
from rich.console import Console

from odyssey_cli.display.fitted_table import FittedTable


def shown(table: FittedTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


NUMBERS = st.floats(0, 1e6).map(lambda value: f"{value:,.2f} %")


@given(st.integers(40, 120), st.lists(st.lists(NUMBERS, min_size=9, max_size=9), min_size=1, max_size=4))
def test_every_number_that_is_shown_is_whole(width: int, rows: list[list[str]]) -> None:
    table = FittedTable(least=("c3", "c7"))
    table.add_column("name", no_wrap=True)
    for i in range(9):
        table.add_column(f"c{i}", justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(f"row {i}", *row)
    header, *lines = shown(table, width)
    names = header.split()[1:]
    assert names and all(len(line) <= width for line in (header, *lines))
    columns = [int(name[1:]) for name in names]
    assert "c3" not in names or len(columns) == 9 or names == ["c0"]
    for line, row in zip(lines, rows, strict=True):
        assert re.split(r" {2,}", line.strip())[1:] == [row[i] for i in columns]


def test_what_has_room_is_whole() -> None:
    table = FittedTable(least=("b",))
    for name in ("name", "a", "b", "c"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("one", "1.5", "2.5", "3.5")
    assert shown(table, 40)[0].split() == ["name", "a", "b", "c"]
    assert shown(table, 16)[0].split() == ["name", "a", "c"]
    assert shown(table, 10)[0].split() == ["name", "a"]
    assert shown(table, 40)[0].split() == ["name", "a", "b", "c"], "nothing is lost by being shown"
