"""The agent's one thread: who is called, and who is not."""

from __future__ import annotations

import os
import time

import pytest

from launcher.host.loop import Loop


@pytest.mark.parametrize("n_more", [1, 3])
def test_who_is_closed_in_a_turn_is_not_called_in_it_though_another_has_its_number(n_more: int) -> None:
    """Whichever of them is called first closes all others, and watches new pipes at their numbers, in which nothing is."""
    loop = Loop(time.monotonic)
    ends = dict(os.pipe() for _ in range(1 + n_more))
    called: list[int] = []
    new: list[int] = []

    def read(fd: int) -> None:
        called.append(fd)
        for other in set(ends) - {fd}:
            loop.unwatch(other)
            empty, its_end = os.pipe()
            os.dup2(empty, other)
            os.close(empty)
            new.extend((other, its_end))
            loop.watch(other, lambda mask: called.append(-1))
        loop.unwatch(fd)

    for fd, write_end in ends.items():
        loop.watch(fd, lambda mask, fd=fd: read(fd))
        os.write(write_end, b"x")
    loop.turn()
    loop.close()
    for fd in {*ends, *ends.values(), *new}:
        os.close(fd)

    assert len(called) == 1 and called[0] in ends


def test_a_watch_that_is_changed_in_a_turn_is_heard_in_the_next() -> None:
    loop = Loop(time.monotonic)
    (first, first_end), (second, second_end) = os.pipe(), os.pipe()
    called: list[str] = []

    def changed(fd: int, name: str) -> None:
        called.append(name)
        loop.unwatch(fd)

    def change(fd: int, other: int) -> None:
        called.append("first")
        loop.unwatch(fd)
        loop.watch(other, lambda mask: changed(other, "second"))

    loop.watch(first, lambda mask: change(first, second))
    loop.watch(second, lambda mask: change(second, first))
    for end in (first_end, second_end):
        os.write(end, b"x")
    loop.turn()
    loop.turn()
    loop.close()
    for fd in (first, first_end, second, second_end):
        os.close(fd)

    assert called == ["first", "second"]
