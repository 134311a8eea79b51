"""`odyssey ps` and `odyssey status`: jobs in a line each, and one job on a screen."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

import msgspec

from launcher.joblog.events import CauseKind
from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import for_people, to_json
from odyssey.plan import worker
from odyssey_cli.display import quantities
from odyssey_cli.display.fidelity import share
from odyssey_cli.jobs import find
from odyssey_cli.jobs.find import FoundJob, Rank

N_LAST_EVENTS = 8


class JobLine(msgspec.Struct, frozen=True):
    """A job as `odyssey ps` has it.
    `agent`: pid, None if it does not run here; `role`: which of several it is, and who leads, for people; empty where there
    can be only one. `n_restarts`: of all its ranks together, or of single ones in a Job. Seconds, and seconds since the
    epoch."""

    job: str
    command: str
    status: str
    agent: int | None
    n_alive: int
    n_ranks: int
    started_at: float
    age_s: float
    step: int | None
    n_restarts: int
    last_event: str
    role: str = ""


class Loss(msgspec.Struct, frozen=True):
    """A rank's end that was not its script's good end."""

    time: float
    rank: worker.Rank
    cause: str


class JobStatus(msgspec.Struct, frozen=True):
    """A job as `odyssey status` has it.
    `reason`, `help`: why it ended; empty while it runs. `n_done_steps`: those of this job, without what it has resumed from;
    `n_approximate_steps`: those of them with approximate gradients."""

    line: JobLine
    folder: str
    max_restarts: int
    ranks: list[Rank]
    losses: list[Loss]
    loss: float | None
    step_s: float | None
    exit_code: int | None
    reason: str
    help: str
    events: list[tuple[float, str]]
    n_unreadable: int
    n_approximate_steps: int = 0
    n_done_steps: int = 0


def ps(*, ended: bool, as_json: bool) -> ExitCode:
    """Print a line for each job."""
    found = [line_of(job) for job in find.everything(ended=ended)]
    if as_json:
        print(msgspec.json.format(to_json(found)).decode())
    elif found:
        print("\n".join(_table(found)))
    else:
        print("no job of yours is known on this host" if ended else "no job is running; --all shows those that have ended")
    return ExitCode.OK


def status(name: str | None, *, as_json: bool) -> ExitCode:
    """Print all that is known of one job."""
    found = status_of(find.find(name))
    if as_json:
        print(msgspec.json.format(to_json(found)).decode())
    else:
        print("\n".join(_status(found)))
    return ExitCode.OK


def line_of(job: FoundJob) -> JobLine:
    board = job.board
    last = board.recent[-1].text.partition("\n")[0] if board.recent else ""
    return JobLine(
        job=job.name,
        command=job.command,
        status=job.status,
        agent=job.agent,
        n_alive=job.n_alive,
        n_ranks=job.n_ranks,
        started_at=board.started,
        age_s=round(job.age_s, 3),
        step=board.told_step if board.told_step is not None else board.steps or None,
        n_restarts=board.n_restarts,
        last_event=last,
        role=_role(job),
    )


def _role(job: FoundJob) -> str:
    if job.owner is None:
        return ""
    agents, own = job.agents, job.owner.number
    role = f"agent {own} of {len(agents.present)}"
    if agents.leader == own:
        return f"{role}, which leads"
    where = agents.known.get(agents.leader)
    address = where.address if where is not None and where.address else job.owner.leader_at[0]
    return f"{role}, led by agent {agents.leader} at {where.host if where is not None else '?'} ({address})"


def status_of(job: FoundJob) -> JobStatus:
    board, ended = job.board, job.board.ended
    return JobStatus(
        line=line_of(job),
        folder=str(job.folder),
        max_restarts=job.started.max_restarts,
        ranks=job.ranks,
        losses=[Loss(at, body.rank, body.cause.text) for at, body in job.losses if body.cause.kind is not CauseKind.ENDED],
        loss=board.loss,
        step_s=board.step_s,
        exit_code=ended.code if ended is not None else None,
        reason=ended.reason if ended is not None else _why_not_ended(job),
        help=ended.help if ended is not None else "",
        events=[(line.time, line.text) for line in list(board.recent)[-N_LAST_EVENTS:]],
        n_unreadable=job.n_unknown,
        n_approximate_steps=board.n_approximate,
        n_done_steps=board.n_done,
    )


def _why_not_ended(job: FoundJob) -> str:
    if job.agent is not None or job.is_elsewhere:
        return ""
    if job.owner is not None:
        return "this host's agent is gone, and its ranks with it: the log here has no end, and the job may go on without it"
    return "the agent was killed: its log has no end; its ranks ended with it"


def _table(lines: Sequence[JobLine]) -> list[str]:
    rows: list[tuple[str, ...]] = [("JOB", "RANKS", "AGE", "STEP", "RESTARTS", "STATUS", "SCRIPT", "LAST EVENT")]
    rows += [
        (
            line.job,
            f"{line.n_alive}/{line.n_ranks}",
            quantities.clock(line.age_s),
            str(line.step) if line.step is not None else "-",
            str(line.n_restarts),
            line.status,
            _short(_in_a_line(line.command), 40),
            line.last_event,
        )
        for line in lines
    ]
    if any(line.role for line in lines):
        rows = [(*row[:-1], role, row[-1]) for row, role in zip(rows, ("HERE", *(line.role for line in lines)), strict=True)]
    return _aligned(rows)


def _status(found: JobStatus) -> list[str]:
    line = found.line
    facts = [
        ("job", line.job),
        ("script", _in_a_line(line.command)),
        ("status", f"{line.status} {'after' if line.agent is None else 'for'} {quantities.clock(line.age_s)}"),
        ("ranks", f"{line.n_alive} of {line.n_ranks} alive"),
        ("restarts", f"{line.n_restarts} of {found.max_restarts}"),
        ("logs", found.folder),
    ]
    if found.exit_code is not None:
        facts.insert(3, ("exit code", str(found.exit_code)))
    if found.reason:
        facts.insert(3, ("why", found.reason))
    if found.help:
        facts.insert(4, ("help", found.help))
    if line.agent is not None:
        facts.insert(3, ("agent", f"pid {line.agent}{f': {line.role}' if line.role else ''}"))
    if line.step is not None:
        loss = f", loss {found.loss:.4g}" if found.loss is not None else ""
        pace = f", {quantities.seconds(found.step_s)} a step" if found.step_s else ""
        facts.insert(-1, ("step", f"{line.step}{loss}{pace}"))
        if found.n_approximate_steps:
            facts.insert(-1, ("fidelity", share(found.n_approximate_steps, found.n_done_steps)))
    width = max(len(name) for name, _ in facts)
    text = [f"{name:<{width}}  {value}" for name, value in facts]
    if found.n_unreadable:
        text.append(f"{'note':<{width}}  {quantities.plural(found.n_unreadable, 'line')} of the log could not be read: skipped")
    if found.ranks:
        rows: list[tuple[str, ...]] = [("rank", "host", "pid", "state")]
        rows += [(str(rank.rank), rank.host, str(rank.pid), rank.state) for rank in found.ranks]
        if not line.role:
            rows = [(rank, pid, state) for rank, _, pid, state in rows]
        text += ["", *(f"  {row}" for row in _aligned(rows))]
    if found.losses:
        text += ["", "losses", *(f"  {_clock(loss.time)}  rank {loss.rank}: {loss.cause}" for loss in found.losses)]
    if found.events:
        text += ["", "last events"]
        for at, event in found.events:
            first, *rest = event.splitlines() or [""]
            when = f"  {_clock(at)}  "
            text += [f"{when}{first}", *(" " * len(when) + more for more in rest)]
    return text


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """In columns; on a terminal no line is longer than it is wide."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        lines = [_short(line, columns) for line in lines]
    return lines


def _in_a_line(command: str) -> str:
    """Give a command without what a terminal would obey: an argument may hold anything."""
    return for_people(command, len(command)).replace("\n", "\\n").replace("\t", "\\t")


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
