"""A reader who does not read, goes away, or has a full disk: the job goes its way, and ends with its own code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.loop import Loop
from launcher.joblog import reader
from launcher.options import RunOptions, Std
from launcher.output.console import BACKLOG_BYTES, write_some
from launcher.output.log_files import JobFolder
from launcher.output.streams import Streams
from tests import ROOT
from tests.agent_runs import nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

RUN = [sys.executable, "-m", "odyssey_cli", "run", "--no-display"]
SEAT = RankAssignment(rank=0, local_rank=0, node=0, n_ranks=1, n_local_ranks=1, n_nodes=1, role_rank=0, n_role_ranks=1)


def start(tmp_path: Path, text: str, *flags: str, stderr: int) -> subprocess.Popen[bytes]:
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [*RUN, f"--log-dir={tmp_path / 'logs'}", *flags, str(script)]
    return subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=stderr
    )


def until(what: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not what():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize("n_signals", [1, 2])
def test_a_reader_who_does_not_read_holds_up_no_restart_and_no_end(n_signals: int, tmp_path: Path) -> None:
    """A signal ends the launcher that only waits for its reader; two end one that waits for its ranks as well."""
    noise = "import os, sys, time; sys.stderr.write('x' * 250_000); sys.stderr.flush(); open(str(time.time_ns()), 'w')\n"
    goes_on = "open('second', 'w') if len(os.listdir('.')) > 3 else sys.exit(3)\ntime.sleep(1000)"
    ours, theirs = os.pipe()
    flags = ("--max-restarts=1", "--retry-same-failure", "--restart-backoff=0", "--shutdown-timeout=1000")
    run = start(tmp_path, noise + ("sys.exit(3)" if n_signals == 1 else goes_on), *flags, stderr=theirs)
    os.close(theirs)
    if n_signals == 2:
        until((tmp_path / "second").exists, run)
        run.send_signal(signal.SIGTERM)
    until(lambda: [log for log in (tmp_path / "logs").glob(f"*/{reader.NAME}") if reader.has_ended(log)], run)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == (1 if n_signals == 1 else 128 + signal.SIGTERM)
    os.close(ours)


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_of_stderr_changes_no_exit_code_and_loses_no_report(code: int, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        run = start(tmp_path, f"import sys; sys.exit({code})", f"--json-report={tmp_path / 'report'}", stderr=full.fileno())
        assert run.wait() == (1 if code else 0)
        assert json.loads((tmp_path / "report").read_bytes())["exitcode"] == (1 if code else 0)
        assert start(tmp_path, "", "--nproc-per-node=none", stderr=full.fileno()).wait() == 2


def test_a_file_that_somebody_made_one_that_does_not_wait_is_waited_for() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    data = os.urandom(1 << 20)
    got = bytearray()

    def read() -> None:
        while len(got) < len(data):
            got.extend(os.read(ours, 1 << 16))

    thread = threading.Thread(target=read)
    thread.start()
    left = data
    while left:
        left = left[write_some(theirs, left) :]
    thread.join()
    assert got == data
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("full_at", range(4))
def test_a_display_that_has_room_again_at_once_is_given_what_comes(full_at: int, tmp_path: Path) -> None:
    """It has too much to show at one of the questions to it, and at the next one no more."""
    questions, shown = iter(range(1 << 20)), bytearray()

    def never(text: str) -> None:
        raise AssertionError(text)

    def show(rank: int, stream: str, data: bytes) -> bool:
        shown.extend(data)
        return not data and next(questions) == full_at

    now = [0.0]
    options = RunOptions("train.py", log_dir=tmp_path / "logs", capture_output=True)
    loop, folder = Loop(lambda: now[0]), JobFolder(options, 0.0, never)
    made = Streams(options, loop, folder.logs_of, show, never)
    of_rank = made.open(SEAT, {})
    try:
        for n in range(1, 5):
            os.write(of_rank.descriptors[1], b"a line\n")
            for _ in range(3):
                now[0] += 1.0
                loop.later(0.0, lambda: None)
                loop.turn()
            assert bytes(shown) == b"a line\n" * n
    finally:
        of_rank.close()
        made.close()
        folder.close()
        loop.close()
    assert next(questions) > full_at


@pytest.mark.parametrize("to", ["the display", "the console"])
def test_ranks_wait_for_who_shows_what_they_write(to: str, tmp_path: Path) -> None:
    def never(text: str) -> None:
        raise AssertionError(text)

    shown, room = bytearray(), [BACKLOG_BYTES]

    def show(rank: int, stream: str, data: bytes) -> bool:
        shown.extend(data)
        return len(shown) > room[0]

    how = {"capture_output": True} if to == "the display" else {"tee": Std.ERR}
    options = RunOptions("train.py", log_dir=tmp_path / "logs", **how)  # type: ignore[arg-type]
    loop, folder = Loop(time.monotonic), JobFolder(options, 0.0, never)
    ours, theirs, stderr = *os.pipe(), os.dup(2)
    try:
        os.dup2(theirs, 2)
        made = Streams(options, loop, folder.logs_of, show, never)
        of_rank = made.open(SEAT, {})
        os.set_blocking(of_rank.descriptors[2], False)
        n_bytes = n_refused = 0
        while n_refused < 3:  # in a row: the pipe is full, and nobody reads it
            try:
                n_bytes, n_refused = n_bytes + os.write(of_rank.descriptors[2], b"x" * 1023 + b"\n"), 0
            except BlockingIOError:
                n_refused += 1
            loop.later(0.0, lambda: None)
            loop.turn()
        assert BACKLOG_BYTES <= n_bytes < 1.5 * BACKLOG_BYTES
        room[0] = 1 << 40
        n_shown = 0
        os.set_blocking(ours, False)
        while n_shown < n_bytes:  # somebody reads again
            if to == "the display":
                n_shown = len(shown)
            else:
                with contextlib.suppress(BlockingIOError):
                    n_shown += len(os.read(ours, 1 << 16).replace(b"[default0]:", b""))
            loop.later(0.0, lambda: None)
            loop.turn()
        made.abandon()
        of_rank.close()
        made.close()
    finally:
        os.dup2(stderr, 2)
        for fd in (ours, theirs, stderr):
            os.close(fd)
        folder.close()
        loop.close()
