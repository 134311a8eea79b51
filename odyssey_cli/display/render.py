"""How a board looks in a terminal: header, layout, the newest recovery, recent events. Pure: Board in, renderable out."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from launcher.joblog.wording import ranks_text
from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board, ShownRecovery
from odyssey_cli.display.candidates import candidate_table, forms, near_equal_text, rate_note, why
from odyssey_cli.display.layout_grid import idle_line, plan_grid
from odyssey_cli.display.layout_words import legend, wrapped
from odyssey_cli.display.progress import progress
from strategies.situation import Aim

SHOW_RECOVERY_S = 20.0
"""How long the phases and candidates of a recovery stay after it ended."""

WIDE = 130
"""From this width on there is room for reasons beside the numbers of candidates."""

MOST_CANDIDATES = 6
LONGEST_BAR = 76
_LEAST_FIGURES = ("lost", "time", "loss", "left")
_DETECT_STYLE = "red"
_PHASES = (
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
    if line := progress(board.steps, board.n_steps, list(board.step_times_s), width, ascii_only=ascii_only):
        parts.append(line)
        room -= 1
    recovery = board.recovery
    shows_recovery = recovery is not None and (recovery.ended is None or now - recovery.ended < SHOW_RECOVERY_S)
    if board.plan is not None:
        rows = max(2, min(16, room - (13 if shows_recovery else 7)))
        grid = plan_grid(board.plan, board.ranks, width, rows, ascii_only=ascii_only)
        outside = idle_line(board.plan, board.ranks, ascii_only=ascii_only)
        parts += ["", grid, *([outside] if outside else [])]
        room -= grid.row_count + 1 + (outside is not None)
        words = wrapped("layout       ", board.plan, width)
        n_lines = words.count("\n") + 1
        if room >= n_lines:
            parts.insert(-1 if outside is None else -2, Text(words, style="dim"))
            room -= n_lines
    elif board.ranks:
        parts += ["", waiting(board)]
        room -= 2
    if recovery is not None and shows_recovery and room >= 5:
        lines = list(recovery_lines(recovery, board, width, room - 1, ascii_only=ascii_only))
        parts += ["", *lines]
        room -= 1 + sum(line.row_count + 2 if isinstance(line, Table) else 1 for line in lines)
    n_recent = max(0, min(5, room - 1, len(board.recent)))
    if n_recent:
        parts += ["", recent(board, n_recent, width)]
        room -= n_recent + 1
    if shows_recovery and recovery is not None and recovery.proposed is not None:
        meanings = [line for text in legend(forms(recovery.proposed.candidates)) for line in textwrap.wrap(text, width)]
        if room > len(meanings):
            parts += ["", Text("\n".join(meanings), style="dim")]
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
    return Group(title, fitting(figures(board, now), width))


def figures(board: Board, now: float) -> dict[str, Text]:
    """Step, loss, speed, losses so far, elapsed time and what is left of it, by what they are about."""

    def figure(name: str, value: str, style: str = "bold") -> Text:
        return Text.assemble((name + " ", "dim"), (value, style))

    of = f" of {board.n_steps:,}" if board.n_steps is not None else ""
    found = {"step": figure("step", f"{board.steps:,}{of}")}
    if board.loss is not None and not (board.job is not None and board.job.rehearsed):
        found["loss"] = figure("loss", f"{board.loss:.4f}")
    speed = board.samples_per_s
    if board.recovering:
        found["speed"] = Text("recovering", style="bold yellow")
    elif speed is not None:
        found["speed"] = figure("samples/s", quantities.rate(speed))
    found["lost"] = figure("lost", quantities.plural(board.n_lost, "rank"), "bold" if board.n_lost else "dim")
    found["time"] = figure("time", quantities.clock(max(0.0, now - board.started)))
    if (left_s := board.left_s) is not None:
        found["left"] = figure("left", quantities.clock(round(left_s)))
    return found


def fitting(found: dict[str, Text], width: int) -> Text:
    """The figures in a line, without those that matter least where it is too narrow for all."""
    shown = dict(found)
    for name in _LEAST_FIGURES:
        if sum(text.cell_len + 2 for text in shown.values()) - 2 > width:
            shown.pop(name, None)
    return Text("  ", no_wrap=True, overflow="ellipsis").join(shown.values())


def waiting(board: Board) -> Text:
    """Before the first plan: how far the ranks are."""
    started = len(board.ranks)
    joined = sum(state.value == "ready" for state in board.ranks.values())
    expected = board.job.n_nodes * board.job.n_ranks_per_node if board.job is not None else started
    if joined == 0:
        return Text(f"{started} of {quantities.plural(expected, 'rank')} started", style="dim")
    ready = f"{joined} of {quantities.plural(expected, 'rank')} ready"
    return Text(ready if joined < expected or board.profile is not None else f"{ready}, measuring the model", style="dim")


def recovery_lines(
    recovery: ShownRecovery, board: Board, width: int, room: int, *, ascii_only: bool = False
) -> Iterator[RenderableType]:
    """What was lost, how long each phase took, which plans were to choose from, and why this one was taken: `room` lines."""
    causes = {board.causes[rank] for rank in recovery.lost if rank in board.causes}
    title = Text(no_wrap=True, overflow="ellipsis")
    what = f"loss of {ranks_text(recovery.lost)}" if recovery.lost else recovery.reason
    title.append(what, style="bold red" if recovery.went is None else "bold")
    if causes:
        title.append(f" ({', '.join(sorted(causes))})", style="dim")
    end = Text()
    if recovery.went is not None:
        total = recovery.went.total_s
        took = quantities.seconds(total if total is not None else (recovery.ended or recovery.began) - recovery.began)
        end.append(f"  recovered in {took}", style="bold green")
        if recovery.lost_s is not None:
            end.append(f"  cost {quantities.seconds(recovery.lost_s)}", style="dim")
    title.truncate(max(0, width - end.cell_len), overflow="ellipsis")
    yield title.append_text(end)
    room -= 1
    if recovery.went is not None:
        parts = list(phases(recovery, width, ascii_only=ascii_only))
        yield from parts
        room -= len(parts)
    if recovery.proposed is None:
        return
    notes = _notes(recovery, board, width, ascii_only)
    n_candidates = min(MOST_CANDIDATES, room - len(notes) - 3)  # a blank line, the names of columns, how many more
    if n_candidates > 0:
        yield Text()
        yield candidate_table(
            recovery.proposed.candidates,
            recovery.is_chosen,
            recovery.predicted_before,
            width,
            max_rows=n_candidates,
            with_reasons=width >= WIDE,
            ascii_only=ascii_only,
        )
    yield from notes[: max(1, room)]


def _notes(recovery: ShownRecovery, board: Board, width: int, ascii_only: bool) -> list[RenderableType]:
    """A line each: why the plan was taken, and what has to be known to read the table."""
    proposed = recovery.proposed
    assert proposed is not None
    candidates, objective = proposed.candidates, (board.job.aim if board.job is not None else Aim()).objective
    rate = rate_note(candidates, recovery.predicted_before, board.profile.cluster) if board.profile is not None else ""
    change = f"next change expected in {quantities.seconds(proposed.seconds_to_change)} ({proposed.seconds_to_change_source})"
    known = "; ".join(filter(None, (near_equal_text(candidates, ascii_only=ascii_only), change)))
    told = [(why(candidates, recovery.is_chosen, objective), ""), (rate, "dim"), (known, "dim")]
    return [Text(line, style) for text, style in told for line in textwrap.wrap(text, width, break_on_hyphens=False)]


def phases(recovery: ShownRecovery, width: int, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """The parts of a transition as one bar, each as wide as it was long, and their milliseconds."""
    went = recovery.went
    assert went is not None
    detect_s = recovery.detect_s if recovery.detect_s is not None else went.detect_s
    parts = [("detect", detect_s, _DETECT_STYLE), *((name, getattr(went, key), style) for name, key, style in _PHASES)]
    known = [(name, value, style) for name, value, style in parts if value is not None]
    total, bar_width = sum(value for _, value, _ in known), min(width, LONGEST_BAR)
    bar, legend = Text(no_wrap=True), [Text(no_wrap=True)]
    for name, value, style in known:
        cells = round(bar_width * value / total) if total > 0 else 0
        bar.append(("=" if ascii_only else "━") * max(1, cells), style=style)
        part = Text.assemble(("# " if ascii_only else "■ ", style), (f"{name} ", "dim"), quantities.seconds(value), "   ")
        if legend[-1].cell_len + part.cell_len - 3 > width:
            legend.append(Text(no_wrap=True))
        legend[-1].append_text(part)
    bar.truncate(bar_width)
    yield bar
    yield from legend


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
