"""Profiles of models that nobody has run here: from a YAML file of the model, one of the cluster, and arithmetic.

A job file names both, with a layout and batch sizes (`configs/gpt3-medium-a100-32.yaml`). Costs are a roofline: what an op
computes at the cluster's peak rate times a stated efficiency, or what it touches at the memory's bandwidth, the longer one.
A block of hidden size d and feed-forward size f on b sequences of s tokens computes 8 b s d² + 4 b s d f + 4 b s² d forward
(6 b s d f where the feed-forward is gated), its backward twice that. A profile measured by `odyssey profile` is always better.

Bytes that a block keeps for its backward, with two-byte activations (Korthikanti et al. 2022, arXiv 2205.05198, eq. 1 and 2 and
section 5, counted likewise for a gated feed-forward, which has no dropout): 18 b s d + 4 b s f, gated 16 b s d + 6 b s f; with
`none` also the scores of a heads, 5 b a s²; with `full` its input alone, 2 b s d, and its backward computes the forward again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from odyssey.codec import field_first
from odyssey.errors import ProfileError
from odyssey.plan.approximation import ApproximateCost
from perfmodel.profile.profile import (
    ANY_WAY,
    AllReduce,
    Cluster,
    Count,
    Few,
    LayerProfile,
    Link,
    Profile,
    Recovery,
    check_numbers,
    read,
)

Positive = Annotated[float, msgspec.Meta(gt=0)]
T = TypeVar("T", bound=msgspec.Struct)


class Precision(msgspec.Struct, frozen=True):
    """Bytes of a parameter, of its gradient, of its optimizer's state (Adam's moments; beside halves a copy in fp32)."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {"bf16": Precision(2, 2, 12), "fp16": Precision(2, 2, 12), "fp32": Precision(4, 4, 8)}
)
"""Mixed precision as in ZeRO (arXiv 1910.02054, section 3.1), and plain fp32."""
Kept = Literal["none", "selective", "full"]


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transformer: embedding, blocks, head. `feed_forward`: its hidden size, 4 times `hidden` where nothing is said.

    `gated`: a feed-forward of three matrices. `tied`: the head has the embedding's. `positions`: whether they are
    learnt. `heads`: of attention, for checkpointing `none`. `checkpointing`: what the backward computes
    again: nothing, the attention scores (as any flash attention does), or the whole block. `dropout`: its probability in
    training; where it is 0 nothing is drawn, and plans may cut micro-batches.
    """

    name: str
    n_blocks: Few
    hidden: Count
    sequence: Count
    vocabulary: Count
    feed_forward: Count | None = None
    heads: Count | None = None
    gated: bool = False
    tied: bool = False
    positions: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    checkpointing: Kept = "selective"
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal devices. `flops`: peak rate of a device by precision, `efficiency`: the part of it that a block reaches.

    The defaults of `runtime_gb` and `op_overhead_s` are assumed: what a device's context and buffers take, and the launch of
    a few kernels.
    """

    name: str
    n_ranks: Few
    ranks_per_node: Few
    memory_gb: Positive
    flops: dict[Literal["bf16", "fp16", "fp32"], Positive]
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)]
    memory_bandwidth: Positive
    intra_host: Link
    inter_host: Link
    nodes_per_host: Few = 1
    interface_bandwidth: Positive | None = None
    cores: Count | None = None
    runtime_gb: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    op_overhead_s: Annotated[float, msgspec.Meta(ge=0)] = 50e-6
    all_reduce: Annotated[tuple[AllReduce, ...], msgspec.Meta(min_length=1)] = ANY_WAY
    recovery: Recovery = Recovery()


class JobFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on a cluster.
    `model` and `cluster`: names of files in `configs/`, or paths. `precision`, `checkpointing`: in place of the model's."""

    model: str
    cluster: str
    layout: str
    global_batch: Count
    micro_batch: Count
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    checkpointing: Kept | None = None


class ConfiguredJob(msgspec.Struct, frozen=True):
    """What a job file comes to."""

    name: str
    profile: Profile
    layout: str
    n_ranks: int


def load(path_or_name: str | Path) -> tuple[Profile, str]:
    """The profile and the default layout of a job file, of `model@cluster`, or of a measured `profile.json`."""
    if Path(path_or_name).suffix == ".json":
        return read(Path(path_or_name)), "auto"
    job = load_job(path_or_name)
    return job.profile, job.layout


def load_job(path_or_name: str | Path) -> ConfiguredJob:
    """A job file, or `model@cluster` with one sequence a micro-batch and four a rank.

    Raises ProfileError naming file and field.
    """
    text = str(path_or_name)
    if "@" in text and not Path(text).exists():
        model_name, _, cluster_name = text.partition("@")
        cluster = _read(cluster_name, "clusters", ClusterFile)
        profile = analytic(_read(model_name, "models", ModelFile), cluster, 4 * cluster.n_ranks, 1)
        check_numbers(profile, text, _compare("models"))
        return ConfiguredJob(text, profile, "auto", cluster.n_ranks)
    job = _read(text, "", JobFile)
    cluster = _read(job.cluster, "clusters", ClusterFile)
    asked = {"precision": job.precision, "checkpointing": job.checkpointing}
    model = replace(_read(job.model, "models", ModelFile), **{name: value for name, value in asked.items() if value})
    profile = analytic(model, cluster, job.global_batch, job.micro_batch)
    check_numbers(profile, text, _compare(""))
    return ConfiguredJob(Path(text).name.removesuffix(".yaml").removesuffix(".yml"), profile, job.layout, cluster.n_ranks)


def names() -> dict[str, list[str]]:
    """What `configs/` offers: `jobs`, `models`, `clusters`."""
    root = _root()
    return {
        kind: sorted(path.stem for path in (root / folder).glob("*.yaml"))
        for kind, folder in (("jobs", ""), ("models", "models"), ("clusters", "clusters"))
    }


def analytic(model: ModelFile, cluster: ClusterFile, global_batch: int, micro_batch: int) -> Profile:
    """The profile by arithmetic. Raises ProfileError where model and cluster do not go together."""
    layers = _Layers(model, cluster, micro_batch)
    embedding, block, head = layers.embedding(), layers.block(), layers.head()
    blocks = [replace(block, name=f"block {i}", digest=f"{model.name}/block {i}") for i in range(model.n_blocks)]
    tie_bytes = model.vocabulary * model.hidden * PRECISIONS[model.precision].parameter_bytes
    logits = micro_batch * model.sequence * model.vocabulary
    recomputed = layers.kept() if model.checkpointing == "full" else 0
    return Profile(
        model=model.name,
        micro_batch=micro_batch,
        global_batch=global_batch,
        layers=(embedding, *blocks, head),
        ties=((0, model.n_blocks + 1),) if model.tied else (),
        tie_bytes=(tie_bytes,) if model.tied else (),
        loss_s=3 * 4 * logits / cluster.memory_bandwidth,
        op_overhead_s=cluster.op_overhead_s,
        commit_s=2 * (cluster.n_ranks - 1).bit_length() * cluster.inter_host.latency_s,
        runtime_bytes=round(cluster.runtime_gb * 1e9) + recomputed,
        cluster=Cluster(
            ranks_per_node=cluster.ranks_per_node,
            nodes_per_host=cluster.nodes_per_host,
            cores=cluster.cores,
            memory_bytes=round(cluster.memory_gb * 1e9),
            intra_host=cluster.intra_host,
            inter_host=cluster.inter_host,
            interface_bandwidth=cluster.interface_bandwidth,
            all_reduce=cluster.all_reduce,
        ),
        recovery=cluster.recovery,
        is_modelled=True,
        uncut=f"the blocks of {model.name} draw random numbers for dropout" if model.dropout else "",
    )


class _Layers:
    """The layers of a model for one micro-batch on a device of a cluster."""

    def __init__(self, model: ModelFile, cluster: ClusterFile, micro_batch: int) -> None:
        flops = cluster.flops.get(model.precision)
        if flops is None:
            known = ", ".join(sorted(cluster.flops))
            raise ProfileError(f"cluster {cluster.name}: flops: none for {model.precision}", f"precision may be {known}")
        if model.checkpointing == "none" and model.heads is None:
            raise ProfileError(f"model {model.name}: checkpointing none: heads is missing", "its scores are kept for each head")
        self._model = model
        self._precision = PRECISIONS[model.precision]
        self._rate = flops * cluster.efficiency
        self._bandwidth = cluster.memory_bandwidth
        self._tokens = micro_batch * model.sequence
        self._feed_forward = model.feed_forward or 4 * model.hidden
        self._message = self._precision.parameter_bytes * self._tokens * model.hidden

    def embedding(self) -> LayerProfile:
        model = self._model
        n_parameters = (0 if model.tied else model.vocabulary) + (model.sequence if model.positions else 0)
        found = self._layer("embedding", n_parameters * model.hidden, 0, 0, 2 * self._message, 8 * self._tokens)
        return replace(found, input_gradient_s=0.0)  # of whole numbers there is none

    def block(self) -> LayerProfile:
        """Two norms, attention of four matrices, a feed-forward of two or three, and biases where it has two."""
        d, f, gated = self._model.hidden, self._feed_forward, self._model.gated
        n_parameters = 4 * d * d + (3 if gated else 2) * d * f + (2 * d if gated else 9 * d + f)
        linear = self._tokens * (8.0 * d * d + (6.0 if gated else 4.0) * d * f)
        attention = 4.0 * self._tokens * self._model.sequence * d
        is_full = self._model.checkpointing == "full"
        found = self._layer(
            "block",
            n_parameters,
            linear,
            attention,
            self._message,
            self._message if is_full else self.kept(),
        )
        if is_full:
            found = replace(found, input_gradient_s=found.input_gradient_s + found.forward_s)
        return replace(found, approximate=self._approximate())

    def _approximate(self) -> ApproximateCost:
        """The feed-forward again, its backward to its input, and gradients of its weights in the span of r = d / 4 vectors,
        2 b r (d + f) + 2 r d f each; kept are the inputs of its norm and its own. A matrix's vectors take 2 d f (d + r), and
        9 d³ for eigenvectors (Golub and Van Loan, Matrix Computations, 8.3) at an assumed twentieth of a block's rate."""
        d, f, n_matrices = self._model.hidden, self._feed_forward, 3 if self._model.gated else 2
        rank, short, long = max(1, min(d, f) // 4), min(d, f), max(d, f)
        each = 4.0 * self._tokens * d * f + 2.0 * self._tokens * rank * (d + f) + 2.0 * rank * d * f
        return ApproximateCost(
            backward_s=max(n_matrices * each / self._rate, self._message / self._bandwidth),
            activation_bytes=2 * self._message,
            refresh_s=n_matrices * (2.0 * long * short * (short + rank) + 20 * 9.0 * short**3) / self._rate,
            without=(),
        )

    def head(self) -> LayerProfile:
        model, logits = self._model, self._tokens * self._model.vocabulary
        n_parameters = (0 if model.tied else model.vocabulary * model.hidden) + 2 * model.hidden
        kept = 2 * self._message + 6 * logits
        return self._layer("head", n_parameters, 2.0 * logits * model.hidden, 0, 2.0 * logits, kept)

    def kept(self) -> int:
        """Bytes of a block's activations between its forward and its backward, or while that is computed again."""
        model, d, f = self._model, self._model.hidden, self._feed_forward
        size = self._tokens * (16 * d + 6 * f if model.gated else 18 * d + 4 * f)
        if model.checkpointing == "none":
            size += 5 * self._tokens * (model.heads or 0) * model.sequence
        return size * self._precision.parameter_bytes // 2

    def _layer(self, name: str, n_parameters: int, linear: float, attention: float, touched: float, kept: int) -> LayerProfile:
        precision, memory_s = self._precision, touched / self._bandwidth
        state = n_parameters * (precision.parameter_bytes + precision.gradient_bytes + precision.optimizer_bytes)
        return LayerProfile(
            name=name,
            digest=f"{self._model.name}/{name}",
            forward_s=max((linear + attention) / self._rate, memory_s),
            input_gradient_s=max((linear + 2 * attention) / self._rate, memory_s),
            weight_gradient_s=max(linear / self._rate, memory_s),
            optimizer_s=2 * state / self._bandwidth,
            parameter_bytes=n_parameters * precision.parameter_bytes,
            gradient_bytes=n_parameters * precision.gradient_bytes,
            optimizer_bytes=n_parameters * precision.optimizer_bytes,
            buffer_bytes=0,
            activation_bytes=kept,
            output_bytes=self._message,
        )


def _root() -> Path:
    import configs

    return Path(configs.__file__).parent


def _compare(folder: str) -> str:
    return f"compare it with those in {_root() / folder}"


def _read(path_or_name: str, folder: str, kind: type[T]) -> T:
    path = Path(path_or_name)
    if path.suffix not in (".yaml", ".yml"):
        path = _root() / folder / f"{path_or_name}.yaml"
        if not path.exists():
            what = folder.rstrip("s") or "job"
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
            raise ProfileError(f"no {what} is called {path_or_name!r}", f"give a YAML file, or one of: {known}")
    help = _compare(folder)
    no_zero = "each holder of a layer keeps all of its optimizer state, to recover from: docs/internals/performance-model.md"
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}", "give the path of a YAML file") from None
    except msgspec.ValidationError as error:
        what = field_first(str(error))
        raise ProfileError(f"{path}: {what}", no_zero if "`zero`" in what else help) from None
    except msgspec.DecodeError as error:
        why = " ".join(str(error).replace('in "<byte string>",', "at").split())  # PyYAML takes several lines for it
        raise ProfileError(f"{path}: not YAML: {why}", help) from None
    check_numbers(found, str(path), help)
    return found
