"""Profiles of models that nobody has run here: from a YAML file of the model, one of the cluster, and arithmetic.

A job file names both, with a layout and batch sizes (`configs/gpt3-medium-a100-32.yaml`). Costs are analytic: a block of hidden
size d on b sequences of s tokens takes 24 b s d² + 4 b s² d floating-point operations forward, its backward twice that,
at the cluster's peak rate times a stated efficiency; what is bound by memory takes bytes over memory bandwidth. Activations are
34 b s d bytes a block (Korthikanti et al. 2022, with attention scores recomputed). A profile measured by
`odyssey profile` is always better than this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from odyssey.codec import field_first
from odyssey.errors import ProfileError
from perfmodel.profile import Cluster, LayerProfile, Link, Profile, Recovery, read

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer. `*_bytes` are per parameter; the layers are embedding, blocks, head."""

    name: str
    n_blocks: Count
    hidden: Count
    sequence: Count
    vocabulary: Count
    parameter_bytes: Count = 2
    gradient_bytes: Count = 2
    optimizer_bytes: Count = 12


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal devices. `flops`: peak rate of a device, `efficiency`: the part of it that a block reaches."""

    name: str
    n_ranks: Count
    ranks_per_node: Count
    memory_gb: Positive
    flops: Positive
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)]
    memory_bandwidth: Positive
    intra_host: Link
    inter_host: Link
    nodes_per_host: Count = 1
    interface_bandwidth: Positive | None = None
    cores: Count | None = None
    runtime_gb: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    op_overhead_s: Annotated[float, msgspec.Meta(ge=0)] = 50e-6
    recovery: Recovery = Recovery()


class JobFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on a cluster. `model` and `cluster`: names of files in `configs/`, or paths."""

    model: str
    cluster: str
    layout: str
    global_batch: Count
    micro_batch: Count


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
        return ConfiguredJob(text, profile, "auto", cluster.n_ranks)
    job = _read(text, "", JobFile)
    cluster = _read(job.cluster, "clusters", ClusterFile)
    profile = analytic(_read(job.model, "models", ModelFile), cluster, job.global_batch, job.micro_batch)
    return ConfiguredJob(Path(text).name.removesuffix(".yaml").removesuffix(".yml"), profile, job.layout, cluster.n_ranks)


def names() -> dict[str, list[str]]:
    """What `configs/` offers: `jobs`, `models`, `clusters`."""
    root = _root()
    return {
        kind: sorted(path.stem for path in (root / folder).glob("*.yaml"))
        for kind, folder in (("jobs", ""), ("models", "models"), ("clusters", "clusters"))
    }


def analytic(model: ModelFile, cluster: ClusterFile, global_batch: int, micro_batch: int) -> Profile:
    """The profile by arithmetic."""
    d, tokens = model.hidden, micro_batch * model.sequence
    rate = cluster.flops * cluster.efficiency
    message = 2 * tokens * d

    def layer(name: str, n_parameters: int, linear: float, attention: float, touched: float, kept: int) -> LayerProfile:
        memory_s = touched / cluster.memory_bandwidth
        state = n_parameters * (model.parameter_bytes + model.gradient_bytes + model.optimizer_bytes)
        return LayerProfile(
            name=name,
            digest=f"{model.name}/{name}",
            forward_s=max((linear + attention) / rate, memory_s),
            input_gradient_s=max((linear + 2 * attention) / rate, memory_s),
            weight_gradient_s=max(linear / rate, memory_s),
            optimizer_s=2 * state / cluster.memory_bandwidth,
            parameter_bytes=n_parameters * model.parameter_bytes,
            gradient_bytes=n_parameters * model.gradient_bytes,
            optimizer_bytes=n_parameters * model.optimizer_bytes,
            buffer_bytes=0,
            activation_bytes=kept,
            output_bytes=message,
        )

    embedding = layer("embedding", (model.vocabulary + model.sequence) * d, 0, 0, 2 * message, 8 * tokens)
    blocks = [
        layer(
            f"block {i}",
            12 * d * d + 13 * d,
            24.0 * tokens * d * d,
            4.0 * tokens * model.sequence * d,
            message,
            34 * tokens * d,
        )
        for i in range(model.n_blocks)
    ]
    logits = tokens * model.vocabulary
    head = layer("head", model.vocabulary * d + 2 * d, 2.0 * logits * d, 0, 2.0 * logits, 4 * tokens * d + 6 * logits)
    return Profile(
        model=model.name,
        micro_batch=micro_batch,
        global_batch=global_batch,
        layers=(embedding, *blocks, head),
        ties=(),
        tie_bytes=(),
        loss_s=3 * 4 * logits / cluster.memory_bandwidth,
        op_overhead_s=cluster.op_overhead_s,
        commit_s=2 * (cluster.n_ranks - 1).bit_length() * cluster.inter_host.latency_s,
        runtime_bytes=round(cluster.runtime_gb * 1e9),
        cluster=Cluster(
            ranks_per_node=cluster.ranks_per_node,
            nodes_per_host=cluster.nodes_per_host,
            cores=cluster.cores,
            memory_bytes=round(cluster.memory_gb * 1e9),
            intra_host=cluster.intra_host,
            inter_host=cluster.inter_host,
            interface_bandwidth=cluster.interface_bandwidth,
        ),
        recovery=cluster.recovery,
    )


def _root() -> Path:
    import configs

    return Path(configs.__file__).parent


def _read(path_or_name: str, folder: str, kind: type[T]) -> T:
    path = Path(path_or_name)
    if path.suffix not in (".yaml", ".yml"):
        path = _root() / folder / f"{path_or_name}.yaml"
        if not path.exists():
            what = folder.rstrip("s") or "job"
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
            raise ProfileError(f"no {what} is called {path_or_name!r}", f"give a YAML file, or one of: {known}")
    help = f"compare it with those in {_root() / folder}"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}", "give the path of a YAML file") from None
    except msgspec.ValidationError as error:
        raise ProfileError(f"{path}: {field_first(str(error))}", help) from None
    except msgspec.DecodeError as error:
        raise ProfileError(f"{path}: not YAML: {error}", help) from None
