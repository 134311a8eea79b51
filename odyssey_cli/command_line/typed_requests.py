"""What `plan`, `rehearse`, `replay` and `slurm` are asked: a field is an option, a docstring what `--help` says first.

Typer makes their command lines of it (odyssey_cli/commands.py). What values mean, and which go together, the commands judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def option(metavar: str, help: str, *names: str) -> Any:
    """It has a value, and is called like its field where no `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help)


def switch(help: str, *names: str) -> Any:
    """It has none, and no opposite."""
    return typer.Option(*names, help=help)


Layout = Annotated[str, option("LAYOUT", "auto, 2x4 (pipelines x stages) or 3+2+3.")]
Nodes = Annotated[int | None, option("N", "Nodes. Default: as in SOURCE.")]
RanksPerNode = Annotated[int | None, option("N", "Ranks of a node. Default: as in SOURCE.")]
Objective = Annotated[str | None, option("NAME", "ahead, up to the loss after the next; or paper, eq. 8.")]
Protect = Annotated[str | None, option("WHAT", "Layers with one holder are kept: auto, by price; none; state.")]
AllowApproximate = Annotated[
    bool, switch("Strategies may compute gradients approximately after a loss.", "--allow-approximate")
]
Json = Annotated[bool, switch("Print the answer as JSON.", "--json")]
SvgFile = Annotated[str | None, option("FILE", "Write the timeline as a picture.")]
TraceFile = Annotated[str | None, option("FILE", "Write the timeline as a trace for ui.perfetto.dev.")]
ChangeFile = Annotated[str | None, option("FILE", "Draw the layouts before and after each change.")]


@dataclass(frozen=True)
class PlanRequest:
    """Say what would be done if ranks were lost or came, and what to start with, without starting any.

    $ odyssey plan --fail 2
    $ odyssey plan gpt3-medium-a100-32 --fail-ranks 5 --timeline
    $ odyssey plan profile.json --spares 4 --mtbf 6h
    """

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A profile, a job (as for status), a log directory, or a model of configs/. "
            "Default: ./profile.json or the newest job.",
        ),
    ] = None
    fail: Annotated[int | None, option("N", "Lose any N ranks: the worst case.")] = None
    fail_ranks: Annotated[str | None, option("RANKS", "Lose these: 1,5 or 4-7.")] = None
    fail_nodes: Annotated[int | None, option("N", "Lose any N whole nodes.")] = None
    join: Annotated[int | None, option("N", "N ranks come after the loss: say whether they are taken in.")] = None
    join_nodes: Annotated[int | None, option("N", "The same for whole nodes.")] = None
    layouts: Annotated[
        bool, switch("Instead, say what each layout to start with comes to at this failure rate.", "--layouts")
    ] = False
    spares: Annotated[int | None, option("K", "Instead, say what up to K ranks that stand by are worth.")] = None
    spare_nodes: Annotated[int | None, option("K", "The same for whole nodes.")] = None
    horizon: Annotated[str | None, option("TIME", "How long --layouts and --spares look ahead. Default: 1d.")] = None
    layout: Layout = "auto"
    nodes: Nodes = None
    nproc_per_node: RanksPerNode = None
    mtbf: Annotated[str | None, option("TIME", "Expected time to the next change: 3600, 90s, 6h. Default: estimated.")] = None
    failure_rate: Annotated[float | None, option("RATE", "What that estimate begins with: losses per node-day.")] = None
    objective: Objective = None
    survive: Annotated[int | None, option("F", "Every layer has a holder after the loss of any F ranks.")] = None
    survive_nodes: Annotated[int | None, option("F", "The same for whole nodes.")] = None
    protect: Protect = None
    allow_approximate: AllowApproximate = False
    strategy: Annotated[str, option("NAME", "Only this one may propose a plan.")] = "auto"
    json: Json = False
    timeline: Annotated[
        bool, switch("Show what every rank does during a step; with --fail or --join also after it.", "--timeline")
    ] = False
    svg: SvgFile = None
    trace: TraceFile = None
    change: ChangeFile = None


@dataclass(frozen=True)
class RehearseRequest:
    """Rehearse a job on a cluster that is not there: real ranks, real losses and returns, and ops that only take their time.

    $ odyssey rehearse gpt3-medium-a100-32
    $ odyssey rehearse gpt3-medium-a100-32 --strategy all --drill 'step=5 lose=3'
    $ odyssey rehearse profile.json --mtbf 30s --steps 100
    """

    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A job of configs/, model@cluster, a profile, or a job.")]
    drill: Annotated[
        list[str] | None,
        option("FAULT", "As for run: 'step=5 lose=3', 'step=9 join=3'. Default: lose one rank, in the middle."),
    ] = None
    trace: Annotated[str | None, option("TRACE", "Lose nodes and have them back as a trace of `odyssey replay` says.")] = None
    strategy: Annotated[str, option("NAMES", "auto, one or several with commas, or all: a job for each.")] = "auto"
    steps: Annotated[int, option("N", "Steps of each job.")] = 12
    speed: Annotated[float, option("X", "Seconds of the cluster that pass in one of ours.")] = 1.0
    layout: Annotated[str | None, option("LAYOUT", "As for plan. Default: as in SOURCE.")] = None
    nodes: Nodes = None
    nproc_per_node: RanksPerNode = None
    mtbf: Annotated[str | None, option("TIME", "Lose ranks at random, one in this time on average: 30s, 6h.")] = None
    objective: Objective = None
    protect: Protect = None
    allow_approximate: AllowApproximate = False
    jitter: Annotated[float, option("SIGMA", "Noise: standard deviation of the logarithm of an op.")] = 0.0
    slow: Annotated[list[str] | None, option("RANK=FACTOR", "A straggler: its ops take so many times as long.")] = None
    seed: Annotated[int, option("N", "Seed of noise and losses.")] = 0
    max_restarts: Annotated[int, option("N", "As for run: what respawn may use.")] = 0
    spares: Annotated[int, option("N", "As for run: the last N ranks stand by from the start.")] = 0
    log_dir: Annotated[Path, option("FOLDER", "Where jobs keep their logs.")] = Path("odyssey-logs")
    json: Annotated[Path | None, option("FILE", "Write the result there, too.")] = None
    no_display: Annotated[bool, switch("As for run.", "--no-display")] = False


@dataclass(frozen=True)
class ReplayRequest:
    """Replay a trace of lost and returned nodes against a job, by simulation: what each policy makes of it.

    $ odyssey replay infinitehbd-400 llama2-7b-h100-64
    $ odyssey replay exponential profile.json --mtbf 6h --days 10
    $ odyssey replay odyssey-logs/JOB
    """

    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A file of lost and returned nodes, or a trace of configs/; exponential, weibull or correlated to draw one; "
            "or a job's folder, to check that its decisions come out the same.",
        ),
    ]
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="The job: a profile, a job's folder, or a model of configs/, as for plan."),
    ] = None
    nodes: Nodes = None
    nproc_per_node: RanksPerNode = None
    layout: Layout = "auto"
    mtbf: Annotated[
        str | None,
        option(
            "TIME",
            "Mean time between losses of the whole job: drawn so, and told to the job as to run. "
            "Default for files: the job estimates it.",
        ),
    ] = None
    repair: Annotated[str | None, option("TIME", "Mean time until a lost node is back. Default: 1d.")] = None
    transient: Annotated[float, option("SHARE", "Share of drawn losses that leave the node healthy.")] = 0.0
    days: Annotated[float | None, option("DAYS", "Days to replay. Default: the whole trace, or 30 drawn ones.")] = None
    seed: Annotated[int, option("N", "Seed of all that is drawn.")] = 0
    objective: Objective = None
    protect: Protect = None
    allow_approximate: AllowApproximate = False
    trace_nodes: Annotated[int | None, option("N", "Nodes of the traced cluster, where only those that failed are named.")] = (
        None
    )
    policy: Annotated[list[str] | None, option("NAME", "Only this one; may be given again. Default: all.")] = None
    save: Annotated[str | None, option("TIME", "How long a checkpoint holds up training. Default: 10s.")] = None
    restart: Annotated[str | None, option("TIME", "From the end of all ranks to the next step. Default: by their number.")] = (
        None
    )
    checkpoint_every: Annotated[str | None, option("TIME", "Training between checkpoints. Default: the best.")] = None
    json: Annotated[Path | None, option("FILE", "Write the answer as JSON, too.")] = None
    svg: Annotated[Path | None, option("FILE", "Draw the throughput over time, too.")] = None


@dataclass(frozen=True)
class BatchRequest:
    """Print a batch script of SLURM that starts an agent of `odyssey run` on each node, and goes on when some are lost."""

    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="SCRIPT and its arguments, or a whole `odyssey run [OPTIONS] SCRIPT ...`."),
    ]
    nodes: Annotated[str, option("N", "Nodes, one agent on each; 2-4 for what can be had.")] = "1"
    gpus_per_node: Annotated[str, option("N", "GPUs of a node, a rank for each: 8, or h100:8.")] = ""
    cpus_per_task: Annotated[int | None, option("N", "Processors of a node, for all of its ranks.")] = None
    time: Annotated[str, option("TIME", "How long at most: 90m, 1d12h, or as SLURM has it.")] = ""
    partition: Annotated[str, option("NAME", "Where to run.")] = ""
    account: Annotated[str, option("NAME", "The account that pays.")] = ""
    job_name: Annotated[str, option("NAME", "Default: the script's.")] = ""
    output: Annotated[str, option("FILE", "Where the job's output goes.")] = "%x-%j.out"
    elastic: Annotated[int | None, option("N", "Go on while so many nodes are left.")] = None
    requeue: Annotated[int | None, option("N", "When time is over or nodes are taken away: queue again, N times at most.")] = (
        None
    )
    signal: Annotated[str, option("NAME@SECONDS", "To the ranks, before time is over. With --requeue: TERM@120.")] = ""
    sbatch: Annotated[list[str] | None, option("OPTION", "Another option of sbatch. May be repeated.")] = None
    submit: Annotated[bool, switch("Submit it instead of printing it.", "--submit")] = False
