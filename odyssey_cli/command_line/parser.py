"""Command lines that start ranks, split into the options' texts, the script, and what is the script's.

argparse does the splitting, as it does for torchrun: abbreviations, `-r3`, `--opt=value`, everything behind the script.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from odyssey.errors import UsageError
from odyssey_cli.command_line import torch_version
from odyssey_cli.command_line.help import help_text, short_help_text
from odyssey_cli.command_line.options import OPTIONS, Command, Origin

_BY_DEST = {option.dest: option for option in OPTIONS}


class HelpAsked(Exception):
    """`-h`, `--help` or `--print-completion` stands on the command line; the argument is what to print."""


@dataclass(frozen=True)
class Value:
    """An option's text, by which name it was given (`--nnodes` or `PET_NNODES`), and whether it was given at all."""

    text: str
    name: str
    is_given: bool


@dataclass(frozen=True)
class Given:
    """A command line, and what stands in for what is not on it: the environment, and after it `elsewhere`."""

    command: Command
    script: str
    arguments: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]
    """By option, what stands on the command line."""
    environment: Mapping[str, str]
    elsewhere: Mapping[str, Value] = field(default_factory=dict)
    """By option, what is known from somewhere else, as from SLURM."""

    def value(self, dest: str) -> Value:
        """The command line wins over the environment, the last one of a repeated option over the others."""
        option = _BY_DEST[dest]
        if dest in self.texts:
            return Value(self.texts[dest][-1], option.name, True)
        if option.is_of(self.command):
            for variable in option.all_variables:
                if variable in self.environment:
                    return Value(self.environment[variable], variable, True)
        if dest in self.elsewhere:
            return self.elsewhere[dest]
        return Value(option.default, option.name, False)

    def switch(self, dest: str) -> bool:
        """Whether it is on: by the command line, or by a variable that is a number and not 0. Raises UsageError."""
        if dest in self.texts:
            return True
        value = self.value(dest)
        if not value.is_given:
            return False
        try:
            return bool(int(value.text))
        except ValueError:
            raise UsageError(f"{value.name}: expected 0 or 1, got {value.text!r}", f"for example {value.name}=1") from None


def parse(argv: Sequence[str], environment: Mapping[str, str], command: Command) -> Given:
    """Split a command line. Raises UsageError, and HelpAsked."""
    parser = _Parser(command, argv)
    try:
        texts, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise _wrong_value(error, command) from None
    if unknown:
        raise _of_newer_torch(unknown, command) or _no_such_option(unknown[0], command)
    given = vars(texts)
    script, arguments = given.pop("script", ""), given.pop("arguments", ())
    return Given(command, script, tuple(arguments), {dest: tuple(values) for dest, values in given.items()}, environment)


class _Parser(argparse.ArgumentParser):
    def __init__(self, command: Command, argv: Sequence[str]) -> None:
        super().__init__(
            prog=command.value, usage="%(prog)s", add_help=False, argument_default=argparse.SUPPRESS, exit_on_error=False
        )
        self._command = command
        self._argv = argv
        self._torchruns: set[argparse.Action] = {self.add_argument("-h", "--help", action=_Help, nargs=0)}
        for option in OPTIONS:
            if not option.is_of(command):
                continue
            if option.dest == "print_completion":
                action = self.add_argument(*option.spellings, dest=option.dest, action=_Completion)
            elif option.is_switch:
                action = self.add_argument(*option.spellings, dest=option.dest, action="append_const", const="1")
            else:
                action = self.add_argument(*option.spellings, dest=option.dest, action="append")
            if option.origin is not Origin.OURS:
                self._torchruns.add(action)
        if command.has_script:
            self.add_argument("script")
            self.add_argument("arguments", nargs=argparse.REMAINDER)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation can mean: if any, an option of torchrun's, so that no name of ours takes one away."""
        found = super()._get_option_tuples(option_string)
        found = [match for match in found if match[0] in self._torchruns] or found
        names = {match[0].dest: match for match in found}
        if len(names) > 1:
            known = ", ".join(f"--{dest.replace('_', '-')}" for dest in sorted(names))
            ambiguous = _Ambiguous(f"ambiguous option: {option_string.partition('=')[0]}", f"one of: {known}")
            return [(ambiguous, *found[0][1:])]
        return found[:1]  # two spellings of one option are no ambiguity

    def error(self, message: str) -> NoReturn:
        """argparse calls it when the script is missing, which may be because an option is misspelled."""
        names = {spelling for option in OPTIONS if option.is_of(self._command) for spelling in option.spellings}
        for argument in self._argv:
            name = argument.partition("=")[0]
            if name.startswith("--") and not any(known.startswith(name) for known in names):
                raise _of_newer_torch([argument], self._command) or _no_such_option(name, self._command)
        if len(self._argv) > 1 and os.path.isfile(self._argv[-1]):  # an option before it has taken it
            what = f"no script given: {self._argv[-1]} is the value of {self._argv[-2]}"
            raise UsageError(what, f"give {self._argv[-2]} a value before it")
        how_many = "--nproc-per-node 4" if self._command in (Command.TORCHRUN, Command.LAUNCH) else "--nodes 4"
        raise UsageError("no script given", f"for example: {self._command.value} {how_many} train.py")


class _Ambiguous(argparse.Action):
    """Takes the place of an option where it could be several: behind the script, it is none at all."""

    def __init__(self, what: str, help: str) -> None:
        super().__init__([], argparse.SUPPRESS, nargs="?")
        self._error = UsageError(what, help)

    def __call__(self, *_: object) -> NoReturn:
        raise self._error


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, __: object, name: str | None = None) -> NoReturn:
        assert isinstance(parser, _Parser)
        raise HelpAsked((short_help_text if name == "-h" else help_text)(parser._command))


class _Completion(argparse.Action):
    """At once, as torchrun's: there need be no script."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> NoReturn:
        from odyssey_cli.command_line import completion

        assert isinstance(parser, _Parser) and isinstance(shell, str)
        raise HelpAsked(completion.script(shell, parser._command))


def _wrong_value(error: argparse.ArgumentError, command: Command) -> UsageError:
    """An option without its value, or a switch with one: the parser checks nothing else."""
    name = next(part for part in (error.argument_name or "").split("/") if part.startswith("--"))
    option = _BY_DEST.get(name.removeprefix("--").replace("-", "_"))
    what = f"{name} takes no value" if option is None or option.is_switch else f"{name} needs a value"
    return UsageError(what, f"see `{command.value} --help`")


def _of_newer_torch(unknown: Sequence[str], command: Command) -> UsageError | None:
    """In the words of the torchrun that does not know it; None for what the newest does not either."""
    name = unknown[0].partition("=")[0]
    for option in OPTIONS:
        is_meant = name.startswith("--") and any(known.startswith(name) for known in option.spellings)
        if is_meant and option.is_of_newest(command) and not option.is_of(command):
            since, installed = torch_version.spelled(option.since), torch_version.spelled(torch_version.installed())
            help = f"torchrun has {option.name} from torch {since} on, here is {installed}"
            return UsageError(f"unrecognized arguments: {' '.join(unknown)}", help)
    return None


def _no_such_option(argument: str, command: Command) -> UsageError:
    import difflib

    if not argument.startswith("-"):
        return UsageError(f"{command.value} takes no script, got {argument}", f"see `{command.value} --help`")
    name = argument.partition("=")[0]
    help = f"see `{command.value} --help`"
    known = [spelling for option in OPTIONS if option.is_of(command) for spelling in option.names]
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1, 0.5) if len(name) > 2 else []
    return UsageError(f"no such option: {name}", f"did you mean {near[0]}? {help}" if near else help)
