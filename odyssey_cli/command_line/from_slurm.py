"""What a step of SLURM says stands in for options of `odyssey run` that are not given.

Only where the user has said nothing of how agents meet: who gives an endpoint has done it all, as torchrun's recipes do.
"""

from __future__ import annotations

from dataclasses import replace

from odyssey.errors import UsageError
from odyssey_cli.command_line.options import OPTIONS, Command, Group
from odyssey_cli.command_line.parser import Given, Value
from odyssey_cli.command_line.rendezvous import agents
from odyssey_cli.slurm.address import first_host
from odyssey_cli.slurm.step import Step, is_step, step_of

SIGNALS = ("SIGUSR1", "SIGUSR2")
"""What `scancel --signal` and `sbatch --signal` are used with, for scripts that know them: no launcher is to end of them."""
_ENDPOINTS = ("rdzv_endpoint", "master_addr", "standalone")


def filled(given: Given) -> tuple[Given, Step | None]:
    """With what SLURM says, and the step; as given, and None, where that does not apply. Raises UsageError."""
    if not is_step(given.environment):
        return given, None
    signals = _passed_on(given)
    if given.command not in (Command.RUN, Command.CHECK) or _says_how_to_meet(given):
        return replace(given, elsewhere=signals), None
    step = step_of(given.environment)
    least, most = agents(given) if given.value("nnodes").is_given else (len(step.hosts), len(step.hosts))
    if least > len(step.hosts):
        nnodes = given.value("nnodes")
        raise UsageError(
            f"{nnodes.name} {nnodes.text}: step {step.run_id} has {len(step.hosts)} nodes",
            f"give {len(step.hosts)} or less, or more nodes to srun",
        )
    given_port = given.value("master_port")
    port = given_port.text if given_port.is_given else "0" if most == 1 else str(step.port)
    host = "127.0.0.1" if most == 1 else first_host(step)
    found = signals | {
        "nnodes": Value(str(len(step.hosts)), "SLURM_STEP_NUM_NODES", True),
        "node_rank": Value(str(step.node), "SLURM_NODEID", True),
        "rdzv_backend": Value("c10d", "SLURM_STEP_ID", True),
        "rdzv_endpoint": Value(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "SLURM_STEP_NODELIST", True),
        "rdzv_id": Value(step.run_id, "SLURM_JOB_ID", True),
    }
    if not given.value("nproc_per_node").is_given:
        found["nproc_per_node"] = _ranks(step)
    return replace(given, elsewhere=found), step


def _passed_on(given: Given) -> dict[str, Value]:
    """Signals that SLURM sends to every process of a step, where the user has not said that they are to end the job."""
    ending = [name.strip() for name in given.value("signals_to_handle").text.split(",")]
    names = [name for name in SIGNALS if name not in ending]
    return {"forward_signals": Value(",".join(names), "SLURM_STEP_ID", True)} if names else {}


def _says_how_to_meet(given: Given) -> bool:
    """By an option, or by any of torchrun's variables, which another system has set."""
    of_meeting = [option.dest for option in OPTIONS if option.group is Group.MEETING or option.dest == "nnodes"]
    return any(dest in given.texts for dest in _ENDPOINTS) or any(
        f"PET_{dest.upper()}" in given.environment for dest in of_meeting
    )


def _ranks(step: Step) -> Value:
    """One for each GPU of the node. Without GPUs, one for each task that was asked for."""
    n_gpus, n_seen = step.n_gpus_here, step.n_gpus_seen
    if n_gpus is None:
        return Value(str(step.n_tasks_here), "SLURM_STEP_TASKS_PER_NODE", True)
    if n_seen is None or n_seen >= n_gpus:
        return Value(str(n_gpus), "SLURM_GPUS_ON_NODE", True)
    if step.n_tasks_here == 1:
        return Value(str(n_seen), "CUDA_VISIBLE_DEVICES", True)
    raise UsageError(
        f"this task may use {n_seen} of the {n_gpus} GPUs of its node, and is the agent for all of them",
        "give srun --ntasks-per-node=1, or --gpu-bind=none and no --gpus-per-task",
    )


def told(given: Given, step: Step) -> str:
    """One line for people: the options that stand for what was taken from SLURM."""
    taken = [
        f"--{dest.replace('_', '-')} {value.text}" for dest, value in given.elsewhere.items() if given.value(dest) == value
    ]
    return f"from SLURM, step {step.run_id}: {' '.join(taken)}"
