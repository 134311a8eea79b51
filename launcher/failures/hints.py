"""What to do about a failure: one line that fits its kind, for the words `help:` at the end of a failed job."""

from __future__ import annotations

import re
import signal

from launcher.failures.root_cause import FailureKind, RankEnd


def advice(cause: RankEnd) -> str:
    """Empty where the failure says it all, as most exceptions do."""
    if cause.help:
        return cause.help
    if cause.has_left:
        return "let all ranks come to the end of the script together: look for an exit, a return or a shorter loop on that rank"
    if cause.kind is FailureKind.SIGNAL and cause.status is not None:
        return _SIGNALS.get(-cause.status, "")
    if cause.kind is FailureKind.CRASH and cause.status is not None:
        return _CRASHES.get(-cause.status, "")
    if cause.kind is FailureKind.EXIT and cause.status is not None:
        said = next((help for pattern, help in _WORDS if pattern.search(cause.diagnostics.last_lines)), "")
        return said or _EXIT_CODES.get(cause.status, "see the last lines that the rank wrote")
    if cause.kind in (FailureKind.EXCEPTION, FailureKind.COMMUNICATION):
        said = next((help for pattern, help in _WORDS if pattern.search(cause.error)), "")
        if not said and cause.kind is FailureKind.COMMUNICATION:
            return _NETWORK
        return said
    return _KINDS.get(cause.kind, "")


def in_words(end: RankEnd) -> str:
    """Its text, and what a signal means: `SIGSEGV: segmentation fault`."""
    if end.has_left:
        return "exit code 0 while others still needed it"
    words = (
        _MEANINGS.get(-end.status, "") if end.status is not None and end.kind in (FailureKind.SIGNAL, FailureKind.CRASH) else ""
    )
    return f"{end.text}: {words}" if words and not end.error else end.text


_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "its terminal or session has ended",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted by its own native code",
    signal.SIGBUS: "bus error",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "arithmetic error",
    signal.SIGXCPU: "limit of CPU time",
    signal.SIGPIPE: "wrote to a closed pipe",
}
_NETWORK = (
    "no rank is known to have failed before: check the network between the hosts; TORCH_DISTRIBUTED_DEBUG=DETAIL and "
    "NCCL_DEBUG=INFO say more"
)
_MEMORY = "use less memory (smaller batches, fewer data loader workers), or raise the limit of the job or the container"
_KINDS = {
    FailureKind.OUT_OF_MEMORY: _MEMORY,
    FailureKind.HANG: "see where the ranks were, in the lines above; a collective that not all ranks enter waits for ever",
    FailureKind.AGENT: "see the output of that agent, and whether its host is well",
    FailureKind.DRILL: "this loss was ordered with --drill; --max-restarts lets the job go on",
}
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "somebody or something killed it: a scheduler, a limit, or the host's out-of-memory killer (see `dmesg`)",
    signal.SIGTERM: "somebody asked it to end: a scheduler, a limit of time, or a user",
    signal.SIGXCPU: "its limit of CPU time is used up, see `ulimit -t`",
    signal.SIGPIPE: "whoever read its output is gone",
}
_CRASHES: dict[int, str] = {
    signal.SIGSEGV: "native code crashed: what the rank wrote last says where; do extensions fit this torch?",
    signal.SIGABRT: "native code gave up: its reason is in what the rank wrote last; CUDA_LAUNCH_BLOCKING=1 shows the place",
    signal.SIGBUS: "memory behind a file is gone, most often because shared memory is full: see `df /dev/shm`, --shm-size",
    signal.SIGILL: "native code for another processor: were all extensions built on a machine like this one?",
    signal.SIGFPE: "an integer was divided by zero in native code: what the rank wrote last says where",
}
_EXIT_CODES = {
    2: "most often an argument that the script does not know: see its last lines",
    126: "the program cannot be executed: check its permissions",
    127: "a command was not found: check PATH in the environment of the ranks",
    137: "a process below the rank was killed by SIGKILL, perhaps for want of memory: see `dmesg`",
    139: "a process below the rank crashed with SIGSEGV",
    143: "a process below the rank was ended by SIGTERM",
}
_WORDS = tuple(
    (re.compile(pattern), help)
    for pattern, help in (
        (r"CUDA out of memory|OutOfMemoryError", "the GPU's memory is full: use a smaller batch or activation checkpointing; "
         "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragmentation"),
        (r"EADDRINUSE|[Aa]ddress already in use", "another process listens at this port: `ss -ltnp` says which; without "
         "--master-port a free one is taken"),
        (r"ModuleNotFoundError|ImportError", "is this the right environment? the ranks run with the launcher's interpreter, "
         "or the one that PYTHON_EXEC names"),
        (r"DataLoader worker .*(killed|exited)", "a data loader worker was killed, most often for want of memory or of shared "
         "memory: see `df /dev/shm`, or use fewer workers"),
        (r"CUDA error: invalid device ordinal", "there are more ranks than GPUs on this host: lower --nproc-per-node"),
        (r"No space left on device", "a disk is full, or shared memory: see `df`, `df /dev/shm`"),
        (r"Too many open files", "raise the limit of open files with `ulimit -n`"),
        (r"Watchdog caught collective operation timeout|[Tt]imed out waiting", "one rank did not come to a collective: was it "
         "slow, or did it take another branch? --stall-timeout shows where all ranks are"),
        (r"^MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate", _MEMORY),
    )
)  # fmt: skip
