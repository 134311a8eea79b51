"""What the agents of a job say to each other: the members to the leading one, which decides, and it to them.

The first frame of a link is one of `FirstWords`, and what follows are messages of a session (links/session.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from launcher.cluster.questions import Ask
from launcher.health.stacks import Stack
from launcher.health.stalls import Sample
from launcher.host.fitness.findings import HostReport
from launcher.joblog.events import Event, RankExited, RankLost, RankStarted
from odyssey.codec import Count, Name, Pid, SignalNumber, check_ip_address
from odyssey.plan.worker import Rank, RankNumber
from odyssey.protocol.reports import Report

# -- member to leader --------------------------------------------------------------------------------------------------


Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""A session's name: whoever made it up is the only other one to know it."""
Count64 = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Join(msgspec.Struct, frozen=True, tag=True):
    """First words of an agent that wants to be a member.
    A session begins, of the same name each time that it asks, in place of the one before, which it has given up. `address`:
    where other agents reach it, empty for the one that it connects from; `port`: at which it listens. `report`: on its host,
    where it was checked. `endpoint`: the host of the wanted job's, by the name that its agents were given; empty where who
    is asked has had a part in that job."""

    session: Token
    version: Name
    run_id: str
    host: Name
    pid: Pid
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    role: str
    node_rank: Count | None
    address: Name
    port: Port
    report: HostReport | None = None
    endpoint: Name = ""

    def __post_init__(self) -> None:
        if self.address:
            check_ip_address(self.address)


class Resume(msgspec.Struct, frozen=True, tag=True):
    """First words of a member whose link was cut. `n_received`: of the session's messages."""

    session: Token
    n_received: Annotated[int, msgspec.Meta(ge=0)]


class JoinMesh(msgspec.Struct, frozen=True, tag=True):
    """First words of a link that carries one agent's part of the consensus. `log`: of which log."""

    number: Count
    log: Name


class WhichJob(msgspec.Struct, frozen=True, order=True):
    """A job among those of one `run_id`: the least is the oldest.
    `began`: in seconds since the epoch; `founder`: host and process of the agent with which it did."""

    began: float
    founder: str


class LedBy(msgspec.Struct, frozen=True, tag=True):
    """An agent leads the job, and is reached there.
    These are the first words to who may begin a job of the same `run_id`, or has begun one, and the answer of an older one;
    or to who wants to join (then `job` and `endpoint`, as for Join, are not said)."""

    run_id: str
    host: Name
    port: Port
    job: WhichJob | None = None
    endpoint: Name = ""

    def __post_init__(self) -> None:
        check_ip_address(self.host)


class OtherJob(msgspec.Struct, frozen=True, tag=True):
    """The answer to who wants a job of another `run_id`, or of another endpoint, than the one that is asked has a part in.
    `led_at`: where that is led, if it may be the wanted one under another name, as it is led away from its endpoint."""

    run_id: str
    endpoint: Name
    led_at: tuple[Name, Port] | None = None

    def __post_init__(self) -> None:
        if self.led_at is not None:
            check_ip_address(self.led_at[0])


class StillLives(msgspec.Struct, frozen=True, tag=True):
    """The job does, and looks for one that leads it: first words to who may begin a job of the same `run_id`."""

    run_id: str


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """The answer, before the session goes on."""

    n_received: Annotated[int, msgspec.Meta(ge=0)]


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """The answer to who was taken for lost: its ranks are no part of the job any more."""


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The answer to who has never been here: another agent has come where the one listened that it looks for."""


Answer = Resumed | Forgotten | Unknown


class FromRank(msgspec.Struct, frozen=True, tag=True):
    """A report of a rank. `process`: the number of its process, among all of the job."""

    process: int
    report: Report


class Happened(msgspec.Struct, frozen=True, tag=True):
    """What became of a process."""

    process: int
    event: RankStarted | RankExited | RankLost


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A signal has stopped the process of a rank, or it goes on again."""

    process: int
    is_stopped: bool


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First words of a member to an agent that leads anew: a session begins.
    `told`: what it has told of its ranks, and who led may not have made known. `report`: on its host, where it was checked."""

    session: Token
    number: Count
    told: tuple[FromRank | Happened | Stopped, ...]
    report: HostReport | None = None


FirstWords = Join | Resume | Attach | JoinMesh | LedBy | StillLives | Ask
MAX_FIRST_BYTES = 1 << 20
"""The first frame of a link has no more."""


class Notice(msgspec.Struct, frozen=True, tag=True):
    """Something for people."""

    text: str


class SamplesTaken(msgspec.Struct, frozen=True, tag=True):
    """The answer to TakeSamples with this number."""

    number: Count64
    samples: dict[RankNumber, Sample]


class StacksRead(msgspec.Struct, frozen=True, tag=True):
    """The answer to ReadStacks with this number."""

    number: Count64
    stacks: dict[RankNumber, Stack]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The member was asked to end, by a signal, and its ranks are ending; or it was sent on to another agent."""

    reason: str


class WantsToLeave(msgspec.Struct, frozen=True, tag=True):
    """The member was asked to end, by a signal; it does when what its ranks hold has been moved away, and they have ended."""

    reason: str


FromMember = FromRank | Happened | Stopped | Notice | SamplesTaken | StacksRead | WantsToLeave | Leaving

# -- leader to member --------------------------------------------------------------------------------------------------


class Known(msgspec.Struct, frozen=True, tag=True):
    """Another agent of the job, by its number and where it is reached. To those that are there when it comes."""

    number: Count
    host: Name
    port: Port


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The member is in.
    `leader`: the number of who says it; `run_id`: TORCHELASTIC_RUN_ID; `master_addr`, `master_port`: the store's; `log`:
    which one the agents of this job keep together; `others`: those that are there when it comes."""

    number: Count
    leader: Count
    master_addr: Name
    master_port: Port
    run_id: Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$")]
    log: Name
    others: tuple[Known, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The member is not taken, and ends."""

    what: str
    help: str


class WaitForPlace(msgspec.Struct, frozen=True, tag=True):
    """The job has all its agents: the member waits for a place, and ends well if the job ends first."""

    what: str


class Others(msgspec.Struct, frozen=True, tag=True):
    """To who waits for a place: where other agents of the job are reached, one of which may come to lead."""

    at: Annotated[tuple[tuple[Name, Port], ...], msgspec.Meta(max_length=16)]

    def __post_init__(self) -> None:
        for host, _port in self.at:
            check_ip_address(host)


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """An order, framed, for this process of a rank."""

    process: int
    rank: Rank
    order: bytes


class DrillRank(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL or SIGSTOP to a rank on purpose; what follows is told as if it had happened by itself."""

    rank: Rank
    number: SignalNumber


class TakeSamples(msgspec.Struct, frozen=True, tag=True):
    """How much have these ranks used, written and said to others? `elsewhere`: addresses of other agents, but of who asks."""

    number: Count64
    ranks: tuple[Rank, ...]
    elsewhere: tuple[Name, ...] = ()


class ReadStacks(msgspec.Struct, frozen=True, tag=True):
    """Where are these ranks in their code?"""

    number: Count64
    ranks: tuple[Rank, ...]


class KillAll(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL to every rank."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Pass a signal on to every rank."""

    number: SignalNumber


class JobIsOver(msgspec.Struct, frozen=True, tag=True):
    """End what is left and exit with this code. `story`: of a job that failed, what explains it (history.retold).
    `sent_to_all`: the signal that ends the job, where somebody sends it to every process of every host."""

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reason: str
    help: str
    story: tuple[Event, ...] = ()
    sent_to_all: SignalNumber | None = None


FromLeader = (
    Welcome
    | Refused
    | LedBy
    | OtherJob
    | WaitForPlace
    | Others
    | Known
    | ToRank
    | DrillRank
    | TakeSamples
    | ReadStacks
    | KillAll
    | Signal
    | JobIsOver
)
