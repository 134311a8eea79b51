"""Reports of a rank to its agent. One that belongs to a generation carries its number; those of an older one are dropped.

A report that the job's state depends on, a `Word`, is one value all the way: from the rank's socket through the agents' links
to the coordinator, into the log that the agents keep and the one that is read. So it tells whose it is by itself, and who reads
the socket holds it to that; its tag is what a line of the log says.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from odyssey.codec import Count, Name
from odyssey.plan.rest import Summed
from odyssey.plan.worker import Rank
from odyssey.protocol.model_spec import UNCUT, Boundary, LayerCost, ModelSpec
from odyssey.protocol.units import Position, Result


class HandOn(msgspec.Struct, frozen=True, tag=True):
    """`giver` hands the result of a unit without a commit point on to `takers`, who lack it and take the unit over.
    It is for both. The Prepare of this generation follows."""

    generation: int
    giver: Rank
    takers: tuple[Rank, ...]
    result: Result


class Hello(msgspec.Struct, frozen=True, tag="rank_joined"):
    """The script has built its `odyssey.Job`, which asks for a plan. `job`: which one of the script's, counted from 1."""

    rank: Rank
    model: ModelSpec
    job: Count = 1


class Trial(msgspec.Struct, frozen=True):
    """The steps of a trial (trial.py).
    It says what ops took, what a step did from beginning to end, and what it took to digest the state that came of them."""

    times: tuple[OpTime, ...]
    step_s: float
    proof_s: float


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The answer to Measure: this rank's layers, and the link to its successor in the chain.

    `latency_s`, `bandwidth`: None where the chain ends here. `group_s`: seconds to build the chain's group.
    `loss_s`: seconds of loss and its gradient, from the last rank only. `op_overhead_s`: processor seconds of sending
    and receiving once between two layers; None on a rank alone. `runtime_bytes`: memory that is neither model nor
    activations, of pages that ranks share its part. `move_byte_s`: seconds of a byte of state that moves, from the chain's
    first two ranks only.
    `beside_reduction`: what a layer takes while a reduction runs over what it takes without; None on a rank alone.
    `crowding`: processor time of this rank's layers when all compute over that when it does alone, from the last rank only.
    `uncut`: why micro-batches have to stay whole for the sake of these layers or of the loss, empty if they may be cut.
    """

    generation: int
    costs: tuple[LayerCost, ...]
    boundaries: tuple[Boundary, ...]
    latency_s: float | None
    bandwidth: float | None
    group_s: float
    loss_s: float | None
    op_overhead_s: float | None
    runtime_bytes: int
    memory_bytes: int
    move_byte_s: float | None = None
    trial: Trial | None = None
    beside_reduction: float | None = None
    crowding: float | None = None
    uncut: str = UNCUT


class WholeGroup(msgspec.Struct, frozen=True):
    """A process group in which this rank only sums and has nothing under way.
    `name`: unlike any other's of the job; `n`: ranks that are in it; `is_branch`: of the tree in which all sum, or else of a
    reduction."""

    name: Name
    n: Count
    is_branch: bool


class Paused(msgspec.Struct, frozen=True, tag="rank_paused"):
    """Nothing of this rank is in flight: it was aborted, or is done. `position` is the first unit that it has no result of.

    `phase`: `compute` (the unit is not done), `contributed` (everything of the unit is done but its result), `between` (in the
    script's own code), `idle`. `held`: layers with full state. `summed`: gradients of the unit at hand, where that is a step.
    `whole`: groups that the next generation may take on, where all their ranks say so. `passed`: the newest unit that it has
    the result of; `hands_on`: that unit has no commit point, and this rank has what others may lack of it. `why_not`: of a
    replica, why its script cannot go on without who is lost, as far as it knows by itself; empty if it can.
    """

    rank: Rank
    generation: int
    position: Position
    phase: str
    held: tuple[int, ...]
    summed: tuple[Summed, ...] = ()
    whole: tuple[WholeGroup, ...] = ()
    passed: Result | None = None
    hands_on: bool = False
    why_not: str = ""


class Connected(msgspec.Struct, frozen=True, tag="rank_connected"):
    """The answer to Connect: this rank's groups are there, or a `problem` has ended them."""

    rank: Rank
    generation: int
    number: int
    problem: str = ""


MAX_OFFERED_BYTES = 1 << 20
"""What a rank offers to a group of some ten thousand has a few bytes for each of them."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """While groups are built: where this rank is reached.
    The leading agent answers Known when `n` ranks have offered something under this `name`, to all of them."""

    generation: int
    name: Name
    n: Annotated[int, msgspec.Meta(ge=2, le=1 << 16)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFERED_BYTES)]


class Ready(msgspec.Struct, frozen=True, tag="rank_ready"):
    """Groups are built and states moved: what this rank will train, and with whom, see odyssey/runtime/proof.py.

    `digests`: per held shard, of parameters, buffers, optimizer and scheduler. `samples`: for each micro-batch whose loss this
    rank computes, its number of samples; the sum over ranks is the denominator. `contracts`: for each reduce group of this
    rank, a digest of what is summed with whom. `stream`: digest of the data and random numbers that the next step begins
    with; None where this rank reads no data. `problem`: why this rank must not train, empty if nothing is wrong. `proof_s`:
    what it took to find all this. `read_bytes`: of `moved_bytes`, what was read from the memory of ranks of this host.
    `kept_members`: of the groups that this rank has not built anew, their members together. `has_acted`: the unit at hand is an
    action that one rank does, and this one knows that it has been completed.
    """

    rank: Rank
    generation: int
    position: Position
    digests: tuple[tuple[int, str], ...]
    samples: tuple[tuple[int, int], ...]
    denominator: int
    groups_s: float
    moves_s: float
    moved_bytes: int
    contracts: tuple[tuple[int, str], ...] = ()
    stream: str | None = None
    problem: str = ""
    proof_s: float = 0.0
    read_bytes: int = 0
    kept_members: int = 0
    has_acted: bool = False


class Committed(msgspec.Struct, frozen=True, tag="step_committed"):
    """A unit is final, and this rank has its result.
    `unit_s`: its wall time here. `n_steps`: how many steps the script wants in all; None where it does not say."""

    rank: Rank
    generation: int
    result: Result
    n_samples: int
    unit_s: float
    n_steps: int | None = None


class OpTime(msgspec.Struct, frozen=True):
    """Mean compute seconds of `kind` (F, B, I, W, S: optimizer) over layers `[first, stop)` in `n` runs since the last report.

    Kind `O`, with no layers: what an op costs the processor beside its computation (transfers, the interpreter).
    Compute seconds are those of the thread's CPU clock (of the device's own clock on a GPU), so that waiting for a
    busy core does not count. `wall_s`: mean seconds on the wall of the same runs; 0 where nothing is known of them.
    """

    kind: str
    first: Count
    stop: Count
    n: Count
    mean_s: float
    wall_s: float = 0.0


class OpTimes(msgspec.Struct, frozen=True, tag=True):
    """Refreshes the profile from real steps, about once a second. `uncut`: why micro-batches stay whole, if that is new."""

    generation: int
    times: tuple[OpTime, ...]
    uncut: str = ""


class StepTimes(msgspec.Struct, frozen=True, tag="step_timed"):
    """When the ops of one step of a generation ran on this rank, in its program's order, without gaps; for people.

    `began_s`: CLOCK_MONOTONIC seconds; op i ran from `moments_us[i]` to `moments_us[i + 1]`, microseconds after that.
    """

    rank: Rank
    generation: int
    step: int
    began_s: float
    moments_us: tuple[int, ...]


class Pong(msgspec.Struct, frozen=True, tag=True):
    """`where`: what the main thread does, for people (`1F3<2`); `waiting`: on another rank; since when.

    The unit that it is in: `kind`, empty between units, and `position`.
    """

    number: int
    position: Position
    kind: str
    where: str
    waiting: bool
    since_s: float


class Broken(msgspec.Struct, frozen=True, tag="connection_lost"):
    """A connection to another rank ended and no Pause has come: a peer has died, or the network between us.

    `position`: of the unit at hand. The agent says it of a rank that waits where nothing moves.
    """

    rank: Rank
    generation: int
    position: Position
    what: str


class Failed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """The script has raised an exception, and the rank exits after this.
    `is_final`: it is an error of ours about what the script does or passes, which would come again."""

    rank: Rank
    error: str
    help: str
    traceback: str
    is_final: bool = False


class Finished(msgspec.Struct, frozen=True, tag="rank_finished"):
    """The script came to its end, and the rank is about to exit with 0; or to that of its Job, and makes another one."""

    rank: Rank
    position: Position


class CannotGoOn(msgspec.Struct, frozen=True, tag="cannot_go_on"):
    """A replica's script cannot go on without who is lost, as it says why.
    From all ranks of a Job: they have drifted apart, as `what` tells, and `help` what is to be done about it."""

    rank: Rank
    what: str
    help: str = ""


class Saved(msgspec.Struct, frozen=True, tag="script_saved"):
    """From a replica: its script has written a checkpoint with torch.save, and made a step since, which is number `step`."""

    rank: Rank
    step: Count


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A script without a Job has done its first optimizer step.
    `modules`: installed ones that it had imported by then, in the order of their import."""

    modules: tuple[str, ...]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The script called `odyssey.heartbeat()`: it makes progress. `step`: as the script counts, if it told."""

    step: int | None


Word = Hello | Paused | Connected | Ready | Committed | StepTimes | Broken | Failed | Finished | CannotGoOn | Saved
"""What becomes of a job is told by these, and they stand in its log."""
Report = Word | Measured | Offered | OpTimes | Pong | Stepped | Beat


def is_of(report: Report, rank: int) -> bool:
    """Whether this rank has said it, as far as the report itself tells."""
    return not isinstance(report, Word) or report.rank == rank
