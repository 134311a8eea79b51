"""What a rank and its agent say to each other, and how it is framed on the socket between them.

Orders go to the rank, reports come back. Every message that belongs to a generation carries its number, and whoever
receives one of an older generation drops it. A frame is a 4-byte little-endian length and msgpack.

A report that the job's state depends on, a `Word`, is one value all the way: from the rank's socket through the agents' links
to the coordinator, into the log that the agents keep and the one that is read. So it tells whose it is by itself, and who reads
the socket holds it to that; its tag is what a line of the log says.

A *unit* is one transaction of the job: a training step, an evaluation, a save (odyssey/runtime/session.py). Its `position`
is `(step, number of units since that step began)`; every unit ends in one tiny reduction over all workers, whose
values are its *result*. A unit is final for the job as soon as one rank has its result.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from odyssey.codec import Count, Malformed, Name, Packed
from odyssey.plan.approximation import ApproximateCost, LowRank
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.rest import Rest, Summed
from odyssey.plan.worker import Rank
from odyssey.text import all_as_unicode

Position = tuple[int, int]
SAME_CALLS = "let all ranks make the same calls in the same order"
"""What helps where ranks are in different units."""
LOADS = ("load", "load_state_dict", "resume")
"""Kinds of units that go on at the step which their result tells."""
STEPS = ("step", "backward")
"""Kinds of units that are a step of training: of a Job, and of a script's own loop."""
OF_REPLICAS = ("backward", "collective")
"""Kinds of units of a script's own loop: all gradients of a backward, and any other collective."""
NOTHING, UNUSABLE = -1.0, -2.0
"""In place of the step that one of these leads to: there is no checkpoint; there is something that cannot be used."""


class Result(msgspec.Struct, frozen=True):
    """What the last reduction of the unit at `position` gave: of a `step` loss, gradient norm and the learning rate, if it is
    one; of `evaluate` the loss. `metrics`: what the script tells of the samples beside it."""

    position: Position
    kind: str
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = {}

    @property
    def is_step(self) -> bool:
        """Whether it was one of training."""
        return self.kind in STEPS

    @property
    def of_replicas(self) -> bool:
        """Whether the script's own loop made it."""
        return self.kind in OF_REPLICAS

    def __post_init__(self) -> None:
        if self.kind in LOADS and not (
            self.values and self.values[0].is_integer() and (self.values[0] >= 0 or self.values[0] in (NOTHING, UNUSABLE))
        ):
            raise ValueError(f"a {self.kind} that leads to no step: {self.values}")


def position_after(result: Result) -> Position:
    """The position of the unit that follows `result`. A load goes on at the step that the state was saved at.

    Where nothing was loaded its value is below 0.
    """
    step, n_units = result.position
    if result.is_step:
        return (step + 1, 0)
    if result.kind in LOADS and result.values[0] >= 0:
        return (int(result.values[0]), n_units + 1)
    return (step, n_units + 1)


def is_next(result: Result, before: Result | None) -> bool:
    """Whether the unit follows `before`; any does where there is none before. Of replicas only some are told of."""
    if before is None:
        return True
    end = position_after(before)
    return result.position >= end if result.of_replicas else result.position == end


# -- what a rank tells of the model ------------------------------------------------------------------------------------


class LayerSpec(msgspec.Struct, frozen=True):
    """A layer as all ranks must see it alike. `digest` is over names, shapes, dtypes and which parameters are frozen."""

    name: str
    digest: str
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int


class ModelSpec(msgspec.Struct, frozen=True):
    """What `odyssey.Job` was given. Ranks whose specs differ cannot train together.

    `ties`: sets of layers that share a parameter. `tie_bytes`: bytes of each tie's shared parameters (counted in none
    of the layers).

    `optimizers`: in words, what the script makes to train the layers; `values`: digests of the layers as built, empty for
    one that only its holders build, or where they were not taken. Both count before the first step only: a rank that joins
    later takes state over from others.

    `is_whole`: the one layer is the script's own model, which its loop uses on every rank: none may be without work.
    `replicas`: no Job, but a script with a loop of its own, whose ranks each have the whole model. It is one layer here.
    `n_samples`: 0 of data that can only be iterated over. By `stream`, a digest, they begin with the same samples then, and are
    divided alike.
    """

    layers: tuple[LayerSpec, ...]
    ties: tuple[tuple[int, ...], ...]
    tie_bytes: tuple[int, ...]
    global_batch: int
    micro_batch: int
    n_samples: int
    seed: int
    device: str
    clip_norm: float | None = None
    autocast: str = ""
    optimizers: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    is_whole: bool = False
    replicas: bool = False
    stream: str = ""


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape and dtype (`float32`) of a tensor that passes between layers."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


class Boundary(msgspec.Struct, frozen=True):
    """What passes from `layer` to the next one for a micro-batch of `n_samples`.

    `tree` is the nesting as torch's pytree writes it; `tensors` are its leaves in order.
    """

    layer: int
    n_samples: int
    tree: str
    tensors: tuple[TensorSpec, ...]


class LayerCost(msgspec.Struct, frozen=True):
    """One layer measured on one micro-batch of the full size. Seconds of compute, bytes.

    `halves_s`: of both halves of its backward, one after the other; 0 where it has not both. `approximate`: of its approximate
    backward, where that was asked for; or why it has none.
    """

    layer: int
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    optimizer_s: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    output_bytes: int
    halves_s: float = 0.0
    approximate: ApproximateCost | str = ""


# -- orders: agent -> rank ---------------------------------------------------------------------------------------------


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Profile the model along one chain of stages over all ranks; answer Measured. `low_rank`: also approximate backwards."""

    generation: int
    chain: tuple[Stage, ...]
    low_rank: LowRank | None = None


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Abort communication in flight, keep model and optimizer state, answer Paused."""

    generation: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Build the groups of `plan`, which may be the next one, beside what is done in `generation`, and answer Connected.

    `number`: of the attempt; groups of an earlier one are let go. A Prepare whose plan needs the same groups takes them, and a
    Pause ends them.
    """

    generation: int
    number: int
    plan: Plan


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Stop behind the next unit that becomes final, then answer Paused for `generation`, as to a Pause.

    To ranks that have no work, or no plan yet, it is a Pause. All ranks that run stop behind the same unit, even if only one of
    them has been told.
    """

    generation: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Take on `plan`: roll forward to the newest of `results`, build groups, move state, answer Ready.

    `results`: the units that are final since the last committed step, that step's own among them, and all units before
    the first step; a rank that is behind applies them, a rank that joins replays them. `boundaries` tell every
    receiver what to expect between any two layers. `rest`: what is left of the plan's first step, if something of it is kept.
    `kept`: names of the groups that all their ranks have paused with nothing under way in: those that the plan wants are not
    built anew.
    """

    generation: int
    plan: Plan
    results: tuple[Result, ...]
    boundaries: tuple[Boundary, ...]
    rest: Rest | None = None
    kept: tuple[str, ...] = ()


class HandOn(msgspec.Struct, frozen=True, tag=True):
    """To a rank that has the result of a unit without a commit point, `giver`, and to those that lack it, `takers`: the one
    hands it on to the others, who take the unit over. The Prepare of this generation follows."""

    generation: int
    giver: Rank
    takers: tuple[Rank, ...]
    result: Result


class Known(msgspec.Struct, frozen=True, tag=True):
    """What all ranks of a group have offered under `name`, by rank: see Offered."""

    generation: int
    name: str
    values: dict[Rank, bytes]


class Go(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready and agree: run."""

    generation: int


class Follow(msgspec.Struct, frozen=True, tag=True):
    """To an idle rank: the other ranks have finished a unit; its script goes on by one unit too."""

    generation: int
    result: Result


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended its script in good order and another was lost: take `results`, nothing more will be run together."""

    generation: int
    results: tuple[Result, ...]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer Pong: where are you?"""

    number: int


class ReachedAt(msgspec.Struct, frozen=True, tag=True):
    """By which ranks of other hosts reach this rank's host, as it is known since one has come: groups that are built from now
    on listen there."""

    address: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End at once. `reason` is for the rank's own stderr, empty if the agent says it."""

    reason: str
    exit_code: int


Command = Measure | Pause | Connect | Drain | Prepare | HandOn | Known | Go | Follow | Finish | Ping | ReachedAt | Stop

# -- reports: rank -> agent --------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="rank_joined"):
    """The script has built its `odyssey.Job`, which asks for a plan. `job`: which one of the script's, counted from 1."""

    rank: Rank
    model: ModelSpec
    job: Count = 1


UNCUT = "nobody has looked whether its layers take each sample by itself"


class Trial(msgspec.Struct, frozen=True):
    """The steps of a trial (trial.py): what ops took, what a step did from beginning to end, and what it took to
    digest the state that came of them."""

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
    """A process group in which this rank only sums and has nothing under way. `name`: unlike any other's of the job; `n`: ranks
    that are in it; `is_branch`: of the tree in which all sum, or else of a reduction."""

    name: Name
    n: Count
    is_branch: bool


class Paused(msgspec.Struct, frozen=True, tag="rank_paused"):
    """Nothing of this rank is in flight: it was aborted, or is done. `position` is the first unit that it has no result of.

    `phase`: `compute` (the unit is not done), `contributed` (everything of the unit is done but its result), `between` (in the
    script's own code), `idle`. `held`: layers with full state. `summed`: gradients of the unit at hand, where that is a step.
    `whole`: groups that the next generation may take on, where all their ranks say so. `passed`: the newest unit that it has
    the result of; `hands_on`: that unit has no commit point, and this rank has what others may lack of it.
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


class Connected(msgspec.Struct, frozen=True, tag="rank_connected"):
    """The answer to Connect: this rank's groups are there, or a `problem` has ended them."""

    rank: Rank
    generation: int
    number: int
    problem: str = ""


MAX_OFFERED_BYTES = 1 << 20
"""What a rank offers to a group of some ten thousand has a few bytes for each of them."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """While groups are built: where this rank is reached. The leading agent answers Known when `n` ranks have offered something
    under this `name`, to all of them."""

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
    `kept_members`: of the groups that this rank has not built anew, their members together.
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


class Committed(msgspec.Struct, frozen=True, tag="step_committed"):
    """A unit is final, and this rank has its result. `unit_s`: its wall time here. `n_steps`: how many steps the script wants
    in all; None where it does not say."""

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
    """The script has raised an exception, and the rank exits after this. `is_final`: it is an error of ours about what the
    script does or passes, which would come again."""

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
    """From a replica: its script cannot go on without who is lost, as it says why."""

    rank: Rank
    what: str


class Saved(msgspec.Struct, frozen=True, tag="script_saved"):
    """From a replica: its script has written a checkpoint with torch.save, and made a step since, which is number `step`."""

    rank: Rank
    step: Count


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """From a script without a Job: its first optimizer step is done. `modules`: installed ones that it had imported by then,
    in the order of their import."""

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


# -- framing -----------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 27
"""A plan with explicit orders for thousands of ranks is some MB; what claims to be longer than this is none of ours."""
_encoder = msgspec.msgpack.Encoder()


def packed(message: Any) -> bytes:
    """As msgpack. Text that is no Unicode is spelled out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(all_as_unicode(msgspec.to_builtins(message, builtin_types=(bytes,))))


def frame(message: msgspec.Struct) -> bytes:
    """The bytes that carry `message`, an order, a report, or what agents say to each other, on a socket."""
    body = packed(message)
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Collects bytes of a socket into messages of one direction."""

    def __init__(self, message_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`message_type`: `Command` or `Report`; `max_bytes`: of a frame."""
        self._buffer = bytearray()
        self.expect(message_type, max_bytes)

    def expect(self, message_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """From the next frame on."""
        self._decoder = Packed(message_type)
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Any]:
        """All messages that `data` completes. Raises Malformed for a frame that is none of ours; then nothing more is to be
        fed. Nothing is kept of a frame that is too long."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                self._buffer.clear()
                raise Malformed(f"a frame of {length} bytes, where at most {self._max_bytes} are taken")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield self._decoder.decode(body)


def send(sock: socket.socket, message: Command | Report) -> None:
    """Send one whole message on a blocking socket. The caller holds whatever lock keeps frames apart."""
    sock.sendall(frame(message))
