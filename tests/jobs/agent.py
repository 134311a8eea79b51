"""One agent as a process of its own: `python -m tests.jobs.agent OPTIONS_AS_JSON`. What it says comes as plain lines."""

import sys

import msgspec

from launcher.agent import run
from launcher.options import RunOptions
from odyssey.errors import OdysseyError
from odyssey_cli.board import Board
from odyssey_cli.plain import PlainLog


def main(text: str) -> int:
    options = msgspec.json.decode(text, type=RunOptions)
    try:
        return run(options, PlainLog(Board()).watch, lambda *output: None)
    except OdysseyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
