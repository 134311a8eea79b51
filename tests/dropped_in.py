"""A strategy that is dropped in for the time of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import strategies

TOY = '''
"""Toy: the pipelines that are whole do all the work."""

from strategies.building.compose import compose, n_micro_batches_of
from strategies.situation import Proposal, Situation

NAME = "toy"
SUMMARY = "The first pipeline that is whole does everything."


def propose(situation: Situation) -> list[Proposal]:
    alive = set(situation.alive)
    whole = next(p.stages for p in situation.plan.pipelines if all(stage.worker in alive for stage in p.stages))
    return [Proposal(NAME, compose(situation, NAME, [whole], [n_micro_batches_of(situation)]), "")]
'''


@pytest.fixture
def drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes a file of strategies/ called toy.py, for the time of a test."""
    folder = tmp_path / "dropped_in"
    folder.mkdir()
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])

    def drop(text: str) -> Path:
        (folder / "toy.py").write_text(text)
        importlib.invalidate_caches()
        return folder / "toy.py"

    yield drop
    sys.modules.pop("strategies.toy", None)
    vars(strategies).pop("toy", None)
