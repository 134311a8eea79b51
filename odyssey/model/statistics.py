"""Running statistics of a model that every rank holds whole, such as BatchNorm's: one value for all ranks, whoever is there.

Each micro-batch of a step begins with the statistics that the step began with; behind the step they are the mean of what the
micro-batches have made of them. With DistributedDataParallel they are what the first rank's own micro-batches make of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from odyssey.errors import JobError


class Statistics:
    """The buffers of `model` that a forward may change, and what it may not."""

    def __init__(self, model: nn.Module) -> None:
        tracked = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        own = {id(buffer) for module in tracked for buffer in module.buffers(recurse=False)}
        named = dict(model.named_buffers())
        self._tables = {prefix: module._buffers for prefix, module in model.named_modules()}
        self._names = {prefix: set(buffers) for prefix, buffers in self._tables.items()}
        self._buffers = [buffer for buffer in named.values() if id(buffer) in own]
        self._parameters = dict(model.named_parameters())
        self._others = {
            f"{prefix}.{name}".removeprefix("."): (module._buffers, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if id(buffer) not in own
        }
        """Where modules have buffers that no forward may change."""
        self._before: list[torch.Tensor] | None = None
        """Their values when the step began; None between steps."""
        self.are_counted = True
        """Those of the micro-batch at hand."""
        self.sums = torch.empty(0)
        """What micro-batches have added to them, in one row, and how many these were: float64."""

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def begin(self) -> None:
        """A step begins, perhaps anew."""
        self.undo()
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        n_values = sum(buffer.numel() for buffer in self._buffers)
        self.sums = torch.zeros(n_values + 1, dtype=torch.float64, device=self._buffers[0].device if self else None)

    @contextmanager
    def of_micro_batch(self) -> Iterator[None]:
        """Around a forward. Raises JobError if it changes another buffer, or a parameter."""
        facts = self._facts()
        before = self._before or []  # none, where nothing is trained
        for buffer, value in zip(self._buffers, before, strict=False):
            buffer.data.copy_(
                value
            )  # past autograd: the backward of another micro-batch is still to come, and uses none of them
        yield
        if facts != (now := self._facts()):
            self._check_none_is_made()
            names = [f"{what} {name}" for what in ("parameter", "gradient of") for name in self._parameters]
            names += [*(f"buffer {name}" for name in self._others), "buffers"]
            changed = next(name for name, one, other in zip(names, facts, now, strict=True) if one != other)
            what = f"loss(batch) changes the model's {changed}, which would be another on each rank"
            raise JobError(what, "change it between steps, alike on all ranks; only running statistics are taken care of")
        if before and self.are_counted:
            changes = [buffer - value for buffer, value in zip(self._buffers, before, strict=True)]
            self.sums[:-1] += torch.cat([change.double().flatten() for change in changes])
            self.sums[-1] += 1

    def _check_none_is_made(self) -> None:
        """Raises JobError for a buffer that there was not when the job began."""
        for prefix, buffers in self._tables.items():
            if made := buffers.keys() - self._names[prefix]:
                what = f"loss(batch) makes the model's buffer {f'{prefix}.{min(made)}'.removeprefix('.')}"
                raise JobError(what, "register it in __init__, or call the model once before odyssey.resilient")

    def _facts(self) -> list[tuple[int, int]]:
        """By what changes are seen."""
        facts = [(0, parameter._version) for parameter in self._parameters.values()]
        gradients = (parameter.grad for parameter in self._parameters.values())
        buffers = (buffers.get(name) for buffers, name in self._others.values())
        facts += [(id(tensor), 0 if tensor is None else tensor._version) for tensor in chain(gradients, buffers)]
        return [*facts, (0, sum(map(len, self._tables.values())))]

    def take(self) -> None:
        """The step is final, and `sums` are those of all ranks."""
        if not self._before:
            return
        means = torch.split(self.sums[:-1] / self.sums[-1], [buffer.numel() for buffer in self._buffers])
        for buffer, value, mean in zip(self._buffers, self._before, means, strict=True):
            change = mean if buffer.is_floating_point() else mean.round()
            buffer.copy_(value + change.view_as(value).to(buffer.dtype))
        self._before = None

    def undo(self) -> None:
        """Nothing has become of the step."""
        for buffer, value in zip(self._buffers, self._before or [], strict=False):
            buffer.copy_(value)
        self._before = None
