"""What `-h` and `--help` print: usage, what it does, examples, options under headings.

`-h` prints the options of `run`, `profile` and `check` that are needed first; that of `odyssey-torchrun` prints all of them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odyssey_cli.command_line.options import OPTIONS, Command, Group, Option

_ABOUT = {
    Command.RUN: "Start the ranks of SCRIPT, watch them, and go on when some are lost.",
    Command.PROFILE: "Measure what SCRIPT's layers and the links between ranks cost, and write it to a file.",
    Command.CHECK: "Check hosts before a job: what they have, compute and reach. Start it on each, as a job.",
    Command.TORCHRUN: "torchrun's command line, run by Odyssey.",
    Command.LAUNCH: "The command line of torch.distributed.launch, run by Odyssey.",
}
_EXAMPLES = {
    Command.RUN: (
        "$ odyssey run --standalone --nproc-per-node 8 train.py",
        "$ odyssey run --nproc-per-node 8 --on-loss continue --max-restarts 3 train.py",
        "$ odyssey run --nnodes 4 --rdzv-backend c10d --rdzv-endpoint n0:29400 train.py",
    ),
    Command.PROFILE: (
        "$ odyssey profile --nproc-per-node 4 train.py",
        "$ odyssey profile --nodes 2 --nproc-per-node 4 -o two-nodes.json train.py",
    ),
    Command.CHECK: (
        "$ odyssey check --standalone --nproc-per-node 8",
        "$ odyssey check --nnodes 4 --rdzv-backend c10d --rdzv-endpoint n0:29400",
    ),
}
_FIRST = {
    Command.RUN: ("nproc_per_node", "nnodes", "max_restarts", "on_loss", "log_dir"),
    Command.PROFILE: ("nproc_per_node", "nodes", "output"),
    Command.CHECK: ("nproc_per_node", "nnodes", "rdzv_endpoint", "json"),
}
"""Options that `-h` prints."""
_MOST_USED = (
    "nproc_per_node", "nodes", "nnodes", "max_restarts", "on_loss", "tee", "log_dir", "rdzv_endpoint", "rdzv_backend",
    "standalone", "module", "layout", "drill", "stall_timeout", "no_display",
)  # fmt: skip
"""Options that the help of a run tells first; the others follow by what they are about."""
_TAKES_NODES = ("Arguments after SCRIPT are passed to it, except `--nodes N` where no option stands before SCRIPT.",)
_BEHIND_SCRIPT = {Command.RUN: _TAKES_NODES, Command.PROFILE: _TAKES_NODES}
_EXIT_CODES = ("Exit code 0 says that nothing bad was found, 1 that something was.",)
_VARIABLES = (
    "Options of torchrun can be given as environment variables as well:",
    "PET_NNODES=2 is --nnodes 2, PET_STANDALONE=1 is --standalone.",
)
_BY_DEST = {option.dest: option for option in OPTIONS}
_WIDTH = 80
_MOST_INDENT = 32


@dataclass(frozen=True)
class Row:
    """What stands on the left, and on the right the text and, each on lines of its own, what a value does."""

    head: str
    text: str
    values: tuple[str, ...] = ()

    @staticmethod
    def of_option(names: Sequence[str], metavar: str, text: str, default: str = "", values: tuple[str, ...] = ()) -> Row:
        """The long name stands below the others', whether there is a short one or not."""
        short = f"{names[0]}, " if len(names) > 1 else "    "
        head = f"{short}{names[-1]} {metavar}".rstrip()
        return Row(head, f"{text} [{default}]" if default else text, values)


def help_text(command: Command) -> str:
    """What `--help` prints of a command line that starts ranks."""
    about = [_ABOUT[command]]
    about += _BEHIND_SCRIPT.get(command, ("Arguments after SCRIPT are passed to it.",)) if command.has_script else _EXIT_CODES
    first = _MOST_USED if command is Command.RUN else ()
    sections = {"Most used": [_row(_BY_DEST[dest]) for dest in first]} | {
        group.value: [
            _row(option) for option in OPTIONS if option.group is group and option.is_of(command) and option.dest not in first
        ]
        for group in Group
    }
    told = "Print this; -h prints what is needed first." if command in _FIRST else "Print this."
    sections[""] = [Row.of_option(("-h", "--help"), "", told)]
    end = () if command is Command.PROFILE else _VARIABLES
    return page(_usage(command), about, _EXAMPLES.get(command, ()), sections, end=end)


def short_help_text(command: Command) -> str:
    """What `-h` prints of one."""
    if command not in _FIRST:
        return help_text(command)
    rows = [_row(_BY_DEST[dest]) for dest in _FIRST[command]]
    end = (f"All options: {command.value} --help",)
    return page(_usage(command), [_ABOUT[command]], _EXAMPLES[command], {"": rows}, end=end)


def typed_help_text(context: Any) -> str:
    """What `-h` and `--help` print of a command that typer reads. Examples stand at the end of its docstring."""
    command = context.command
    about, _, examples = command.help.partition("\n\n$ ")
    arguments = {param: param.metavar for param in command.params if param.param_type_name == "argument"}
    options = [param for param in (*command.params, command.get_help_option(context)) if param not in arguments]
    given = [name if param.required else f"[{name}]" for param, name in arguments.items()]
    commands = getattr(command, "commands", {})
    usage = [context.command_path, "[OPTIONS]", *given, *(["COMMAND [ARGUMENTS]"] if commands else [])]
    return page(
        " ".join(usage),
        [about],
        [f"$ {example}" for example in examples.split("\n$ ") if example],
        {"Commands": [Row(name, its.short_help) for name, its in commands.items()]},
        {
            "Arguments": [Row(name, param.help) for param, name in arguments.items()],
            "Options": [_typed_row(option) for option in options],
        },
    )


def page(
    usage: str,
    about: Sequence[str],
    examples: Sequence[str],
    *blocks: Mapping[str, Sequence[Row]],
    end: Sequence[str] = (),
) -> str:
    """The whole text. A block is rows by heading, which may be empty; its texts stand below each other."""
    lines = [f"Usage: {usage}", "", *(line for paragraph in about for line in _wrapped(paragraph, _WIDTH))]
    lines += ["", *examples] if examples else []
    for block in blocks:
        widest = max((len(row.head) for rows in block.values() for row in rows), default=0)
        for heading, rows in block.items():
            if rows:
                lines += ["", f"{heading}:"] if heading else [""]
                lines += [line for row in rows for line in _lines(row, min(_MOST_INDENT, widest + 4))]
    lines += ["", *end] if end else []
    return "\n".join(lines)


def _usage(command: Command) -> str:
    return f"{command.value} [OPTIONS]{' SCRIPT [ARGUMENTS]' if command.has_script else ''}"


def _row(option: Option) -> Row:
    default = "" if option.is_switch else option.default
    values = tuple(f"{value}: {sentence}" for value, sentence in option.values().items())
    return Row.of_option(option.names, option.metavar, option.help, default, values)


def _typed_row(option: Any) -> Row:
    names = sorted(option.opts, key=len)
    if "--help" in names:
        return Row.of_option(names, "", "Print this.")
    if option.is_flag:
        return Row.of_option(names, "", option.help)
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default or "")
    return Row.of_option(names, option.metavar, option.help, default)


def _lines(row: Row, indent: int) -> list[str]:
    width = _WIDTH - indent
    texts = _wrapped(row.text, width) + [line for value in row.values for line in _wrapped(value, width, later_lines="  ")]
    head = f"  {row.head}"
    if len(head) + 2 > indent:
        return [head, *(" " * indent + line for line in texts)]
    return [head.ljust(indent) + texts[0], *(" " * indent + line for line in texts[1:])]


def _wrapped(text: str, width: int, later_lines: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=later_lines, break_long_words=False, break_on_hyphens=False)
