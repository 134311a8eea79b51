"""Agents that come and go at random on up to five hosts, and what must become of their job: for test_comings_and_goings.py.

An episode is one job: it begins with some agents, loses and gains others, and then is let end, or loses so many at once that it
must. Who is a member and who leads is read from the agents' own logs. Nothing may be silent for longer than `--detect` allows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from launcher.joblog import reader
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Event,
    GenerationStarted,
    JobStarted,
    LeaderChanged,
    PlanChosen,
    RankStarted,
)
from odyssey.plan.plan import Plan
from tests import ROOT
from tests.hosts.network import Hosts

DETECT_S = 3.0
N_HOSTS, MOST = 5, 4
HOLD_DETECTS = 6
"""For how many `--detect` ranks that nobody leads stand still, and agents wait for others (docs/hosts.md)."""
SHORT = 0.1, 0.5
"""Parts of `--detect`: silences that cost no agent its place."""
STEP = re.compile(r"^step (\d+) ", re.MULTILINE)
KEPT = ROOT / "build" / "comings-and-goings"


class Broken(AssertionError):
    """What must not be. The text says what, and where everything is kept."""


@dataclass
class Running:
    """An agent's process. `endpoint`: the host that it was given; `may_end`: why it may end before its job does; empty where it
    must not."""

    process: subprocess.Popen[bytes]
    out: Path
    logs: Path
    endpoint: int
    may_end: str = ""
    is_apart: bool = False

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


@dataclass
class Seen:
    """The job, by hosts, as its log of the newest generation has it, and the longest of those: an agent that was cut off may
    have a longer one while it does not know that others lead. One that has ended counts if it saw the job end.
    `coming`: those of which no rank has begun since they joined: they may have no voice yet; `holders`: of each layer of a Job,
    by the plan that runs."""

    members: list[int] = field(default_factory=list)
    coming: set[int] = field(default_factory=set)
    leader: int = 0
    holders: list[set[int]] = field(default_factory=list)
    n_lost: int = 0


class Episode:
    """One job. `command`: a script and its arguments; `holds_state`: a Job."""

    def __init__(
        self, hosts: Hosts, folder: Path, port: int, random: Random, command: list[str], *, holds_state: bool, silence_s: float
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self.random = random
        self.holds_state = holds_state
        self.story: list[str] = []
        self._port = port
        self._command = command
        self._silence_s = silence_s
        self._numbers = itertools.count()
        self._began = time.monotonic()
        self._progress = (0, time.monotonic())
        self.agents: dict[int, Running] = {}
        """By host, the newest of each."""
        self.past: list[Running] = []

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:6.1f} s: {text}")
        print(f"  {self.story[-1]}", flush=True)

    # -- what can be done --------------------------------------------------------------------------------------------------

    def start(self, i: int, endpoint: int = 1) -> None:
        """An agent, given another one's host."""
        if i in self.agents:
            self.past.append(self.agents[i])
        name = f"h{i}-{next(self._numbers)}"
        out, logs = self.folder / f"{name}.out", self.folder / f"{name}.logs"
        flags = {"nnodes": f"2:{MOST}", "rdzv-backend": "c10d", "rdzv-endpoint": f"h{endpoint}:{self._port}", "log-dir": logs}
        flags |= {"detect": f"{DETECT_S}s", "rdzv-conf": "last_call_timeout=8,join_timeout=60", "max-restarts": 1000}
        command = [sys.executable, "-m", "odyssey_cli", "run", *(f"--{key}={value}" for key, value in flags.items())]
        with out.open("wb") as file:
            process = subprocess.Popen(
                self.hosts.command(i, [*command, *self._command]), cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(self.folder)}, start_new_session=True,
            )  # fmt: skip
        self.agents[i] = Running(process, out, logs, endpoint)

    def lose(self, i: int, way: str) -> None:
        its = self.agents[i]
        its.may_end, its.is_apart = way, way in ("cut", "freeze")
        match way:
            case "kill":
                its.process.kill()
            case "ask":
                its.process.send_signal(signal.SIGTERM)
            case "cut":
                self.hosts.cut(i)
            case "freeze":
                self.hosts.freeze(i)

    def give_back(self, i: int, way: str) -> None:
        (self.hosts.heal if way == "cut" else self.hosts.thaw)(i)
        self.agents[i].is_apart = False

    # -- what is seen ------------------------------------------------------------------------------------------------------

    def seen(self) -> Seen:
        logs: list[list[Event]] = [[]]
        for its in self.agents.values():
            if its.process.poll() in (None, 0) and not its.is_apart:
                for log in its.logs.glob(f"*/{reader.NAME}"):
                    with contextlib.suppress(OSError):
                        logs.append([event for event in reader.entries(log) if isinstance(event, Event)])
        found = Seen()
        home: dict[int, int] = {}
        chosen: Plan | None = None
        for event in max(logs, key=lambda log: (log[-1].generation if log else 0, len(log))):
            match event.body:
                case JobStarted(agents=agents):
                    found.members = [_host(agent.host) for agent in agents]
                    found.leader = found.members[0]
                case RankStarted(rank=rank, host=host):
                    home[rank] = _host(host)
                    found.coming.discard(home[rank])
                case PlanChosen(plan=plan):
                    chosen = plan
                case GenerationStarted() if chosen is not None:
                    found.holders = [{home[rank] for rank in chosen.holders[layer]} for layer in range(chosen.n_layers)]
                case AgentJoined(agent=agent):
                    found.members = [*(i for i in found.members if i != _host(agent.host)), _host(agent.host)]
                    found.coming.add(_host(agent.host))
                case AgentLost(agent=agent):
                    found.n_lost += 1
                    found.coming.discard(_host(agent.host))
                    found.members = [i for i in found.members if i != _host(agent.host)]
                case LeaderChanged(agent=agent):
                    found.leader = _host(agent.host)
        return found

    def steps(self) -> int:
        """The newest step, or how many were told in all attempts."""
        found = [int(n) for its in self._all() for n in STEP.findall(its.out.read_text(errors="replace"))]
        return max(found, default=-1) + 1 if self.holds_state else len(found)

    def look(self) -> None:
        """Nobody has ended who must not, and the job makes progress once it has begun. Raises Broken."""
        for i, its in self.agents.items():
            if its.has_ended and not its.may_end and not (self._is_done() or its.process.returncode == 0):
                raise self.broken(f"the agent of h{i} has ended with {its.process.returncode}")
        n = self.steps()
        if n != self._progress[0]:
            self._progress = n, time.monotonic()
        elif n and time.monotonic() - self._progress[1] > self._silence_s:  # before the first step torch is imported
            raise self.broken(f"no step for {self._silence_s:g} s")

    def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self.look()
            time.sleep(0.2)

    def until_on(self, n_steps: int = 3) -> None:
        """So many steps more, or the end."""
        before = self.steps()
        self.until(lambda: self.steps() >= before + n_steps or self._is_done())

    def _is_done(self) -> bool:
        return any(its.process.poll() == 0 for its in self.agents.values())

    def _all(self) -> Iterable[Running]:
        return [*self.past, *self.agents.values()]

    # -- the end -----------------------------------------------------------------------------------------------------------

    def end_well(self) -> None:
        """The job comes to its end by itself, and all its agents with it."""
        self.until(self._is_done)
        members = [i for i in self.seen().members if not self.agents[i].has_ended]
        limit = time.monotonic() + self._silence_s
        while not all(self.agents[i].has_ended for i in members):
            if time.monotonic() > limit:
                raise self.broken(f"not all of h{members} end with their job")
            time.sleep(0.1)
        if any(codes := [self.agents[i].process.returncode for i in members]):
            raise self.broken(f"h{members} have ended with {codes}")
        self.end_all()

    def end_all(self) -> None:
        """An agent that waits, or looks for a job that is gone, ends when it is told to; and nothing is left."""
        for i, its in self.agents.items():
            if not its.has_ended:
                its.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                its.process.wait(self._silence_s)
            if not its.has_ended:
                raise self.broken(f"the agent of h{i} does not end when it is told to")
        self._assert_clean()

    def _assert_clean(self) -> None:
        deadline = time.monotonic() + 10.0  # the reaper of an agent that was killed ends what its ranks had started
        while left := {i: pids for i in self.hosts.numbers if (pids := self.hosts.pids(i))}:
            if time.monotonic() > deadline:
                raise self.broken(f"left: {left}")
            time.sleep(0.1)
        for its in self._all():
            text = its.out.read_text(errors="replace")
            if "odyssey itself failed" in text or "please report" in text:
                raise self.broken(f"{its.out.name} has an error of Odyssey's own")
            if its.process.returncode == 1 and "error: " not in text:
                raise self.broken(f"{its.out.name} does not say why it has failed")

    def close(self) -> None:
        """No process and no host is left, however it went."""
        self.hosts.close()
        for its in self._all():
            its.process.wait(self._silence_s)

    def broken(self, what: str) -> Broken:
        kept = KEPT / f"{self.folder.parent.name}-{self.folder.name}"
        shutil.copytree(self.folder, kept, dirs_exist_ok=True)
        said = "".join(f"--- {its.out.name}\n{_talk(its.out.read_text(errors='replace'))}\n" for its in self._all())
        story = "\n".join(self.story)
        return Broken(f"{what}\nkept in {kept}\n{story}\n{said}")


# -- what happens ----------------------------------------------------------------------------------------------------------


def goes_on(seen: Seen, lost: set[int], *, holds_state: bool) -> bool:
    """By the rule in docs/hosts.md, said once more: most are left, or the half with the leading one. A Job needs a holder of
    each layer, a plain script its MIN of two."""
    left = [i for i in seen.members if i not in lost]
    is_enough = 2 * len(left) > len(seen.members) or (2 * len(left) == len(seen.members) and seen.leader in left)
    return is_enough and (all(its & {*left} for its in seen.holders) if holds_state else len(left) >= 2)


def something(its: Episode) -> None:
    """One random thing happens, and the job goes on; nothing while an agent may have a place and no voice yet."""
    seen, random = its.seen(), its.random
    if seen.coming:
        its.look()
        return
    well = [i for i in seen.members if not its.agents[i].has_ended and not its.agents[i].is_apart]
    free = [i for i in its.hosts.numbers if i not in its.agents or its.agents[i].has_ended]
    if free and random.random() < 0.4:
        i = random.choice(free)
        endpoint = 1 if i == 1 or 1 in well else seen.leader
        its.tell(f"an agent is started on h{i}, and given h{endpoint}")
        its.start(i, endpoint)
        return
    if random.random() < 0.25:
        i, way = random.choice(well), random.choice(("cut", "freeze"))
        silence_s = random.uniform(*SHORT) * DETECT_S
        its.tell(f"h{i}: {way} for {silence_s:.1f} s")
        before = its.agents[i].may_end
        its.lose(i, way)
        time.sleep(silence_s)
        its.give_back(i, way)
        its.agents[i].may_end = before
        its.until_on()
        return
    n = 2 if random.random() < 0.2 else 1
    sets = [set(some) for some in itertools.combinations(well, n) if goes_on(seen, set(some), holds_state=its.holds_state)]
    if sets:
        _lose(its, seen, random.choice(sets))


def _lose(its: Episode, seen: Seen, those: set[int]) -> None:
    hard = ("kill", "cut", "freeze")
    ways = {i: its.random.choice(hard if i == seen.leader else (*hard, "ask")) for i in sorted(those)}
    its.tell(", ".join(f"h{i}{' (leads)' if i == seen.leader else ''}: {way}" for i, way in ways.items()))
    for i, way in ways.items():
        its.lose(i, way)
        if way in ("kill", "ask"):  # a newcomer that has no place yet finds nobody there
            for j, other in its.agents.items():
                if j not in seen.members and other.endpoint == i:
                    other.may_end = f"h{i}, which it was given, has no agent"
    began = time.monotonic()
    its.until(lambda: its.seen().n_lost >= seen.n_lost + len(those) or its._is_done())
    its.tell(f"noticed after {time.monotonic() - began:.1f} s")
    its.until_on()
    its.tell(f"on after {time.monotonic() - began:.1f} s")
    for i, way in ways.items():
        if way in ("cut", "freeze"):
            its.give_back(i, way)
    its.until_on()


def too_much(its: Episode) -> bool:
    """So many are lost at once that the job must not go on. False where that cannot be done now."""
    seen = its.seen()
    sets = [
        set(some)
        for n in (1, 2, 3)
        for some in itertools.combinations(seen.members, n)
        if n < len(seen.members) and not goes_on(seen, set(some), holds_state=True)
    ]
    if not sets or seen.coming:
        return False
    those = its.random.choice(sets)
    alone = {seen.leader} if goes_on(seen, set(seen.members) - {seen.leader}, holds_state=True) else set()
    its.tell(f"too many at once: {sorted(those)} of {seen.members} are cut off, h{seen.leader} leads")
    for i in those:
        its.lose(i, "cut")
    limit = time.monotonic() + (HOLD_DETECTS + 3) * DETECT_S + 20.0
    ending = [i for i in seen.members if i not in alone]
    while not all(its.agents[i].has_ended for i in ending):
        if time.monotonic() > limit:
            raise its.broken(f"of h{ending} not all have ended")
        time.sleep(0.2)
    if any(its.agents[i].process.returncode != 1 for i in ending):
        raise its.broken("who has too few others has ended, and not with 1")
    for i in those:
        its.give_back(i, "cut")
    return True


def _talk(text: str) -> str:
    """What agents say, without the steps in between."""
    lines = text.splitlines()
    return "\n".join(line for i, line in enumerate(lines) if not STEP.match(line) or i == len(lines) - 1)


def _host(name: str) -> int:
    return int(name.removeprefix("h"))
