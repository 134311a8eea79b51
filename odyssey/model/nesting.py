"""Nestings of state: dicts, lists and tuples of tensors and plain values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def mapped(state: Any, replaced: Callable[[Any], Any]) -> Any:
    """A nesting with what `replaced` gives in the place of each value that it gives something for.

    A dict stays of its class, with what it has beside: that of a module's `state_dict` keeps the versions of its parts.
    """
    if (its := replaced(state)) is not None:
        return its
    if isinstance(state, dict):
        found = copy.copy(state)
        found.update((key, mapped(value, replaced)) for key, value in state.items())
        return found
    if type(state) in (list, tuple):
        return type(state)(mapped(value, replaced) for value in state)
    return state
