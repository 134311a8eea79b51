"""Several agents of one process, one after the other: no signal is lost in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.host.signals import Signals
from launcher.options import RunOptions
from launcher.processes.local_agent import LocalAgent
from odyssey.errors import OdysseyError


class Idle:
    """A role without ranks. `begin(local)`: called at its start; what it was asked to end by is kept, and ends it."""

    have_ended = True
    decides = True
    is_needed = False

    def __init__(self, local: LocalAgent, begin: Callable[[LocalAgent], None]) -> None:
        self._local = local
        self._begin = begin
        self.asked: list[int] = []
        self.ranks = self

    def start(self) -> None:
        self._begin(self._local)

    def asked_to_end(self, number: signal.Signals) -> None:
        self.asked.append(number)
        self._local.code = 128 + number

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Follow(OdysseyError):
    pass


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals(RunOptions("train.py"))
    made.watch()
    yield made
    made.close()


def sent() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def new_agent() -> LocalAgent:
    return LocalAgent(RunOptions("train.py", log_dir=Path(os.devnull)), None, lambda rank, stream, data: None)


@pytest.mark.parametrize("when", ["in the same turn", "while ranks end", "as it ends", "in between", "undecided"])
def test_a_signal_to_an_agent_that_is_over_is_for_the_one_that_follows(when: str, signals: Signals) -> None:
    def begin(local: LocalAgent) -> None:
        if when in ("in the same turn", "while ranks end", "undecided"):
            sent()
        if when == "undecided":
            local.loop.later(0.03, lambda: local.begin_anew(Follow("elsewhere")))
            return
        local.begin_anew(Follow("elsewhere"))
        if when == "as it ends":
            local.owes = owes

    def owes() -> bool:
        sent()
        return False

    first = new_agent()
    role = Idle(first, begin)
    role.have_ended = when != "while ranks end"  # then it is over when it is told again
    with pytest.raises(Follow):
        first.run(role, signals)
    if when == "in between":
        sent()
    second = new_agent()
    role = Idle(second, lambda local: None)
    assert second.run(role, signals) == 128 + signal.SIGTERM
    assert role.asked == [signal.SIGTERM]
