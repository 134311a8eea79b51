"""`odyssey run` and its like: have the command line read, hand it to the agent, and show what happens."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from launcher.failures.history import FailureHistory, after, failure_of
from launcher.joblog.events import Event
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey.plan.worker import Rank
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.parser import HelpAsked
from odyssey_cli.command_line.request import read
from odyssey_cli.display.board import Board
from odyssey_cli.display.failure_block import failure_text, reason_text
from odyssey_cli.display.own_lines import OwnLines
from odyssey_cli.display.plain_log import PlainLog
from odyssey_cli.display.summary import summary
from odyssey_cli.errors import error_text
from odyssey_cli.jobs import json_report
from odyssey_cli.slurm.step import Step

Watch = Callable[[Event], None]


def execute(argv: Sequence[str], command: Command) -> int:
    """Run a command line that starts ranks; returns the exit code. Raises UsageError before anything is started."""
    try:
        request = read(argv, os.environ, command)
    except HelpAsked as asked:
        print(asked, flush=True)
        return ExitCode.OK
    if request.step is not None and not request.step.is_agent:
        from odyssey_cli.slurm import node_tasks

        return node_tasks.follow(request.step)
    for note in request.notes:
        _say(note)
    if request.options.write_profile is not None:
        from odyssey_cli.planning.profile import profile

        return profile(request.options, request.options.write_profile)
    if command is Command.CHECK:
        from odyssey_cli.check.check import check

        return _in_step(request.step, lambda: check(request.options, request.step, request.answer))
    if request.step is not None:
        _tell_of_step(request.options, request.step)
    options = msgspec.structs.replace(request.options, ends_process=True)
    return _in_step(request.step, lambda: run(options, display=request.wants_display))


def _tell_of_step(options: RunOptions, step: Step) -> None:
    """One of the agents of a step of SLURM tells what SLURM will do."""
    from odyssey_cli.slurm import recipe

    if complaint := recipe.too_few_processors(len(os.sched_getaffinity(0)), os.environ):
        _say(complaint)
    if step.node == 0:  # in a thread: SLURM may take its time to answer
        threading.Thread(target=_advise, args=(step, options.max_agents > 1), name="advice", daemon=True).start()


def _in_step(step: Step | None, launch: Callable[[], int]) -> int:
    """For the agent of a node of SLURM with several tasks: the others exit as this one does."""
    if step is None or step.n_tasks_here == 1:
        return launch()
    from odyssey_cli.slurm import node_tasks

    with node_tasks.leading(step) as others:
        code = launch()
        others.tell(code)
    return code


def _advise(step: Step, has_several_agents: bool) -> None:
    """What SLURM will do to this step, and when its time is over."""
    from odyssey_cli.slurm import recipe, time_limit

    if has_several_agents and (found := recipe.seen(step, os.environ)):
        _say(f"as SLURM runs this step, {'; '.join(found)}; see `odyssey slurm`")
    time_limit.tell_in_time(lambda: time_limit.job_end(step.job_id), _say)


def _say(text: str) -> None:
    print(f"odyssey: {text}", file=sys.stderr, flush=True)


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

    with OwnLines(options) as lines:
        if display and sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None):
            code = _run_in_display(msgspec.structs.replace(options, capture_output=True), board, watched, lines)
        else:
            log = PlainLog(board, lines.write)
            code = start.run(
                msgspec.structs.replace(options, capture_output=False), watched(log.watch), _no_output, lines.hurry
            )
        if code > 128:
            lines.hurry()
        if options.json_report is not None and (history.job is not None or code != 0):  # else the leading agent's to tell
            _write_report(options.json_report, history, code, lines)
        failure = failure_of(history)
        has_cause = failure is not None and failure.cause is not None
        why = failure_text(failure, str(_folder(board) or "")) if failure is not None and has_cause else reason_text(board)
        for text in filter(None, (why, *(f"odyssey: {line}" for line in summary(board, _folder(board)).splitlines()))):
            lines.write(text)
    return code


def _run_in_display(options: RunOptions, board: Board, watched: Callable[[Watch], Watch], lines: OwnLines) -> int:
    from rich.console import Console

    from launcher.agent import start
    from odyssey_cli.display.screen import Screen
    from odyssey_cli.display.terminal import Terminal

    terminal = Terminal()

    def wait_for(thread: threading.Thread) -> None:
        lines.wait_for(thread, lambda: terminal.n_written_bytes)

    with Screen(board, Console(file=terminal.text(), highlight=False), wait_for) as screen:
        code = start.run(options, watched(screen.watch), screen.output, lines.hurry)
        if code > 128:
            lines.hurry()
    return code


def _write_report(path: Path, history: FailureHistory, code: int, lines: OwnLines) -> None:
    """The job is over, whether or not this can be written."""
    try:
        json_report.write(path, history, code)
    except OSError as error:
        lines.write(error_text(f"--json-report: cannot write {path}: {(error.strerror or str(error)).lower()}"))


def _no_output(rank: Rank, stream: str, data: bytes) -> None:
    """Ranks write to the launcher's own streams."""


def _folder(board: Board) -> Path | None:
    """The job's own, where it keeps one."""
    return Path(board.job.folder) if board.job is not None and board.job.folder else None
