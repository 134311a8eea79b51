"""A picture of a job at its most telling moment: shortly after its last recovery. `make picture` draws docs/picture.svg.

python -m odyssey_cli.jobs.picture [JOB] --output docs/picture.svg
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launcher.joblog import reader
from launcher.joblog.events import Event, GenerationStarted
from odyssey.errors import OdysseyError, UsageError
from odyssey.protocol.reports import Committed
from odyssey_cli.display.board import Board
from odyssey_cli.display.render import render
from odyssey_cli.errors import report
from odyssey_cli.jobs.find import newest_job

N_STEPS_AFTER = 8
_WIDTH, _HEIGHT = 100, 40


def telling_moment(events: Sequence[Event]) -> int:
    """How many events to take: up to a few steps after the last recovery, or everything."""
    recoveries = [
        i for i, event in enumerate(events) if isinstance(event.body, GenerationStarted) and event.body.total_s is not None
    ]
    if not recoveries:
        return len(events)
    steps = [i for i in range(recoveries[-1], len(events)) if isinstance(events[i].body, Committed)]
    return steps[min(N_STEPS_AFTER, len(steps)) - 1] + 1 if steps else recoveries[-1] + 1


def svg(events: Sequence[Event]) -> str:
    """The display at the telling moment, as SVG."""
    board = Board()
    for event in events[: telling_moment(events)]:
        board.apply(event)
    console = Console(width=_WIDTH, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor")
    console.print(render(board, board.now, _WIDTH, _HEIGHT))
    return console.export_svg(title="odyssey run")


def draw(
    job: Annotated[Path, typer.Argument(help="A job's log directory, or a directory of jobs.")] = Path("odyssey-logs"),
    output: Annotated[Path, typer.Option("--output", "-o", help="The SVG file to write.")] = Path("picture.svg"),
) -> None:
    """Draw a job's telling moment as SVG."""
    folder = job if (job / reader.NAME).is_file() else newest_job(job)
    if folder is None:
        raise UsageError(
            f"{job}: no job there", "run one: odyssey run --nodes 4 --drill 'step=20 kill=2' examples/train_gpt.py"
        )
    output.write_text(svg(list(reader.events(folder / reader.NAME))))


if __name__ == "__main__":
    try:
        typer.run(draw)
    except OdysseyError as error:
        sys.exit(report(error))
