"""The bytes that autograd keeps from a forward to its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_bytes(parameters: Iterable[torch.Tensor]) -> Iterator[list[int]]:
    """Collects in element 0 the bytes that autograd keeps for backward, parameters excepted, each storage once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    total = [0]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
