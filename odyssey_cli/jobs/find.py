"""The jobs of this user on this host, as their logs and /proc show them: which there are, which is meant, what it does."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from launcher.host import proc
from launcher.joblog import owner as owners
from launcher.joblog import reader, registry
from launcher.joblog.events import Event, JobStarted, RankLost, RankStarted
from launcher.joblog.owner import Owner
from launcher.joblog.reader import UnknownEvent
from odyssey.errors import OdysseyError, UsageError
from odyssey.plan import worker
from odyssey.protocol.reports import Hello
from odyssey_cli.display.board import Board
from odyssey_cli.display.rank_state import RankState
from odyssey_cli.errors import denied
from odyssey_cli.jobs.agents import Agents


class Rank(msgspec.Struct, frozen=True):
    """The newest process of a rank.
    `node`: of its agent, or its failure domain; `state`: for people; `is_alive`: it runs, as this host's /proc has it, or
    where another host has it the log. `is_here`: it is one of this host's. `agent`: the number of the one that has it."""

    rank: worker.Rank
    pid: int
    node: int
    local_rank: int
    host: str
    state: str
    is_alive: bool
    is_here: bool = True
    agent: int = 0


@dataclass
class FoundJob:
    """One job, its log folded as it is read.
    `start`: the event with what was asked for, a JobStarted; None where not even that can be read. `processes`: the newest
    of each rank; `is_job`: it has ranks with an odyssey.Job. `unknown`: the first of `n_unknown` lines that cannot be read."""

    folder: Path
    start: Event | None = None
    agents: Agents = field(default_factory=Agents)
    board: Board = field(default_factory=Board)
    processes: dict[worker.Rank, RankStarted] = field(default_factory=dict)
    losses: list[tuple[float, RankLost]] = field(default_factory=list)
    is_job: bool = False
    unknown: UnknownEvent | None = None
    n_unknown: int = 0

    def take(self, entry: Event | UnknownEvent) -> None:
        """Take in the next line of the log."""
        if isinstance(entry, UnknownEvent):
            self.unknown = self.unknown or entry
            self.n_unknown += 1
            return
        self.agents.take(entry)
        self.board.apply(entry)
        match entry.body:
            case JobStarted():
                self.start = self.start or entry
            case RankStarted(rank=rank) as process:
                self.processes[rank] = process
            case RankLost() as loss:
                self.losses.append((entry.time, loss))
            case Hello():
                self.is_job = True

    @cached_property
    def owner(self) -> Owner | None:
        """Whose folder this is; None where there can be only one agent."""
        return owners.read(self.folder)

    @cached_property
    def agent(self) -> int | None:
        """Pid of its agent if that runs here; where there can be several, of the one whose folder this is."""
        return self.look_for_agent()

    @property
    def name(self) -> str:
        """The same on all hosts."""
        return self.owner.job if self.owner is not None else self.folder.name

    def look_for_agent(self) -> int | None:
        """As it is now."""
        if self.owner is not None:
            return self.owner.process.pid if self.owner.process.runs_here else None
        return registry.agent_of(self.start) if self.start is not None else None

    def check_is_ours(self) -> None:
        """Raises OdysseyError for a job whose processes this user cannot do anything to."""
        try:
            if self.agent is not None:
                os.kill(self.agent, 0)
        except PermissionError:
            raise OdysseyError(f"{self.name} is another user's", "ask them") from None
        except ProcessLookupError:
            pass  # it has just ended

    @property
    def started(self) -> JobStarted:
        """What was asked for. Raises OdysseyError if the log does not even tell that."""
        if self.start is None:
            raise self.unknown or OdysseyError(f"{self.folder / reader.NAME}: tells of no job")
        assert isinstance(self.start.body, JobStarted)
        return self.start.body

    @property
    def command(self) -> str:
        return self.started.what

    @property
    def age_s(self) -> float:
        """Until now, or until its log ends."""
        return max(0.0, (time.time() if self.agent is not None else self.board.now) - self.board.started)

    @property
    def is_elsewhere(self) -> bool:
        host = self.owner.process.host if self.owner is not None else self.started.host
        return host not in ("", socket.gethostname())

    @property
    def status(self) -> str:
        """In a word or two."""
        board, ended = self.board, self.board.ended
        if ended is not None:
            word = "done" if ended.code == 0 else "stopped" if ended.code > 128 else "failed"
            return f"{word}, ranks still end" if self.agent is not None else word
        if self.agent is None:
            if self.is_elsewhere:
                return f"on {self.started.host}"
            return "agent was killed" if self.owner is None else "agent is gone"
        if owners.is_held(self.folder):
            return "cut off, ranks stand still"
        if board.stalled:
            return "stalled"
        if board.recovering:
            return "recovering"
        if board.restarting:
            return "restarting"
        return "running" if board.running or RankState.RUNNING in board.ranks.values() else "started"

    @cached_property
    def ranks(self) -> list[Rank]:
        """In order."""
        newest = self.processes
        has_several = self.owner is not None and self.agents.n_ranks > 0
        return [self._rank(newest[rank]) for rank in sorted(newest) if not has_several or rank < self.agents.n_ranks]

    def _rank(self, body: RankStarted) -> Rank:
        home = self.agents.home_of.get(body.rank, 0)
        is_here = body.host in ("", socket.gethostname()) and (self.owner is None or home == self.owner.number)
        process = proc.stat(body.pid) if is_here else None
        if process is not None and process.parent != self.agent:
            process = None  # another one, that has come to have its number
        is_alive = process is not None or (not is_here and self._lives_elsewhere(body.rank, home))
        state = self._state(body.rank, process, is_alive)
        return Rank(body.rank, body.pid, body.node, body.local_rank, body.host, state, is_alive, is_here, home)

    def _lives_elsewhere(self, rank: worker.Rank, home: int) -> bool:
        """As far as it is known here."""
        if self.owner is None or self.agent is None or self.board.ended is not None or home not in self.agents.present:
            return False
        return self.board.ranks.get(rank) not in (RankState.LOST, RankState.FINISHED)

    @property
    def n_alive(self) -> int:
        return sum(rank.is_alive for rank in self.ranks)

    @property
    def n_ranks(self) -> int:
        if self.owner is not None and self.agents.n_ranks:
            return self.agents.n_ranks
        return max(self.started.n_nodes * self.started.n_ranks_per_node, len(self.ranks))

    def _state(self, rank: worker.Rank, process: proc.Stat | None, is_alive: bool) -> str:
        state = self.board.ranks.get(rank, RankState.STARTING)
        if is_alive:
            is_stopped = process is not None and process.is_stopped
            if is_stopped and owners.is_held(self.folder):
                return "held by its agent, which is cut off"
            if rank in self.board.stalled:
                return "stalled"
            return "stopped by a signal" if is_stopped else state.value
        if state is RankState.LOST and rank in self.board.causes:
            return f"lost: {self.board.causes[rank]}"
        return state.value if state in (RankState.LOST, RankState.FINISHED) else "ended"


def read(folder: Path) -> FoundJob:
    """Raises OdysseyError if there is no log that can be read."""
    job = FoundJob(folder)
    try:
        for entry in reader.entries(folder / reader.NAME):
            job.take(entry)
    except PermissionError as error:
        raise denied(error) from None
    except OSError as error:
        raise OdysseyError(f"{folder / reader.NAME}: {(error.strerror or str(error)).lower()}") from None
    return job


def everything(*, ended: bool) -> list[FoundJob]:
    """The running jobs, or with `ended` all; the newest first. What nobody can read is left out."""
    known = _one_folder_a_job(registry.folders())
    chosen = [folder for folder in known if ended or registry.is_running(folder)]
    jobs = []
    for folder in chosen:
        try:
            job = read(folder)
        except OdysseyError:
            continue  # its folder went while we looked
        if job.start is not None:
            jobs.append(job)
    return jobs


def find(text: str | None, *, only_running: bool = False) -> FoundJob:
    """The job that is meant: by name, the beginning of a name, pid of the agent, folder, or `last`; without any the only
    running one, else the newest. Raises UsageError."""
    if text is not None and (os.sep in text or text in (".", "..")):
        return _in_folder(Path(text))
    known = _one_folder_a_job(registry.folders())
    running = [folder for folder in known if registry.is_running(folder)]
    candidates = running if only_running else known
    if text is None:
        if len(running) > 1:
            raise UsageError(f"{len(running)} jobs are running: say which", _one_of(running))
        if only_running and not running:
            raise UsageError("no job is running", "`odyssey ps --all` shows those that have ended")
        if not known:
            raise UsageError("no job of yours is known on this host", "start one with `odyssey run`, or give its log folder")
        return read((running or known)[0])
    if text == "last" and candidates:
        return read(candidates[0])
    if (job := called(text)) is not None:
        return job
    if (Path(text) / reader.NAME).exists():
        return _in_folder(Path(text))
    raise UsageError(f"no such job: {text}", _one_of(known) if known else "no job of yours is known on this host")


def called(text: str) -> FoundJob | None:
    """The job with this name, beginning of its name or pid of its agent. Raises UsageError if there are several."""
    everywhere = registry.folders()
    known = _one_folder_a_job(everywhere)
    found = [folder for folder in known if _name(folder) == text]
    found = found or [folder for folder in everywhere if folder.name == text]
    if text.isdecimal():
        found += [folder for folder in everywhere if registry.is_running(folder) and read(folder).agent == int(text)]
    found = found or [folder for folder in known if _name(folder).startswith(text)]
    if len(found) > 1:
        raise UsageError(f"{len(found)} jobs begin with {text}: say which", _one_of(found))
    return read(found[0]) if found else None


def _in_folder(folder: Path) -> FoundJob:
    if not (folder / reader.NAME).exists():
        raise UsageError(f"{folder} is no job's folder: it has no {reader.NAME}", "`odyssey ps --all` lists jobs")
    return read(folder.resolve())


def _name(folder: Path) -> str:
    its = owners.read(folder)
    return its.job if its is not None else folder.name


def _one_folder_a_job(folders: list[Path]) -> list[Path]:
    """Agents of one job may share a host, or a registry: of their folders that of one that runs here, of the first one else."""
    found: dict[str, tuple[tuple[bool, int], Path]] = {}
    for folder in folders:
        its = owners.read(folder)
        key = f"job {its.job}" if its is not None else str(folder)
        worth = (not its.process.runs_here, its.number) if its is not None else (True, 0)
        if key not in found or worth < found[key][0]:
            found[key] = worth, folder
    return [folder for _, folder in found.values()]


def _one_of(folders: list[Path]) -> str:
    names = [_name(folder) for folder in folders[:8]]
    more = f" and {len(folders) - 8} more, see `odyssey ps --all`" if len(folders) > 8 else ""
    return f"one of {', '.join(names)}{more}"


def newest_job(log_dir: Path) -> Path | None:
    """The folder below `log_dir` whose event log was written last."""
    return next(iter(newest_first(log_dir)), None)


def newest_first(log_dir: Path) -> list[Path]:
    """The folders below `log_dir` with an event log, by when it was written last."""
    logs = [(log.stat().st_mtime, log) for log in log_dir.glob(f"*/{reader.NAME}")]
    return [log.parent for _, log in sorted(logs, reverse=True)]
