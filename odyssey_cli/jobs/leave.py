"""`odyssey leave` gives notice of a rank, or of all that a host has, to the agent that leads the job.
What they hold is moved away, and then they end."""

from __future__ import annotations

from launcher.agent import notice_socket
from launcher.cluster.questions import AskLeave
from launcher.joblog.exit_codes import ExitCode
from launcher.joblog.wording import ranks_text
from odyssey.errors import OdysseyError, UsageError
from odyssey.plan.worker import Rank
from odyssey_cli.command_line.values import duration_s
from odyssey_cli.jobs import find
from odyssey_cli.jobs.conversation import Conversation


def leave(who: str, name: str | None, within: str | None) -> ExitCode:
    """`who`: a rank's number, or a host's name; `within`: a duration. Returns when the job has been told. Raises UsageError,
    OdysseyError."""
    within_s = duration_s(within, "--within") if within is not None else None
    job = find.find(name, only_running=name is None or name == "last")
    if job.agent is None:
        raise UsageError(f"{job.name} does not run here ({job.status})", "`odyssey ps` shows the jobs that do")
    job.check_is_ours()
    if not job.is_job:
        raise UsageError(f"{job.name} has no odyssey.Job, which could go on without a rank", "`odyssey stop` ends it")
    ask = AskLeave(ranks := _ranks_of(who, job), within_s)
    if job.owner is None:
        _tell_the_only_agent(job, ask)
    else:
        conversation = Conversation(job)
        try:
            conversation.ask_leader(ask, "ask on that host")
        finally:
            conversation.close()
    print(f"{ranks_text(ranks)} of {job.name} will leave; `odyssey status {job.name}` says when, or why not")
    return ExitCode.OK


def _tell_the_only_agent(job: find.FoundJob, ask: AskLeave) -> None:
    try:
        notice_socket.give(job.folder, ask)
    except ConnectionRefusedError:
        raise OdysseyError(f"{job.name} has just ended") from None
    except OSError as error:
        what = f"{job.folder / notice_socket.NAME}: {(error.strerror or str(error)).lower()}"
        raise OdysseyError(what, "see what the job said when it began; `odyssey stop` ends it") from None


def _ranks_of(who: str, job: find.FoundJob) -> tuple[Rank, ...]:
    agents, host_of = job.agents, {rank.rank: rank.host for rank in job.ranks}
    if job.owner is not None:
        host_of = {rank: agents.known[home].host for rank, home in agents.home_of.items() if home in agents.present}
    if who.isdecimal():
        rank = Rank(int(who))
        if rank not in host_of:
            raise UsageError(f"{job.name} has no rank {who}", f"it has ranks 0 to {max(host_of, default=0)}")
        return (rank,)
    ranks = tuple(sorted(rank for rank, host in host_of.items() if host == who))
    if not ranks:
        hosts = ", ".join(sorted({*host_of.values()}))
        raise UsageError(f"{job.name} has no ranks on a host {who!r}", f"it has them on {hosts}")
    if len(ranks) == len(host_of):
        raise UsageError(f"{job.name} has ranks on {who} only: nobody would be left", "`odyssey stop` ends it")
    return ranks
