"""One run of a launcher with a benchmark job in it: start it, watch the marks of its ranks, kill one, end it all.

The ranks note each finished step with CLOCK_MONOTONIC in a file of their own (benchmarks/jobs/gpt.py), so that both
launchers are measured by the same means, from outside. Nothing of a trial outlives it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType

import msgspec
import psutil
from msgspec.structs import replace

from benchmarks.run import MEMORY
from launcher.joblog import reader
from launcher.joblog.events import Event
from odyssey.plan.plan import Plan, encode
from perfmodel.profile import profile as profiles

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "benchmarks" / "jobs"
QUIET_S = 1.0
N_NEAR = 5
"""Steps before a kill from which on a trial is looked at often."""
PROFILE_S = 180.0
"""For what takes some seconds."""


class Mark(msgspec.Struct, frozen=True):
    """A rank's process has finished `step` at `time` (CLOCK_MONOTONIC). `loss`: None where its script does not tell it."""

    pid: int
    rank: int
    step: int
    time: float
    loss: float | None = None


class FirstLine(msgspec.Struct, frozen=True):
    """A rank's process has done its imports at `time` (CLOCK_MONOTONIC)."""

    pid: int
    rank: int
    time: float


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL was sent to `rank`; the same moment on both clocks."""

    rank: int
    pid: int
    monotonic: float
    epoch: float


class TrialError(Exception):
    """The launcher ended or hung where it should have gone on; carries the end of its output."""


class Trial:
    """A launcher in a folder of its own. Use it as a context manager."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.marks_folder = folder / "marks"
        self.marks_folder.mkdir()
        self._output = (folder / "output").open("wb")
        self._known: dict[int, psutil.Process] = {}
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--marks", str(self.marks_folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._note_children()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._output.close()
        for child in self._known.values():
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass

    def marks(self) -> list[Mark]:
        """All marks so far, by time."""
        found = []
        for path in self.marks_folder.glob("*.marks"):
            data = path.read_text()
            for line in data[: data.rfind("\n") + 1].splitlines():
                rank, step, moment, *loss = line.split()
                found.append(Mark(int(path.stem), int(rank), int(step), float(moment), float(loss[0]) if loss else None))
        return sorted(found, key=lambda mark: mark.time)

    def first_lines(self) -> list[FirstLine]:
        """The first lines of all processes so far (benchmarks/jobs/first_line.py), by time."""
        found = []
        for path in self.marks_folder.glob("*.first"):
            if data := path.read_text():
                rank, moment = data.split()
                found.append(FirstLine(int(path.stem), int(rank), float(moment)))
        return sorted(found, key=lambda first: first.time)

    def memory_bytes(self) -> int:
        """The memory of the launcher and all below it, shared pages in parts (proportional set size)."""
        self._note_children()
        return sum(_proportional_bytes(pid) for pid in (self._process.pid, *self._known))

    def events(self) -> list[Event]:
        """The job's log so far; empty where there is none."""
        logs = list((self.folder / "logs").glob("*/events.jsonl"))
        return list(reader.events(logs[0])) if logs else []

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120.0, look_s: float = 0.1) -> None:
        """Look every `look_s`. Raises TrialError if the launcher ends first or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._process.poll() is not None:
                raise TrialError(f"the launcher ended with {self._process.returncode} before {what}\n{self.output_end()}")
            if time.monotonic() > deadline:
                raise TrialError(f"no {what} within {timeout_s:.0f} s\n{self.output_end()}")
            time.sleep(look_s)  # looking takes the measured job's own cores

    def wait_for_end(self, timeout_s: float) -> None:
        """Let the job come to its own end. Raises TrialError if that is not exit code 0."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TrialError(f"not at its end within {timeout_s:.0f} s\n{self.output_end()}") from None
        if code != 0:
            raise TrialError(f"the launcher ended with {code}\n{self.output_end()}")

    def ends_before(self, moment: float) -> bool:
        """Wait until then (CLOCK_MONOTONIC), or until the launcher's end."""
        try:
            self._process.wait(max(0.0, moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.wait_until(lambda: any(mark.step >= step for mark in self.marks()), f"step {step}", timeout_s)

    def kill(self, generator: random.Random, spared: int | None = None) -> Kill:
        """SIGKILL a rank drawn by `generator` at a moment drawn within a step; then leave the machine to the job a second.
        `spared`: a rank that is not drawn."""
        time.sleep(generator.random() * step_s(self.marks()))
        return self.kill_now(generator, spared)

    def kill_now(self, generator: random.Random, spared: int | None = None) -> Kill:
        """SIGKILL one of `living_ranks`, drawn by `generator`; then leave the machine to the job a second."""
        return self._kill(*generator.choice([(rank, pid) for rank, pid in self.living_ranks() if rank != spared]))

    def kill_behind(self, rank: int, step: int) -> Kill:
        """SIGKILL this rank as soon as it is seen to have finished `step`; then leave the machine to the job a second."""
        self.wait_for_step(max(0, step - N_NEAR))

        def pids() -> list[int]:
            return [mark.pid for mark in self.marks() if (mark.rank, mark.step) == (rank, step)]

        self.wait_until(lambda: bool(pids()), f"step {step} on rank {rank}", look_s=0.01)
        return self._kill(rank, pids()[-1])

    def living_ranks(self) -> list[tuple[int, int]]:
        """Those that have finished a step in the process that they have now, by number, with its pid."""
        self._note_children()
        newest = {mark.rank: mark.pid for mark in self.marks()}
        return sorted((rank, pid) for rank, pid in newest.items() if _lives(pid))

    def output(self) -> str:
        """What launcher and ranks have written so far."""
        return (self.folder / "output").read_text(errors="replace")

    def output_end(self) -> str:
        """The last 30 lines of it."""
        return "\n".join(self.output().splitlines()[-30:])

    def _kill(self, rank: int, pid: int) -> Kill:
        now = Kill(rank, pid, time.monotonic(), time.time())
        os.kill(pid, signal.SIGKILL)
        time.sleep(QUIET_S)
        return now

    def _note_children(self) -> None:
        """Remember what to end: ranks of a launcher that is killed may be left running."""
        try:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._known[child.pid] = child
        except psutil.NoSuchProcess:
            pass


def step_s(marks: Sequence[Mark], n_warm_up: int = 2) -> float:
    """Median time from mark to mark of the rank's process that has most of them, its first `n_warm_up` left out."""
    of_pid: dict[int, list[float]] = {}
    for mark in marks:
        of_pid.setdefault(mark.pid, []).append(mark.time)
    times = max(of_pid.values(), key=len)[n_warm_up:]
    return median(late - early for early, late in pairwise(times))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _proportional_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def watch_peak(pid: int) -> None:
    """Let the highest memory of a process, as `peak_bytes` tells it, begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most memory of a process since `watch_peak`: its proportional set size now, and how much less it has than at most."""
    fields = {
        line.split(":")[0]: line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "kB" in line
    }
    return _proportional_bytes(pid) + (int(fields["VmHWM"]) - int(fields["VmRSS"])) * 1024


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one trial, in memory where the system offers that. It ends with the benchmark, however that ends."""
    return tempfile.TemporaryDirectory(prefix="odyssey-bench-", dir=os.environ[MEMORY])


def odyssey(
    folder: Path, n_ranks: int, flags: Sequence[str], arguments: Sequence[str], script: str = "odyssey_gpt.py"
) -> Trial:
    """`odyssey run` with the benchmarks' model."""
    run = [sys.executable, "-m", "odyssey_cli", "run", "--nodes", str(n_ranks), "--log-dir", str(folder / "logs"), *flags]
    return Trial([*run, str(JOBS / script), *arguments], {"PYTHONPATH": str(ROOT)}, folder)


def profile_of_own_processors(folder: Path, n_ranks: int, script: Path, arguments: Sequence[str]) -> Path:
    """A profile of `script`, measured here and written to `folder`, but for one thing: each rank has a processor of its own."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "odyssey_cli", "profile", "--nodes", str(n_ranks), "--output", str(path)]
    command += ["--log-dir", str(folder / "logs-of-profile"), str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=PROFILE_S)
    profile = profiles.read(path)
    profiles.write(replace(profile, cluster=replace(profile.cluster, cores=None)), path)
    return path


def odyssey_with_plan(folder: Path, n_ranks: int, plan: Plan, arguments: Sequence[str]) -> Trial:
    """The same, starting with this plan."""
    file = folder / "plan.json"
    file.write_bytes(encode(plan))
    given = [sys.executable, "-m", "benchmarks.with_plan", str(file)]
    run = [*given, "run", "--protect", "none", "--nodes", str(n_ranks)]  # it keeps what it says, and no more
    command = [*run, "--log-dir", str(folder / "logs"), str(JOBS / "odyssey_gpt.py"), *arguments]
    return Trial(command, {"PYTHONPATH": str(ROOT)}, folder)


def torchrun(folder: Path, n_ranks: int, script: str, flags: Sequence[str], arguments: Sequence[str]) -> Trial:
    """torchrun with `script` of benchmarks/jobs.

    Without the variable restarts never succeed: ranks would read addresses of dead ones from the shared store.
    """
    return _torchrun(folder, n_ranks, script, flags, arguments, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def torchrun_as_it_comes(folder: Path, n_ranks: int, script: str, flags: Sequence[str], arguments: Sequence[str]) -> Trial:
    """torchrun with `script` of benchmarks/jobs, and nothing else done for it."""
    return _torchrun(folder, n_ranks, script, flags, arguments, {})


def odyssey_as_torchrun(folder: Path, n_ranks: int, script: str, flags: Sequence[str], arguments: Sequence[str]) -> Trial:
    """`odyssey run` with `script` of benchmarks/jobs, one that knows nothing of Odyssey."""
    run = [sys.executable, "-m", "odyssey_cli", "run", "--no-display", "--nproc-per-node", str(n_ranks)]
    command = [*run, "--log-dir", str(folder / "logs"), *flags, str(JOBS / script), *arguments]
    return Trial(command, {"PYTHONPATH": str(ROOT)}, folder)


def _torchrun(
    folder: Path, n_ranks: int, script: str, flags: Sequence[str], arguments: Sequence[str], environment: dict[str, str]
) -> Trial:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), *flags]
    return Trial([*run, str(JOBS / script), *arguments], {"PYTHONPATH": str(ROOT), **environment}, folder)


PLAIN_LAUNCHERS = {"odyssey": odyssey_as_torchrun, "torchrun": torchrun, "torchrun as it comes": torchrun_as_it_comes}
"""By name: whatever runs a script that was written for torchrun."""
