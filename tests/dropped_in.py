"""A strategy that is dropped in for the time of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

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


class DropIn(Protocol):
    """Makes a file of strategies/, by default toy.py, for the time of a test."""

    def __call__(self, text: str, name: str = "toy") -> Path: ...


@pytest.fixture
def drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DropIn]:
    """See DropIn."""
    folder = tmp_path / "dropped_in"
    folder.mkdir()
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])

    def drop(text: str, name: str = "toy") -> Path:
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return folder / f"{name}.py"

    yield drop
    for file in folder.glob("*.py"):
        sys.modules.pop(f"strategies.{file.stem}", None)
        vars(strategies).pop(file.stem, None)
