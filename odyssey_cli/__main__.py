"""`odyssey`: hands a command line to the command. Commands are declared in commands.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from odyssey.errors import OdysseyError
from odyssey_cli.errors import ExitCode, report, report_internal


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        from odyssey_cli import commands

        return commands.execute(given)
    except OdysseyError as error:
        return report(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        return report_internal(error)


if __name__ == "__main__":
    sys.exit(main())
