"""`odyssey logs`: what the ranks of a job wrote, from the files in its folders, and on request what they go on to write.

Each agent of a job has a folder. That of another host is read where it can be seen from here, else its agent is asked.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path
from typing import Protocol

from launcher.cluster.questions import AskFiles, AskPiece, Files, Piece, Question
from launcher.health.stacks import ranges
from launcher.joblog import owner as owners
from launcher.joblog import reader
from launcher.joblog.exit_codes import ExitCode
from launcher.output import log_reader
from launcher.output.log_reader import KeptFile
from odyssey.errors import OdysseyError, UsageError
from odyssey.plan.worker import Rank
from odyssey_cli.display import quantities
from odyssey_cli.jobs import find
from odyssey_cli.jobs.conversation import Conversation
from odyssey_cli.jobs.find import FoundJob

RELOOK_S = 1.0
"""While ranks are started again the job's log is read this often."""
LOOK_S = 0.2
"""While a job is followed its files are looked at this often."""
ANSWER_S = 10.0
"""For an agent of another host."""
RETRY_S = 5.0
"""Before one that could not be reached is asked again."""


def logs(name: str | None, *, rank: Rank | None, follow: bool) -> ExitCode:
    """Print the output of all ranks, or of one. Each line tells whose it is where there are several."""
    job = find.find(name)
    tail = LogTail(job, rank)
    try:
        tail.print_new()
        if not tail.has_files and job.owner is None:
            os.listdir(job.folder)  # raises PermissionError where nobody but its owner may know what there is
        if not tail.has_files and not tail.missing and not (follow and job.agent is not None):
            raise OdysseyError(
                f"the ranks of {job.name} wrote to the terminal of their launcher, and nothing was kept",
                "`odyssey run --tee 3` keeps it as well",
            )
        if follow and job.agent is not None:
            _follow(job.agent, job, tail)
        tail.flush()
    finally:
        tail.close()
    if tail.has_files and not tail.has_stdout:
        print("odyssey: what ranks wrote to stdout went where their launcher's goes; --tee 1 keeps it as well", file=sys.stderr)
    for missing in tail.missing:
        print(f"odyssey: {missing}", file=sys.stderr)
    return ExitCode.FAILED if tail.missing else ExitCode.OK


def _follow(agent: int, job: FoundJob, tail: LogTail) -> None:
    try:
        process = os.pidfd_open(agent)
    except ProcessLookupError:
        process = None
    if process is not None:
        try:
            gone = select.poll()
            gone.register(process, select.POLLIN)
            if not tail.has_files:
                text = f"no rank of {job.name} has written to a file yet; `odyssey run --tee 3` keeps what goes to the terminal"
                print(f"odyssey: {text}", file=sys.stderr, flush=True)
            while not gone.poll(LOOK_S * 1000):
                tail.print_new()
        finally:
            os.close(process)
    tail.print_new()


class Source(Protocol):
    """It reads one agent's files. `problem`: why they cannot be read, for people; empty where they can."""

    problem: str

    def files(self) -> dict[KeptFile, tuple[int, int]]: ...

    def piece(self, file: KeptFile, offset: int) -> bytes: ...


class Folder:
    """Seen from here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""

    def files(self) -> dict[KeptFile, tuple[int, int]]:
        return log_reader.files(self.path)

    def piece(self, file: KeptFile, offset: int) -> bytes:
        return log_reader.piece(self.path, file, offset)


class AskedAgent:
    """On another host."""

    def __init__(self, conversation: Conversation, number: int) -> None:
        self._conversation = conversation
        self._number = number
        self._ask_again_at = 0.0
        self.problem = ""

    def files(self) -> dict[KeptFile, tuple[int, int]]:
        answer = self._ask(AskFiles()) if time.monotonic() >= self._ask_again_at else None
        return dict(answer.files) if isinstance(answer, Files) else {}

    def piece(self, file: KeptFile, offset: int) -> bytes:
        answer = self._ask(AskPiece(file, offset)) if not self.problem else None
        return answer.data if isinstance(answer, Piece) else b""

    def _ask(self, question: Question) -> object:
        answer = self._conversation.ask({self._number: question}, ANSWER_S)[self._number]
        self.problem = "" if isinstance(answer, Files | Piece) else getattr(answer, "why", "it gave another answer")
        if self.problem:
            self._ask_again_at = time.monotonic() + RETRY_S
        return answer


class Gone:
    """Neither to be seen nor to be asked."""

    problem = "it is in a log folder there"

    def files(self) -> dict[KeptFile, tuple[int, int]]:
        return {}

    def piece(self, file: KeptFile, offset: int) -> bytes:
        return b""


class LogTail:
    """What is new in the files of a job's ranks: whole lines, each file by itself."""

    def __init__(self, job: FoundJob, rank: Rank | None) -> None:
        """Raises UsageError if there is no such rank."""
        if rank is not None and rank not in {known.rank for known in job.ranks} | set(job.agents.rank_at.values()):
            raise UsageError(f"{job.name} has no rank {rank} here", f"its ranks are 0 to {max(job.n_ranks - 1, 0)}")
        self._job = job
        self._rank = rank
        self._is_prefixed = rank is None and job.n_ranks > 1
        self._conversation: Conversation | None = None
        self._sources: dict[int, Source] = {}
        self._find_sources()
        self._looked_at = time.monotonic()
        """When the job's log was read."""
        self._read: dict[tuple[int, KeptFile], int] = {}
        self._rest: dict[tuple[int, KeptFile], bytes] = {}
        self._in_line: set[tuple[int, KeptFile]] = set()
        """What begins within a line there, is not shown up to its end."""

    def _find_sources(self) -> None:
        """By numbers of agents: those that have had a rank that is asked for."""
        job, sources = self._job, self._sources
        if job.owner is None:
            sources[0] = Folder(job.folder)
            return
        seen = _folders_of(job)
        for home in sorted({home for (home, _, _), rank in job.agents.rank_at.items() if self._rank in (None, rank)}):
            if home in seen:
                sources.setdefault(home, Folder(seen[home]))
            elif job.agent is not None and home in job.agents.present:
                self._conversation = self._conversation or Conversation(job)
                sources.setdefault(home, AskedAgent(self._conversation, home))
            else:
                sources[home] = Gone()

    @property
    def has_files(self) -> bool:
        return bool(self._read)

    @property
    def has_stdout(self) -> bool:
        return any(file.stream == "stdout" for _, file in self._read)

    @property
    def missing(self) -> list[str]:
        """What could not be read, for people."""
        told = []
        for home, source in self._sources.items():
            ranks = sorted({rank for (its, _, _), rank in self._job.agents.rank_at.items() if its == home})
            if source.problem:
                name = f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
                told.append(f"not all that {name} wrote at {self._job.agents.name(home)} is shown: {source.problem}")
        return told

    def print_new(self) -> None:
        for home, file, (first, stop) in self._files():
            key = home, file
            offset = self._read.setdefault(key, 0)
            if offset < first:
                offset = self._left_out(key, first)
            while stop > offset and (data := self._sources[home].piece(file, offset)):
                offset = self._read[key] = offset + len(data)
                if key in self._in_line:
                    _, end, data = data.partition(b"\n")
                    self._in_line -= {key} if end else set()
                *lines, self._rest[key] = (self._rest.get(key, b"") + data).split(b"\n")
                for line in lines:
                    self._print(key, line)
        sys.stdout.flush()

    def _left_out(self, key: tuple[int, KeptFile], first: int) -> int:
        """Say how much of a stream is not there any more; go on at its next whole line, behind byte `first`."""
        gone = quantities.size(first - self._read[key])
        sys.stdout.flush()
        print(f"odyssey: {gone} that rank {self._rank_of(*key)} wrote are not kept any more (--keep-output)", file=sys.stderr)
        self._rest.pop(key, None)
        self._in_line.add(key)
        self._read[key] = first
        return first

    def flush(self) -> None:
        """What has no end of line."""
        for key, rest in self._rest.items():
            if rest:
                self._print(key, rest)
        self._rest.clear()
        sys.stdout.flush()

    def close(self) -> None:
        if self._conversation is not None:
            self._conversation.close()

    def _files(self) -> list[tuple[int, KeptFile, tuple[int, int]]]:
        """Attempt by attempt, rank by rank."""
        files = [(home, file, held) for home, source in self._sources.items() for file, held in source.files().items()]
        if any(self._rank_of(home, file) is None for home, file, _ in files):
            self._look_again()
        found = []
        for home, file, held in files:
            rank = self._rank_of(home, file)
            if rank is not None and self._rank in (None, rank):  # else the log does not have it yet
                found.append((file.attempt, rank, file.stream != "stdout", home, file, held))
        return [(home, file, held) for *_, home, file, held in sorted(found, key=lambda one: one[:4])]

    def _look_again(self) -> None:
        """Ranks have been started again, maybe elsewhere."""
        if time.monotonic() - self._looked_at > RELOOK_S:
            self._looked_at = time.monotonic()
            self._job = find.read(self._job.folder)
            self._find_sources()

    def _rank_of(self, home: int, file: KeptFile) -> Rank | None:
        """None where the log has told of no such rank."""
        if self._job.owner is None:
            return Rank(file.place)
        return self._job.agents.rank_at.get((home, file.attempt, file.place))

    def _print(self, key: tuple[int, KeptFile], line: bytes) -> None:
        prefix = f"[rank {self._rank_of(*key)}]: " if self._is_prefixed else ""
        sys.stdout.write(f"{prefix}{line.decode(errors='replace')}\n")


def _folders_of(job: FoundJob) -> dict[int, Path]:
    """Give the folders of the job's agents, by their numbers, as far as they are seen from here: beside this one, where hosts
    share them, and beside the one with which the job began."""
    assert job.owner is not None
    found = {job.owner.number: job.folder}
    for beside in {job.folder.parent, Path(job.started.folder).parent}:
        for folder in beside.glob(f"*/{owners.NAME}"):
            its = owners.read(folder.parent)
            if its is not None and its.job == job.owner.job and os.path.exists(folder.parent / reader.NAME):
                found.setdefault(its.number, folder.parent)
    return found
