"""The job's folder, and where the streams of each rank go.

    LOG_DIR/20261121-121548_3f9c/events.jsonl
                                 attempt_0/filtered_stdout.log
                                           2/stdout.log, stderr.log, error.json
                                 kept/attempt_0/2/stdout.log, stderr.log

`<run id>_<random>`, and below it torchrun's tree: an attempt, a local rank. Files are made where something goes to them. Below
`kept` is the end of what nobody has asked to have in files, of this attempt and the one before.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.joblog import owner, reader
from launcher.joblog.events import Event, encode
from launcher.options import RunOptions, Std
from odyssey.errors import UsageError

KEPT = "kept"
"""The folder of that."""
STREAMS = {Std.OUT: "stdout", Std.ERR: "stderr"}


class Outlet(msgspec.Struct, frozen=True):
    """Where one stream of a rank goes.
    `file`: None for none. `is_teed`: to the terminal as well as to the file, line by line with the rank's prefix.
    `is_shown`: to the terminal at all, or to the display in its place. `kept`: where its end is kept if there is no file, as
    far as it comes by the agent.
    """

    file: Path | None
    is_teed: bool
    is_shown: bool
    kept: Path | None = None


class RankLogs(msgspec.Struct, frozen=True):
    """Where the streams of a rank go, its error file, what else is in its environment, and the attempt's filtered files."""

    outlets: dict[Std, Outlet]
    error_file: str
    variables: dict[str, str]
    filtered: dict[Std, Path]


class LogFile:
    """Appends whole pieces at once, unbuffered. No fsync: what is written survives the agent, not the host.

    When it cannot be written to any more, `complain` says so once, and the job goes on without it.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """Raises UsageError if the file cannot be opened."""
        self._path = path
        self._complain = complain
        self._fd: int | None = open_file(path)

    def write(self, data: bytes) -> None:
        try:
            while data and self._fd is not None:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.close()
            self._complain(f"cannot write to {self._path}: {_reason(error)}; the job goes on without this file")

    def empty(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class JobFolder:
    """`path` is None where `log_dir` is /dev/null: then nothing is written anywhere."""

    def __init__(self, options: RunOptions, now: float, complain: Callable[[str], None]) -> None:
        """Raises UsageError if the folder cannot be made."""
        name = (
            f"{options.run_id.replace('/', '_') or time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}_{secrets.token_hex(4)}"
        )
        self.run_id = options.run_id or name
        self.path: Path | None = None
        self._options = options
        self._complain = complain
        self._events: LogFile | None = None
        if options.log_dir != Path(os.devnull):
            self.path = (options.log_dir / name).absolute()
            _make(self.path, mode=0o700)  # others read neither a job's output nor its state
            self._events = LogFile(self.path / reader.NAME, complain)

    def append(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(encode(event))

    def mark_held(self, is_held: bool) -> None:
        """That ranks stand still, for commands of `odyssey`: nobody is to continue them by hand."""
        if self.path is None:
            return
        try:
            if is_held:
                (self.path / owner.HELD).touch()
            else:
                (self.path / owner.HELD).unlink(missing_ok=True)
        except OSError as error:
            self._complain(f"{self.path / owner.HELD}: {_reason(error)}")

    def begin_again(self) -> None:
        """Another log is about to come."""
        if self._events is not None:
            self._events.empty()

    def logs_of(self, assignment: RankAssignment, variables: dict[str, str]) -> RankLogs:
        """As torchrun has it, whatever the variables; its folder is there. Raises UsageError if it cannot be made."""
        attempt = folder = None
        if self.path is not None:
            attempt = self.path / f"attempt_{assignment.attempt}"
            folder = attempt / str(assignment.local_rank)
            _make(folder)
            self._forget(assignment.attempt - 2)
        shown = self._options.shown_ranks
        is_shown = not shown or assignment.local_rank in shown
        outlets = {}
        for stream, name in STREAMS.items():
            is_teed = bool(_of(self._options.tee, assignment) & stream)
            to_file = is_teed or bool(_of(self._options.redirects, assignment) & stream)
            has_file = folder is not None and (to_file or self._options.capture_output)
            is_only_file = to_file and not is_teed and folder is not None
            file = folder / f"{name}.log" if folder is not None and has_file else None
            kept = None
            if self.path is not None and folder is not None and file is None and self._options.keep_bytes:
                kept = self.path / KEPT / folder.relative_to(self.path) / f"{name}.log"
            outlets[stream] = Outlet(file, is_teed, is_shown and not is_only_file, kept)
        filtered = {s: attempt / f"filtered_{name}.log" for s, name in STREAMS.items()} if attempt is not None else {}
        return RankLogs(outlets, str(folder / "error.json") if folder is not None else "", {}, filtered)

    def _forget(self, attempt: int) -> None:
        """What was kept of an attempt goes when the next but one begins."""
        if self.path is not None and attempt >= 0:
            shutil.rmtree(self.path / KEPT / f"attempt_{attempt}", ignore_errors=True)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def open_file(path: Path) -> int:
    """To append to. Raises UsageError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}", "name another directory with --log-dir") from None


def _make(folder: Path, mode: int = 0o777) -> None:
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the log directory {folder}: {_reason(error)}",
            "name another one with --log-dir; with --log-dir /dev/null nothing is kept",
        ) from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _of(choice: dict[int, Std] | Std, assignment: RankAssignment) -> Std:
    return choice.get(assignment.local_rank, Std.NONE) if isinstance(choice, dict) else choice
