"""`odyssey logs`: what the ranks of a job wrote, from the files in its folder, and on request what they go on to write."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.jobs import find
from odyssey_cli.jobs.find import FoundJob

LOOK_S = 0.2
"""While a job is followed its files are looked at this often."""


def logs(name: str | None, *, rank: int | None, follow: bool) -> ExitCode:
    """Print the output of all ranks, or of one. Of several each line tells whose it is."""
    job = find.find(name)
    tail = LogTail(job, rank)
    tail.print_new()
    if not tail.has_files and not (follow and job.agent is not None):
        raise OdysseyError(
            f"the ranks of {job.name} wrote to the terminal of their launcher, and nothing was kept",
            "`odyssey run --tee 3` keeps it as well",
        )
    if follow and job.agent is not None:
        _follow(job.agent, job, tail)
    tail.flush()
    return ExitCode.OK


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
                print(f"odyssey: no rank of {job.name} has written to a file yet", file=sys.stderr)
            while not gone.poll(LOOK_S * 1000):
                tail.print_new()
        finally:
            os.close(process)
    tail.print_new()


class LogTail:
    """What is new in the files of a job's ranks: whole lines, each file by itself."""

    def __init__(self, job: FoundJob, rank: int | None) -> None:
        """Raises UsageError if there is no such rank."""
        if rank is not None and all(known.rank != rank for known in job.ranks):
            raise UsageError(f"{job.name} has no rank {rank} here", f"its ranks are 0 to {max(job.n_ranks - 1, 0)}")
        self._folder = job.folder
        agents = job.started.agents
        if agents:  # the folder is the leading agent's
            ours = next(node for node, agent in enumerate(agents) if agent.number == 0)
            self._rank_of = {known.local_rank: known.rank for known in job.ranks if known.node == ours}
        else:
            by_rank = job.started.n_nodes > 1
            self._rank_of = {known.rank if by_rank else known.local_rank: known.rank for known in job.ranks}
        self._rank = rank
        self._is_prefixed = rank is None and job.n_ranks > 1
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    @property
    def has_files(self) -> bool:
        return bool(self._read)

    def print_new(self) -> None:
        for file in self._files():
            try:
                with file.open("rb") as stream:
                    stream.seek(self._read.get(file, 0))
                    data = stream.read()
            except OSError:
                continue  # removed while we looked
            self._read[file] = self._read.get(file, 0) + len(data)
            *lines, self._rest[file] = (self._rest.get(file, b"") + data).split(b"\n")
            for line in lines:
                self._print(file, line)
        sys.stdout.flush()

    def flush(self) -> None:
        """What has no end of line."""
        for file, rest in self._rest.items():
            if rest:
                self._print(file, rest)
        self._rest.clear()
        sys.stdout.flush()

    def _files(self) -> list[Path]:
        """Attempt by attempt, rank by rank."""
        found = []
        for file in self._folder.glob("attempt_*/*/std*.log"):
            attempt, place = file.parts[-3].removeprefix("attempt_"), file.parts[-2]
            if attempt.isdigit() and place.isdigit():
                rank = self._rank_of.get(int(place), int(place))
                if self._rank in (None, rank):
                    found.append((int(attempt), rank, file.name != "stdout.log", file))
        return [file for *_, file in sorted(found)]

    def _print(self, file: Path, line: bytes) -> None:
        prefix = ""
        if self._is_prefixed:
            place = int(file.parts[-2])
            prefix = f"[rank {self._rank_of.get(place, place)}]: "
        sys.stdout.write(f"{prefix}{line.decode(errors='replace')}\n")
