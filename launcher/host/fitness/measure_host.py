"""Measures this host. Imports torch: called in a rank, or in a child of an agent, never in the agent."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.host import proc
from launcher.host.fitness.findings import MAX_DEVICES, Device, HostReport, Versions, name
from odyssey import control_group

if TYPE_CHECKING:
    import torch

N_REPEATS = 7
"""So often it is measured, and the median counts: a single one may meet whatever else the host does."""
N_WARM_UP = 2
SIZE, GPU_SIZE = 1024, 4096
"""Rows of the matrices for speed: some 30 ms on one processor, a few on a GPU."""
DIGEST_SIZE = 384
"""Rows of those for the digest, which each processor multiplies: a millisecond or two."""
SEED = 20260101


def measure_host(n_ranks: int, log_dir: Path) -> HostReport:
    """This host, for so many ranks, and for logs in this folder. Takes a few seconds. What is wrong is in the report."""
    import psutil
    import torch

    memory, allowed = psutil.virtual_memory(), control_group.allowance()
    memory_bytes, n_usable = control_group.memory_bytes(), len(os.sched_getaffinity(0))
    available_bytes = memory.available if allowed.free_bytes is None else min(memory.available, allowed.free_bytes)
    disk_bytes, disk_problem = _disk(log_dir)
    n_gpus = min(torch.cuda.device_count(), MAX_DEVICES) if torch.cuda.is_available() else 0
    return HostReport(
        host=name(socket.gethostname()),
        n_ranks=n_ranks,
        machine=name(proc.boot_id()),
        n_processors=n_usable if allowed.processors is None else min(n_usable, allowed.processors),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        disk_bytes=disk_bytes,
        disk_problem=name(disk_problem),
        own_addresses=_own_addresses(),
        open_files=min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 64), 1 << 60),  # -1 is no limit
        shared_bytes=_shared_bytes(),
        versions=Versions(platform.python_version(), name(torch.__version__), name(torch.version.cuda or "")),
        devices=tuple(_gpu(i) for i in range(n_gpus)) or (_processors(memory_bytes, available_bytes, allowed.processors),),
        complaints=tuple(map(name, _complaints(allowed.processors, min(n_ranks, n_usable)))),
    )


def _complaints(allowed: float | None, n_needed: int) -> list[str]:
    """`n_needed`: processors, to have one for each rank."""
    if allowed is None or allowed >= n_needed:
        return []
    return [f"its control group leaves it {allowed:.2g} processors: give the container or job more, or start fewer ranks"]


def _own_addresses() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(its[0]) for *_, its in found))[:64]


def _disk(log_dir: Path) -> tuple[int | None, str]:
    """Bytes free where logs go, and why nothing can be written there."""
    if str(log_dir) == os.devnull:
        return None, ""
    present = log_dir.absolute()
    while not present.exists():
        present = present.parent
    try:
        with tempfile.TemporaryFile(dir=present) as file:
            file.write(b"odyssey" * 1024)
            file.flush()
            os.fsync(file.fileno())
        return shutil.disk_usage(present).free, ""
    except OSError as error:
        return 0, f"{present}: {error.strerror or error}"


def _shared_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


# -- devices -----------------------------------------------------------------------------------------------------------


def _processors(memory_bytes: int, free_bytes: int, allowed: float | None) -> Device:
    import torch

    model = name(f"{proc.processor_model() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})")
    n_threads = torch.get_num_threads()
    try:
        digest, odd = _digest_of_processors()
        flops = _flops(torch.device("cpu"), SIZE, lambda: None)
        if allowed is not None and allowed < n_threads:  # a group is slowed down only when it has used its part of a while
            flops *= allowed / n_threads
    except Exception as error:  # whatever torch raises says that this host does not compute
        return Device("cpu", model, n_threads, memory_bytes, free_bytes, problem=name(error))
    return Device("cpu", model, n_threads, memory_bytes, free_bytes, flops, digest, odd)


def _digest_of_processors() -> tuple[str, str]:
    """By one thread, on each of the processors in turn: one that is faulty may give wrong results and nothing else."""
    import torch

    usable, n_threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[int, str] = {}
    try:
        a, b = _matrices(DIGEST_SIZE, torch.device("cpu"))
        for processor in sorted(usable):
            os.sched_setaffinity(0, {processor})
            found[processor] = _digest(torch.matmul(a, b))
    finally:
        os.sched_setaffinity(0, usable)
        torch.set_num_threads(n_threads)
    digest = Counter(found.values()).most_common(1)[0][0]
    odd = [str(processor) for processor, its in found.items() if its != digest]
    return digest, name(f"processor {', '.join(odd)}") if odd else ""


def _gpu(index: int) -> Device:
    import torch

    device, model, free, total = torch.device("cuda", index), "", 0, 0
    try:
        model = name(torch.cuda.get_device_name(index))
        free, total = torch.cuda.mem_get_info(index)
        a, b = _matrices(DIGEST_SIZE, device)
        digests = [_digest(torch.matmul(a, b)) for _ in range(N_REPEATS)]
        digest = Counter(digests).most_common(1)[0][0]
        n_odd = len(digests) - digests.count(digest)
        flops = _flops(device, GPU_SIZE, lambda: torch.cuda.synchronize(index))
    except Exception as error:  # of CUDA, or a lack of memory: this device does not compute
        return Device(str(device), model, 1, total, free, problem=name(error))
    return Device(str(device), model, 1, total, free, flops, digest, f"{n_odd} of {len(digests)} times" if n_odd else "")


def _matrices(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return tuple(torch.rand(size, size, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def _digest(product: torch.Tensor) -> str:
    return hashlib.blake2b(product.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _flops(device: torch.device, size: int, wait: Callable[[], None]) -> float:
    import torch

    a, b = _matrices(size, device)
    took: list[float] = []
    for _ in range(N_WARM_UP + N_REPEATS):
        wait()
        began = time.perf_counter()
        torch.matmul(a, b)
        wait()
        took.append(time.perf_counter() - began)
    return 2.0 * size**3 / statistics.median(took[N_WARM_UP:])
