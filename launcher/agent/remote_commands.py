"""What commands of `odyssey` find of an agent that may have others: whose folder it is, and answers to what they ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.agent.notice_socket import notice
from launcher.cluster.command_server import CommandServer
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.cluster.questions import Answer, AskLeave, Ending, Noted, NotLeading
from launcher.joblog import owner
from launcher.joblog.events import JobStarted
from launcher.joblog.owner import Owner
from launcher.processes.local_agent import LocalAgent
from odyssey.plan.worker import Rank


def owner_of_folder(local: LocalAgent, number: int, started: JobStarted, leader: int, leader_at: Address) -> Owner:
    """`number`: of this agent. `leader`, `leader_at`: who led when it joined, and where, from here."""
    folder, secret_file = started.folder or str(local.folder.path or ""), local.options.secret_file
    return Owner(
        job=Path(folder).name,
        number=number,
        process=owner.this_process(),
        port=local.options.master_port,
        secret_file=str(secret_file.absolute()) if secret_file is not None else "",
        leader=leader,
        leader_at=(leader_at.host, leader_at.port),
    )


def answer_commands(local: LocalAgent, listener: Listener, leader: Callable[[], int]) -> None:
    """From now on, whatever the agent's role is then. `leader()`: who leads where this agent does not."""

    def end(now: bool) -> Answer:
        return Ending(local.end(now)) if local.decides else NotLeading(leader())

    def leave(ask: AskLeave) -> Answer:
        if not local.decides:
            return NotLeading(leader())
        local.sink.event(notice(ask))
        return Noted()

    def pids() -> dict[Rank, int]:
        return local.own_ranks.pids(local.processes.ranks)

    def is_ending() -> bool:
        return local.code is not None

    local.owes = CommandServer(
        local.loop, listener, local.folder.path, pids=pids, end=end, leave=leave, is_ending=is_ending
    ).owes
