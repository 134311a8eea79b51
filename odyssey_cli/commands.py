"""The commands of `odyssey`, and their options. What a command does lies in a file of its own.

The command lines of `run`, `profile` and `check` are read by command_line/request.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey_cli.command_line.options import Command

_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda option: option.replace("_", "-"),
    "max_content_width": 100,
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


app = typer.Typer(
    name="odyssey",
    help="Train with PyTorch, and keep training when ranks are lost.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)

_LAUNCH: dict[str, Any] = {"cls": _Launch, "context_settings": _PASSED_ON, "add_help_option": False}

Layout = Annotated[str, typer.Option("--layout", metavar="LAYOUT", help="auto, 2x4 (pipelines x stages) or 3+2+3.")]
Mtbf = Annotated[
    str | None,
    typer.Option("--mtbf", metavar="TIME", help="Expected time to the next change: 3600, 90s, 6h. Default: estimated."),
]
FailureRate = Annotated[
    float | None,
    typer.Option("--failure-rate", metavar="RATE", help="What that estimate begins with: losses per node-day."),
]
ObjectiveName = Annotated[
    str | None, typer.Option("--objective", metavar="NAME", help="ahead, up to the loss after the next; or paper, eq. 8.")
]
Survive = Annotated[
    int | None, typer.Option("--survive", metavar="F", help="Any F ranks may be lost, and every layer has a holder.")
]
SurviveNodes = Annotated[int | None, typer.Option("--survive-nodes", metavar="F", help="The same for whole nodes.")]
ProtectName = Annotated[
    str | None, typer.Option("--protect", metavar="WHAT", help="Layers with one holder are kept: auto, by price; none; state.")
]
AllowApproximate = Annotated[
    bool, typer.Option("--allow-approximate", help="Strategies may compute gradients approximately after a loss.")
]
SvgFile = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Write the timeline as a picture.")]
TraceFile = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write the timeline as a trace for ui.perfetto.dev.")
]

ChangeFile = Annotated[
    str | None, typer.Option("--change", metavar="FILE", help="Draw the layouts before and after each change.")
]

Nodes = Annotated[int | None, typer.Option("--nodes", metavar="N", help="Nodes. Default: as in SOURCE.")]
RanksPerNode = Annotated[
    int | None, typer.Option("--nproc-per-node", metavar="N", help="Ranks of a node. Default: as in SOURCE.")
]


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


@app.command(
    cls=_Launch, context_settings=_PASSED_ON, add_help_option=False, short_help="Train, and go on when ranks are lost."
)
def run(context: typer.Context) -> None:
    """Train: start the ranks of a script, and go on with a new layout when some are lost."""
    raise typer.Exit(_launch(context, Command.RUN))


@app.command(**_LAUNCH, short_help="Measure a script's layers and links.")
def profile(context: typer.Context) -> None:
    """Measure what a script's layers and the links between ranks cost, and write it to a file."""
    raise typer.Exit(_launch(context, Command.PROFILE))


@app.command(**_LAUNCH, short_help="Check hosts before a job needs them.")
def check(context: typer.Context) -> None:
    """Check hosts before a job: what they have, how fast and how right they compute, how they reach each other."""
    raise typer.Exit(_launch(context, Command.CHECK))


def _launch(context: typer.Context, command: Command) -> int:
    from odyssey_cli import run

    return run.execute(context.args, command)


@app.command(
    context_settings=_SETTINGS, short_help="Say what would be done if ranks were lost or came, and what to start with."
)
def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A profile, a job (as for status), a log directory, or a model of configs/. "
            "Default: ./profile.json or the newest job.",
        ),
    ] = None,
    fail: Annotated[int | None, typer.Option("--fail", metavar="N", help="Lose any N ranks: the worst case.")] = None,
    fail_ranks: Annotated[str | None, typer.Option("--fail-ranks", metavar="RANKS", help="Lose these: 1,5 or 4-7.")] = None,
    fail_nodes: Annotated[int | None, typer.Option("--fail-nodes", metavar="N", help="Lose any N whole nodes.")] = None,
    join: Annotated[
        int | None, typer.Option("--join", metavar="N", help="N ranks come, after what is lost: are they taken in?")
    ] = None,
    join_nodes: Annotated[int | None, typer.Option("--join-nodes", metavar="N", help="The same for whole nodes.")] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Instead: what each layout to start with comes to at this failure rate.")
    ] = False,
    spares: Annotated[
        int | None, typer.Option("--spares", metavar="K", help="Instead: what up to K ranks that stand by are worth.")
    ] = None,
    spare_nodes: Annotated[int | None, typer.Option("--spare-nodes", metavar="K", help="The same for whole nodes.")] = None,
    horizon: Annotated[
        str | None, typer.Option("--horizon", metavar="TIME", help="Until lost ranks are back, for these. Default: 1d.")
    ] = None,
    layout: Layout = "auto",
    nodes: Nodes = None,
    nproc_per_node: RanksPerNode = None,
    mtbf: Mtbf = None,
    failure_rate: FailureRate = None,
    objective: ObjectiveName = None,
    survive: Survive = None,
    survive_nodes: SurviveNodes = None,
    protect: ProtectName = None,
    allow_approximate: AllowApproximate = False,
    strategy: Annotated[str, typer.Option("--strategy", metavar="NAME", help="Only this one may propose a plan.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show what every rank does during a step; with --fail or --join also after it.")
    ] = False,
    svg: SvgFile = None,
    trace: TraceFile = None,
    change: ChangeFile = None,
) -> None:
    """Say what would be done if ranks were lost or came, and what to start with, without starting any."""
    from odyssey_cli.planning import plan as command

    raise typer.Exit(
        command.plan(
            command.PlanRequest(
                source=source,
                fail=fail,
                fail_ranks=fail_ranks,
                fail_nodes=fail_nodes,
                join=join,
                join_nodes=join_nodes,
                layouts=layouts,
                spares=spares,
                spare_nodes=spare_nodes,
                horizon=horizon,
                layout=layout,
                nodes=nodes,
                nproc_per_node=nproc_per_node,
                mtbf=mtbf,
                failure_rate=failure_rate,
                objective=objective,
                survive=survive,
                survive_nodes=survive_nodes,
                protect=protect,
                allow_approximate=allow_approximate,
                strategy=strategy,
                as_json=json,
                with_timeline=timeline,
                svg=svg,
                trace=trace,
                change=change,
            )
        )
    )


Drills = Annotated[
    list[str] | None,
    typer.Option(
        "--drill", metavar="FAULT", help="As for run: 'step=5 lose=3', 'step=9 join=3'. Default: lose one rank, in the middle."
    ),
]
Strategies = Annotated[
    str, typer.Option("--strategy", metavar="NAMES", help="auto, one or several with commas, or all: a job for each.")
]
Losses = Annotated[
    str | None,
    typer.Option("--mtbf", metavar="TIME", help="Lose ranks at random, one in this time on average: 30s, 6h."),
]
Slow = Annotated[
    list[str] | None, typer.Option("--slow", metavar="RANK=FACTOR", help="A straggler: all its ops take so many times.")
]


@app.command(context_settings=_SETTINGS, short_help="Rehearse a cluster that is not there, with losses and returns.")
def rehearse(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A job of configs/, model@cluster, a profile, or a job.")],
    drill: Drills = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Lose nodes, and have them back, as in a trace.")] = None,
    strategy: Strategies = "auto",
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each job.")] = 12,
    speed: Annotated[float, typer.Option(metavar="X", help="Seconds of the cluster that pass in one of ours.")] = 1.0,
    layout: Annotated[str | None, typer.Option(metavar="LAYOUT", help="As for plan. Default: as in SOURCE.")] = None,
    nodes: Nodes = None,
    nproc_per_node: RanksPerNode = None,
    mtbf: Losses = None,
    objective: ObjectiveName = None,
    protect: ProtectName = None,
    allow_approximate: AllowApproximate = False,
    jitter: Annotated[float, typer.Option(metavar="SIGMA", help="Noise: standard deviation of the logarithm of an op.")] = 0.0,
    slow: Slow = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of noise and losses.")] = 0,
    max_restarts: Annotated[int, typer.Option(metavar="N", help="As for run: what respawn may use.")] = 0,
    spares: Annotated[int, typer.Option(metavar="N", help="As for run: the last N ranks stand by from the start.")] = 0,
    log_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Where jobs keep their logs.")] = Path("odyssey-logs"),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there, too.")] = None,
    no_display: Annotated[bool, typer.Option("--no-display", help="As for run.")] = False,
) -> None:
    """Rehearse a job on a cluster that is not there: real ranks, real losses and returns, and ops that only take their time."""
    from odyssey_cli.rehearsal import rehearse as rehearsal

    raise typer.Exit(
        rehearsal.command(
            source,
            strategy=strategy,
            drills=tuple(drill or ()),
            trace=trace,
            steps=steps,
            speed=speed,
            layout=layout,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            mtbf=mtbf,
            objective=objective,
            protect=protect,
            allow_approximate=allow_approximate,
            jitter=jitter,
            slow=tuple(slow or ()),
            seed=seed,
            max_restarts=max_restarts,
            spares=spares,
            log_dir=log_dir,
            json_file=json_file,
            display=not no_display,
        )
    )


@app.command(context_settings=_SETTINGS, short_help="Replay a trace of failures against a job, by simulation.")
def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A trace of lost and returned nodes; exponential, weibull or correlated to draw one; "
            "or a job's folder, to check that its decisions come out the same.",
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE]", help="The job: a profile, a job's folder, or a model of configs/, as for plan."),
    ] = None,
    nodes: Nodes = None,
    nproc_per_node: RanksPerNode = None,
    layout: Layout = "auto",
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="TIME",
            help="Mean time between losses of the whole job: drawn so, and told to the job as to run. "
            "Default for files: the job estimates it.",
        ),
    ] = None,
    repair: Annotated[
        str | None, typer.Option("--repair", metavar="TIME", help="Mean time until a lost node is back. Default: 1d.")
    ] = None,
    transient: Annotated[
        float, typer.Option("--transient", metavar="SHARE", help="Of drawn losses, those that leave the node healthy.")
    ] = 0.0,
    days: Annotated[
        float | None, typer.Option("--days", metavar="DAYS", help="How long. Default: the whole trace, or 30 drawn ones.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of all that is drawn.")] = 0,
    objective: ObjectiveName = None,
    protect: ProtectName = None,
    allow_approximate: AllowApproximate = False,
    trace_nodes: Annotated[
        int | None,
        typer.Option("--trace-nodes", metavar="N", help="Nodes of the traced cluster, where only those that failed are named."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help="Only this one; may be given again. Default: all.")
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="TIME", help="How long a checkpoint holds up training. Default: 10s.")
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option("--restart", metavar="TIME", help="From the end of all ranks to the next step. Default: by their number."),
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option("--checkpoint-every", metavar="TIME", help="Training between checkpoints. Default: the best.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the answer as JSON, too.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the throughput over time, too.")] = None,
) -> None:
    """Replay a trace of lost and returned nodes against a job, by simulation: what each policy makes of it."""
    from odyssey_cli.replay import replay as command

    raise typer.Exit(
        command.replay(
            command.ReplayRequest(
                trace=trace,
                source=source,
                nodes=nodes,
                nproc_per_node=nproc_per_node,
                layout=layout,
                mtbf=mtbf,
                objective=objective,
                protect=protect,
                allow_approximate=allow_approximate,
                repair=repair,
                transient=transient,
                days=days,
                seed=seed,
                trace_nodes=trace_nodes,
                policies=tuple(policy or ()),
                save=save,
                restart=restart,
                checkpoint_every=checkpoint_every,
                json=json,
                svg=svg,
            )
        )
    )


@app.command(
    context_settings={**_SETTINGS, "allow_interspersed_args": False},
    short_help="Print a batch script of SLURM for a command line of run.",
)
def slurm(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="SCRIPT and its arguments, or a whole `odyssey run [OPTIONS] SCRIPT ...`."),
    ],
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="N", help="Nodes, one agent on each; 2-4 for what can be had.")
    ] = "1",
    gpus_per_node: Annotated[
        str, typer.Option("--gpus-per-node", metavar="N", help="GPUs of a node, a rank for each: 8, or h100:8.")
    ] = "",
    cpus_per_task: Annotated[
        int | None, typer.Option("--cpus-per-task", metavar="N", help="Processors of a node, for all of its ranks.")
    ] = None,
    time: Annotated[str, typer.Option("--time", metavar="TIME", help="How long at most: 90m, 1d12h, or as SLURM has it.")] = "",
    partition: Annotated[str, typer.Option("--partition", metavar="NAME", help="Where to run.")] = "",
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Who pays.")] = "",
    job_name: Annotated[str, typer.Option("--job-name", metavar="NAME", help="Default: the script's.")] = "",
    output: Annotated[str, typer.Option("--output", metavar="FILE", help="Where the job's output goes.")] = "%x-%j.out",
    elastic: Annotated[
        int | None, typer.Option("--elastic", metavar="N", help="Go on with so many nodes of those that there were.")
    ] = None,
    requeue: Annotated[
        int | None,
        typer.Option("--requeue", metavar="N", help="When time is over or nodes are taken away: queue again, N times at most."),
    ] = None,
    signal: Annotated[
        str,
        typer.Option("--signal", metavar="NAME@SECONDS", help="To the ranks, before time is over. With --requeue: TERM@120."),
    ] = "",
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="Another option of sbatch. May be repeated.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it instead of printing it.")] = False,
) -> None:
    """Print a batch script of SLURM that starts an agent of `odyssey run` on each node, and goes on when some are lost."""
    from odyssey_cli.submission import batch
    from odyssey_cli.submission import slurm as submission

    request = batch.BatchRequest(
        command=(),
        script="",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        time=time,
        partition=partition,
        account=account,
        job_name=job_name,
        output=output,
        elastic=elastic,
        requeue=requeue,
        signal=signal,
        more=tuple(sbatch or ()),
    )
    raise typer.Exit(submission.slurm(request, command, submit=submit))


JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="Name or its beginning, pid of the launcher, log folder, or 'last'. Default: the running job, else the newest.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@app.command(context_settings=_SETTINGS, short_help="List your jobs on this host.")
def ps(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    json: Json = False,
) -> None:
    """List your jobs on this host, the newest first."""
    from odyssey_cli.jobs import status

    raise typer.Exit(status.ps(ended=ended, as_json=json))


@app.command(context_settings=_SETTINGS, short_help="Show what a job does, or why it ended.")
def status(job: JobName = None, json: Json = False) -> None:
    """Show what a job does, what it has lost, or why it ended."""
    from odyssey_cli.jobs import status

    raise typer.Exit(status.status(job, as_json=json))


@app.command(context_settings=_SETTINGS, short_help="End a job.")
def stop(
    job: JobName = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for its ranks to end by themselves.")] = False,
) -> None:
    """End a job, and return when it is gone."""
    from odyssey_cli.jobs import stop as command

    raise typer.Exit(command.stop(job, now=now))


@app.command(context_settings=_SETTINGS, short_help="Have a rank or a host leave a job.")
def leave(
    who: Annotated[str, typer.Argument(metavar="RANK|HOST", help="The rank, or the host all of whose ranks are meant.")],
    job: JobName = None,
    within: Annotated[str | None, typer.Option("--within", metavar="TIME", help="They will be lost then: 60, 90s, 2m.")] = None,
) -> None:
    """Have a rank, or all ranks of a host, leave a job: what they hold is moved to others first, and nothing is done again."""
    from odyssey_cli.jobs import leave as command

    raise typer.Exit(command.leave(who, job, within))


@app.command(context_settings=_SETTINGS, short_help="Show what a job's ranks wrote.")
def logs(
    job: JobName = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what they go on to write, until the job ends.")] = False,
) -> None:
    """Show what a job's ranks wrote: what went to files, and the end of what else passed the launcher."""
    from odyssey_cli.jobs import logs

    raise typer.Exit(logs.logs(job, rank=None if rank is None else Rank(rank), follow=follow))


@app.command(context_settings=_SETTINGS, short_help="Show where a running job's ranks are in their code.")
def stacks(
    job: JobName = None,
    whole: Annotated[bool, typer.Option("--whole", help="All frames, innermost first.")] = False,
) -> None:
    """Show where a running job's ranks are in their Python code, those together that are at the same place."""
    from odyssey_cli.jobs import stacks as command

    raise typer.Exit(command.stacks(job, whole=whole))


@app.command(context_settings=_SETTINGS, short_help="Show what a job's ranks did during a step.")
def timeline(
    job: JobName = None,
    generation: Annotated[
        int | None, typer.Option("--generation", metavar="N", help="Only this one. Default: the newest.")
    ] = None,
    no_prediction: Annotated[bool, typer.Option("--no-prediction", help="Leave out what was predicted.")] = False,
    svg: SvgFile = None,
    trace: TraceFile = None,
    change: ChangeFile = None,
) -> None:
    """Show what every rank did during a step of each generation, below what was predicted."""
    from odyssey_cli.jobs import timeline as command

    raise typer.Exit(
        command.timeline(job, generation=generation, with_prediction=not no_prediction, svg=svg, trace=trace, change=change)
    )


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
