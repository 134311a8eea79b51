"""The random generators of the process that a script may draw from: torch's, Python's, numpy's.
They are set aside while its code is run for a place in the training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class SampleSource(Protocol):
    def __getitem__(self, sample_id: int, /) -> Any: ...


_CPU = torch.device("cpu")
States = tuple[list[torch.Tensor], Any, Any]


class Generators:
    """All of them, as one. Torch's are that of the processor and that of `device`."""

    def __init__(self, device: torch.device = _CPU) -> None:
        own = default_generator(device)
        self._torch = [torch.default_generator, *([] if own is torch.default_generator else [own])]

    def torch_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._torch]

    def states(self) -> States:
        return self.torch_states(), random.getstate(), None if (numpy := _numpy()) is None else numpy.get_state()

    def restore(self, states: States) -> None:
        for generator, state in zip(self._torch, states[0], strict=True):
            generator.set_state(state)
        random.setstate(states[1])
        if states[2] is not None:
            _numpy().set_state(states[2])

    def seed(self, number: int) -> None:
        """It takes ten microseconds, and `torch.manual_seed`, which seeds all devices, more than a hundred."""
        for generator in self._torch:
            generator.manual_seed(number)
        random.seed(number)
        if (numpy := _numpy()) is not None:
            numpy.seed(number & 0xFFFFFFFF)

    def seeded(self, number: int, data: SampleSource, sample_id: int) -> Any:
        """A sample, with the random numbers that follow from `number`. An exception of the script's says which one it was."""
        self.seed(number)
        try:
            return data[sample_id]
        except Exception as error:
            error.add_note(f"in data[{sample_id}]")
            raise

    def have_drawn(self, number: int) -> bool:
        """Whether anything was drawn since they were seeded with `number`. Seeds them again."""
        now = self.states()
        self.seed(number)
        return not self.are_at(now)

    def are_at(self, states: States) -> bool:
        """Whether nothing was drawn since they had these states."""
        torch_then, python_then, numpy_then = states
        torch_now, python_now, numpy_now = self.states()
        if not all(map(torch.equal, torch_then, torch_now)) or python_then != python_now:
            return False
        return _numpy_facts(numpy_then) == _numpy_facts(numpy_now)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that layers draw from."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _numpy() -> Any:
    """Its generator; None where nobody has imported it, so nobody draws from it."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _numpy_facts(state: Any) -> tuple[Any, ...]:
    if state is None:
        return ()
    kind, keys, *rest = state
    return (kind, keys.tobytes(), *rest)


@contextmanager
def apart(device: torch.device = _CPU) -> Iterator[Generators]:
    """Afterwards they are as they were."""
    generators = Generators(device)
    before = generators.states()
    try:
        yield generators
    finally:
        generators.restore(before)
