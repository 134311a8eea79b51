"""Manifests of configs/kubernetes: of fields that Kubernetes and Kubeflow know, and with a command line that we read.

The types below are the part of their schemas (batch/v1, v1, kubeflow.org/v1) that our manifests use; a field of no such name is
refused, as their API servers refuse it.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

from launcher.options import Rendezvous, RunOptions
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.request import read
from tests import ROOT

FOLDER = ROOT / "configs" / "kubernetes"
SCRIPT = str(ROOT / "tests" / "models.py")
Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Object(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class Metadata(Object, kw_only=True):
    name: Label | None = None
    labels: dict[str, str] = {}


class ServicePort(Object, kw_only=True):
    name: Label
    port: Port


class ServiceSpec(Object, kw_only=True):
    cluster_ip: str = msgspec.field(name="clusterIP")
    publish_not_ready_addresses: bool
    selector: dict[str, str]
    ports: list[ServicePort]


class Service(Object, kw_only=True):
    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class Resources(Object, kw_only=True):
    limits: dict[str, int | str]


class Mount(Object, kw_only=True):
    name: Label
    mount_path: Annotated[str, msgspec.Meta(pattern="^/")]


class Container(Object, kw_only=True):
    name: Label
    image: str
    command: list[str]
    args: list[str] = []
    resources: Resources
    volume_mounts: list[Mount]


class EmptyDir(Object, kw_only=True):
    medium: Literal["", "Memory"] = ""


class Volume(Object, kw_only=True):
    name: Label
    empty_dir: EmptyDir


class PodSpec(Object, kw_only=True):
    subdomain: Label | None = None
    restart_policy: Literal["Never", "OnFailure"] | None = None
    termination_grace_period_seconds: Natural
    containers: Annotated[list[Container], msgspec.Meta(min_length=1)]
    volumes: list[Volume]


class PodTemplate(Object, kw_only=True):
    metadata: Metadata | None = None
    spec: PodSpec


class JobSpec(Object, kw_only=True):
    completion_mode: Literal["Indexed"]
    completions: Positive
    parallelism: Positive
    backoff_limit: Natural
    template: PodTemplate


class Job(Object, kw_only=True):
    api_version: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class ElasticPolicy(Object, kw_only=True):
    min_replicas: Positive
    max_replicas: Positive
    rdzv_backend: Literal["c10d"]
    max_restarts: Natural


class ReplicaSpec(Object, kw_only=True):
    replicas: Positive
    restart_policy: Literal["OnFailure", "Never", "Always", "ExitCode"]
    template: PodTemplate


class PyTorchJobSpec(Object, kw_only=True):
    nproc_per_node: str
    elastic_policy: ElasticPolicy
    pytorch_replica_specs: dict[Literal["Master", "Worker"], ReplicaSpec]


class PyTorchJob(Object, kw_only=True):
    api_version: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: PyTorchJobSpec


def documents(name: str) -> list[object]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def options(words: list[str], environment: dict[str, str]) -> RunOptions:
    """The options of `odyssey run …`, on a host with a processor for a GPU."""
    text = [SCRIPT if word == "train.py" else "1" if word == "gpu" else "logs" if word == "/logs" else word for word in words]
    assert text[:2] == ["odyssey", "run"]
    return read(text[2:], environment, Command.RUN).options


def volumes_fit(pod: PodSpec) -> bool:
    return {mount.name for one in pod.containers for mount in one.volume_mounts} == {volume.name for volume in pod.volumes}


def test_all_manifests_are_checked_here() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"indexed-job.yaml", "pytorchjob.yaml"}


@pytest.mark.parametrize("index", [0, 3])
def test_pods_of_an_indexed_job_meet_at_the_first(index: int) -> None:
    service, job = (
        msgspec.convert(found, kind) for found, kind in zip(documents("indexed-job.yaml"), (Service, Job), strict=True)
    )
    pod = job.spec.template.spec
    assert job.spec.template.metadata is not None
    assert service.spec.selector.items() <= job.spec.template.metadata.labels.items()
    assert pod.subdomain == service.metadata.name and service.spec.cluster_ip == "None" and volumes_fit(pod)
    (container,) = pod.containers
    (line,) = container.args
    words = [word.replace("$JOB_COMPLETION_INDEX", str(index)) for word in shlex.split(line)]
    assert words[0] == "exec"

    found = options(words[1:], {})

    assert (found.rendezvous, found.min_agents, found.max_agents, found.node_rank) == (Rendezvous.C10D, 2, 4, index)
    assert found.max_agents == job.spec.completions == job.spec.parallelism
    # Kubernetes calls the pod of an index <job>-<index>.<subdomain>
    assert found.master_addr == f"{job.metadata.name}-0.{pod.subdomain}"
    assert found.master_port == service.spec.ports[0].port


def test_a_pytorchjob_is_told_all_by_variables() -> None:
    (found,) = documents("pytorchjob.yaml")
    job = msgspec.convert(found, PyTorchJob)
    worker = job.spec.pytorch_replica_specs["Worker"]
    policy = job.spec.elastic_policy
    assert policy.min_replicas <= worker.replicas <= policy.max_replicas and volumes_fit(worker.template.spec)
    (container,) = worker.template.spec.containers
    assert container.name == "pytorch", "the operator puts its variables into the container of this name"
    variables = {
        "PET_RDZV_BACKEND": policy.rdzv_backend,
        "PET_RDZV_ENDPOINT": "train-worker-0:23456",
        "PET_RDZV_ID": "train",
        "PET_NNODES": f"{policy.min_replicas}:{policy.max_replicas}",
        "PET_NPROC_PER_NODE": job.spec.nproc_per_node,
        "PET_MAX_RESTARTS": str(policy.max_restarts),
    }
    got = options(container.command, variables)
    assert (got.rendezvous, got.min_agents, got.max_agents, got.run_id) == (Rendezvous.C10D, 2, 4, "train")
    assert (got.master_addr, got.master_port, got.n_ranks_per_node, got.max_restarts) == ("train-worker-0", 23456, 8, 12)


def test_a_trainjob_without_elasticity_is_static() -> None:
    """As Kubeflow's Trainer sets them."""
    variables = {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
    }
    got = options(["odyssey", "run", "train.py"], variables)
    assert (got.rendezvous, got.max_agents, got.node_rank) == (Rendezvous.STATIC, 4, 2)
    assert (got.master_addr, got.master_port, got.n_ranks_per_node) == ("train-node-0-0.train", 29400, 8)
