"""What a script gives its ranks to train, as they tell of it: layers, what passes between them, and what they cost."""

from __future__ import annotations

import msgspec

from odyssey.plan.approximation import ApproximateCost


class LayerSpec(msgspec.Struct, frozen=True):
    """A layer as all ranks must see it alike.
    `digest` is over names, shapes, dtypes, which parameters are frozen, and how the others lie in memory."""

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
    one that only its holders build, or where they were not taken, as on a rank that was started again. Both count before the
    first step only: a rank that joins later takes state over from others.

    `n_shards`: of the script's own model, which its loop uses on every rank. 1: it is the one layer, and no rank may be without
    work; more: layer i is shard i of it, and each rank has one. 0: these are the layers of a Job.
    `replicas`: no Job, but a script with a loop of its own, whose ranks each have the whole model. It is one layer here.
    `n_samples`: 0 of data that can only be iterated over. By `stream`, a digest, they begin with the same samples then, and are
    divided alike. For other data it is a digest of the script's own order, if it has one.
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
    n_shards: int = 0
    replicas: bool = False
    stream: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it is the script's own model."""
        return self.n_shards > 0


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


UNCUT = "nobody has looked whether its layers take each sample by itself"
