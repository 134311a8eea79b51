"""`odyssey-torchrun`, `python -m odyssey_cli.torchrun`: torchrun's command line, no more and no less, run by Odyssey.

For tools that build a torchrun command line themselves: a link named `torchrun` to it serves them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from odyssey_cli import run
from odyssey_cli.command_line.options import Command
from odyssey_cli.errors import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: run.execute(given, Command.TORCHRUN))


if __name__ == "__main__":
    sys.exit(main())
