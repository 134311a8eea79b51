"""Whether a script has changed what it was handed, in place: by `x.sub_(mean)` in its first layer, by `batch.pop("labels")`.

A redone step needs the values as they were read. Tensors count their changes themselves, as autograd needs that. What goes
round it, by `x.data` or `x.numpy()`, is seen by nobody. Nor is a change of what is neither tensor, nor dict, list or constant,
as numpy's arrays: of such a value the script can be given a copy.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from torch.utils import _pytree as pytree

_CONSTANTS = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device])


class HandedOut:
    """A value, and what there was to see of it when it was handed out."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._seen = list(_look(value))

    @property
    def is_changed(self) -> bool:
        """Whether something else is to be seen now."""
        return self._seen != list(_look(self.value))

    @property
    def may_be_changed(self) -> bool:
        """Whether it is, or has parts that nothing can be told of."""
        return self._is_opaque or self.is_changed

    def give(self) -> Any:
        """The value for the script; a copy of it, where a change could not be seen. What cannot be copied counts as changed
        from now on."""
        if not self._is_opaque:
            return self.value
        try:
            return deepcopy(self.value)
        except Exception:  # of the script's own class, which may raise anything
            self._seen = []
            return self.value

    @property
    def _is_opaque(self) -> bool:
        return any(isinstance(part, _Opaque) for part in self._seen)


def anew(value: Any) -> Any:
    """The same tensors in a nesting of their own, from which a script may take something."""
    return pytree.tree_map(lambda leaf: copy(leaf) if isinstance(leaf, UserDict) else leaf, value)


class _Same:
    """Equal to the same object only: one that is gone may have its address taken by another one, so it is kept."""

    def __init__(self, its: object) -> None:
        self._its = its

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._its is other._its

    __hash__ = None  # type: ignore[assignment]


class _Opaque(_Same):
    """What may have been changed without a sign."""


def _look(value: Any) -> Iterator[Any]:
    """All parts of a nesting, in order."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        yield from (_Same(value), value._version, value.requires_grad)
    elif isinstance(value, dict | UserDict):
        yield from (type(value), list(value))
        yield from _look(list(value.values()))
    elif isinstance(value, list | tuple):
        yield from (type(value), len(value))
        if _CONSTANTS.issuperset(map(type, value)):  # there may be thousands
            yield tuple(value)
        else:
            for its in value:
                yield from _look(its)
    else:
        yield value if type(value) in _CONSTANTS else _Opaque(value)
