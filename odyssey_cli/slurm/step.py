"""What SLURM tells a task of the step that it is part of: read from the environment, and from nothing else.

A step is what one `srun` runs: tasks on nodes. The batch script itself and an interactive shell (of salloc, or by `srun --pty`)
are no steps to start a job by, although their environment says so as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from odyssey.errors import UsageError
from odyssey_cli.slurm.hostlist import hosts

PORTS = range(24000, 32761)
"""The ports of endpoints: below those that the kernel hands out by itself, and apart from those at which leading agents listen
beside them (launcher/cluster/links/addresses.py)."""
_STEPS_APART, _RESTARTS_APART = 131, 7919
"""Ports of neighbours among jobs, and of a job's restarts, differ by these. The number of ports is a prime."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's own numbers for what is no step: the batch script, an interactive shell, …"""
_HELP = "give --rdzv-endpoint HOST:PORT and --nnodes, or --standalone"


class Step(msgspec.Struct, frozen=True):
    """One step, as one of its tasks sees it.

    `job`: as people know it, `1234` or `1234_7` of an array. `job_id`: its number. `restarts`: how often it was requeued.
    `hosts`: of its nodes, in their order. `node`, `local_task`: where this task is. `n_tasks_here`: tasks on this node.
    `n_gpus_here`: GPUs of the step on this node, None where SLURM does not say; `n_gpus_seen`: of these, those that this task
    may use. `launch_address`: of the host that `srun` runs on.
    """

    job: str
    job_id: int
    step: int
    restarts: int
    hosts: tuple[str, ...]
    node: int
    local_task: int
    n_tasks_here: int
    n_gpus_here: int | None
    n_gpus_seen: int | None
    launch_address: str

    @property
    def run_id(self) -> str:
        """`1234.0`, and `1234.0-restart1` after a requeue: logs of both lie beside each other."""
        return f"{self.job}.{self.step}" + (f"-restart{self.restarts}" if self.restarts else "")

    @property
    def port(self) -> int:
        """The endpoint's port: another one than those of other steps and jobs that may share a node."""
        number = self.job_id * _STEPS_APART + self.step + self.restarts * _RESTARTS_APART
        return PORTS[number % len(PORTS)]

    @property
    def is_agent(self) -> bool:
        """The first task of each node is its agent."""
        return self.local_task == 0


def is_step(environment: Mapping[str, str]) -> bool:
    """Whether a step of SLURM starts a job here."""
    if not all(environment.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")):
        return False
    if "SLURM_PTY_PORT" in environment or "TORCHELASTIC_RUN_ID" in environment:  # a shell; a rank, of us or of torchrun
        return False
    step = environment["SLURM_STEP_ID"]
    return not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def step_of(environment: Mapping[str, str]) -> Step:
    """The step that starts a job. Raises UsageError where what SLURM says cannot be understood."""
    try:
        nodes = hosts(environment["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise UsageError(f"SLURM_STEP_NODELIST: {error}", _HELP) from None
    node = _number(environment, "SLURM_NODEID")
    if node >= len(nodes):
        raise UsageError(f"SLURM_NODEID {node}: the step has {len(nodes)} nodes", _HELP)
    job_id = _number(environment, "SLURM_JOB_ID")
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return Step(
        job=f"{array}_{task}" if array and task else str(job_id),
        job_id=job_id,
        step=_number(environment, "SLURM_STEP_ID"),
        restarts=_number(environment, "SLURM_RESTART_COUNT", 0),
        hosts=nodes,
        node=node,
        local_task=_number(environment, "SLURM_LOCALID"),
        n_tasks_here=_tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        n_gpus_here=_gpus(environment),
        n_gpus_seen=_gpus_seen(environment),
        launch_address=environment.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise UsageError(f"{name}: expected a number, got {text[:200]!r}", _HELP)
    return int(text)


def _tasks_of(text: str, node: int) -> int:
    """How many tasks a node has, by `2(x3),1`: node after node."""
    passed = 0
    for part in text.split(","):
        if (found := re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part, re.ASCII)) is None:
            break
        passed += int(found[2] or 1)
        if node < passed:
            return int(found[1])
    raise UsageError(f"SLURM_STEP_TASKS_PER_NODE: expected tasks of {node + 1} nodes or more, got {text[:200]!r}", _HELP)


def _gpus(environment: Mapping[str, str]) -> int | None:
    """By SLURM_GPUS_ON_NODE, else as asked for: `8`, `a100:8`, `a100:4,h100:4`."""
    text = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE") or ""
    numbers = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(map(int, numbers)) or None if all(re.fullmatch(r"\d{1,4}", number, re.ASCII) for number in numbers) else None


def _gpus_seen(environment: Mapping[str, str]) -> int | None:
    """As many as are named."""
    listed = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("ROCR_VISIBLE_DEVICES")
    return len(listed.split(",")) if listed else None
