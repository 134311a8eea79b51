"""What a rank finds in its environment: torchrun's variables, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.options import RunOptions

AGENT_FD = "ODYSSEY_AGENT_FD"


def for_all(inherited: Mapping[str, str], n_ranks: int) -> dict[str, str]:
    """What the zygote and all ranks share: read by torch when it is imported."""
    variables = dict(inherited)
    if n_ranks > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every loss prints C++ stack traces of the survivors
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return variables


def for_rank(
    options: RunOptions, inherited: Mapping[str, str], rank: int, *, port: int, job_id: str, job_dir: Path, n_restarts: int
) -> dict[str, str]:
    """The whole environment of `rank`. Its agent socket's number is added by whoever starts it."""
    n_ranks = options.n_nodes * options.n_ranks_per_node
    node, local_rank = divmod(rank, options.n_ranks_per_node)
    variables = for_all(inherited, n_ranks)
    variables |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(options.n_ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(options.n_nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(n_ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(n_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(job_dir / f"rank{rank}-error.json"),
        "ODYSSEY_JOB_DIR": str(job_dir),
        "ODYSSEY_NODE": str(node),
    }
    return variables
