"""The Profile: what was measured of a model on a cluster, and the file `profile.json` that keeps it.

All times are seconds of compute for one micro-batch of `micro_batch` samples, alone on a device (the CPU clock of the
thread on a CPU, so that sharing cores is the timeline's business, not the measurement's). All sizes are bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from odyssey.codec import Json, Malformed, field_first, to_json
from odyssey.errors import ProfileError
from odyssey.plan.approximation import ApproximateCost
from odyssey.protocol.model_spec import UNCUT, Boundary, LayerSpec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Few = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
"""A number of what takes a value each in memory: layers and ranks."""


class LayerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one layer.
    `activation_bytes`: kept from F to B of a micro-batch; `output_bytes`: passed on; `approximate`: of its approximate
    backward, or why it has none; empty where nobody has asked."""

    name: str
    digest: str
    forward_s: Annotated[float, msgspec.Meta(gt=0)]
    input_gradient_s: Seconds
    weight_gradient_s: Seconds
    optimizer_s: Seconds
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffer_bytes: Bytes
    activation_bytes: Bytes
    output_bytes: Bytes
    approximate: ApproximateCost | str = ""

    @property
    def backward_s(self) -> float:
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def state_bytes(self) -> int:
        """What a move of the layer transfers."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer of n bytes takes `latency_s + n / bandwidth` (bytes per second)."""

    latency_s: Seconds
    bandwidth: Annotated[float, msgspec.Meta(gt=0)]

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds until `size_bytes` have arrived."""
        return self.latency_s + size_bytes / self.bandwidth


class AllReduce(enum.StrEnum):
    """How the workers of a group sum what each has, see perfmodel/step/all_reduce.py."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


ANY_WAY = tuple(AllReduce)


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the workers run.
    `cores`: processors of a host that its ranks share; None where each rank computes on a device of its own. `memory_bytes`:
    what one worker may take. `interface_bandwidth`: bytes per second, each way, that all ranks of a host share to other
    hosts; None where each has an interface of its own. `all_reduce`: the ways that its library has, of which it takes the
    quickest: Gloo the ring alone, NCCL all. `beside_reduction`: what a computation takes while its rank reduces gradients,
    over what it takes else; `crowding`: the processor time of a computation while all cores of its host compute, over that
    while no other one does. Both are 1 in cluster files, where nobody has measured them."""

    ranks_per_node: Few
    nodes_per_host: Few
    cores: Count | None
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)]
    intra_host: Link
    inter_host: Link
    interface_bandwidth: Annotated[float, msgspec.Meta(gt=0)] | None = None
    all_reduce: Annotated[tuple[AllReduce, ...], msgspec.Meta(min_length=1)] = (AllReduce.RING,)
    beside_reduction: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    crowding: Annotated[float, msgspec.Meta(ge=1)] = 1.0

    def crowded(self, n_active: int) -> float:
        """Processor time of a computation over that alone, while so many are active on its host: the more cores compute, the
        more of what they share (caches, memory) is wanted."""
        if self.cores is None or self.cores == 1:
            return 1.0
        return 1 + (self.crowding - 1) * (min(n_active, self.cores) - 1) / (self.cores - 1)

    def rate(self, n_active: int) -> float:
        """How fast each of so many computations of a host progresses, over one that is alone."""
        return min(1.0, (self.cores or n_active) / n_active) / self.crowded(n_active)


class Recovery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of a transition as measured (or the stated defaults before the first one).

    `move_layer_s`: of a layer that moves, for its optimizer and messages about it, whatever its size. `move_byte_s`: of a byte
    that is packed, digested, read or sent, and copied: within a host that is all, between hosts it counts where the link is not
    slower; 0 in cluster files: the link alone counts there.
    `rest_s`: until Go beside all of these, for orders on their way and engines that are made, and `proof_byte_s` of each byte
    of state whose digest a rank shows before it goes on; 0 in cluster files. `n_seen`: transitions of the job that these have
    been learnt from.
    Groups take `groups_base_s + groups_member_s * (sum over the groups of a rank of their members)`. Moves take `moves_scale`
    times what bytes and links alone would.

    `resubmit_s`: until a job that has ended makes steps again: 9 minutes until it is scheduled and 14 of set-up (Unicron, arXiv
    2401.00134, without its 30 of noticing and 15 of redone steps). Others: requeued in 7.6 minutes on 2,048 GPUs (ByteRobust,
    arXiv 2509.16293), resubmitted in 10 (DLRover), loaded from a shared store in 33 (504 B200, arXiv 2605.09370). `save_s`: how
    long a checkpoint holds up training, guessed between a blocking write to a store (11 to 120 s in Oobleck's artifact) and a
    copy to memory (0.2 s, DLRover). Nobody measures these two.
    """

    detect_s: Seconds = 0.01
    pause_s: Seconds = 0.004
    spawn_s: Seconds = 1.0
    groups_base_s: Seconds = 0.002
    groups_member_s: Seconds = 0.001
    warm_up_s: Seconds = 0.0
    moves_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    move_layer_s: Seconds = 0.005
    move_byte_s: Seconds = 0.0
    rest_s: Seconds = 0.0
    proof_byte_s: Seconds = 0.0
    n_seen: Annotated[int, msgspec.Meta(ge=0)] = 0
    resubmit_s: Seconds = 1380.0
    save_s: Seconds = 10.0


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far off prices of this job's own plans were, predicted / measured - 1 each, the newest last.
    They are step times of plans that ran, and the parts of transitions that are a plan's own. What they are for says
    perfmodel/profile/spread.py."""

    steps: tuple[float, ...] = ()
    transitions: tuple[float, ...] = ()


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the performance model knows of a job.

    `step_scale`: measured over modelled step time of the plans that have run, 1 until one has: what the op graph leaves
    out (waking up, memory traffic, other users of the machine) is much the same for all plans. `halves_scale`: the two halves
    of a backward over the whole one. `is_modelled`: by arithmetic (catalog.py), nobody has run it. `uncut`: why micro-batches
    have to stay whole, empty if plans may cut them. `n_shards`: see ModelSpec; of a layer that is a
    shard the costs are those of a pass through the whole model.
    `errors`: of the prices of plans that ran in this job.
    """

    model: str
    micro_batch: Count
    global_batch: Count
    layers: Annotated[tuple[LayerProfile, ...], msgspec.Meta(min_length=1)]
    ties: tuple[tuple[int, ...], ...]
    tie_bytes: tuple[int, ...]
    loss_s: Seconds
    op_overhead_s: Seconds
    commit_s: Seconds
    runtime_bytes: Bytes
    cluster: Cluster
    recovery: Recovery
    step_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    halves_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    boundaries: tuple[Boundary, ...] = ()
    is_modelled: bool = False
    uncut: str = UNCUT
    n_shards: int = 0
    errors: Errors = Errors()

    @property
    def is_whole(self) -> bool:
        """Whether the one layer is the script's own model, so that no rank should be without work."""
        return self.n_shards == 1

    @property
    def is_sharded(self) -> bool:
        """Whether layers are shards of it."""
        return self.n_shards > 1


def layer_specs(profile: Profile) -> tuple[LayerSpec, ...]:
    """The layers as the ranks of the profile's model tell of them."""
    return tuple(
        LayerSpec(layer.name, layer.digest, layer.parameter_bytes, layer.gradient_bytes, layer.buffer_bytes)
        for layer in profile.layers
    )


def scaled(profile: Profile, speed: float) -> Profile:
    """The same on a cluster where everything is `speed` times as fast."""

    def faster(link: Link) -> Link:
        return Link(link.latency_s / speed, link.bandwidth * speed)

    def quicker(part: LayerProfile | ApproximateCost | Recovery | Profile) -> dict[str, float]:
        return {name: getattr(part, name) / speed for name in part.__struct_fields__ if name.endswith("_s")}

    def quicker_layer(layer: LayerProfile) -> LayerProfile:
        its = layer.approximate
        return replace(layer, approximate=its if isinstance(its, str) else replace(its, **quicker(its)), **quicker(layer))

    replace, cluster = msgspec.structs.replace, profile.cluster
    interface = cluster.interface_bandwidth
    return replace(
        profile,
        **quicker(profile),
        layers=tuple(map(quicker_layer, profile.layers)),
        cluster=replace(
            cluster,
            intra_host=faster(cluster.intra_host),
            inter_host=faster(cluster.inter_host),
            interface_bandwidth=None if interface is None else interface * speed,
        ),
        recovery=replace(profile.recovery, **quicker(profile.recovery)),
    )


def write(profile: Profile, path: Path) -> None:
    """Write the profile as indented JSON, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(to_json(profile), indent=1) + b"\n")
    temporary.replace(path)


LEAST, MOST_COUNTED = 1e-30, 10**18
"""What a file may have besides 0: seconds and rates from LEAST to 1 / LEAST, and so many bytes. No quotient overflows then."""
_AGAIN = "measure it again with `odyssey profile train.py`"


def read(path: Path) -> Profile:
    """Read a profile. Raises ProfileError that names file and field."""
    try:
        profile: Profile = Json(Profile).decode(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}", "measure one with `odyssey profile train.py`") from None
    except Malformed as error:
        raise ProfileError(f"{path}: {field_first(str(error))}", _AGAIN) from None
    check_numbers(profile, str(path), _AGAIN)
    n_layers = len(profile.layers)
    for i, tie in enumerate(profile.ties):
        if len(tie) < 2 or not all(0 <= layer < n_layers for layer in tie):
            raise ProfileError(
                f"{path}: ties[{i}]: expected two or more of the layers 0 to {n_layers - 1}, got {list(tie)}", _AGAIN
            )
    if len(profile.tie_bytes) != len(profile.ties):
        expected, got = len(profile.ties), len(profile.tie_bytes)
        raise ProfileError(f"{path}: tie_bytes: expected a size for each of {expected} ties, got {got}", _AGAIN)
    return profile


def check_numbers(value: msgspec.Struct, name: str, help: str) -> None:
    """Raise ProfileError for a number that nothing can be computed with; it names the field, and what that is of by `name`."""
    for field, number in _numbers(msgspec.to_builtins(value), ""):
        if number != 0 and not LEAST <= abs(number) <= (MOST_COUNTED if isinstance(number, int) else 1 / LEAST):
            raise ProfileError(f"{name}: {field}: no cluster has {number:g}", help)


def _numbers(value: object, path: str) -> Iterator[tuple[str, int | float]]:
    """All of a file, each with the path of its field."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _numbers(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _numbers(child, f"{path}[{i}]")
    elif isinstance(value, int | float):
        yield path, value
