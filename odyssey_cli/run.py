"""`odyssey run` and its like: have the command line read, hand it to the agent, and show what happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from launcher.chronicle import Chronicle, after, failure_of
from launcher.events import Event
from launcher.options import RunOptions
from odyssey_cli import json_report
from odyssey_cli.board import Board
from odyssey_cli.errors import ExitCode, print_error
from odyssey_cli.failure import print_failure
from odyssey_cli.launch_arguments import read
from odyssey_cli.launch_options import Command
from odyssey_cli.launch_parser import HelpAsked
from odyssey_cli.plain import PlainLog
from odyssey_cli.summary import summary

Watch = Callable[[Event], None]
Agent = Callable[[RunOptions, Watch, Callable[[int, str, bytes], None]], int]


def execute(argv: Sequence[str], command: Command) -> int:
    """Run a command line that starts ranks; returns the exit code. Raises UsageError before anything is started."""
    try:
        request = read(argv, os.environ, command)
    except HelpAsked as asked:
        print(asked, flush=True)
        return ExitCode.OK
    for note in request.notes:
        print(f"odyssey: {note}", file=sys.stderr)
    if request.options.write_profile is not None:
        from odyssey_cli.profile import profile

        return profile(request.options, request.options.write_profile)
    return run(request.options, display=request.wants_display)


def run(options: RunOptions, *, display: bool, agent: Agent | None = None) -> int:
    """Run the job to its end; returns its exit code. `agent` stands in for the launcher's in tests."""
    if agent is None:
        from launcher.agent import run as launch

        agent = launch
    board = Board()
    chronicle = Chronicle()

    def watched(show: Watch) -> Watch:
        def watch(event: Event) -> None:
            nonlocal chronicle
            chronicle = after(chronicle, event)
            show(event)

        return watch

    if display and sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None):
        from odyssey_cli.screen import Screen

        with Screen(board) as screen:
            code = agent(msgspec.structs.replace(options, capture_output=True), watched(screen.watch), screen.output)
    else:
        log = PlainLog(board)
        code = agent(msgspec.structs.replace(options, capture_output=False), watched(log.watch), _no_output)
    failure = failure_of(chronicle)
    if failure is not None and failure.cause is not None:
        print_failure(failure, str(_folder(board) or ""))
    elif code != 0:
        end_with_error(board)
    if options.json_report is not None:
        _write_report(options.json_report, chronicle, code)
    for line in summary(board, _folder(board)).splitlines():
        print(f"odyssey: {line}", file=sys.stderr)
    return code


def _write_report(path: Path, chronicle: Chronicle, code: int) -> None:
    """The job is over, whether or not this can be written."""
    try:
        json_report.write(path, chronicle, code)
    except OSError as error:
        print_error(f"--json-report: cannot write {path}: {(error.strerror or str(error)).lower()}")


def _no_output(rank: int, stream: str, data: bytes) -> None:
    """Ranks write to the launcher's own streams."""


def _folder(board: Board) -> Path | None:
    """The job's own, where it keeps one."""
    return Path(board.job.folder) if board.job is not None and board.job.folder else None


def end_with_error(board: Board) -> None:
    """Say why the job failed, where its log knows. A signal is no error: the user knows."""
    ended = board.ended
    if ended is not None and ended.code > 128:
        print(f"odyssey: {ended.reason}", file=sys.stderr)
    elif ended is not None and ended.code != 0:
        print_error(ended.reason, ended.help)


def newest_job(log_dir: Path) -> Path | None:
    """The folder below `log_dir` whose event log was written last."""
    logs = [(log.stat().st_mtime, log) for log in log_dir.glob("*/events.jsonl")]
    return max(logs)[1].parent if logs else None
