"""What one `odyssey run` was asked to do. The command line fills it, the agent obeys it."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from odyssey.errors import UsageError
from strategies.situation import Aim


class Entry(enum.StrEnum):
    """How a rank runs `script`."""

    SCRIPT = "script"
    """`python -u SCRIPT`: a file, or a directory or zip file with a __main__.py."""
    MODULE = "module"
    """`python -u -m SCRIPT`."""
    PROGRAM = "program"
    """SCRIPT itself is executed (`--no-python`)."""
    PATH = "path"
    """`runpy.run_path(SCRIPT, run_name='__main__')` (`--run-path`)."""


class Rendezvous(enum.StrEnum):
    """How the agents of a job find each other."""

    LOCAL = "local"
    """There is only this one; its store listens on a free port, or on the one that was asked for."""
    STATIC = "static"
    """The agent with `node_rank` 0 hosts the endpoint."""
    C10D = "c10d"
    """Whichever agent can bind the endpoint first hosts it."""


class OnLoss(enum.StrEnum):
    """What becomes of a script without a Job when a rank of it is lost."""

    RESTART = "restart"
    """All ranks start again, as torchrun has it."""
    CONTINUE = "continue"
    """The others go on in the same step, where that can be (odyssey/replicas)."""
    AUTO = "auto"
    """Whichever costs less (launcher/coordinator/replicas.py)."""


class Std(enum.IntFlag):
    """Standard streams, as `--redirects` and `--tee` number them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class RunOptions(msgspec.Struct, frozen=True):
    """Units are in the names. Local ranks count within this agent, ranks within the job.

    What to run. `interpreter`: empty for this one. `passes_local_rank`: append `--local-rank=N` to the arguments, as
    `torch.distributed.launch` does.

    Where. `n_nodes`: failure domains on this host, of `n_ranks_per_node` ranks each; more than one only if this is the only
    agent. `min_agents`, `max_agents`: of the job. `master_addr`, `master_port`: the endpoint; port 0 takes a free one.
    `node_rank`: None where the agents are to be numbered in the order in which they come. `local_addr`: where other agents
    reach this one; empty to find out. `run_id`: empty for one made up. `join_timeout_s`: for `min_agents` to come;
    `last_call_s`: how long to wait for more. `detect_s`: an agent of which nothing is heard for so long is lost. `secret_file`:
    what agents share (launcher/cluster/links/secret.py). `checks_hosts`: have hosts compared before ranks start there.

    `on_loss`: what becomes of a script without a Job.

    Restarts. `max_restarts`: of the whole job. `never_retry`: exit codes that end the job. `restart_limit`: at most so many
    restarts in so many seconds. `restart_backoff_s`: the pause before the second restart in a row that had no progress in
    between, twice as long before each further one. `retries_same_failure`: also when it came before any progress.

    Output. `capture_output`: a display is up, so what ranks write to the terminal goes to it. `keep_bytes`: of each stream of a
    rank that goes to no file and comes by the agent the end is kept, no more than so much; 0 for nothing. `redirects`, `tee`:
    streams of each local rank that go to a file, or to a file and the terminal. `shown_ranks`: local ranks whose output comes
    to the terminal; empty for all. `stdout_filters`: lines with one of these go to filtered_stdout.log as well. `line_prefix`:
    a template with `${role_name}`, `${rank}`, `${local_rank}`, `${hostname}`; empty for `[${role_name}${local_rank}]:`.
    `log_dir`: each job makes a folder below it; /dev/null for none. `stdin_rank`: the only rank that reads standard input; None
    for all. `json_report`: where to write why the job failed. `verbose`: say which rules decided what.

    Ends. `ending_signals` end the job and are passed on to the ranks; `forwarded_signals` are passed on and end nothing.
    `ends_process`: this process ends with the job, and those that end a job come too late for it then.
    `stall_timeout_s`: None for no watch over ranks that make no progress; `ends_stalled`: treat such a rank as lost.

    `rehearsed`: what the ranks stand in for, and how, in a rehearsal; empty for a real job. `speed`: how many seconds of that
    pass in one of ours.

    `drills`: as given to `--drill`. `write_profile`: measure, write the profile there, and stop. `layout`: `auto`, `2x4` or
    `3+2+3`. `n_spares`: so many ranks have no work in a Job's first plan. `strategy`: `auto` or a strategy's name. `aim`: what
    the best plan is. `mtbf_s`: expected time to the next loss; `failure_rate`: the prior of that, in losses per node-day. None
    where nothing is said.
    """

    script: str
    arguments: tuple[str, ...] = ()
    entry: Entry = Entry.SCRIPT
    interpreter: str = ""
    passes_local_rank: bool = False
    numa_binding: str = ""
    virtual_local_rank: bool = False
    role: str = "default"

    n_nodes: int = 1
    n_ranks_per_node: int = 1
    min_agents: int = 1
    max_agents: int = 1
    rendezvous: Rendezvous = Rendezvous.LOCAL
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node_rank: int | None = None
    run_id: str = ""
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    local_addr: str = ""
    detect_s: float = 5.0
    secret_file: Path | None = None
    checks_hosts: bool = False

    on_loss: OnLoss = OnLoss.RESTART
    max_restarts: int = 0
    never_retry: tuple[int, ...] = ()
    restart_limit: tuple[int, float] | None = None
    restart_backoff_s: float = 1.0
    retries_same_failure: bool = False

    log_dir: Path = Path("odyssey-logs")
    capture_output: bool = False
    keep_bytes: int = 4 << 20
    redirects: dict[int, Std] | Std = Std.NONE
    tee: dict[int, Std] | Std = Std.NONE
    shown_ranks: frozenset[int] = frozenset()
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    line_prefix: str = ""
    logs_specs: str = ""
    event_log_handler: str = "null"
    stdin_rank: int | None = None
    json_report: Path | None = None
    verbose: bool = False

    ending_signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    forwarded_signals: tuple[str, ...] = ()
    ends_process: bool = False
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float | None = None
    ends_stalled: bool = False

    rehearsed: str = ""
    speed: float = 1.0

    layout: str = "auto"
    n_spares: int = 0
    strategy: str = "auto"
    aim: Aim = Aim()
    mtbf_s: float | None = None
    failure_rate: float | None = None
    drills: tuple[str, ...] = ()
    profile: Path | None = None
    write_profile: Path | None = None

    def check_script(self) -> None:
        """Raises UsageError if there is nothing to run."""
        if self.entry in (Entry.MODULE, Entry.PROGRAM):
            return  # found by Python, or on PATH
        path = Path(self.script)
        if not path.exists():
            raise UsageError(f"no such script: {self.script}", "give the path of the training script")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise UsageError(f"{self.script} is a directory without __main__.py", "give the path of the training script")
