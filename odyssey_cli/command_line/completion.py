"""What shells complete command lines that start ranks by.

`completions` answers a shell that `odyssey --install-completion` has told of us. `script` is for torchrun's option
`--print-completion SHELL`: shtab makes it, and is imported only here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.options import OnLoss
from odyssey.errors import UsageError
from odyssey_cli.command_line.options import NUMA_BINDINGS, OPTIONS, START_METHODS, Command
from odyssey_cli.command_line.values import choice
from strategies.situation import Objective, Protect

_CHOICES: dict[str, tuple[str, ...]] = {
    "numa_binding": NUMA_BINDINGS,
    "start_method": START_METHODS,
    "on_loss": tuple(OnLoss),
    "objective": tuple(Objective),
    "protect": tuple(Protect),
    "rdzv_backend": ("static", "c10d"),
}


def completions(command: Command, before: Sequence[str], word: str) -> list[tuple[str, str]]:
    """What `word` may become, each with its help, behind the words `before` it: options, or an option's values. Nothing where a
    file is meant, and behind the script."""
    options = {spelling: option for option in OPTIONS if option.is_of(command) for spelling in option.spellings}
    value_of = None
    for its in before:
        if value_of is not None:
            value_of = None
        elif not its.startswith("-"):
            return []
        elif its in options and not options[its].is_switch:
            value_of = options[its]
    if value_of is not None:
        values = {**dict.fromkeys(_CHOICES.get(value_of.dest, ()), ""), **value_of.values()}
        return [(value, help) for value, help in values.items() if value.startswith(word)]
    if not word.startswith("-"):
        return []
    named = [(name, option.help) for option in OPTIONS if option.is_of(command) for name in option.names]
    return [(name, help) for name, help in (*named, ("--help", "Print this.")) if name.startswith(word)]


def script(shell: str, command: Command) -> str:
    """Raises UsageError without shtab, or for a shell that it does not know."""
    try:
        import shtab
    except ImportError:
        raise UsageError("--print-completion needs the package shtab", "pip install shtab") from None
    choice(shell, "--print-completion", shtab.SUPPORTED_SHELLS)
    parser = _described(command, tuple(shtab.SUPPORTED_SHELLS))
    for action in parser._actions:
        if action.dest in ("script", "log_dir"):
            action.complete = shtab.FILE if action.dest == "script" else shtab.DIRECTORY  # type: ignore[attr-defined]
    if command is Command.RUN:
        program, subcommand = command.value.split()
        whole = argparse.ArgumentParser(prog=program)
        whole.add_subparsers().add_parser(subcommand, parents=[parser], add_help=False, help="Start ranks.")
        parser = whole
    completion: str = shtab.complete(parser, shell=shell)
    return completion


def _described(command: Command, shells: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options with all that shells show of them."""
    # as torch.distributed.run and launch, which are modules, complete the program
    name = "torchrun" if Path(sys.argv[0]).name == "torchrun" else Command.TORCHRUN.value
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="Print this.")
    for option in OPTIONS:
        if not option.is_of(command):
            continue
        text = option.help.replace("%", "%%")
        if option.is_switch:
            parser.add_argument(*option.spellings, dest=option.dest, action="store_true", help=text)
        else:
            choices = {**_CHOICES, "print_completion": shells}.get(option.dest)
            parser.add_argument(*option.spellings, dest=option.dest, metavar=option.metavar, choices=choices, help=text)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser
