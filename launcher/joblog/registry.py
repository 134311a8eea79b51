"""The jobs of this user: a link to each job's folder, and whether its agent still runs.

`$XDG_STATE_HOME/odyssey/jobs/<host>/<name of the job's folder>` (`~/.local/state` by default) points to the folder; what is
true of a job is in its event log and nowhere else. A link is only how `odyssey ps` finds it: a job without one runs as well.
Hosts may share a home and not the folders of their jobs, nor see each other's processes: each cleans up its own links.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from launcher.host import proc
from launcher.joblog import owner, reader
from launcher.joblog.events import Event, JobStarted

N_KEPT = 100


def directory() -> Path:
    """Where this host's links are; it need not exist. Raises FileNotFoundError for a user without a home, as in containers."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise FileNotFoundError("this user has no home; set HOME or XDG_STATE_HOME") from None
    return home / "odyssey" / "jobs" / socket.gethostname()


def enter(folder: Path) -> None:
    """Add a job that begins here, forget those whose folder is gone and all but the newest that have ended. Raises OSError."""
    links = directory()
    links.mkdir(parents=True, exist_ok=True)
    name = folder.name
    while (links / name).resolve() != folder.resolve():
        try:
            (links / name).symlink_to(folder)
            break
        except FileExistsError:  # of a folder elsewhere
            name = f"{name}+"
    _prune(links)


def _prune(links: Path) -> None:
    ended = 0
    for link in _newest_first(links):
        if not os.path.exists(link / reader.NAME):  # or nobody of this user sees it any more
            gone = True
        else:
            ended += 1
            gone = ended > N_KEPT and not is_running(link)
        if gone:
            link.unlink(missing_ok=True)


def folders() -> list[Path]:
    """Give the folders of all jobs that are known, on any host, and are seen from here, the newest first; none for a user
    without a home."""
    try:
        hosts = list(directory().parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [link.resolve() for link in _newest_first(*hosts) if os.path.exists(link / reader.NAME)]


def _newest_first(*folders: Path) -> list[Path]:
    times: list[tuple[float, Path]] = []
    for links in folders:
        try:
            for entry in links.iterdir():
                try:
                    times.append((entry.lstat().st_mtime, entry))
                except FileNotFoundError:
                    continue  # another agent is cleaning up
        except (FileNotFoundError, NotADirectoryError):
            continue
    return [link for _, link in sorted(times, reverse=True)]


# -- the agent's process -----------------------------------------------------------------------------------------------


def started_at(pid: int) -> float | None:
    """When a process began, seconds after boot; None if there is none of this number."""
    found = proc.stat(pid)
    return found.started_s if found is not None else None


def agent_of(started: Event) -> int | None:
    """The only agent's pid if it still runs here. `started`: the JobStarted of its log."""
    job = started.body
    if not isinstance(job, JobStarted):
        return None
    return job.pid if owner.Process(job.host, job.pid, job.pid_started, job.boot).runs_here else None


def is_running(folder: Path) -> bool:
    """Whether the agent whose folder this is runs on this host."""
    if (found := owner.read(folder)) is not None:
        return found.process.runs_here
    try:
        for entry in reader.entries(folder / reader.NAME):  # notes may come before the line that tells
            if isinstance(entry, Event) and isinstance(entry.body, JobStarted):
                return agent_of(entry) is not None
    except OSError:
        pass
    return False
