"""What a rank keeps of the Jobs that its script has made: nothing of those that are over."""

from __future__ import annotations

import atexit
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from odyssey import joining


class Session:
    """It holds what a Job does, as the real one."""

    finished = 0

    def __init__(self, *its: Any) -> None:
        self.held = lambda: self

    def start(self) -> None:
        pass

    def finish(self) -> None:
        type(self).finished += 1


def test_of_jobs_that_are_over_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_newest", None)
    monkeypatch.setattr(joining, "Session", Session)
    monkeypatch.setattr(joining, "Layers", lambda *its: its)
    model: Any = SimpleNamespace(is_divided=False)
    agent: Any = SimpleNamespace(rank=0)
    nothing: Any = None
    try:
        made = [weakref.ref(joining.session_of(agent, model, nothing, nothing)) for _ in range(3)]
        gc.collect()
        assert [session() is None for session in made] == [True, True, False]
        assert Session.finished == 2
    finally:
        atexit.unregister(joining._finish_newest)
