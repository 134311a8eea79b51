"""The commands of `odyssey`.
What a command does lies in a file of its own, what the larger ones are asked in command_line/typed_requests.py. The command
lines of `run`, `profile` and `check` are read by command_line/request.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer
import typer.core

from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey_cli.command_line.help import typed_help_text
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.typed_requests import (
    BatchRequest,
    ChangeFile,
    Json,
    PlanRequest,
    RehearseRequest,
    ReplayRequest,
    SvgFile,
    TraceFile,
    option,
    switch,
)

_Request = TypeVar("_Request")
_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda option: option.replace("_", "-"),
}
_PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""For command lines that command_line/parser.py reads."""


class _Completion(NamedTuple):
    value: str
    help: str
    type: str = "plain"


class _Launch(typer.core.TyperCommand):
    """A command whose line command_line/parser.py reads: typer does not know what it can be completed by."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from odyssey_cli.command_line.completion import completions

        found = completions(Command(f"odyssey {self.name}"), ctx.args, incomplete)
        return [_Completion(value, help) for value, help in found]


class _Typed(typer.core.TyperCommand):
    def get_help(self, ctx: Any) -> str:
        return typed_help_text(ctx)


class _All(typer.core.TyperGroup):
    def get_help(self, ctx: Any) -> str:
        return typed_help_text(ctx)


app = typer.Typer(
    cls=_All,
    name="odyssey",
    help="Train with PyTorch, and keep training when ranks are lost.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


_small_command = partial(app.command, cls=_Typed, context_settings=_SETTINGS)


def _command(
    asked: type[_Request], short_help: str, **settings: object
) -> Callable[[Callable[[_Request], int]], Callable[[_Request], int]]:
    """The decorated function answers what this type says: its fields are the options, its docstring is the help."""

    def declare(answer: Callable[[_Request], int]) -> Callable[[_Request], int]:
        @wraps(asked, updated=())
        def command(**given: Any) -> int:
            return answer(asked(**given))

        command.__annotations__ = get_type_hints(asked, include_extras=True)
        declared = app.command(answer.__name__, cls=_Typed, context_settings={**_SETTINGS, **settings}, short_help=short_help)
        declared(command)
        return answer

    return declare


@app.callback(invoke_without_command=True)
def _odyssey(
    context: typer.Context, version: Annotated[bool, switch("Print the version and exit.", "--version")] = False
) -> None:
    if version:
        from odyssey import __version__

        print(f"odyssey {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def _launch(context: typer.Context) -> int:
    from odyssey_cli import run

    return run.execute(context.args, Command(f"odyssey {context.info_name}"))


for _name, _short_help in (
    ("run", "Train, and go on when ranks are lost."),
    ("profile", "Measure a script's layers and links."),
    ("check", "Check hosts before a job needs them."),
):
    app.command(_name, cls=_Launch, context_settings=_PASSED_ON, add_help_option=False, short_help=_short_help)(_launch)


@_command(PlanRequest, "Say what would be done if ranks were lost or came, and what to start with.")
def plan(asked: PlanRequest) -> int:
    from odyssey_cli.planning import plan as command

    return command.plan(asked)


@_command(RehearseRequest, "Rehearse a cluster that is not there, with losses and returns.")
def rehearse(asked: RehearseRequest) -> int:
    from odyssey_cli.rehearsal import rehearse as rehearsal

    return rehearsal.command(asked)


@_command(ReplayRequest, "Replay a trace of failures against a job, by simulation.")
def replay(asked: ReplayRequest) -> int:
    from odyssey_cli.replay import replay as command

    return command.replay(asked)


@_command(BatchRequest, "Print a batch script of SLURM for a command line of run.", allow_interspersed_args=False)
def slurm(asked: BatchRequest) -> int:
    from odyssey_cli.submission import slurm as submission

    return submission.slurm(asked)


JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="Name or its beginning, pid of the launcher, log folder, or 'last'. Default: the running job, else the newest.",
    ),
]


@_small_command(short_help="List your jobs on this host.")
def ps(ended: Annotated[bool, switch("Those that have ended, too.", "--all", "-a")] = False, json: Json = False) -> int:
    """List your jobs on this host, the newest first."""
    from odyssey_cli.jobs import status

    return status.ps(ended=ended, as_json=json)


@_small_command(short_help="Show what a job does, or why it ended.")
def status(job: JobName = None, json: Json = False) -> int:
    """Show what a job does, what it has lost, or why it ended."""
    from odyssey_cli.jobs import status

    return status.status(job, as_json=json)


@_small_command(short_help="End a job.")
def stop(
    job: JobName = None, now: Annotated[bool, switch("Do not wait for its ranks to end by themselves.", "--now")] = False
) -> int:
    """End a job, and return when it is gone."""
    from odyssey_cli.jobs import stop as command

    return command.stop(job, now=now)


@_small_command(short_help="Have a rank or a host leave a job.")
def leave(
    who: Annotated[str, typer.Argument(metavar="RANK|HOST", help="The rank, or the host all of whose ranks are meant.")],
    job: JobName = None,
    within: Annotated[str | None, option("TIME", "They will be lost then: 60, 90s, 2m.")] = None,
) -> int:
    """Have a rank, or all ranks of a host, leave a job: what they hold is moved to others first, and nothing is done again."""
    from odyssey_cli.jobs import leave as command

    return command.leave(who, job, within)


@_small_command(short_help="Show what a job's ranks wrote.")
def logs(
    job: JobName = None,
    rank: Annotated[int | None, option("N", "Only this rank.")] = None,
    follow: Annotated[bool, switch("And what they go on to write, until the job ends.", "--follow", "-f")] = False,
) -> int:
    """Show what a job's ranks wrote: what went to files, and the end of what else passed the launcher."""
    from odyssey_cli.jobs import logs

    return logs.logs(job, rank=None if rank is None else Rank(rank), follow=follow)


@_small_command(short_help="Show where a running job's ranks are in their code.")
def stacks(job: JobName = None, whole: Annotated[bool, switch("All frames, innermost first.", "--whole")] = False) -> int:
    """Show where a running job's ranks are in their Python code, those together that are at the same place."""
    from odyssey_cli.jobs import stacks as command

    return command.stacks(job, whole=whole)


@_small_command(short_help="Show what a job's ranks did during a step.")
def timeline(
    job: JobName = None,
    generation: Annotated[int | None, option("N", "Only this one. Default: the newest.")] = None,
    no_prediction: Annotated[bool, switch("Leave out what was predicted.", "--no-prediction")] = False,
    svg: SvgFile = None,
    trace: TraceFile = None,
    change: ChangeFile = None,
) -> int:
    """Show what every rank did during a step of each generation, below what was predicted."""
    from odyssey_cli.jobs import timeline as command

    return command.timeline(job, generation=generation, with_prediction=not no_prediction, svg=svg, trace=trace, change=change)


def execute(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Raises UsageError for one that cannot be meant."""
    try:
        return int(app(args=list(argv), prog_name="odyssey", standalone_mode=False) or 0)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        raise _usage_error(error) from None


def _usage_error(error: typer.TyperException) -> UsageError:
    """Typer's error in our words: what is wrong, lower case, no full stop, and the way out apart from it."""
    context = getattr(error, "ctx", None)
    help = f"see `{context.command_path if context is not None else 'odyssey'} --help`"
    what = error.format_message().strip().rstrip(".")
    wrong = getattr(error, "option_name", None)
    named = re.search(r"'([^']+)'", what)
    name = named[1] if named is not None else ""
    if what.startswith("No such command"):
        if name.endswith(".py"):
            return UsageError(f"no such command: {name}", f"to train with it: odyssey run {name}")
        return UsageError(f"no such command: {name}", _did_you_mean(name, list(typer.main.get_group(app).commands), help))
    if what.startswith("No such option"):
        known = [option for param in context.command.params for option in param.opts] if context is not None else []
        return UsageError(f"no such option: {wrong}", _did_you_mean(str(wrong).replace("_", "-"), known, help))
    if "requires an argument" in what:
        return UsageError(f"{name} needs a value", help)
    if what.startswith("Invalid value"):
        kind = "a whole number" if "integer" in what else "another value"
        return UsageError(f"{name}: expected {kind}", help)
    return UsageError(what[:1].lower() + what[1:], help)


def _did_you_mean(name: str, known: Sequence[str], help: str) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]}? {help}" if near else help
