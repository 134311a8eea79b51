"""One start of a case's job: its agents as processes, what is done to them from outside, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.joblog import reader
from launcher.joblog.events import Event, JobStarted, Note
from tests import ROOT
from tests.descendants import END_S, Descendants, describe
from tests.launchers import free_port
from tests.soak import strangers
from tests.soak.case import Case, logs_of

SILENT_S = 150.0
"""Longer than anything that the agents wait for, their join timeout at most twice: a job whose logs tell nothing for that long
hangs, but for a slow script."""
LIMIT_S = 1500.0
"""For a whole job, on the busiest machine."""
LOOK_EVERY_S = 2.0
"""Between two looks at the logs."""
GRACE_S = 20.0
"""For what a killed agent has left to end: its reaper sees to that."""


class Broken(Exception):
    """The promise is: `verdict` says how, in a word or two."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(f"{verdict}: {why}")
        self.verdict, self.why = verdict, why


class Start:
    """The `number`th. `struck`: what has come true; `ended`: what agents said at their end; `codes`: their exit codes."""

    def __init__(self, case: Case, folder: Path, number: int) -> None:
        self.case = case
        self.folder = folder
        self.number = number
        self.struck: list[dict[str, Any]] = []
        self.ended: dict[int, dict[str, Any]] = {}
        self.codes: dict[int, int] = {}
        self.is_killed = False
        """As a whole."""
        self._agents: list[subprocess.Popen[bytes]] = []
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._below = Descendants()
        self._port = free_port() if case.agents is not None else 0
        self._came_true = self._own_faults()
        """Before this start."""

    @property
    def hit(self) -> set[int]:
        """Numbers of the agents that something has struck; they may end as they like."""
        pids = {each["agent"] for each in self.struck if each["agent"] is not None}
        return {i for i, agent in enumerate(self._agents) if agent.pid in pids}

    @property
    def hit_pids(self) -> set[int]:
        return {self._agents[i].pid for i in self.hit}

    def was_outside(self, pid: int) -> bool:
        """Whether the loss of an agent that led has caught this one before it was in the job, as it says itself."""
        numbers = [i for i, agent in enumerate(self._agents) if agent.pid == pid]
        return any("before this one was in the job" in self.output(i) for i in numbers)

    def output(self, agent: int) -> str:
        return self._output(agent).read_text(errors="replace")

    def jobs(self) -> list[set[int]]:
        """Agents that nothing has struck, by the job that they were in, the oldest first. One that was not in it yet, when too
        few were left to go on, begins another."""
        began: dict[float, set[int]] = {}
        for i in set(self.codes) - self.hit:
            events = [
                event for log in self._last_logs({i}) for event in reader.events(log) if isinstance(event.body, JobStarted)
            ]
            if events:
                began.setdefault(events[-1].time, set()).add(i)
        return [agents for _, agents in sorted(began.items())]

    def _last_logs(self, agents: set[int]) -> list[Path]:
        """Find that of the job that each was in at last: one that gave its own up for an older one has a log of either."""
        of_each = [self.logs({i}) for i in agents]
        return [max(logs, key=lambda log: log.stat().st_mtime) for logs in of_each if logs]

    def has_begun(self, agent: int) -> bool:
        """It was in a job, whether that was its last one or not."""
        return any(isinstance(event.body, JobStarted) for log in self.logs({agent}) for event in reader.events(log))

    def log(self) -> list[Event]:
        """Return the log of the newest job, or that of struck agents if nothing else began; empty if nothing did at all."""
        return self.longest_log(jobs[-1] if (jobs := self.jobs()) else self.hit)

    def longest_log(self, agents: set[int]) -> list[Event]:
        """One of them may have heard of more than the others."""
        return max((list(reader.events(log)) for log in self._last_logs(agents)), key=len, default=[])

    def logs(self, agents: set[int]) -> list[Path]:
        return [log for i in agents for log in logs_of(self.folder, self.number, i).glob(f"*/{reader.NAME}")]

    def run(self) -> None:
        """To its end. Raises Broken for a hang, a crash, and anything that is left behind."""
        self._read_end, self._write_end = os.pipe()
        silent_s = SILENT_S + 4 * sum(slow.seconds for slow in self.case.slow if slow.seconds > 1)
        try:
            for _ in range(self.case.agents.n_first if self.case.agents is not None else 1):
                self._start_agent()
            self._watch(silent_s)
        except TimeoutError as error:
            self._write_stacks()
            raise Broken("hang", f"{error}, after {[each['struck'] for each in self.struck]}") from None
        finally:
            left = self._end_all()
            self._below.close()
            os.close(self._read_end)
            self.struck += [each for name, each in self._own_faults().items() if name not in self._came_true]
        for i in set(range(len(self._agents))) - self.hit - set(self.ended):
            if not self.is_killed:
                raise Broken("crash", f"agent {i} ended with {self.codes[i]}: {self.output(i)[-1500:]}")
        left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(f"_{a.pid}_" in name for a in self._agents)]
        left += [str(path) for path in (self.folder / "tmp").iterdir()]
        left += [text for ended in self.ended.values() for text in (*ended["children"], *ended["descriptors"])]
        if left:
            raise Broken("left behind", f"{left}")

    def _output(self, agent: int) -> Path:
        return self.folder / f"output-{self.number}-{agent}.txt"

    def _start_agent(self) -> None:
        number = len(self._agents)
        own = {
            "OMP_NUM_THREADS": "1",
            "ODYSSEY_SECRET": "known to all agents of the soak",
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch"),
        }
        command = [sys.executable, "-m", "tests.soak.drive", str(Path(__file__).with_name("train.py"))]
        command += map(str, (self.folder / "case.json", self.folder, self._write_end, self.number, number, self._port))
        with self._output(number).open("wb") as output:
            # Linux may share processors by session: agents that share one, with pytest in it, starve beside ranks, which
            # have one each. Agents on several hosts share none.
            self._agents.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | own,
                    pass_fds=[self._write_end],
                    start_new_session=True,
                )
            )

    def _watch(self, silent_s: float) -> None:
        """Do what is asked for, until all agents have ended that can. Raises TimeoutError, as `_messages` does."""
        for message in self._messages(silent_s):
            match message:
                case {"struck": _}:
                    self.struck.append(message)
                case {"do": "freeze", "pid": pid, "seconds": seconds}:
                    self._send(pid, signal.SIGSTOP)
                    threading.Timer(seconds, self._send, (pid, signal.SIGCONT)).start()
                case {"do": "join"}:
                    if self.case.agents is not None and len(self._agents) < self.case.n_agents:
                        self._start_agent()
                case {"do": "kill"}:
                    self.is_killed = True
                    for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another one end
                        for agent in self._agents:
                            agent.send_signal(number)
                case {"do": "overwrite", "host": host, "port": port}:
                    command = [sys.executable, "-m", strangers.__name__, host, str(port)]
                    self._helpers.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL))  # which may be late
                case {"code": _, "by": number}:
                    self.ended[number] = message

    def _n_events(self) -> int:
        """What the logs tell, without notes: those tell of waiting, too."""
        entries = (entry for log in self.logs(set(range(len(self._agents)))) for entry in reader.entries(log))
        return sum(isinstance(entry, Event) and not isinstance(entry.body, Note) for entry in entries)

    def _messages(self, silent_s: float) -> Iterator[dict[str, Any]]:
        """Raises TimeoutError for a job whose logs tell nothing for `silent_s`, or that never ends."""
        data, n_events = b"", 0
        began = looked_at = told_at = time.monotonic()
        while any(agent.poll() is None for i, agent in enumerate(self._agents) if i not in self.hit) or self._has_news(0):
            if not self._has_news(0.05):
                now = time.monotonic()
                if now > looked_at + LOOK_EVERY_S:
                    before, n_events, looked_at = n_events, self._n_events(), now
                    told_at = now if n_events != before else told_at
                if now > told_at + silent_s:
                    raise TimeoutError(f"nothing but notes in its logs for {silent_s:g} s")
                if now > began + LIMIT_S:
                    raise TimeoutError(f"it has not ended after {LIMIT_S:g} s")
                continue
            *lines, data = (data + os.read(self._read_end, 1 << 16)).split(b"\n")
            yield from map(json.loads, lines)

    def _has_news(self, seconds: float) -> bool:
        return bool(select.select([self._read_end], [], [], seconds)[0])

    def _send(self, pid: int, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        next(agent for agent in self._agents if agent.pid == pid).send_signal(number)

    def _end_all(self) -> list[str]:
        """What has been struck may be gone by itself, soon. SIGKILL to whatever is left then; says what it was."""
        left = []
        for i, agent in enumerate(self._agents):
            if i not in self.hit and not self.is_killed and agent.poll() is None:
                left.append(f"agent {i}")
            agent.kill()  # if it was struck, it stands still, or waits for a job that is over
            self.codes[i] = agent.wait(END_S)
        for helper in self._helpers:
            helper.kill()
            helper.wait(END_S)
        os.close(self._write_end)
        self._below.wait(GRACE_S if self.hit or self.is_killed else 0.0)
        return left + self._below.end()

    def _write_stacks(self) -> None:
        """Where everybody stands, for whoever looks into a hang."""
        py_spy = Path(sys.executable).with_name("py-spy")
        with (self.folder / "stacks.txt").open("wb") as file:
            for process in self._below.living():
                file.write(f"\n==== {describe(process)}\n".encode())
                file.flush()
                command = [py_spy, "dump", "--nonblocking", "--pid", str(process.pid)]
                subprocess.run(command, stdout=file, stderr=file, check=False, timeout=20)

    def _own_faults(self) -> dict[str, dict[str, Any]]:
        """The script's own that have come true, by the file that says so."""
        found = {}
        for fault in self.case.script_faults:
            path = self.folder / f"failed-{fault.step}-{fault.rank}"
            if path.exists():
                found[path.name] = {"struck": fault.label, "rank": fault.rank, "agent": None, "innocent": False}
        for i, point in enumerate(self.case.point_faults):
            path = self.folder / f"point-{i}"
            if path.exists() and (victim := path.read_text()):
                found[path.name] = {"struck": point.label, "rank": int(victim), "agent": None, "innocent": False}
        return found
