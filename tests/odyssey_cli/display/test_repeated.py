"""Tracebacks of several ranks on the terminal: alike ones once, and no line of another kind lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odyssey_cli.display.repeated import Line, Repeated

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 5, in <module>
    f(1)
ValueError: bad number
two lines

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    g()
KeyError: 3""".splitlines()


def lines_of(rank: int, text: list[str] = TRACEBACK, prefix: str = "") -> list[Line]:
    return [(rank, prefix + line) for line in text]


def test_what_ranks_print_alike_is_shown_once() -> None:
    repeated = Repeated()
    ranks = [lines_of(rank, prefix=f"[rank{rank}]: ") for rank in (2, 0, 1, 3)]

    mixed = [line for together in zip(*ranks, strict=True) for line in together]
    shown = repeated.take([(1, "before"), *mixed[:20]]) + repeated.release() + repeated.take(mixed[20:]) + repeated.release()

    assert shown == [(1, "before")], "it may go on"
    assert repeated.release() == [*ranks[0], (0, "the same traceback as rank 2; ranks 0, 1 and 3 alike")]
    assert repeated.release(all_of_them=True) == []


def test_each_that_differs_is_shown_whole() -> None:
    repeated = Repeated()
    others = [*TRACEBACK[:-1], "KeyError: 4"]

    assert repeated.take([*lines_of(0), *lines_of(1, others)]) == []
    assert repeated.release(all_of_them=True) == [*lines_of(0), *lines_of(1, others)]


def test_a_rank_that_prints_one_again_shows_it_again() -> None:
    repeated = Repeated()

    for _ in range(2):
        repeated.take(lines_of(0))
        assert repeated.release(all_of_them=True) == lines_of(0)
    repeated.take(lines_of(1))
    assert repeated.release(all_of_them=True) == [(1, "the same traceback as rank 0")]


def test_a_rank_that_has_caught_its_exception_and_goes_on_printing_is_not_held_back_for_long() -> None:
    repeated = Repeated()
    assert repeated.take(lines_of(0)) == []

    shown: list[Line] = []
    for i in range(20):
        shown += repeated.take([(0, f"line {i}")]) + repeated.release()

    assert shown == [*lines_of(0), *((0, f"line {i}") for i in range(20))]
    assert repeated.take(lines_of(1)) + repeated.release() + repeated.release() == lines_of(1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.sampled_from([TRACEBACK[0], f"[rank7]: {TRACEBACK[0]}", "  File", "Error", ""])),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_every_line_of_a_rank_is_shown_or_stands_for_one_that_was(steps: list[Line | bool]) -> None:
    repeated, printed, shown = Repeated(), [], []
    for step in steps:
        if isinstance(step, bool):
            shown += repeated.release(all_of_them=step)
        else:
            printed.append(step)
            shown += repeated.take([step])
    shown += repeated.release(all_of_them=True)

    same = [line for line in shown if "the same traceback" in line[1]]
    for rank in range(3):
        of_rank = [text for r, text in printed if r == rank]
        left = iter(of_rank)
        told = [text for r, text in shown if r == rank and (r, text) not in same]
        assert all(text in left for text in told), "in the order in which it came"
        if not same:
            assert told == of_rank
