"""The ranks' own output: whole lines, whatever pieces the bytes come in."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from odyssey_cli.display.output_lines import LineCutter


def test_a_line_is_given_out_when_its_newline_has_come() -> None:
    cutter = LineCutter()

    assert cutter.feed(0, "stdout", b"hal") == []
    assert cutter.feed(1, "stdout", b"one\ntw") == [(1, "one")]
    assert cutter.feed(0, "stdout", b"f\n") == [(0, "half")]
    assert cutter.feed(0, "stderr", b"no newline") == []
    assert cutter.flush() == [(0, "no newline"), (1, "tw")]
    assert cutter.flush() == []


def test_of_a_redrawn_line_the_last_state_is_shown() -> None:
    cutter = LineCutter()

    lines = cutter.feed(0, "stderr", b" 10%\r 20%\r") + cutter.feed(0, "stderr", b"100%\ndone\r\n")

    assert lines == [(0, "100%"), (0, "done")]


def test_a_progress_bar_without_end_takes_no_memory() -> None:
    cutter = LineCutter()

    for i in range(20_000):
        assert cutter.feed(0, "stderr", f"\r{i:>8} steps".encode()) == []

    assert cutter.flush() == [(0, "   19999 steps")]


def test_cursor_movements_are_dropped_and_colours_kept() -> None:
    line = LineCutter().feed(0, "stdout", b"\x1b[2K\x1b[1A\x1b[31mred\x1b[0m\x07\n")

    assert line == [(0, "\x1b[31mred\x1b[0m")]


def test_a_title_goes_whichever_way_it_ends_and_no_text_with_it() -> None:
    [(_, line)] = LineCutter().feed(0, "stdout", b"\x1b]0;one\x1b\\here \x1b]0;two\x07and there\n")

    assert Text.from_ansi(line).plain == "here and there"


@given(
    texts=st.lists(
        st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f\x85\u2028")), max_size=6
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_pieces_do_not_matter(texts: list[str], cuts: list[int]) -> None:
    data = "".join(text + "\n" for text in texts).encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    cutter = LineCutter()

    lines = [line for a, b in itertools.pairwise(places) for line in cutter.feed(0, "stdout", data[a:b])]

    assert lines == [(0, text) for text in texts]
    assert cutter.flush() == []
