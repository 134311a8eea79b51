"""How a board looks in a terminal: header, layout, the newest recovery, recent events. Pure: Board in, renderable out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from launcher.joblog.events import GenerationStarted
from launcher.joblog.wording import ranks_text
from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board, Recovery
from odyssey_cli.display.candidates import candidate_table, ties_text
from odyssey_cli.display.layout_grid import idle_line, plan_grid

SHOW_RECOVERY_S = 20.0
"""How long the phases and candidates of a recovery stay after it ended."""

WIDE = 130
"""From this width on there is room for reasons beside the numbers of candidates."""

_PHASES = (
    ("detect", "detect_s", "red"),
    ("pause", "pause_s", "yellow"),
    ("plan", "plan_s", "magenta"),
    ("spawn", "spawn_s", "green"),
    ("groups", "groups_s", "blue"),
    ("move", "moves_s", "cyan"),
    ("rest", "rest_s", "bright_black"),
)


def render(board: Board, now: float, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """The live area. `now`: seconds since the epoch; `height`: lines that it may take."""
    parts: list[RenderableType] = [Rule(style="bright_black", characters="-" if ascii_only else "─"), header(board, now, width)]
    room = height - 3
    recovery = board.recovery
    shows_recovery = recovery is not None and (recovery.ended is None or now - recovery.ended < SHOW_RECOVERY_S)
    if board.plan is not None:
        rows = max(2, min(16, room - (12 if shows_recovery else 6)))
        grid = plan_grid(board.plan, board.ranks, width, rows, ascii_only=ascii_only)
        outside = idle_line(board.plan, board.ranks, ascii_only=ascii_only)
        parts += ["", grid, *([outside] if outside else [])]
        room -= grid.row_count + 1 + (outside is not None)
    elif board.ranks:
        parts += ["", waiting(board)]
        room -= 2
    if recovery is not None and shows_recovery and room >= 5:
        n_candidates = min(6, room - 8)
        parts += ["", *render_recovery(recovery, board, width, n_candidates, ascii_only=ascii_only)]
        n_rows = len(recovery.proposed.candidates) if recovery.proposed is not None else 0
        room -= 5 + (3 + min(n_candidates + 1, n_rows) if n_candidates > 0 and n_rows else 0)
    n_recent = max(0, min(5, room - 1))
    if board.recent and n_recent:
        parts += ["", recent(board, n_recent, width)]
    return Group(*parts)


def header(board: Board, now: float, width: int) -> RenderableType:
    """Two lines: what runs, and how it goes."""
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append("odyssey", style="bold")
    if board.job is not None:
        title.append(f"  {board.job.what}")
    right = f"generation {board.generation}" if board.plan is not None else "starting"
    if board.ended is not None:
        right = "ended"
    title.truncate(max(10, width - len(right) - 2), overflow="ellipsis")
    title.append(" " * max(2, width - title.cell_len - len(right)))
    title.append(right, style="dim")
    return Group(title, Text("  ", no_wrap=True, overflow="ellipsis").join(figures(board, now)))


def figures(board: Board, now: float) -> Iterator[Text]:
    """Step, loss, speed, losses so far, elapsed time."""

    def figure(name: str, value: str, style: str = "bold") -> Text:
        return Text.assemble((name + " ", "dim"), (value, style))

    yield figure("step", f"{board.steps:,}")
    if board.loss is not None and not (board.job is not None and board.job.rehearsed):
        yield figure("loss", f"{board.loss:.4f}")
    speed = board.samples_per_s
    if board.recovering:
        yield Text("recovering", style="bold yellow")
    elif speed is not None:
        yield figure("samples/s", quantities.rate(speed))
    yield figure("lost", quantities.plural(board.n_lost, "rank"), "bold" if board.n_lost else "dim")
    yield figure("time", quantities.clock(max(0.0, now - board.started)))


def waiting(board: Board) -> Text:
    """Before the first plan: how far the ranks are."""
    started = len(board.ranks)
    joined = sum(state.value == "ready" for state in board.ranks.values())
    expected = board.job.n_nodes * board.job.n_ranks_per_node if board.job is not None else started
    if joined == 0:
        return Text(f"{started} of {quantities.plural(expected, 'rank')} started", style="dim")
    ready = f"{joined} of {quantities.plural(expected, 'rank')} ready"
    return Text(ready if joined < expected or board.profile is not None else f"{ready}, measuring the model", style="dim")


def render_recovery(
    recovery: Recovery, board: Board, width: int, n_candidates: int, *, ascii_only: bool = False
) -> Iterator[RenderableType]:
    """What was lost, how long each phase took, and which plans were to choose from (none shown for `n_candidates` <= 0)."""
    causes = {board.causes[rank] for rank in recovery.lost if rank in board.causes}
    title = Text(no_wrap=True, overflow="ellipsis")
    what = f"loss of {ranks_text(recovery.lost)}" if recovery.lost else recovery.reason
    title.append(what, style="bold red" if recovery.went is None else "bold")
    if causes:
        title.append(f" ({', '.join(sorted(causes))})", style="dim")
    if recovery.went is not None:
        total = recovery.went.total_s
        took = quantities.seconds(total if total is not None else (recovery.ended or recovery.began) - recovery.began)
        title.append(f"  recovered in {took}", style="bold green")
        if recovery.lost_s is not None:
            title.append(f"  cost {quantities.seconds(recovery.lost_s)}", style="dim")
    yield title
    if recovery.went is not None:
        yield phases(recovery.went, min(width, 76), ascii_only=ascii_only)
    if recovery.proposed is not None and n_candidates > 0:
        table = candidate_table(
            recovery.proposed.candidates,
            recovery.is_chosen,
            recovery.predicted_before,
            width,
            max_rows=n_candidates,
            with_reasons=width >= WIDE,
            ascii_only=ascii_only,
        )
        yield Padding(table, (1, 0, 0, 0))
        change, source = recovery.proposed.seconds_to_change, recovery.proposed.seconds_to_change_source
        expected = f"next change expected in {quantities.seconds(change)} ({source})"
        ties = ties_text(recovery.proposed.candidates, ascii_only=ascii_only)
        yield Text("; ".join(filter(None, (ties, expected))), style="dim", no_wrap=True, overflow="ellipsis")


def phases(went: GenerationStarted, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The parts of a transition as one bar, each as wide as it was long, and their milliseconds."""
    parts = [(name, value, style) for name, key, style in _PHASES if (value := getattr(went, key)) is not None]
    total = sum(value for _, value, _ in parts)
    bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
    for i, (name, value, style) in enumerate(parts):
        cells = round(width * value / total) if total > 0 else 0
        bar.append(("=" if ascii_only else "━") * max(1, cells), style=style)
        legend.append("   " if i else "").append("# " if ascii_only else "■ ", style=style)
        legend.append(f"{name} ", style="dim").append(quantities.seconds(value))
    bar.truncate(width)
    return Group(bar, legend)


def recent(board: Board, n_lines: int, width: int) -> Text:
    """The last events, newest last."""
    lines = list(board.recent)[-n_lines:]
    text = Text(no_wrap=True, overflow="ellipsis")
    for i, line in enumerate(lines):
        entry = Text.assemble((time.strftime("%H:%M:%S", time.localtime(line.time)), "dim"), "  ", (line.text, line.style))
        entry.truncate(width, overflow="ellipsis")
        text.append_text(entry)
        if i < len(lines) - 1:
            text.append("\n")
    return text
