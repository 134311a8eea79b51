"""What a script's loop sets on its modules beside their tensors: `model.dropout.p = 0.1`.

A module's attributes that are numbers, strings or truth values are what its class and the script that built it have made them.
What has become of them since the job's first unit goes to ranks that get the model's state. It is not compared among ranks: a
module may count what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

_PLAIN = bool, int, float, str, type(None)
_OF_ALL = frozenset(vars(nn.Module()))
"""Those of any module. Its mode is moved by itself."""


class Attributes:
    """The plain attributes of the modules of `model`, by name, in the order of `model.modules()`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        """The job's first unit is here: what they are now, each rank's script has made by itself."""
        if self._first is None:
            self._first = [_plain(module) for module in self._model.modules()]

    def changed(self) -> list[dict[str, Any]]:
        """For each module those that are others since then."""
        now = [_plain(module) for module in self._model.modules()]
        pairs = zip(now, self._first or now, strict=True)
        return [{name: its[name] for name in its if name not in first or first[name] != its[name]} for its, first in pairs]

    def put(self, changed: Sequence[Mapping[str, Any]]) -> None:
        """Set what another rank's have become. The others are there as they were at first: so they are here, whatever this
        rank's script has done."""
        assert self._first is not None
        for module, first, its in zip(self._model.modules(), self._first, changed, strict=True):
            as_at_first = {name: first[name] for name in _plain(module) if name in first}
            for name, value in {**as_at_first, **its}.items():
                setattr(module, name, value)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN and name not in _OF_ALL}
