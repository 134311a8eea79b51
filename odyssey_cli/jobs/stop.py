"""`odyssey stop` ends a job by a signal to its agent, and to no other process that has come to have its number.
Where there may be several agents, to each of which a signal is a notice, it asks the one that leads."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from launcher.cluster.questions import AskEnd, AskLife, Ending
from launcher.joblog import reader
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import UsageError
from odyssey_cli.jobs import find
from odyssey_cli.jobs.conversation import ANSWER_S, Conversation

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
    job.check_is_ours()
    try:
        process = os.pidfd_open(agent)
    except ProcessLookupError:
        print(f"{job.name} has just ended")
        return ExitCode.OK
    try:
        if job.owner is not None:
            _ask(process, job, now)
        elif job.look_for_agent() == agent:  # seen again through a descriptor that nobody else can get
            _end(process, job, now)
    finally:
        os.close(process)
    print(f"{job.name} has ended")
    return ExitCode.OK


def _end(process: int, job: find.FoundJob, now: bool) -> None:
    gone = select.poll()
    gone.register(process, select.POLLIN)
    if not now:
        _say_that_it_ends(job)
    try:
        _tell_to_end(process)
        if now and job.board.ended is None:
            log, deadline = job.folder / reader.NAME, time.monotonic() + TAKEN_S
            while not gone.poll(LOOK_S * 1000) and not reader.has_ended(log) and time.monotonic() < deadline:
                pass
            _tell_to_end(process)
    except ProcessLookupError:
        pass  # gone
    gone.poll()


def _tell_to_end(process: int) -> None:
    """One that was stopped, as by Ctrl-Z, hears of it when it goes on. Raises ProcessLookupError."""
    signal.pidfd_send_signal(process, signal.SIGTERM)
    signal.pidfd_send_signal(process, signal.SIGCONT)


def _ask(process: int, job: find.FoundJob, now: bool) -> None:
    """`process`: this host's agent, which ends with the job."""
    if not now:
        _say_that_it_ends(job)
    conversation = Conversation(job)
    try:
        help = "stop it on that host, by Ctrl-C; a SIGTERM to an agent has that one leave"
        leader, _ = conversation.ask_leader(AskEnd(now=False), help)
        question = AskEnd(now=True) if now else AskLife()
        while isinstance(conversation.ask({leader: question}, ANSWER_S)[leader], Ending):
            time.sleep(LOOK_S)
    finally:
        conversation.close()
    gone = select.poll()
    gone.register(process, select.POLLIN)
    gone.poll()


def _say_that_it_ends(job: find.FoundJob) -> None:
    print(f"stopping {job.name}: its ranks get SIGTERM; `odyssey stop {job.name} --now` does not wait for them")
    sys.stdout.flush()
