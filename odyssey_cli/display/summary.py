"""What is said at the end of a job."""

from __future__ import annotations

from pathlib import Path

from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board
from odyssey_cli.display.fidelity import share


def summary(board: Board, log_dir: Path | None) -> str:
    """A line each: steps, losses recovered, time lost, where the log is."""
    took = quantities.clock(max(0.0, board.now - board.started))
    if board.job is None:
        return ""  # another agent leads the job, and sums it up
    lines = [f"{quantities.plural(board.n_done, 'step')} in {took}" if board.plan is not None else f"ran for {took}"]
    if board.n_restarts and board.plan is None:
        lines.append(f"all ranks were started again {quantities.plural(board.attempt, 'time')}")
    recovered = [recovery for recovery in board.recoveries if recovery.went is not None]
    if recovered:
        n_ranks = sum(len(recovery.lost) for recovery in recovered)
        times = [recovery.went.total_s for recovery in recovered if recovery.went and recovery.went.total_s is not None]
        what = f"recovered from the loss of {quantities.plural(n_ranks, 'rank')}" if n_ranks else "reconfigured"
        took = f" in {' and '.join(map(quantities.seconds, times))}" if times else ""
        if len(times) > 3:
            took = f" in {quantities.seconds(min(times))} to {quantities.seconds(max(times))}"
        lines.append("; ".join(part for part in (f"{what}{took}", board.planned_ahead) if part))
        lines.append(f"{quantities.seconds(board.lost_s)} lost in all, the work that was redone included")
    if board.n_approximate:
        lines.append(share(board.n_approximate, board.n_done))
    if board.changes:
        n_joined, n_left = (sum(map(len, its)) for its in zip(*((c.joined, c.leaving) for c, _ in board.changes), strict=True))
        parts = [f"took in {quantities.plural(n_joined, 'rank')}"] if n_joined else []
        parts += [f"let {quantities.plural(n_left, 'rank')} go"] if n_left else []
        stood = quantities.seconds(sum(stood_s for _, stood_s in board.changes))
        lines.append(f"{' and '.join(parts) or 'rearranged the ranks'}, standing still for {stood} in all")
    if log_dir is not None:
        lines.append(f"log: {log_dir}")
    return "\n".join(lines)
