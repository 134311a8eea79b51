"""`python -m odyssey_cli.launch`: the command line of `torch.distributed.launch`, run by Odyssey.

It is torchrun's, and each script is given `--local-rank=N`, unless `--use-env` says that it reads LOCAL_RANK.
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
    return exit_code_of(lambda: run.execute(given, Command.LAUNCH))


if __name__ == "__main__":
    sys.exit(main())
