"""Several optimizers of a script's own as one: such as Muon for matrices, and AdamW for the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch.optim import Optimizer

from odyssey.errors import JobError


class Optimizers(Optimizer):
    """`parts` step in this order, each its own parameters. Groups and states are theirs, as they have them at the moment:
    `load_state_dict` of one puts others in their place."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([{"params": []}], {})
        self.parts = tuple(parts)
        self.state: Any = _States(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of each, one after the other."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Torch's constructor begins with none."""
        assert not groups, "each part has its own"

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for part in self.parts:
            part.step()

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizers:
        return Optimizers([copied(part, memo) for part in self.parts])


class _States(MutableMapping[Any, Any]):
    """Parameter -> state, where its optimizer keeps it; what is no parameter's, and new, is the first one's."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        self._owner: dict[int, Optimizer] = {}

    def _of(self, key: Any) -> MutableMapping[Any, Any]:
        if (having := next((part for part in self._parts if key in part.state), None)) is not None:
            return having.state
        if id(key) not in self._owner:
            self._owner = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        return self._owner.get(id(key), self._parts[0]).state

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        return key in self._of(key)  # an optimizer's own makes what is asked for

    def clear(self) -> None:
        """Nothing is known of any parameter."""
        for part in self._parts:
            part.state.clear()

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy with all that it has: torch's own leaves out attributes that it does not know. Hooks stay with the script's,
    and the `step` that a scheduler has put there. Raises JobError for what cannot be copied."""
    its = copy.deepcopy(optimizer, memo)
    if not isinstance(optimizer, Optimizer):
        return its
    for name, value in vars(optimizer).items():
        if name in vars(its) or name == "step":
            continue
        is_another = isinstance(value, Optimizer) and id(value) not in memo
        try:
            vars(its)[name] = copied(value, memo) if is_another else copy.deepcopy(value, memo)
        except Exception as error:
            what = f"{name} of optimizer, a {type(optimizer).__name__}, cannot be copied: {error}"
            raise JobError(what, "let it be made when it is used: steps are measured with a copy of the optimizer") from error
    return its


def as_one(given: Optimizer | Sequence[Optimizer]) -> Any:
    """What a script gives. Raises JobError for several that cannot be one; what is no optimizer is refused elsewhere."""
    if not isinstance(given, list | tuple):
        return given
    if not given or not all(isinstance(part, Optimizer) for part in given):
        raise JobError("optimizer is a list of other things than optimizers", "give torch.optim.Optimizers, at least one")
    for part in given:
        kind = type(part)
        if kind.load_state_dict is not Optimizer.load_state_dict or kind.state_dict is not Optimizer.state_dict:
            what = f"optimizer has a {kind.__name__} among others, which writes its state in a way of its own"
            raise JobError(what, "give it alone")
    numbers = [id(p) for part in given for group in part.param_groups for p in group["params"]]
    if len(set(numbers)) < len(numbers):
        raise JobError("a parameter is stepped by more than one optimizer", "give each parameter to one of them")
    return Optimizers(given) if len(given) > 1 else given[0]


def is_of(scheduler: Any, optimizer: Optimizer | None) -> bool:
    """Whether a scheduler sets the rate of this optimizer, or of one of its parts. One that does not say is taken to."""
    own = getattr(scheduler, "optimizer", optimizer)
    return own is optimizer or any(own is part for part in getattr(optimizer, "parts", ()))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """What a script has made."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)
