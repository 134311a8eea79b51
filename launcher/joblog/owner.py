"""Whose folder this is: where a job may have several agents each has one, with the whole log and what its ranks wrote.

`agent.json` beside the log tells the commands of `odyssey` which agent that is, and how the others are reached from here.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from launcher.host import proc
from odyssey.codec import Json, Malformed, to_json

NAME = "agent.json"
HELD = "held"
"""A file that is there while the agent is cut off from the others, and has its ranks stand still."""
_SAME_START_S = 0.5 * proc.TICK_S


class Process(msgspec.Struct, frozen=True):
    """An agent's. `pid_started`: seconds after its `host` began to run, as which it is called `boot`."""

    host: str
    pid: int
    pid_started: float
    boot: str

    @property
    def runs_here(self) -> bool:
        """It, and no other process that has come to have its number."""
        if self.host not in ("", socket.gethostname()) or self.boot != proc.boot_id():
            return False
        now = proc.stat(self.pid)
        return now is not None and abs(now.started_s - self.pid_started) < _SAME_START_S


class Owner(msgspec.Struct, frozen=True):
    """The agent that a folder of logs belongs to.
    `job`: what the job is called on every host; `number`: of the agent. `port`: of the endpoint; `secret_file`: as given,
    empty for none. `leader`: who led when it joined, reached at `leader_at`; empty where it led itself."""

    job: str
    number: int
    process: Process
    port: int
    secret_file: str = ""
    leader: int = 0
    leader_at: tuple[str, int] = ("", 0)


_owner = Json(Owner)


def write(folder: Path, owner: Owner) -> None:
    """The whole file or none. Raises OSError."""
    part = folder / f"{NAME}.part"
    part.write_bytes(to_json(owner) + b"\n")
    part.replace(folder / NAME)


def read(folder: Path) -> Owner | None:
    """None for a job that has only one agent, and for what is no such file."""
    try:
        found: Owner = _owner.decode((folder / NAME).read_bytes())
    except (OSError, Malformed):
        return None
    return found


def is_held(folder: Path) -> bool:
    """Whether the ranks of the agent whose folder this is stand still by its doing."""
    return os.path.exists(folder / HELD)


def this_process() -> Process:
    """The one that calls this."""
    own = proc.stat(os.getpid())
    return Process(socket.gethostname(), os.getpid(), own.started_s if own is not None else 0.0, proc.boot_id())
