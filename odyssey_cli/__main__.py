"""`odyssey`: hands a command line to the command. The commands are declared in commands.py.

`odyssey run` and its like go their own way, without typer, which would take a third of the time to the first rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from odyssey_cli.errors import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: _execute(given))


def _execute(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("run", "profile", "check"):
        from odyssey_cli import run
        from odyssey_cli.command_line.options import Command

        return run.execute(argv[1:], Command(f"odyssey {argv[0]}"))
    from odyssey_cli import commands

    return commands.execute(argv)


if __name__ == "__main__":
    sys.exit(main())
