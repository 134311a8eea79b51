"""`odyssey run` and its like: have the command line read, hand it to the agent, and show what happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from launcher.failures.history import FailureHistory, after, failure_of
from launcher.joblog.events import Event
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.parser import HelpAsked
from odyssey_cli.command_line.request import read
from odyssey_cli.display.board import Board
from odyssey_cli.display.failure_block import print_failure, print_reason
from odyssey_cli.display.plain_log import PlainLog
from odyssey_cli.display.summary import summary
from odyssey_cli.errors import print_error
from odyssey_cli.jobs import json_report

Watch = Callable[[Event], None]


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
        from odyssey_cli.planning.profile import profile

        return profile(request.options, request.options.write_profile)
    return run(request.options, display=request.wants_display)


def run(options: RunOptions, *, display: bool, also: Watch | None = None) -> int:
    """Run the job to its end; returns its exit code. `also` sees every event, beside what shows them."""
    from launcher.agent import start

    board = Board()
    history = FailureHistory()

    def watched(show: Watch) -> Watch:
        def watch(event: Event) -> None:
            nonlocal history
            history = after(history, event)
            show(event)
            if also is not None:
                also(event)

        return watch

    if display and sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None):
        from odyssey_cli.display.screen import Screen

        with Screen(board) as screen:
            code = start.run(msgspec.structs.replace(options, capture_output=True), watched(screen.watch), screen.output)
    else:
        log = PlainLog(board)
        code = start.run(msgspec.structs.replace(options, capture_output=False), watched(log.watch), _no_output)
    failure = failure_of(history)
    if failure is not None and failure.cause is not None:
        print_failure(failure, str(_folder(board) or ""))
    elif code != 0:
        print_reason(board)
    if options.json_report is not None:
        _write_report(options.json_report, history, code)
    for line in summary(board, _folder(board)).splitlines():
        print(f"odyssey: {line}", file=sys.stderr)
    return code


def _write_report(path: Path, history: FailureHistory, code: int) -> None:
    """The job is over, whether or not this can be written."""
    try:
        json_report.write(path, history, code)
    except OSError as error:
        print_error(f"--json-report: cannot write {path}: {(error.strerror or str(error)).lower()}")


def _no_output(rank: int, stream: str, data: bytes) -> None:
    """Ranks write to the launcher's own streams."""


def _folder(board: Board) -> Path | None:
    """The job's own, where it keeps one."""
    return Path(board.job.folder) if board.job is not None and board.job.folder else None
