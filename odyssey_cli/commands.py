"""The commands of `odyssey` that are read by typer, and their options. What a command does lies in a file of its own.

`odyssey run` is read in launch_arguments.py, without typer: it is on the way to the first rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from odyssey.errors import UsageError

_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda option: option.replace("_", "-"),
    "max_content_width": 100,
}
_SCRIPT_SETTINGS: dict[str, Any] = {**_SETTINGS, "allow_interspersed_args": False}

app = typer.Typer(
    name="odyssey",
    help="Train with PyTorch, and keep training when ranks are lost.",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Everything behind the script is the script's.")
]
Nodes = Annotated[int, typer.Option("--nodes", metavar="N", help="Nodes: failure domains of --nproc-per-node ranks each.")]
RanksPerNode = Annotated[int, typer.Option("--nproc-per-node", metavar="N", help="Ranks of a node.")]
Layout = Annotated[str, typer.Option("--layout", metavar="LAYOUT", help="auto, 2x4 (pipelines x stages) or 3+2+3.")]
Strategy = Annotated[str, typer.Option("--strategy", metavar="NAME", help="auto, reroute, repartition, shrink or respawn.")]
Mtbf = Annotated[
    str | None,
    typer.Option("--mtbf", metavar="TIME", help="Expected time to the next change: 3600, 90s, 6h. Default: estimated."),
]
LogDir = Annotated[Path, typer.Option("--log-dir", metavar="DIR", help="Where every job gets a folder for its logs.")]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Use these measurements instead of measuring at the start.")
]
MasterAddr = Annotated[str, typer.Option("--master-addr", metavar="HOST", help="Address that ranks meet at.")]
MasterPort = Annotated[int, typer.Option("--master-port", metavar="PORT", help="Its port; 0 takes a free one.")]
NoDisplay = Annotated[bool, typer.Option("--no-display", help="Plain lines instead of the live display.")]


@app.callback(invoke_without_command=True)
def _odyssey(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from odyssey import __version__

        print(f"odyssey {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command(context_settings=_SCRIPT_SETTINGS, short_help="Train, and go on when ranks are lost.")
def run(
    context: typer.Context,
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    nproc_per_node: RanksPerNode = 1,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", help="Processes that may be respawned in all.")
    ] = 0,
    layout: Layout = "auto",
    strategy: Strategy = "auto",
    mtbf: Mtbf = None,
    log_dir: LogDir = Path("odyssey-logs"),
    drill: Annotated[
        list[str] | None,
        typer.Option("--drill", metavar="DRILL", help="Lose ranks on purpose: 'step=20 kill=2'. May be repeated."),
    ] = None,
    profile: ProfileFile = None,
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 0,
    no_display: NoDisplay = False,
) -> None:
    """Train: start the ranks of SCRIPT, and go on with a new layout when some are lost."""
    from odyssey_cli import run as command

    options = command.options(
        script=script,
        arguments=tuple(arguments or ()),
        options_before_script=_has_options(context),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        max_restarts=max_restarts,
        layout=layout,
        strategy=strategy,
        mtbf=mtbf,
        log_dir=log_dir,
        drills=tuple(drill or ()),
        profile=profile,
        master_addr=master_addr,
        master_port=master_port,
    )
    raise typer.Exit(command.run(options, display=not no_display))


@app.command(context_settings=_SCRIPT_SETTINGS, short_help="Measure a script's layers and links.")
def profile(
    context: typer.Context,
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    nproc_per_node: RanksPerNode = 1,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path("profile.json"),
    log_dir: LogDir = Path("odyssey-logs"),
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 0,
) -> None:
    """Measure what SCRIPT's layers and the links between ranks cost, and write it to a file."""
    from odyssey_cli import profile as command
    from odyssey_cli import run as run_command

    options = run_command.options(
        script=script,
        arguments=tuple(arguments or ()),
        options_before_script=_has_options(context),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        log_dir=log_dir,
        master_addr=master_addr,
        master_port=master_port,
    )
    raise typer.Exit(command.profile(options, output))


@app.command(context_settings=_SETTINGS, short_help="Say what would be done if ranks were lost.")
def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A profile, a job's log directory, or a model of configs/. Default: ./profile.json or the newest job.",
        ),
    ] = None,
    fail: Annotated[int | None, typer.Option("--fail", metavar="N", help="Lose any N ranks: the worst case.")] = None,
    fail_ranks: Annotated[str | None, typer.Option("--fail-ranks", metavar="RANKS", help="Lose these: 1,5 or 4-7.")] = None,
    layout: Layout = "auto",
    nodes: Annotated[int | None, typer.Option("--nodes", metavar="N", help="Nodes. Default: as in SOURCE.")] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", metavar="N", help="Ranks of a node. Default: as in SOURCE.")
    ] = None,
    mtbf: Mtbf = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Say what would be done if ranks were lost, without starting any."""
    from odyssey_cli import plan as command

    raise typer.Exit(
        command.plan(
            source,
            fail=fail,
            fail_ranks=fail_ranks,
            layout=layout,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            mtbf=mtbf,
            as_json=json,
        )
    )


def execute(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Raises UsageError for one that cannot be meant."""
    try:
        return int(app(args=list(argv), prog_name="odyssey", standalone_mode=False) or 0)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        raise _usage_error(error) from None


def _has_options(context: typer.Context) -> bool:
    """Whether any option stands on the command line before the script."""
    return any(
        source is not None and source.name == "COMMANDLINE"
        for name in context.params
        if name not in ("script", "arguments") and (source := context.get_parameter_source(name)) is not None
    )


def _usage_error(error: typer.TyperException) -> UsageError:
    """Typer's error in our words: what is wrong, lower case, no full stop, and the way out apart from it."""
    context = getattr(error, "ctx", None)
    help = f"see `{context.command_path if context is not None else 'odyssey'} --help`"
    what = error.format_message().strip().rstrip(".")
    wrong = getattr(error, "option_name", None)
    named = re.search(r"'([^']+)'", what)
    name = named[1] if named is not None else ""
    if what.startswith("Missing argument 'SCRIPT"):
        return UsageError("no script given", "for example: odyssey run --nodes 4 train.py")
    if what.startswith("No such command"):
        if name.endswith(".py"):
            return UsageError(f"no such command: {name}", f"to train with it: odyssey run {name}")
        return UsageError(f"no such command: {name}", _did_you_mean(name, ["run", "profile", "plan"], help))
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
