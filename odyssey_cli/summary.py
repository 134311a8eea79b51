"""What is said at the end of a job."""

from __future__ import annotations

from pathlib import Path

from odyssey_cli import quantities
from odyssey_cli.board import Board


def summary(board: Board, log_dir: Path | None) -> str:
    """One or two lines: steps, losses recovered, time lost, where the log is."""
    took = quantities.clock(max(0.0, board.now - board.started))
    parts = [f"{quantities.plural(board.steps, 'step')} in {took}"]
    recovered = [recovery for recovery in board.recoveries if recovery.went is not None]
    if recovered:
        n_ranks = sum(len(recovery.lost) for recovery in recovered)
        times = [recovery.went.total_s for recovery in recovered if recovery.went and recovery.went.total_s is not None]
        slowest = f", the slowest in {quantities.seconds(max(times))}" if len(times) > 1 else ""
        single = f" in {quantities.seconds(times[0])}" if len(times) == 1 else ""
        what = f"loss of {quantities.plural(n_ranks, 'rank')}"
        parts.append(f"recovered from the {what}{single}{slowest}" if n_ranks else f"reconfigured{single}{slowest}")
        parts.append(f"{quantities.seconds(board.lost_s)} lost in all")
    lines = ["; ".join(parts)]
    if log_dir is not None:
        lines.append(f"log: {log_dir}")
    return "\n".join(lines)
