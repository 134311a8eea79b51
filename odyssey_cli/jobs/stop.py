"""`odyssey stop`: ends a job by a signal to its agent, and to no other process that has come to have its number."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from launcher.joblog import reader
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.jobs import find

LOOK_S = 0.02
TAKEN_S = 5.0
"""With --now the second signal comes when the log has the end that the first one asked for, else they would count as one; and
after this time in any case."""


def stop(name: str | None, *, now: bool) -> ExitCode:
    """SIGTERM to the agent, which ends its ranks; returns when it is gone. `now`: without waiting for the ranks."""
    job = find.find(name, only_running=name is None or name == "last")
    agent = job.agent
    if agent is None:
        if job.is_elsewhere:
            raise UsageError(f"{job.name} runs on {job.started.host}", "stop it there")
        raise UsageError(f"{job.name} does not run any more ({job.status})", "`odyssey ps` shows the jobs that do")
    try:
        process = os.pidfd_open(agent)
    except ProcessLookupError:
        print(f"{job.name} has just ended")
        return ExitCode.OK
    try:
        if job.look_for_agent() == agent:  # seen again through a descriptor that nobody else can get
            _end(process, job, now)
    except PermissionError:
        raise OdysseyError(f"{job.name} is another user's", "ask them") from None
    finally:
        os.close(process)
    print(f"{job.name} has ended")
    return ExitCode.OK


def _end(process: int, job: find.FoundJob, now: bool) -> None:
    gone = select.poll()
    gone.register(process, select.POLLIN)
    if not now:
        print(f"stopping {job.name}: its ranks get SIGTERM; `odyssey stop {job.name} --now` does not wait for them")
        sys.stdout.flush()
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if now and job.board.ended is None:
            log, deadline = job.folder / reader.NAME, time.monotonic() + TAKEN_S
            while not gone.poll(LOOK_S * 1000) and not reader.has_ended(log) and time.monotonic() < deadline:
                pass
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        pass  # gone
    gone.poll()
