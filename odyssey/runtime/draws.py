"""The random generators of the process that a data set may draw from, set aside while it does: torch's, Python's, numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Samples(Protocol):
    def __getitem__(self, sample_id: int, /) -> Any: ...


class Generators:
    """All of them, as one."""

    def __init__(self) -> None:
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)  # who has not imported it draws nothing from it

    def states(self) -> tuple[torch.Tensor, Any, Any]:
        return torch.get_rng_state(), random.getstate(), None if self._numpy is None else self._numpy.get_state()

    def restore(self, states: tuple[torch.Tensor, Any, Any]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if self._numpy is not None:
            self._numpy.set_state(states[2])

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if self._numpy is not None:
            self._numpy.seed(number & 0xFFFFFFFF)

    def seeded(self, number: int, data: Samples, sample_id: int) -> Any:
        """A sample, with the random numbers that follow from `number`. An exception of the script's says which one it was."""
        self.seed(number)
        try:
            return data[sample_id]
        except Exception as error:
            error.add_note(f"in data[{sample_id}]")
            raise

    def have_drawn(self, number: int) -> bool:
        """Whether anything was drawn since they were seeded with `number`. Seeds them again."""
        torch_now, python_now, numpy_now = self.states()
        self.seed(number)
        torch_then, python_then, numpy_then = self.states()
        if not torch.equal(torch_now, torch_then) or python_now != python_then:
            return True
        return numpy_now is not None and _numpy_facts(numpy_now) != _numpy_facts(numpy_then)


def _numpy_facts(state: Any) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return (kind, keys.tobytes(), *rest)


@contextmanager
def apart() -> Iterator[Generators]:
    """Afterwards they are as they were."""
    generators = Generators()
    before = generators.states()
    try:
        yield generators
    finally:
        generators.restore(before)
