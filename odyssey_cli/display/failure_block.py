"""The block at the end of a failed job: what failed first, where, when, what it did to the others, and what to do.

Readable on one screen. `FAILED`, `Root Cause` and the names of the fields are those that people's tools search torchrun's
output for.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence

from launcher.failures.hints import in_words
from launcher.failures.history import Attempt, Failure
from launcher.failures.root_cause import FailureKind, RankEnd
from odyssey.plan.worker import Rank
from odyssey.protocol.calls import ranks_alike
from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board
from odyssey_cli.errors import error_text

N_TRACEBACK_LINES = 15
N_OTHERS = 4
N_ATTEMPTS = 5
NARROWEST, WIDEST = 60, 100


def failure_text(failure: Failure, folder: str) -> str:
    """For stderr, in colour where that is a terminal. `folder`: with the logs of the job; may be empty."""
    width = shutil.get_terminal_size((WIDEST, 24)).columns
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""  # it was removed while the job ran
    return render(failure, folder, width, cwd=cwd, in_colour=sys.stderr.isatty())


def render(failure: Failure, folder: str, width: int, *, cwd: str = "", in_colour: bool = False) -> str:
    """The block as text, no line longer than `width` where it can be broken. Paths below `cwd` are shortened."""
    red, bold, dim, cyan, reset = ("\033[1;31m", "\033[1m", "\033[2m", "\033[36m", "\033[0m") if in_colour else ("",) * 5
    width = max(NARROWEST, min(width, WIDEST))
    cause = failure.cause
    rule = "=" * width
    lines = [rule, f"{red}{failure.script or 'the job'} FAILED{reset}"]
    if cause is not None:
        lines += [f"{bold}Root Cause (the first failure that explains the others):{reset}"]
        lines += _fields(_facts(failure, cause, folder, cwd), width)
        lines += _traceback(cause, width, dim, reset)
        lines += _consequences(failure, cause, width)
    lines += _earlier(failure.attempts, width)
    lines += [rule, *_wrapped(f"{red}error:{reset} ", failure.reason, width)]
    if failure.help:
        lines += _wrapped(f"{cyan}help:{reset} ", failure.help, width)
    return "\n".join(lines)


def _facts(failure: Failure, cause: RankEnd, folder: str, cwd: str) -> Iterable[tuple[str, str]]:
    clock = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(cause.time))
    yield "time", f"{clock}, {quantities.seconds(cause.time - failure.started_at)} after the start"
    yield "host", failure.host
    yield "rank", f"{cause.rank} (local_rank: {failure.local_rank})"
    if cause.status is not None:
        yield "exitcode", f"{cause.status}" + (f" (pid: {failure.pid})" if failure.pid is not None else "")
    yield "cause", _NAMES.get(cause.kind, "") + in_words(cause)
    if len(failure.alike) > 1:
        yield "same on", ranks_alike(failure.alike)
    if failure.step is not None:
        yield "step", str(failure.step)
    if failure.attempts:
        yield "attempt", str(failure.attempt)
    yield "log", (cause.diagnostics.log or folder).removeprefix(f"{cwd}/" if cwd else "")


_NAMES = {
    FailureKind.COMMUNICATION: "its connection to another rank broke: ",
    FailureKind.OUT_OF_MEMORY: "the kernel killed it: ",
}


def _fields(facts: Iterable[tuple[str, str]], width: int) -> list[str]:
    return [line for name, value in facts if value for line in _wrapped(f"  {name:9} : ", value, width)]


def _traceback(cause: RankEnd, width: int, dim: str, reset: str) -> list[str]:
    """Its end, whatever the width: lines of a traceback are not broken. Else the last lines of its stderr. The log has all."""
    text = cause.traceback or cause.diagnostics.last_lines
    if not text.strip():
        return []
    told = _folded(text.rstrip().splitlines())
    lines = told[-N_TRACEBACK_LINES:]
    name = "traceback" if cause.traceback else "last lines"
    left_out = f" (the last {len(lines)} lines of {len(told)})" if len(told) > len(lines) else ""
    return [f"  {name:9} :{left_out}", *(f"    {dim}{line}{reset}" for line in lines)]


_OF_A_LIBRARY = re.compile(r'  File "(?:.*/(?:site-packages|dist-packages|lib(?:64)?/python3\.\d+)/|<frozen )(\w+)')


def _folded(lines: Sequence[str]) -> list[str]:
    """The traceback, or several behind each other, with a line in place of what the user cannot change."""
    told: list[str] = []
    frames: list[list[str]] = []
    for line in lines:
        if line.startswith('  File "'):
            frames.append([line])
        elif frames and line.startswith("  "):
            frames[-1].append(line)
        else:
            told += [*_without_libraries(frames), line]
            frames = []
    return told + _without_libraries(frames)


def _without_libraries(frames: Sequence[Sequence[str]]) -> list[str]:
    """Those of libraries behind the user's innermost frame, or ours, are counted; all are told where there is no such one."""
    names = [found[1] if (found := _OF_A_LIBRARY.match(frame[0])) else "" for frame in frames]
    n_told = max((i + 1 for i, name in enumerate(names) if name in ("", "odyssey")), default=len(frames))
    lines = [line for frame in frames[:n_told] for line in frame]
    if left_out := names[n_told:]:
        lines.append(f"  ... {quantities.plural(len(left_out), 'frame')} in {', '.join(dict.fromkeys(left_out))}")
    return lines


def _consequences(failure: Failure, cause: RankEnd, width: int) -> list[str]:
    lines = []
    broken = [end for end in failure.others if end.kind is FailureKind.COMMUNICATION]
    own = [end for end in failure.others if end.kind is not FailureKind.COMMUNICATION]
    if own:
        lines.append("Other failures:")
        for end in own[:N_OTHERS]:
            lines += _wrapped(f"  rank {end.rank}: ", in_words(end), width)
        if len(own) > N_OTHERS:
            lines.append(f"  and {ranks_alike(end.rank for end in own[N_OTHERS:])}")
    if broken:
        lines += _wrapped("", f"lost their connection to it: {_numbers(end.rank for end in broken)}", width)
    if failure.victims:
        lines += _wrapped("", f"ended by us after rank {cause.rank} failed: {_numbers(failure.victims)}", width)
    return lines


def _numbers(ranks: Iterable[Rank]) -> str:
    """`0, 1, 3`; runs of ranks in short where there are many."""
    numbers = sorted(ranks)
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else ranks_alike(numbers).removeprefix("ranks ")


def _earlier(attempts: Sequence[Attempt], width: int) -> list[str]:
    if not attempts:
        return []
    lines = ["Earlier attempts:"]
    if len(attempts) > N_ATTEMPTS:
        lines.append(f"  {quantities.plural(len(attempts) - N_ATTEMPTS, 'attempt')} before these")
    for attempt in attempts[-N_ATTEMPTS:]:
        lines += _wrapped(
            f"  attempt {attempt.number}: ", f"{attempt.failure}, after {quantities.seconds(attempt.ran_s)}", width
        )
    return lines


def _wrapped(head: str, text: str, width: int) -> list[str]:
    """`head`, which may hold colours, then `text`, its further lines indented."""
    indent = "    "
    shown = len(head) - sum(len(code) for code in ("\033[1;31m", "\033[36m", "\033[0m") if code in head)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * shown,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=4,
    )
    return [head + lines[0][shown:], *lines[1:]] if lines else [head.rstrip()]


def reason_text(board: Board) -> str:
    """Why the job failed, where its log knows; else empty. A signal is no error: the user knows."""
    ended = board.ended
    if ended is None or ended.code == 0:
        return ""
    return f"odyssey: {ended.reason}" if ended.code > 128 else error_text(ended.reason, ended.help)
