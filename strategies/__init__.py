"""What to do after a change: one file a strategy, and the search that asks them all, prices what they propose and ranks it.

Every file here is a strategy, and to drop one in is all that it takes. It has a story (its docstring) and

    NAME                the name of the file
    SUMMARY             one sentence for `--help` and docs/strategies.md: what happens to the ranks and the lost one's work
    propose(situation)  Plans, or the reason why there is none

No strategy imports another. Beside them, from the top, each importing only from those below it:

search      all strategies asked and priced, the best first; and what is no choice among strategies: how a job starts
(a file)    a strategy
building    what strategies are made of
situation   what a strategy is given and answers

May import `perfmodel`, `odyssey.plan` and its parts, `odyssey.schedule`, `odyssey.kernel`, `odyssey.errors` and
`odyssey.text`, and no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from odyssey.errors import OdysseyError, UsageError

if TYPE_CHECKING:
    from strategies.situation import Proposal, Situation

__all__ = ["Strategy", "load", "load_all", "names"]


HELP = "docs/strategies.md says what a strategy consists of"


@dataclass(frozen=True)
class Strategy:
    """What a file of this folder has."""

    name: str
    summary: str
    propose: Callable[[Situation], list[Proposal]]


def names() -> tuple[str, ...]:
    """All strategies, by the alphabet. They are the names of files: nothing is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg))


def load(name: str) -> Strategy:
    """Raises UsageError if there is no such strategy, OdysseyError if its file is not what a strategy has to be."""
    if name not in names():
        raise UsageError(f"unknown strategy {name!r}", f"one of {', '.join(names())}")
    return _load(name)


def load_all() -> list[Strategy]:
    """All of them, in the order of `names`. Raises OdysseyError for the first file that is no strategy."""
    return [_load(name) for name in names()]


def _load(name: str) -> Strategy:
    try:
        module = import_module(f"{__name__}.{name}")
    except Exception as error:
        from strategies.situation.faults import fault_text

        raise OdysseyError(f"strategy {name} cannot be loaded: {fault_text(error)}", HELP) from error
    has = vars(module)
    summary = has.get("SUMMARY")
    for attribute, is_right, expected in (
        ("NAME", has.get("NAME") == name, f"{name!r}, as the file is called"),
        ("SUMMARY", isinstance(summary, str) and summary.strip() and "\n" not in summary, "one sentence, a string"),
        ("propose", callable(has.get("propose")), "a function from a Situation to a list of Proposals"),
    ):
        if not is_right:
            found = f"got {has[attribute]!r}" if attribute in has else "it has none"
            raise OdysseyError(f"{module.__file__}: {attribute}: expected {expected}, {found}", HELP)
    return Strategy(name, has["SUMMARY"], has["propose"])
