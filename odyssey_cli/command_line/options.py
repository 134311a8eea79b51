"""Every option that a launch can be given, as data: the parser, the help and the PET_ variables are made from this table.

`odyssey run` takes all of them, `odyssey-torchrun` only torchrun's, `python -m odyssey_cli.launch` these and `--use-env`,
`odyssey profile` and `odyssey check` the few that say where to run. What their values mean is read in request.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import strategies
from odyssey_cli.command_line import torch_version


class Command(enum.Enum):
    """A command line that starts ranks. The value is what it is called by."""

    RUN = "odyssey run"
    PROFILE = "odyssey profile"
    CHECK = "odyssey check"
    TORCHRUN = "odyssey-torchrun"
    LAUNCH = "python -m odyssey_cli.launch"

    @property
    def has_script(self) -> bool:
        return self is not Command.CHECK


class Origin(enum.Enum):
    """Whose option it is."""

    TORCHRUN = "torchrun"
    LAUNCH = "torch.distributed.launch"
    OURS = "odyssey run"
    PROFILE = "odyssey profile"
    CHECK = "odyssey check"


class Group(enum.Enum):
    """Headings of the help, in their order."""

    SCRIPT = "What to run"
    RANKS = "Ranks and nodes"
    MEETING = "How agents on several hosts meet"
    LOSS = "When ranks are lost"
    STALL = "When ranks stall"
    OUTPUT = "Output"
    END = "The end"


@dataclass(frozen=True)
class Option:
    """`names`: the long one last; spelled with dashes, underscores are accepted as well. `metavar`: empty for a switch.

    `default`: as it would be given; empty for none, or where the help tells it in words. `variables`: read before the
    default, after the command line and PET_<NAME>. `values`: what it can be, a sentence each; asked for by the help only.
    `since`: the torch whose torchrun has it first; zeros where any that we run on will do.
    """

    names: tuple[str, ...]
    metavar: str
    help: str
    group: Group
    origin: Origin = Origin.OURS
    default: str = ""
    variables: tuple[str, ...] = ()
    repeats: bool = False
    in_profile: bool = False
    in_check: bool = False
    values: Callable[[], Mapping[str, str]] = dict
    since: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names, the long ones with underscores too."""
        return tuple(dict.fromkeys((*self.names, f"--{self.dest}")))

    @property
    def all_variables(self) -> tuple[str, ...]:
        """The environment variables that stand for it, the first one first."""
        return (f"PET_{self.dest.upper()}", *self.variables) if self.origin is Origin.TORCHRUN else self.variables

    def is_of(self, command: Command) -> bool:
        """Whether this command has it, with the torch that is installed."""
        return self.since <= torch_version.installed() and self.is_of_newest(command)

    def is_of_newest(self, command: Command) -> bool:
        """Whether it has it with the newest torch."""
        match command:
            case Command.RUN:
                return self.origin in (Origin.TORCHRUN, Origin.OURS)
            case Command.PROFILE:
                return self.in_profile
            case Command.CHECK:
                return self.in_check or self.group is Group.MEETING
            case Command.TORCHRUN:
                return self.origin is Origin.TORCHRUN
            case Command.LAUNCH:
                return self.origin in (Origin.TORCHRUN, Origin.LAUNCH)


NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
START_METHODS = ("spawn", "fork", "forkserver")
_THEIRS = Origin.TORCHRUN


def _strategies() -> dict[str, str]:
    """Those that may be asked for."""
    asked = (its for its in strategies.load_all() if strategies.Moment.PROPOSE in its.answers and not its.is_sharded)
    return {its.name: its.summary for its in asked}


OPTIONS: tuple[Option, ...] = (
    # What to run
    Option(("-m", "--module"), "", "SCRIPT is a module, as with `python -m`.", Group.SCRIPT, _THEIRS),
    Option(("--no-python",), "", "SCRIPT is a program: run it as it is, without Python.", Group.SCRIPT, _THEIRS),
    Option(("--run-path",), "", "Run SCRIPT with `runpy.run_path`.", Group.SCRIPT, _THEIRS),
    Option(
        ("--use-env",), "", "Do not append --local-rank=N to the arguments of the script.", Group.SCRIPT, Origin.LAUNCH
    ),
    Option(
        ("--virtual-local-rank",), "", "Each rank sees its own GPU as number 0, and LOCAL_RANK=0.", Group.SCRIPT, _THEIRS
    ),
    Option(
        ("--numa-binding",), "MODE", f"Bind ranks near their GPUs: {', '.join(NUMA_BINDINGS)}.", Group.SCRIPT, _THEIRS
    ),
    Option(
        ("--start-method",), "METHOD", f"{', '.join(START_METHODS)}: no effect here.", Group.SCRIPT, _THEIRS, "spawn"
    ),
    Option(
        ("-o", "--output"), "FILE", "Where to write the profile.", Group.SCRIPT, Origin.PROFILE, "profile.json", in_profile=True
    ),
    # Ranks and nodes
    Option(
        ("--nproc-per-node",), "N", "Ranks of a node: a number, or auto, gpu, cpu, xpu to count devices.", Group.RANKS,
        _THEIRS, "1", in_profile=True, in_check=True,
    ),
    Option(
        ("--nodes",), "N", "Nodes on this host: failure domains of --nproc-per-node ranks each.",
        Group.RANKS, default="1", in_profile=True,
    ),
    Option(
        ("--nnodes",), "N", "Agents of the job, one on each host: a number, or MIN:MAX.", Group.RANKS, _THEIRS, "1:1",
        in_check=True,
    ),
    Option(("--check",), "", "Compare the hosts first, and leave bad ones out while there are enough others.", Group.RANKS),
    Option(("--role",), "NAME", "What ranks are called in the prefix of their lines.", Group.RANKS, _THEIRS, "default"),
    # How agents meet
    Option(("--standalone",), "", "This agent is the only one; where others meet is ignored.", Group.MEETING, _THEIRS),
    Option(
        ("--rdzv-backend",), "NAME", "static: the agent of node rank 0 hosts. c10d: whichever can.", Group.MEETING, _THEIRS,
        "static",
    ),
    Option(("--rdzv-endpoint",), "HOST:PORT", "Where agents meet. Port with c10d: 29400.", Group.MEETING, _THEIRS),
    Option(("--rdzv-id",), "ID", "The job's name: only agents that give the same one meet.", Group.MEETING, _THEIRS, "none"),
    Option(
        ("--rdzv-conf",), "KEY=VALUE", "join_timeout, last_call_timeout in seconds; others are ignored.",
        Group.MEETING, _THEIRS,
    ),
    Option(("--node-rank",), "N", "Number of this agent, with static.", Group.MEETING, _THEIRS, "0"),
    Option(
        ("--master-addr",), "HOST", "The endpoint's host, with static.", Group.MEETING, _THEIRS, "127.0.0.1", in_profile=True
    ),
    Option(
        ("--master-port",), "PORT", "The endpoint's port, with static: 29500. On one host a free one, unless it is given.",
        Group.MEETING, _THEIRS, in_profile=True,
    ),
    Option(
        ("--local-addr",), "HOST", "Where other agents reach this one: an address, a name or an interface.", Group.MEETING,
        _THEIRS,
    ),
    Option(
        ("--detect",), "TIME", "An agent of which nothing is heard for this long is lost.", Group.MEETING, default="5s",
    ),
    Option(
        ("--secret-file",), "FILE", "The secret of the agents. Default: ODYSSEY_SECRET, or ~/.odyssey/secret.", Group.MEETING
    ),
    # When ranks are lost
    Option(("--max-restarts",), "N", "How often ranks may be started again, in the whole job.", Group.LOSS, _THEIRS, "0"),
    Option(
        ("--on-loss",), "WHAT",
        "What a script without a Job does: restart all ranks; continue with the others; auto, by price.",
        Group.LOSS, default="restart",
    ),
    Option(("--never-retry",), "CODES", "Exit codes that end the job at once: 2,70-75.", Group.LOSS),
    Option(("--restart-limit",), "N/TIME", "End the job at more than N restarts in TIME: 5/1h.", Group.LOSS),
    Option(
        ("--restart-backoff",), "TIME", "Pause before the second restart without progress, doubled each time.", Group.LOSS,
        default="1s",
    ),
    Option(
        ("--retry-same-failure",), "", "Restart also when the same failure comes back before any progress.", Group.LOSS
    ),
    Option(("--layout",), "LAYOUT", "auto, 2x4 (pipelines x stages) or 3+2+3.", Group.LOSS, default="auto"),
    Option(
        ("--spares",), "N", "The last N ranks stand by: without work until a rank is lost or slow.", Group.LOSS, default="0"
    ),
    Option(
        ("--strategy",), "NAME", "auto asks all of these, a name this one, and the others where it has no plan.", Group.LOSS,
        default="auto", values=_strategies,
    ),
    Option(("--mtbf",), "TIME", "Expected time to the next loss: 3600, 90s, 6h. Default: estimated.", Group.LOSS),
    Option(
        ("--failure-rate",), "RATE", "What that estimate begins with: losses per node-day. Default: 0.0065.", Group.LOSS,
    ),
    Option(
        ("--objective",), "NAME",
        "What a plan is worth: ahead, up to the loss after the next; or paper, Odyssey's eq. 8.", Group.LOSS, default="ahead",
    ),
    Option(
        ("--survive",), "F", "Every layer has a holder after the loss of any F ranks. Default: 1 where that can be.",
        Group.LOSS,
    ),
    Option(("--survive-nodes",), "F", "Every layer has a holder after the loss of any F whole nodes.", Group.LOSS),
    Option(
        ("--protect",), "WHAT", "Ranks keep layers that one, or one node, would hold: auto, by price; state, always; none.",
        Group.LOSS, default="auto",
    ),
    Option(
        ("--allow-approximate",), "", "Strategies may compute gradients approximately after a loss: neighbour does.", Group.LOSS
    ),
    Option(
        ("--low-rank",), "R", "Rank of approximate gradients of feed-forward weights. Default: a quarter of the shorter side.",
        Group.LOSS,
    ),
    Option(("--low-rank-steps",), "N", "Steps for which approximate gradients keep their subspace. Default: 200.", Group.LOSS),
    Option(("--profile",), "FILE", "Use these measurements instead of measuring at the start.", Group.LOSS),
    Option(("--drill",), "DRILL", "Lose ranks on purpose: 'step=20 kill=2'; or for a while: 'step=20 lose=2 step=40 join=2'. "
           "May be repeated.", Group.LOSS, repeats=True),
    # When ranks stall
    Option(
        ("--stall-timeout",), "TIME", "Warn when a rank shows no progress for so long: 10m. Default: no watch.", Group.STALL
    ),
    Option(("--end-stalled",), "", "Treat a rank that shows no progress for so long as lost.", Group.STALL),
    # Output
    Option(
        ("--log-dir",), "DIR", "Each job makes a folder for its logs in it. Default: odyssey-logs.", Group.OUTPUT, _THEIRS,
        in_profile=True, in_check=True,
    ),
    Option(
        ("-r", "--redirects"), "STREAMS",
        "Write output to files instead: 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:2.", Group.OUTPUT, _THEIRS, "0",
    ),
    Option(
        ("-t", "--tee"), "STREAMS", "Write output to files as well, with a prefix on each line. Values as for -r.",
        Group.OUTPUT, _THEIRS, "0",
    ),
    Option(
        ("--keep-output",), "MIB",
        "Keep so much for `odyssey logs`: of each stream of a rank that -r and -t leave out the end, of this attempt and the "
        "one before. What ranks write to a terminal themselves is not kept. 0 keeps nothing.", Group.OUTPUT, default="4",
    ),
    Option(
        ("--log-line-prefix-template",), "TEXT",
        "The prefix of each line: ${role_name}, ${rank}, ${local_rank} and ${hostname} are filled in.", Group.OUTPUT, _THEIRS,
        since=(2, 15),
    ),
    Option(("--local-ranks-filter",), "RANKS", "Show only these local ranks: 0,1.", Group.OUTPUT, _THEIRS),
    Option(
        ("--duplicate-stdout-filters",), "WORDS", "Write lines of stdout with one of these to filtered_stdout.log as well.",
        Group.OUTPUT, _THEIRS,
    ),
    Option(
        ("--duplicate-stderr-filters",), "WORDS", "Write lines of stderr with one of these to filtered_stderr.log as well.",
        Group.OUTPUT, _THEIRS,
    ),
    Option(("--logs-specs",), "NAME", "An entry point of torchrun.logs_specs that says where logs go.", Group.OUTPUT, _THEIRS),
    Option(
        ("--event-log-handler",), "NAME", "Where torchrun's own events go: null, console, or a registered one.",
        Group.OUTPUT, _THEIRS, "null",
    ),
    Option(
        ("--print-completion",), "SHELL", "Print what bash, zsh or tcsh completes this command line by. Needs shtab.",
        Group.OUTPUT, _THEIRS, since=(2, 15),
    ),
    Option(("--json",), "FILE", "Write the answer there, for programs.", Group.OUTPUT, Origin.CHECK, in_check=True),
    Option(("--json-report",), "FILE", "Write there why the job failed, for programs.", Group.OUTPUT),
    Option(("--stdin-rank",), "RANK", "Standard input goes to this rank only, for a debugger. Default: to all.", Group.OUTPUT),
    Option(("--no-display",), "", "Plain lines instead of the live display.", Group.OUTPUT),
    Option(("--verbose",), "", "Say which rules decided what.", Group.OUTPUT),
    # The end
    Option(
        ("--signals-to-handle",), "SIGNALS", "Signals that end the job, passed on to ranks.", Group.END, _THEIRS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT", ("TORCHELASTIC_SIGNALS_TO_HANDLE",),
    ),
    Option(("--forward-signals",), "SIGNALS", "Signals that are passed on to ranks and end nothing: SIGUSR1.", Group.END),
    Option(
        ("--shutdown-timeout",), "TIME", "Time from SIGTERM to SIGKILL.", Group.END, _THEIRS, "30",
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Option(("--monitor-interval",), "SECONDS", "No effect: an end is noticed when it happens.", Group.END, _THEIRS, "0.1"),
)  # fmt: skip
