"""Where answers are printed: the terminal, or a page that is wide enough for their tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_COLUMNS = 110
"""The width of what is no terminal and does not tell its own."""


def page() -> Console:
    """Standard output."""
    is_told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_told else _COLUMNS)
