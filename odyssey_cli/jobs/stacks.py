"""`odyssey stacks`: where the ranks of a running job are in their Python code, those together that are at the same place."""

from __future__ import annotations

import sys

from launcher.cluster.questions import AskStacks, CannotTell, Stacks
from launcher.health import stacks as reading
from launcher.health.stacks import Stack, cleaned
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey_cli.jobs import find
from odyssey_cli.jobs.conversation import Conversation, Unreachable
from odyssey_cli.jobs.find import FoundJob

ANSWER_S = 2 * reading.LIMIT_S + 5.0
"""For an agent of another host: it has so long to read them, and some more to be reached."""


def stacks(name: str | None, *, whole: bool) -> ExitCode:
    """Print a line for each group of ranks; with `whole` all their frames."""
    job = find.find(name, only_running=name is None or name == "last")
    if not any(rank.is_alive for rank in job.ranks):
        raise UsageError(f"no rank of {job.name} is alive here ({job.status})", "`odyssey ps` shows the jobs that run")
    job.check_is_ours()
    there = _elsewhere(job)
    found = reading.Reading().read({rank.rank: rank.pid for rank in job.ranks if rank.is_alive and rank.is_here}) | there
    groups = reading.group(found)
    apart = reading.outliers(groups)
    for group, line in zip(groups, reading.lines(groups), strict=True):
        print(line + ("   <- not with the others" if apart & set(group.ranks) else ""))
        if whole:
            for frame in reading.frames_for_people(found[group.ranks[0]]):
                print(f"    {frame.function} ({frame.file}:{frame.line})")
    are_all_there = all(rank.rank in found for rank in job.ranks if rank.is_alive)
    return ExitCode.OK if are_all_there and all(group.readable for group in groups) else ExitCode.FAILED


def _elsewhere(job: FoundJob) -> dict[Rank, Stack]:
    """Those of other agents; who cannot be asked is told of."""
    homes = {rank.agent for rank in job.ranks if rank.is_alive and not rank.is_here}
    if not homes:
        return {}
    conversation = Conversation(job)
    try:
        answers = conversation.ask({home: AskStacks() for home in sorted(homes)}, ANSWER_S)
    finally:
        conversation.close()
    found: dict[Rank, Stack] = {}
    for home, answer in answers.items():
        if isinstance(answer, Stacks):
            ranks = {rank.rank for rank in job.ranks if rank.agent == home}
            found |= {rank: cleaned(stack) for rank, stack in answer.stacks.items() if rank in ranks}
        elif isinstance(answer, Unreachable):
            print(f"odyssey: {job.agents.name(home)} cannot be asked: {answer.why}", file=sys.stderr)
        elif isinstance(answer, CannotTell):
            print(f"odyssey: {job.agents.name(home)} cannot tell where its ranks are: {answer.why}", file=sys.stderr)
    return found
