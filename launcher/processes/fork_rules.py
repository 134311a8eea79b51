"""The rules by which ranks are plain spawns: where a fork of the zygote would not behave as `python -u script.py` does."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from typing import NamedTuple

from launcher.options import Entry, RunOptions
from odyssey.zygote.protocol import Imported


class Rule(NamedTuple):
    """`applies` answers the reason, empty where there is none. `surprises`: people are told without being asked."""

    name: str
    applies: Callable[[RunOptions, Mapping[str, str]], str]
    surprises: bool = False


class Ruling(NamedTuple):
    """Ranks are plain spawns by rule `name`."""

    name: str
    reason: str
    surprises: bool


START_VARIABLES = ("PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONINSPECT", "PYTHONPERFSUPPORT", "PYTHONDUMPREFS")
"""What these make of an interpreter they make of it when it starts, for the rank to see: not of the zygote."""


def _no_python(options: RunOptions, environment: Mapping[str, str]) -> str:
    return "the program is run as it is" if options.entry is Entry.PROGRAM else ""


def _other_interpreter(options: RunOptions, environment: Mapping[str, str]) -> str:
    other = options.interpreter not in ("", sys.executable)
    return f"{options.interpreter} runs the script, and this is {sys.executable}" if other else ""


def _switched_off(options: RunOptions, environment: Mapping[str, str]) -> str:
    return "ODYSSEY_ZYGOTE is 0" if environment.get("ODYSSEY_ZYGOTE") == "0" else ""


def _compiled(options: RunOptions, environment: Mapping[str, str]) -> str:
    is_compiled = options.entry is Entry.SCRIPT and options.script.endswith(".pyc")
    return f"{options.script} is compiled" if is_compiled else ""


def _start_variable(options: RunOptions, environment: Mapping[str, str]) -> str:
    names = [name for name in START_VARIABLES if environment.get(name)]
    return f"{names[0]} is set, which changes how an interpreter starts" if names else ""


def _coverage(options: RunOptions, environment: Mapping[str, str]) -> str:
    measured = "coverage" in sys.modules or any(name.startswith("COVERAGE_PROCESS_") for name in environment)
    return "coverage hooks into the start of the interpreter" if measured else ""


def _debugger(options: RunOptions, environment: Mapping[str, str]) -> str:
    followed = "pydevd" in sys.modules or "debugpy" in sys.modules
    return "a debugger follows the start of processes" if followed else ""


def _customized(options: RunOptions, environment: Mapping[str, str]) -> str:
    """The interpreter's own folder may have one: it came with the system, and knows of no ranks."""
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    for name in ("sitecustomize", "usercustomize"):
        file = os.path.realpath(getattr(sys.modules.get(name), "__file__", None) or stdlib)
        if file != stdlib and os.path.dirname(file) != stdlib and not file.startswith("/etc/"):
            return f"{file} runs whenever an interpreter starts"
    return ""


RULES = (
    Rule("no-python", _no_python),
    Rule("other-interpreter", _other_interpreter),
    Rule("switched-off", _switched_off),
    Rule("compiled", _compiled),
    Rule("start-variable", _start_variable),
    Rule("coverage", _coverage),
    Rule("debugger", _debugger),
    Rule("customized", _customized, surprises=True),
)


def ruling(options: RunOptions, environment: Mapping[str, str]) -> Ruling | None:
    """By the first rule that applies, known before anything is started."""
    for rule in RULES:
        if reason := rule.applies(options, environment):
            return Ruling(rule.name, reason, rule.surprises)
    return None


def ruling_on(imported: Imported) -> Ruling | None:
    """What the zygote's own imports have shown."""
    if imported.error:
        return Ruling("broken-import", f"importing ahead failed, {imported.error}", True)
    if imported.shadow:
        return Ruling("shadow", f"{imported.shadow} has the name of a module that torch imports", True)
    if imported.threads > 1:
        return Ruling("threads", f"importing torch has started {imported.threads - 1} threads", True)
    if imported.has_cuda:
        return Ruling("cuda", "importing torch has initialised CUDA", True)
    return None


DIES = Ruling("dies", "the process to fork from has ended twice", True)


class Rulings:
    """Those that were made so far. `say`: for people, of surprises; with `verbose`, of all."""

    def __init__(self, verbose: bool, say: Callable[[str], None]) -> None:
        self._verbose = verbose
        self.say = say
        self.ranks: Ruling | None = None
        """Why ranks are plain spawns."""
        self.zygote: Ruling | None = None
        """Why no zygote can be forked from, which the store needs too."""

    @property
    def allow_forks(self) -> bool:
        """Ranks are forks, as far as is known."""
        return self.ranks is None and self.zygote is None

    def of_ranks(self, ruling: Ruling) -> None:
        self.ranks = ruling
        self._tell(ruling)

    def of_zygote(self, ruling: Ruling) -> None:
        self.zygote = ruling
        self._tell(ruling)

    def _tell(self, ruling: Ruling) -> None:
        text = f"ranks are started afresh, not forked: {ruling.reason}"
        if self._verbose:
            self.say(f"{text} (rule {ruling.name})")
        elif ruling.surprises and self.ranks in (None, ruling):
            self.say(text)

    def explain(self, text: str) -> None:
        """What nobody has to know."""
        if self._verbose:
            self.say(text)
