"""Pictures and traces in files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from odyssey_cli import files
from odyssey_cli.timeline import change_svg, svg, trace
from odyssey_cli.timeline.change import Stand, layouts
from odyssey_cli.timeline.picture import Picture


def save(picture: Picture, svg_file: Path | None, trace_file: Path | None) -> None:
    """Write what was asked for, and say so. Raises OdysseyError if a file cannot be written."""
    if svg_file is not None:
        files.write(svg_file, svg.render(picture).encode())
    if trace_file is not None:
        files.write(trace_file, trace.encode(picture))
        print("odyssey: open it at https://ui.perfetto.dev", file=sys.stderr)


def save_change(title: str, stands: Sequence[Stand], file: Path) -> None:
    """Write the layouts one below the other, what has changed marked. Raises OdysseyError if the file cannot be written."""
    files.write(file, change_svg.render(title, layouts(stands)).encode())
