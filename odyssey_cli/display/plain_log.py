"""Events as plain lines on stderr: for pipes, batch logs, and `--no-display`. No colour, no cursor, one line an event."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

from launcher.failures.history import RETOLD
from launcher.joblog.events import (
    CauseKind,
    Draining,
    Event,
    GenerationStarted,
    JobStarted,
    Note,
    Pausing,
    PlanChosen,
    Profiled,
    Proposed,
    RankExited,
    RankLost,
    Restarting,
    Resumed,
    Stalled,
    StoreLost,
    Suspected,
)
from launcher.joblog.wording import loss_text
from odyssey.plan.form import form_of
from odyssey.protocol.reports import Failed, Hello
from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board
from odyssey_cli.display.layout_words import in_words

QUIET_S = 10.0
"""A suspicion that comes again within this time is not told again."""


class PlainLog:
    """Writes a line for each event that people care about. Steps are the script's own to print."""

    def __init__(self, board: Board, write: Callable[[str], None]) -> None:
        """`board` is fed by `watch`, for the summary at the end; `write` takes a line, and waits for nobody."""
        self._board = board
        self._failed = False
        self._suspected = 0.0
        self._is_job = False
        self._write = write

    def watch(self, event: Event) -> None:
        """Take in an event; called by the agent, so it only formats and writes one line, and never raises."""
        if self._failed:
            return
        try:
            self._board.apply(event)
            self._is_job = self._is_job or isinstance(event.body, Hello)
            text = _text(event, self._board) if self._is_news(event) else ""
            if isinstance(event.body, Suspected):
                if event.time - self._suspected < QUIET_S:
                    return
                self._suspected = event.time
            if text:
                clock = time.strftime("%H:%M:%S", time.localtime(event.time))
                self._write(f"odyssey {clock} {text}")
        except Exception:
            self._failed = True
            self._write(traceback.format_exc())
            self._write("odyssey: the lines above are a bug of Odyssey, please report it; the job goes on")

    def _is_news(self, event: Event) -> bool:
        """What the agent ends itself is no loss, and losses of a script without a Job are told together when all are gone.

        An exit code ends the job of a Job, and is told then.
        """
        if event.origin == RETOLD:
            return False
        match event.body:
            case RankLost() if self._board.has_left(event.body):
                return self._board.ended is None
            case RankLost(cause=cause):
                return self._board.ended is None and self._is_job and cause.kind not in (CauseKind.ENDED, CauseKind.EXIT)
            case Failed():
                return self._board.ended is None and self._is_job
            case Note():
                return True  # at the end, too, ranks may be waited for
            case _:
                return self._board.ended is None


def _text(event: Event, board: Board) -> str:
    """`board`: with this event in it."""
    match event.body:
        case JobStarted() as job:
            ranks = quantities.plural(job.n_nodes * job.n_ranks_per_node, "rank")
            logs = f"; logs: {_short(job.folder)}" if job.folder else ""
            return f"start {job.what} on {ranks}{logs}"
        case Profiled(seconds=0):
            return "profile read, not measured"
        case Profiled(seconds=seconds):
            return f"profile measured in {quantities.seconds(seconds)}"
        case RankLost(rank=rank) | RankExited(rank=rank) if board.has_left(event.body):
            return f"rank {rank} has left"
        case RankLost() as lost:
            return loss_text(lost)
        case Failed() as failed:
            return f"rank {failed.rank} failed: {failed.error}"
        case Draining(reason=reason):
            return f"generation {event.generation}: {reason}; all stop when the step at hand is done"
        case Pausing(lost=(), reason=reason):
            return f"generation {event.generation}: pause: {reason}"
        case Proposed() as proposed if event.generation > 1:
            return f"generation {event.generation}: {_proposed(proposed, board)}"
        case PlanChosen(plan=plan, reason=reason, n_kept=n_kept):
            kept = f"; of step {plan.step} {n_kept} of {plan.global_batch} samples are kept" if n_kept else ""
            idle = f", {len(plan.idle)} stand{'s' if len(plan.idle) == 1 else ''} by" if plan.idle else ""
            layout = f"layout {form_of(plan)} ({in_words(plan)})"
            return f"generation {event.generation}: plan {plan.strategy}, {layout}{idle}: {reason}{kept}"
        case GenerationStarted() as went:
            return "; ".join(part for part in (_went(event.generation, went, board), board.fidelity) if part)
        case StoreLost(reason=reason):
            return f"store lost: {reason}"
        case Stalled(text=text):
            return text
        case Resumed(seconds=seconds):
            return f"all ranks make progress again, after {quantities.seconds(seconds)}"
        case Suspected(reason=reason):
            return reason
        case Restarting(reason=reason):
            return reason
        case Note(text=text):
            return text
        case _:
            return ""


def _proposed(proposed: Proposed, board: Board) -> str:
    """How many candidates; how many losses plans were ready for; and where this one was none of these, how far that was."""
    n_candidates = quantities.plural(len(proposed.candidates), "candidate")
    change = quantities.seconds(proposed.seconds_to_change)
    parts = [f"{n_candidates}, next change expected in {change} ({proposed.seconds_to_change_source})"]
    if board.planned_ahead:
        parts.append(board.planned_ahead)
    if not proposed.ahead and proposed.n_to_plan:
        parts.append(f"plans ahead: {proposed.n_planned} of {quantities.plural(proposed.n_to_plan, 'class', 'classes')}")
    if proposed.ahead_problem:
        parts.append(f"searched now, as the plan found ahead cannot be: {proposed.ahead_problem}")
    return "; ".join(parts)


def _short(folder: str) -> str:
    """As short as it can be said here."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder


def _went(generation: int, went: GenerationStarted, board: Board) -> str:
    if went.total_s is None and went.stood_s is None:
        return f"generation {generation}: go"
    hung_s = board.recovery.detect_s if board.recovery is not None and went.total_s is not None else None
    named = (
        ("detect", hung_s if hung_s is not None else went.detect_s),
        ("pause", went.pause_s),
        ("plan", went.plan_s),
        ("spawn", went.spawn_s),
        ("groups", went.groups_s),
        ("move", went.moves_s),
        ("rest", went.rest_s),
    )
    parts = [f"{name} {quantities.seconds(value)}" for name, value in named if value is not None]
    if went.total_s is None:
        assert went.stood_s is not None
        return f"generation {generation}: go, all stood still for {quantities.seconds(went.stood_s)} ({', '.join(parts)})"
    return f"generation {generation}: go, recovered in {quantities.seconds(went.total_s)} ({', '.join(parts)})"
