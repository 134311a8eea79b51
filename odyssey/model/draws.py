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
        """Whether anything was drawn since they were seeded with `number`. Seeds them again.

        What they draw next tells it in forty microseconds, but for one chance in 2**53; numpy takes longer to tell its state.
        """
        now = self._next()
        self.seed(number)
        then = self._next()
        self.seed(number)
        return not all(map(torch.equal, now[0], then[0])) or now[1:] != then[1:]

    def _next(self) -> tuple[list[torch.Tensor], float, float | None]:
        """Torch's states, which cost little, and numbers drawn from the others."""
        return self.torch_states(), random.random(), None if (numpy := _numpy()) is None else numpy.random_sample()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that layers draw from."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _numpy() -> Any:
    """Its generator; None where nobody has imported it, so nobody draws from it."""
    return getattr(sys.modules.get("numpy"), "random", None)


@contextmanager
def apart(device: torch.device = _CPU) -> Iterator[Generators]:
    """Afterwards they are as they were."""
    generators = Generators(device)
    before = generators.states()
    try:
        yield generators
    finally:
        generators.restore(before)
