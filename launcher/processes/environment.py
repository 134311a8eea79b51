"""What a rank finds in its environment: torchrun's variables, and ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes.store import StoreAddress
from odyssey.codec import for_people
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey.runtime import nccl

_NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
AGENT_FD = "ODYSSEY_AGENT_FD"
"""See odyssey/protocol/link.py."""
ADDRESS = "ODYSSEY_ADDRESS"
"""See odyssey/runtime/groups.py."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What Gloo and NCCL would otherwise guess, by the host's name or the order of its interfaces."""
MAX_FAILURE = 4096
"""Characters of the last failure: what scripts raise may be of any length, and hold what no variable can."""


def for_all(inherited: Mapping[str, str], n_ranks: int) -> dict[str, str]:
    """What all ranks share."""
    # AGENT_FD and ADDRESS would be those of a rank which is a launcher itself
    variables = {name: value for name, value in inherited.items() if name not in (ADDRESS, AGENT_FD)}
    if n_ranks > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    variables.setdefault("PYTHONFAULTHANDLER", "1")  # a rank whose native code crashes says where
    if _NCCL_HANDLING not in variables:  # a Job's ranks change it: it is not the user's
        variables |= {_NCCL_HANDLING: "1", nccl.OF_TORCHRUN: _NCCL_HANDLING}
    return variables


def nccl_problem(inherited: Mapping[str, str]) -> str:
    """What keeps a Job's ranks from outliving a loss, in what a user has set for NCCL; empty if nothing does."""
    of_torchrun = inherited.get(nccl.OF_TORCHRUN, "").split(",")
    wrong = [
        f"{name}={inherited[name]}"
        for name, value in nccl.OUTLIVING.items()
        if name not in of_torchrun and inherited.get(name, value) != value
    ]
    if not wrong:
        return ""
    return f"with {' '.join(wrong)} a loss may end other ranks, or have them train on what has not arrived: leave it unset"


def for_zygote(inherited: Mapping[str, str], n_ranks: int, *, for_jobs: bool = False) -> dict[str, str]:
    """What torch reads when it is imported."""
    # Else every loss prints C++ stack traces of the survivors: of NCCL, which a Job outlives, as errors. What ranks start
    # themselves does not inherit it.
    return {"TORCH_CPP_LOG_LEVEL": "FATAL" if for_jobs else "ERROR"} | for_all(inherited, n_ranks)


def for_rank(
    options: RunOptions,
    inherited: Mapping[str, str],
    assignment: RankAssignment,
    *,
    master_addr: str,
    master_port: int,
    run_id: str,
    job_dir: Path | None,
    error_file: str,
    timer_file: str = "",
) -> dict[str, str]:
    """The whole environment of a rank. Its agent socket's number is added by whoever starts it."""
    return for_all(inherited, options.n_nodes * options.n_ranks_per_node) | {
        "RANK": str(assignment.rank),
        "LOCAL_RANK": "0" if options.virtual_local_rank else str(assignment.local_rank),
        "WORLD_SIZE": str(assignment.n_ranks),
        "LOCAL_WORLD_SIZE": str(assignment.n_local_ranks),
        "GROUP_RANK": "0" if options.n_nodes > 1 else str(assignment.node),  # nodes of one agent are one group
        "GROUP_WORLD_SIZE": "1" if options.n_nodes > 1 else str(assignment.n_nodes),
        "ROLE_RANK": str(assignment.role_rank),
        "ROLE_WORLD_SIZE": str(assignment.n_role_ranks),
        "ROLE_NAME": options.role,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.n_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(assignment.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(options.ending_signals),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "ODYSSEY_JOB_DIR": str(job_dir or ""),
        "ODYSSEY_ON_LOSS": options.on_loss,
        "ODYSSEY_NODE": str(assignment.node),
        **({"TORCHELASTIC_TIMER_FILE": timer_file} if timer_file else {}),
        **_device(options, inherited, assignment),
        # Restarts that were counted, as TORCHELASTIC_RESTART_COUNT; a new attempt may also come of a changed membership.
        "ODYSSEY_RESTART_COUNT": str(assignment.n_restarts),
        "ODYSSEY_MAX_RESTARTS": str(assignment.max_restarts),
        "ODYSSEY_ATTEMPT": str(assignment.attempt),
        # One line, such as `rank 2 was lost (SIGKILL)`; empty in the first attempt.
        "ODYSSEY_LAST_FAILURE": for_people(assignment.last_failure, MAX_FAILURE),
    }


class _TimerFile:
    """The pipe of torch.distributed.elastic.timer, which a process of this agent makes. `path`: empty where nobody asks for it.

    In a folder that is the agent's alone: who can write to the pipe can have processes of this user ended."""

    def __init__(self, inherited: Mapping[str, str], job_dir: Path | None) -> None:
        """Raises UsageError."""
        self._folder: Path | None = None
        self.path = ""
        if inherited.get("TORCHELASTIC_ENABLE_FILE_TIMER") != "1":
            return
        self.path = inherited.get("TORCHELASTIC_TIMER_FILE", "")
        if not self.path:
            if job_dir is None:
                job_dir = self._folder = _private_folder()
            self.path = str(job_dir / f"timers-{os.getpid()}")

    def remove(self) -> None:
        """An error is not told, as the job is over, whatever has become of its folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # what cleans such folders may have been faster
        elif self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="odyssey-timers-"))
    except OSError as error:
        raise UsageError(
            f"there is no folder for the pipe of timers: {error.strerror}", "give --log-dir, or set TMPDIR"
        ) from None


class Environments:
    """Those of all ranks of one agent, which meet at `store`. `defaults`: what they have unless the user sets it."""

    def __init__(
        self, options: RunOptions, folder: JobFolder, store: StoreAddress, defaults: Mapping[str, str] | None = None
    ) -> None:
        self._options = options
        self._defaults = defaults or {}
        self.store = store
        self._job_dir = folder.path
        self.run_id = folder.run_id
        """TORCHELASTIC_RUN_ID."""
        self.address = ""
        """By which the ranks of the job reach this host, as far as it is known."""
        self.interface = ""
        """By which the hosts of the job reach each other; empty where there is one, or where it is not known."""
        self._timer_file = _TimerFile(os.environ, folder.path)

    @property
    def timer_file(self) -> str:
        """Empty where there are no timers to watch."""
        return self._timer_file.path

    def of(self, assignment: RankAssignment) -> dict[str, str]:
        """Give the variables of a rank that starts now, but for where it writes."""
        return (
            dict(self._defaults)
            | for_rank(
                self._options,
                os.environ,
                assignment,
                master_addr=self.store.host,
                master_port=self.store.port,
                run_id=self.run_id,
                job_dir=self._job_dir,
                timer_file=self.timer_file,
                error_file="",
            )
            | self._how_reached()
        )

    @property
    def tells_address(self) -> bool:
        """What the user says of interfaces counts."""
        return bool(self.address) and "GLOO_SOCKET_IFNAME" not in os.environ

    def _how_reached(self) -> dict[str, str]:
        given = {name: self.interface for name in INTERFACES if self.interface and name not in os.environ}
        return given | ({ADDRESS: self.address} if self.tells_address else {})

    def close(self) -> None:
        """What was made for the ranks to find is removed."""
        self._timer_file.remove()


def of_ranks(options: RunOptions) -> frozenset[str]:
    """Names of the variables that differ between ranks, or between starts of a rank."""
    assignment = RankAssignment(Rank(0), 0, 0, 1, 1, 1, 0, 1)
    of_one = for_rank(options, {}, assignment, master_addr="", master_port=0, run_id="", job_dir=None, error_file="")
    return frozenset(of_one) - frozenset(for_all({}, 2)) | {AGENT_FD}


def _device(options: RunOptions, inherited: Mapping[str, str], assignment: RankAssignment) -> dict[str, str]:
    """With a virtual local rank: the one device that the rank sees, as its device 0.

    Where both variables are set ROCm heeds HIP_VISIBLE_DEVICES: then it says which there are, and must not say more.
    """
    if not options.virtual_local_rank:
        return {}
    hip = inherited.get("HIP_VISIBLE_DEVICES")
    name, visible = ("HIP_VISIBLE_DEVICES", hip) if hip else ("CUDA_VISIBLE_DEVICES", inherited.get("CUDA_VISIBLE_DEVICES"))
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(assignment.local_rank)}
    devices = visible.split(",")
    if assignment.local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: no device for local rank {assignment.local_rank} in {name}={visible}",
            "start no more ranks here than it names devices",
        )
    device = devices[assignment.local_rank].strip()
    return {"CUDA_VISIBLE_DEVICES": device} | ({name: device} if hip else {})
