"""How ranks and waits are named in messages: the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.joblog.events import CauseKind, RankLost
from odyssey.plan.worker import Rank
from strategies.situation import Candidate

REPORT = "this is a bug: please report it"


def ranks_text(ranks: Iterable[Rank]) -> str:
    """`rank 3`, `ranks 1, 2 and 5`."""
    ordered = [str(rank) for rank in sorted(ranks)]
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {', '.join(ordered[:-1])} and {ordered[-1]}" if ordered else "no rank"


def seconds_text(seconds: float) -> str:
    """How long something has lasted or may last, `75 s`: seconds also where they are many, as the options that set them."""
    return f"{seconds:.0f} s"


def loss_text(lost: RankLost) -> str:
    """`rank 2 lost: SIGKILL`, with what that means for its place."""
    if lost.cause.kind is CauseKind.NOT_STARTED:
        return f"rank {lost.rank} could not be started: {lost.cause.text}"
    return f"rank {lost.rank} lost: {lost.cause.text}{', its slot is gone' if lost.slot_lost else ''}"


def faults_texts(candidates: Iterable[Candidate]) -> list[str]:
    """The rows that bugs have cost: what failed, where, and what to do about it; each once."""
    rows = dict.fromkeys((row.strategy, row.reason) for row in candidates if row.is_fault)
    return [f"{strategy} failed, the others decide: {reason} ({REPORT})" for strategy, reason in rows]
