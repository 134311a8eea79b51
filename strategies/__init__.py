"""What to do after a change: one file a strategy, and the search that asks them all, prices what they propose and ranks it.

Every file here is a strategy, and to drop one in is all that it takes. It has a story (its docstring) and

    NAME                the name of the file
    SUMMARY             one sentence for `--help` and docs/strategies.md: what happens to the ranks and the lost one's work

    SHARDED             optional: True where it is for models that are sharded, and for no others

and one or more of these functions, each for its moment. They answer Plans, or the reason why there is none.

    start(situation)    before the first step: there is no plan yet
    propose(situation)  workers with work in the plan in force are lost, or leaving
    grow(situation)     workers have come, and all that have work in the plan in force are there
    slow(situation)     workers compute more slowly than the profile says

and, before anything is lost, of a plan in which some layer would have one holder, or one node: what workers may keep of it,
way by way

    protect(situation, plan)

No strategy imports another. Beside them, from the top, each importing only from those below it:

search      all strategies asked and priced, the best first; and what is no strategy: to go on as before, and what is made of
            the plans that strategies propose
(a file)    a strategy
building    what strategies are made of
situation   what a strategy is given and answers

May import `perfmodel`, `odyssey.plan`, `odyssey.kernel`, `odyssey.errors` and `odyssey.text`, and no torch.
"""

from __future__ import annotations

import enum
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any

from odyssey.errors import OdysseyError, UsageError

__all__ = ["Moment", "Strategy", "load", "load_all", "names"]


HELP = "docs/strategies.md says what a strategy consists of"


class Moment(enum.StrEnum):
    """When strategies are asked, by the name of the function that answers."""

    START = "start"
    PROPOSE = "propose"
    GROW = "grow"
    SLOW = "slow"
    PROTECT = "protect"


@dataclass(frozen=True)
class Strategy:
    """What a file of this folder has.
    `answers`: the function for each moment that it has one for. `is_sharded`: it is for models that are sharded, and no
    other is for these."""

    name: str
    summary: str
    is_sharded: bool
    answers: Mapping[Moment, Callable[..., Iterable[Any]]]


def names(moment: Moment = Moment.PROPOSE, *, sharded: bool = False) -> tuple[str, ...]:
    """Those that are asked at this moment, by the alphabet; by default the values of `--strategy`. `sharded`: those for models
    that are sharded.

    Their files are read, and none is imported. One that defines none of the functions is asked to propose: to load it says what
    is wrong.
    """
    found = []
    for name, file in _files():
        text = file.read_text(errors="replace")
        if sharded != bool(re.search(r"^SHARDED = True$", text, re.MULTILINE)):
            continue
        defined = set(re.findall(r"^def (\w+)\(", text, re.MULTILINE))
        if moment in defined or (moment is Moment.PROPOSE and not defined.intersection(Moment)):
            found.append(name)
    return tuple(sorted(found))


def load(name: str, moment: Moment = Moment.PROPOSE) -> Strategy:
    """Raises UsageError if no such strategy is asked then, OdysseyError if its file is not what a strategy has to be."""
    if name not in (known := names(moment)) and name not in names(moment, sharded=True):
        raise UsageError(f"unknown strategy {name!r}", f"one of {', '.join(known)}")
    return _load(name)


def load_all() -> list[Strategy]:
    """All files, by the alphabet. Raises OdysseyError for the first one that is no strategy."""
    return [_load(name) for name in sorted(name for name, _ in _files())]


def _files() -> Iterator[tuple[str, Path]]:
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg and isinstance(module.module_finder, FileFinder):
            yield module.name, Path(module.module_finder.path) / f"{module.name}.py"


def _load(name: str) -> Strategy:
    try:
        module = import_module(f"{__name__}.{name}")
    except Exception as error:
        from strategies.situation.faults import fault_text

        raise OdysseyError(f"strategy {name} cannot be loaded: {fault_text(error)}", HELP) from error
    has = vars(module)
    summary = has.get("SUMMARY")
    answers = {moment: has[moment] for moment in Moment if moment in has}
    functions = tuple((moment.value, callable(answer), "a function") for moment, answer in answers.items())
    for attribute, is_right, expected in (
        ("NAME", has.get("NAME") == name, f"{name!r}, as the file is called"),
        ("SUMMARY", isinstance(summary, str) and summary.strip() and "\n" not in summary, "one sentence, a string"),
        *functions,
    ):
        if not is_right:
            found = f"got {has[attribute]!r}" if attribute in has else "it has none"
            raise OdysseyError(f"{module.__file__}: {attribute}: expected {expected}, {found}", HELP)
    if not answers:
        raise OdysseyError(f"{module.__file__}: expected one or more functions of {', '.join(Moment)}, it has none", HELP)
    return Strategy(name, has["SUMMARY"], has.get("SHARDED", False), answers)
