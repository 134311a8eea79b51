"""Pictures and traces in files."""

from __future__ import annotations

import sys
from pathlib import Path

from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.timeline import svg, trace
from odyssey_cli.timeline.picture import Picture


def check(path: str | None, option: str) -> Path | None:
    """The file to write, None for none. Raises UsageError if its folder is missing, before anything is computed."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"{option}: {path} is a folder", "name a file")
    if not file.parent.is_dir():
        raise UsageError(f"{option}: no folder {file.parent}", "create it first")
    return file


def save(picture: Picture, svg_file: Path | None, trace_file: Path | None) -> None:
    """Write what was asked for, and say so. Raises OdysseyError if a file cannot be written."""
    if svg_file is not None:
        _write(svg_file, svg.render(picture).encode())
    if trace_file is not None:
        _write(trace_file, trace.encode(picture))
        print("odyssey: open it at https://ui.perfetto.dev", file=sys.stderr)


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise OdysseyError(f"{file}: {(error.strerror or str(error)).lower()}") from None
    print(f"odyssey: written to {file}", file=sys.stderr)
