"""`odyssey leave`: gives notice of a rank, or of all that a host has, to the agent that leads the job: what they hold is moved
away, and then they end."""

from __future__ import annotations

from launcher.cluster.questions import AskLeave
from launcher.joblog.exit_codes import ExitCode
from launcher.joblog.wording import ranks_text
from odyssey.errors import UsageError
from odyssey_cli.jobs import find
from odyssey_cli.jobs.conversation import Conversation


def leave(who: str, name: str | None) -> ExitCode:
    """`who`: a rank's number, or a host's name. Returns when the job has been told. Raises UsageError, OdysseyError."""
    job = find.find(name, only_running=name is None or name == "last")
    if job.agent is None:
        raise UsageError(f"{job.name} does not run here ({job.status})", "`odyssey ps` shows the jobs that do")
    if job.owner is None:
        raise UsageError(
            f"{job.name} has one agent, which nobody else can talk to",
            "run it with --nnodes MIN:MAX, or try it with --drill 'step=20 leave=2'",
        )
    ranks = _ranks_of(who, job)
    conversation = Conversation(job)
    try:
        conversation.ask_leader(AskLeave(ranks), "ask on that host")
    finally:
        conversation.close()
    print(f"{ranks_text(ranks)} of {job.name} will leave; `odyssey status {job.name}` says when, or why not")
    return ExitCode.OK


def _ranks_of(who: str, job: find.FoundJob) -> tuple[int, ...]:
    agents = job.agents
    if who.isdigit():
        if int(who) not in agents.home_of:
            raise UsageError(f"{job.name} has no rank {who}", f"it has ranks 0 to {agents.n_ranks - 1}")
        return (int(who),)
    there = {number for number in agents.present if agents.known[number].host == who}
    ranks = tuple(sorted(rank for rank, home in agents.home_of.items() if home in there))
    if not ranks:
        hosts = ", ".join(sorted({agents.known[number].host for number in agents.present}))
        raise UsageError(f"{job.name} has no ranks on a host {who!r}", f"it has them on {hosts}")
    return ranks
