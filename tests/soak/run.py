"""Runs a case as `odyssey run` would, and says what became of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launcher.joblog.events import Event, GenerationStarted, PlanChosen
from tests.soak import verdict
from tests.soak.case import Case
from tests.soak.verdict import Broken

LIMIT_S = 150.0
"""Longer than anything that the agent waits for."""
MARKER = "ODYSSEY_SOAK_JOB"
"""In the environment of every process of a job."""
GOOD = ("exact", "stopped")


@dataclass
class Outcome:
    """`verdict`: `exact`, `stopped` (rightly, because of what was lost), or what went wrong, and `why`."""

    case: Case
    folder: Path
    verdict: str = "exact"
    why: str = ""
    struck: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    strategies: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD

    def __str__(self) -> str:
        case = self.case
        what = f"{case.layout} {case.strategy} {case.recipe.variant} {case.recipe.optimizer}, {len(self.struck)} faults"
        bad = "" if self.is_good else f": {self.why}; see {self.folder}"
        return f"seed {case.seed}: {self.verdict} ({what}, {self.seconds:.1f} s){bad}"


def run(case: Case, folder: Path) -> Outcome:
    """Run it and check everything that the promise says. `folder` is its own, and keeps all of it."""
    folder.mkdir(parents=True)
    (folder / "tmp").mkdir()
    outcome = Outcome(case, folder)
    started = time.monotonic()
    told: list[dict[str, Any]] = []
    try:
        code = _started(case, folder, told)
        outcome.verdict, log = verdict.judge(case, folder, code, told)
        _look_at(log, told, outcome)
    except Broken as broken:
        outcome.verdict, outcome.why = broken.verdict, broken.why
    outcome.struck = [each["struck"] for each in told]
    outcome.seconds = time.monotonic() - started
    return outcome


def _look_at(log: list[Event], told: list[dict[str, Any]], outcome: Outcome) -> None:
    outcome.marks = verdict.marks(log)
    if verdict.lost_unstruck(log, told):
        outcome.marks.add("lost without a strike")
    for event in log:
        if isinstance(event.body, PlanChosen):
            outcome.strategies.append(event.body.plan.strategy)
        elif isinstance(event.body, GenerationStarted) and event.body.total_s is not None:
            outcome.recovery_s.append(event.body.total_s)


def _started(case: Case, folder: Path, told: list[dict[str, Any]]) -> int:
    """The job's exit code; `told` gets what struck it. Raises Broken for a hang, a crash, and anything that is left behind."""
    case_file = folder / "case.json"
    case_file.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1))
    read_end, write_end = os.pipe()
    command = [sys.executable, str(Path(__file__).with_name("drive.py")), str(case_file), str(folder), str(write_end)]
    own = {
        "OMP_NUM_THREADS": "1",
        MARKER: str(folder),
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
    }
    with (folder / "output.txt").open("wb") as output:
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | own, pass_fds=[write_end]
        )
    os.close(write_end)
    ended: dict[str, Any] | None = None
    try:
        for message in _messages(read_end, time.monotonic() + LIMIT_S):
            if "freeze_agent" in message:
                _freeze(agent, message["freeze_agent"])
            elif "struck" in message:
                told.append(message)
            else:
                ended = message
        code = agent.wait(10)
    except (TimeoutError, subprocess.TimeoutExpired):
        _write_stacks(folder)
        raise Broken("hang", f"it has not ended after {LIMIT_S:g} s, after {[each['struck'] for each in told]}") from None
    finally:
        os.close(read_end)
        left = _end_all(folder)
        agent.wait()
        for fault in case.script_faults:
            if (folder / f"failed-{fault.step}-{fault.rank}").exists():
                told.append({"struck": fault.label, "rank": fault.rank, "innocent": False})
    if ended is None:
        raise Broken("crash", f"the agent ended with {code}: {(folder / 'output.txt').read_text()[-1500:]}")
    left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"_{agent.pid}_" in name]
    left += [str(path) for path in (folder / "tmp").iterdir()]
    if left or ended["children"] or ended["descriptors"]:
        raise Broken("left behind", f"{left} {ended['children']} {ended['descriptors']}")
    return int(ended["code"])


def _messages(fd: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Until the other end is closed. Raises TimeoutError."""
    data = b""
    while True:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        more = os.read(fd, 1 << 16)
        if not more:
            return
        *lines, data = (data + more).split(b"\n")
        yield from map(json.loads, lines)


def _freeze(agent: subprocess.Popen[bytes], seconds: float) -> None:
    agent.send_signal(signal.SIGSTOP)
    time.sleep(seconds)  # the fault itself
    agent.send_signal(signal.SIGCONT)


def _processes_of(folder: Path) -> list[int]:
    """Everything that runs, or stands still, with the job's mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARKER}={folder}".encode() in variables:
                found.append(int(name))
    return found


def _end_all(folder: Path) -> list[str]:
    """SIGKILL to whatever the job has left; says what it was."""
    left = []
    while pids := _processes_of(folder):
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                os.kill(pid, signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue
            left.append(f"{pid} {command[:80]}")
    return left


def _write_stacks(folder: Path) -> None:
    """Where everybody stands, for whoever looks into a hang."""
    py_spy = Path(sys.executable).with_name("py-spy")
    with (folder / "stacks.txt").open("wb") as file:
        for pid in _processes_of(folder):
            file.write(f"\n==== {pid}\n".encode())
            file.flush()
            subprocess.run(
                [py_spy, "dump", "--nonblocking", "--pid", str(pid)], stdout=file, stderr=file, check=False, timeout=20
            )
