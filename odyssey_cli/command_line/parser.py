"""Command lines that start ranks, split into the options' texts, the script, and what is the script's.

argparse does the splitting, as it does for torchrun: abbreviations, `-r3`, `--opt=value`, everything behind the script.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from odyssey.errors import UsageError
from odyssey_cli.command_line import torch_version
from odyssey_cli.command_line.options import OPTIONS, Command, Group, Option, Origin

_BY_DEST = {option.dest: option for option in OPTIONS}


class HelpAsked(Exception):
    """`--help` or `--print-completion` stands on the command line; the argument is what to print."""


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
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, _Parser)
        raise HelpAsked(help_text(parser._command))


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


# -- help --------------------------------------------------------------------------------------------------------------

_ABOUT = {
    Command.RUN: "Start the ranks of SCRIPT, watch them, and go on when some are lost.",
    Command.PROFILE: "Measure what SCRIPT's layers and the links between ranks cost, and write it to a file.",
    Command.CHECK: "Check hosts before a job: what they have, compute and reach. Start it on each, as a job.",
    Command.TORCHRUN: "torchrun's command line, run by Odyssey.",
    Command.LAUNCH: "The command line of torch.distributed.launch, run by Odyssey.",
}
_EXAMPLES = [
    "",
    "$ odyssey run --standalone --nproc-per-node 8 train.py",
    "$ odyssey run --nproc-per-node 8 --on-loss continue --max-restarts 3 train.py",
    "$ odyssey run --nnodes 4 --rdzv-backend c10d --rdzv-endpoint n0:29400 train.py",
]
_MOST_USED = (
    "nproc_per_node", "nodes", "nnodes", "max_restarts", "on_loss", "tee", "log_dir", "rdzv_endpoint", "rdzv_backend",
    "standalone", "module", "layout", "drill", "stall_timeout", "no_display",
)  # fmt: skip
"""Options that the help of a run tells first; the others follow by what they are about."""
_TAKES_NODES = ["Arguments after SCRIPT are passed to it, except `--nodes N` where no option", "stands before SCRIPT."]
_BEHIND_SCRIPT = {Command.RUN: _TAKES_NODES, Command.PROFILE: _TAKES_NODES}
_EXIT_CODES = ["Exit code 0 says that nothing bad was found, 1 that something was."]
_WIDTH = 80
_INDENT = 32


def help_text(command: Command) -> str:
    """What `--help` prints."""
    script = " SCRIPT [ARGUMENTS]" if command.has_script else ""
    lines = [f"Usage: {command.value} [OPTIONS]{script}", "", *textwrap.wrap(_ABOUT[command], _WIDTH)]
    lines += _BEHIND_SCRIPT.get(command, ["Arguments after SCRIPT are passed to it."]) if command.has_script else _EXIT_CODES
    first = _MOST_USED if command is Command.RUN else ()
    groups = {"Most used": [_BY_DEST[dest] for dest in first]} | {
        group.value: [
            option for option in OPTIONS if option.group is group and option.is_of(command) and option.dest not in first
        ]
        for group in Group
    }
    lines += _EXAMPLES if command is Command.RUN else []
    for heading, options in groups.items():
        if options:
            lines += ["", f"{heading}:"]
            lines += [line for option in options for line in _help_lines(option)]
    lines += ["", "  -h, --help".ljust(_INDENT) + "Print this.", ""]
    if command is not Command.PROFILE:
        lines += [
            "Options of torchrun can be given as environment variables as well:",
            "PET_NNODES=2 is --nnodes 2, PET_STANDALONE=1 is --standalone.",
        ]
    return "\n".join(lines)


def _help_lines(option: Option) -> list[str]:
    short = f"{option.names[0]}, " if len(option.names) > 1 else "    "
    head = f"  {short}{option.name} {option.metavar}".rstrip()
    tells_default = option.default and not option.is_switch
    text = f"{option.help} [{option.default}]" if tells_default else option.help
    wrapped = _wrapped(text)
    for value, sentence in option.values().items():
        wrapped += _wrapped(f"{value}: {sentence}", later_lines="  ")
    if len(head) + 2 > _INDENT:
        return [head, *(" " * _INDENT + line for line in wrapped)]
    return [head.ljust(_INDENT) + wrapped[0], *(" " * _INDENT + line for line in wrapped[1:])]


def _wrapped(text: str, later_lines: str = "") -> list[str]:
    width = _WIDTH - _INDENT
    return textwrap.wrap(text, width, subsequent_indent=later_lines, break_long_words=False, break_on_hyphens=False)
