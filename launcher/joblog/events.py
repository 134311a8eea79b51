"""The events of a job: what its log `events.jsonl` holds, one JSON object a line, append-only.

The coordinator's state is a fold over this log; the display, `odyssey status`, `odyssey plan` and post-mortems are
readers of it and of nothing else. Inputs are what happened, by agents and, as they say it, by ranks (reports.Word);
decisions are what the coordinator made of it.
"""

from __future__ import annotations

import enum

import msgspec

from odyssey.codec import Json, Name, Pid, check_ip_address, to_json
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Word
from odyssey.protocol.units import Result
from perfmodel.profile.profile import Profile
from strategies.situation import Aim, Candidate


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent of the job.
    `number`: its own for the whole job, the leading one's is 0; where it stands among the others (GROUP_RANK) changes with
    the membership. `node_rank`: what its command line asks for. `address`, `port`: where other agents reach it; empty where
    nobody has to."""

    number: int
    host: str
    pid: int
    n_ranks: int
    role: str = "default"
    node_rank: int | None = None
    address: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if self.address:
            check_ip_address(self.address)


class CauseKind(enum.StrEnum):
    """What ended a rank."""

    EXIT = "exit"
    """Its script, with an exit code."""
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel, for want of memory."""
    HANG = "hang"
    UNRESPONSIVE = "unresponsive"
    """It did not do in time what the coordinator asked for."""
    MALFORMED = "malformed"
    """It sent what is no report."""
    DIFFERENT = "different"
    """It came to a job that trains, with another model or other data."""
    DRILL = "drill"
    """A user's `--drill`."""
    NOT_STARTED = "not-started"
    """No process of it could be started."""
    AGENT = "agent"
    """It was lost with its agent."""
    ENDED = "ended"
    """Its agent, because another rank failed."""


class Cause(msgspec.Struct, frozen=True):
    """Why a rank is gone.

    `text` is for people: `SIGKILL`, `exit code 3`, `did not answer for 5.0 s`. `status`: exit code, or minus the signal's
    number; None where nobody waited for the process.
    """

    kind: CauseKind
    text: str
    status: int | None = None


class Diagnostics(msgspec.Struct, frozen=True):
    """What a rank has left behind, for people to understand its end. Everything may be missing.

    `error`, `traceback`: its exception, from its error file or the tail of its stderr. `last_lines`: of its stderr, where no
    exception is known. `log`: the file or folder with its output. `error_file`: what torch's `@record` wrote.
    """

    error: str = ""
    traceback: str = ""
    last_lines: str = ""
    log: str = ""
    error_file: str = ""


# -- inputs ------------------------------------------------------------------------------------------------------------


class JobStarted(msgspec.Struct, frozen=True, tag="job_started"):
    """First line of a log.
    `profile_only`: measure the model, write the profile, and end. `agents`: in the order of their ranks; empty where there
    is only one, whose nodes are failure domains. `pid_started`: when the agent's process began, in seconds after the boot of
    its `host`, which is called `boot`: nobody takes another process of this number for it. `folder`: the job's own; empty
    for none. `rehearsed`: what its ranks stand in for; empty for a real job. `speed`: how many seconds of that pass in one
    of ours, which all times of the log are in. `failure_rate`: as asked for, losses per node-day. `may_build_job`: the
    script says that it imports odyssey.
    """

    script: str
    arguments: tuple[str, ...]
    n_nodes: int
    n_ranks_per_node: int
    max_restarts: int
    layout: str
    strategy: str
    mtbf_s: float | None
    version: str
    pid: int
    profile_only: bool = False
    pid_started: float = 0.0
    boot: str = ""
    host: str = ""
    agents: tuple[AgentInfo, ...] = ()
    min_agents: int = 1
    join_timeout_s: float = 600.0
    never_retry: tuple[int, ...] = ()
    restart_limit: tuple[int, float] | None = None
    restart_backoff_s: float = 1.0
    folder: str = ""
    run_id: str = ""
    retries_same_failure: bool = False
    rehearsed: str = ""
    speed: float = 1.0
    aim: Aim = Aim()
    failure_rate: float | None = None
    may_build_job: bool = False
    on_loss: str = "restart"

    @property
    def n_ranks(self) -> int:
        """How many the job begins with."""
        return sum(agent.n_ranks for agent in self.agents) or self.n_nodes * self.n_ranks_per_node

    @property
    def what(self) -> str:
        """What runs, for people: the script and its arguments, or what is rehearsed."""
        return f"{self.rehearsed} (rehearsed)" if self.rehearsed else " ".join((self.script, *self.arguments))


class AgentJoined(msgspec.Struct, frozen=True, tag="agent_joined"):
    """One more agent, after the job began."""

    agent: AgentInfo


class SlotsReturned(msgspec.Struct, frozen=True, tag="slots_returned"):
    """Ranks that were lost with their slots can be started there again. `reason`: who says so, for people."""

    ranks: tuple[Rank, ...]
    reason: str


class NoticeGiven(msgspec.Struct, frozen=True, tag="notice"):
    """These ranks are to leave, and nobody has lost them yet.
    `reason`: who says so, for people. `is_certain`: they will be lost, whether there is a plan without them or not.
    `within_s`: so many seconds from now; None where nobody knows."""

    ranks: tuple[Rank, ...]
    reason: str
    is_certain: bool = False
    within_s: float | None = None


class NoticeExpired(msgspec.Struct, frozen=True, tag="notice_expired"):
    """The time that a notice gave is over."""


class RankSlowed(msgspec.Struct, frozen=True, tag="rank_slowed"):
    """A rank computes `factor` times as long as it should; 1 where it no longer is slow. `since`: when that began."""

    rank: Rank
    factor: float
    since: float


class AgentLost(msgspec.Struct, frozen=True, tag="agent_lost"):
    """An agent is gone, and its ranks with it: it ended, or its host did."""

    agent: AgentInfo
    reason: str


class LeaderChanged(msgspec.Struct, frozen=True, tag="leader_changed"):
    """`agent` leads from now on. What others had begun, and what ranks had said to who led before, may be lost."""

    agent: AgentInfo


class RankStarted(msgspec.Struct, frozen=True, tag="rank_started"):
    """A process was spawned for `rank`."""

    rank: Rank
    pid: Pid
    node: int
    local_rank: int = 0
    host: Name = ""


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The merged profile at the start; `seconds`: what it took."""

    profile: Profile
    seconds: float


class ProfileRefined(msgspec.Struct, frozen=True, tag="profile_refined"):
    """The profile as real steps and transitions have shown it by now; plans are priced with it from here on."""

    profile: Profile


class RankLost(msgspec.Struct, frozen=True, tag="rank_lost"):
    """`slot_lost`: nothing can be respawned there."""

    rank: Rank
    cause: Cause
    slot_lost: bool
    diagnostics: Diagnostics = Diagnostics()


class Proposed(msgspec.Struct, frozen=True, tag="proposed"):
    """The table of all candidates for the situation of this generation, best first.

    `ahead`: found before the loss; `ahead_problem`: why what had been found could not be taken. `n_planned` of `n_to_plan`
    classes of losses had been planned for by then; the second is 0 where it was not known yet. `why_not`, `help`: why there can
    be no plan, and what to do about it, where nothing was asked for one.
    """

    candidates: tuple[Candidate, ...]
    seconds_to_change: float
    seconds_to_change_source: str
    search_s: float
    ahead: bool
    why_not: str = ""
    help: str = ""
    ahead_problem: str = ""
    n_planned: int = 0
    n_to_plan: int = 0


class RankExited(msgspec.Struct, frozen=True, tag="rank_exited"):
    """The rank's process ended with exit code 0. `was_ended`: the agent had told it to end."""

    rank: Rank
    was_ended: bool = False


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """The first sign of progress of a script without a Job, in this generation: an optimizer step or a heartbeat."""

    rank: Rank


class UnitFinal(msgspec.Struct, frozen=True, tag="unit_final"):
    """The agent that leads knows that this unit is final, and so are all before it.
    A step is told when something else is about to be decided upon, so one may stand for many; each line that tells of a step
    to people is a rank's Committed."""

    result: Result


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """No progress for much longer than the profile explains; who waits for whom."""

    reason: str


class StoreLost(msgspec.Struct, frozen=True, tag="store_lost"):
    """The process that served the store is gone; another one serves a fresh store at the same address."""

    reason: str


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """A deadline has passed. `deadline`: its number, among all that the job has set."""

    deadline: int


class StopRequested(msgspec.Struct, frozen=True, tag="stop_requested"):
    """Ctrl-C, a signal to the agent, or an error that leaves no way on; `code` is what the launcher exits with."""

    reason: str
    code: int = 130
    help: str = ""


# -- decisions and notes -----------------------------------------------------------------------------------------------


class Pausing(msgspec.Struct, frozen=True, tag="pausing"):
    """Decision: a new generation begins. `lost`: all ranks lost since the last one that ran."""

    lost: tuple[Rank, ...]
    reason: str


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """Decision: a new generation is to take in the ranks `joined` and to do without those that are `leaving`.
    All that train stop for it behind a unit that is final."""

    joined: tuple[Rank, ...]
    reason: str
    leaving: tuple[Rank, ...] = ()


class PlanChosen(msgspec.Struct, frozen=True, tag="plan"):
    """Decision: this plan, for this reason.
    `results` is what every rank rolls forward to. `n_kept`: samples of the step that was cut that are not run again."""

    plan: Plan
    reason: str
    results: tuple[Result, ...]
    n_kept: int = 0


class GenerationStarted(msgspec.Struct, frozen=True, tag="go"):
    """Decision: all ranks are ready and agree. Measured parts of the transition, seconds; None for what did not take place.

    From the first loss on, one after the other: pause, plan, spawn (None where no rank had to be waited for), groups and
    moves (of the rank that moved longest) and the rest: orders on their way, rolling forward, proofs. Together they are
    `total_s`. A first start has groups, moves and the rest. `proof_s`, within the rest: of the rank that took longest.
    `detect_s`, before them, is None where nobody knows when the rank was gone. `stood_s`: where nobody was lost and ranks were
    taken in, from the first rank that stood still. `kept_members`: of the groups that were not built anew within `groups_s`.
    """

    detect_s: float | None
    pause_s: float | None
    plan_s: float | None
    groups_s: float
    moves_s: float
    total_s: float | None
    spawn_s: float | None = None
    rest_s: float | None = None
    proof_s: float = 0.0
    stood_s: float | None = None
    kept_members: int = 0


class Restarting(msgspec.Struct, frozen=True, tag="restarting"):
    """Decision: all ranks of a script without a Job start again, as attempt number `attempt`, after `wait_s`.

    `failure`: what ended the attempt before. `reason`: the whole story in a line.
    """

    attempt: int
    failure: str
    reason: str
    wait_s: float


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """Decision: the last line of a log. `code`: the launcher's exit code; `help`: what to do about it, may be empty."""

    code: int
    reason: str
    help: str


class AtStep(msgspec.Struct, frozen=True, tag="at_step"):
    """The step that a script without a Job last told by `odyssey.heartbeat(step)`; written now and then."""

    rank: Rank
    step: int


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """Ranks of a script without a Job make no progress.
    `apart`: those that the others seem to wait for; `text`: all of it, with where every rank is, in several lines."""

    ranks: tuple[Rank, ...]
    apart: tuple[Rank, ...]
    text: str


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Every rank that had stalled makes progress again, after `seconds`."""

    seconds: float


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something for people."""

    text: str


Decision = Pausing | Draining | PlanChosen | GenerationStarted | Restarting | JobEnded
Body = (
    JobStarted | AgentJoined | AgentLost | LeaderChanged | RankStarted | Word | Profiled | ProfileRefined
    | SlotsReturned | NoticeGiven | NoticeExpired | RankSlowed | RankLost | Proposed | UnitFinal | RankExited
    | Progressed | Suspected | StoreLost | Tick | StopRequested
    | Pausing | Draining | PlanChosen | GenerationStarted | Restarting | JobEnded | AtStep | Stalled | Resumed | Note
)  # fmt: skip


class Event(msgspec.Struct, frozen=True):
    """A line of the log: seconds since the epoch, generation, who wrote it (`agent`, `rank 3`), and what happened."""

    time: float
    generation: int
    origin: str
    body: Body


_decoder = Json(Event)


def encode(event: Event) -> bytes:
    """The event's line, newline included. Text that is no Unicode is spelled out."""
    return to_json(event) + b"\n"


def decode(line: bytes | str) -> Event:
    """Raises Malformed for a line that is no event."""
    event: Event = _decoder.decode(line)
    return event
