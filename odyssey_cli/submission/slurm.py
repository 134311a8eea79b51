"""`odyssey slurm`: print the batch script for a command line of `odyssey run`, or submit it."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.parser import HelpAsked, parse
from odyssey_cli.command_line.typed_requests import BatchRequest
from odyssey_cli.submission.batch import batch_script

_MEANT = (("odyssey", "run"), ("run",), ("torchrun",))
"""What people write before what stands behind `odyssey run`."""
_SUBMIT_S = 60.0


def slurm(request: BatchRequest) -> int:
    """Its command is a command line of `odyssey run`, or what stands behind these two words. Raises UsageError."""
    words = request.command
    for meant in _MEANT:
        if tuple(words[: len(meant)]) == meant:
            words = words[len(meant) :]
            break
    try:
        given = parse(words, {}, Command.RUN)  # what is misspelled is told now, and not when the job begins
    except HelpAsked:
        raise UsageError("there is no script to run", "for example: odyssey slurm --nodes 4 train.py") from None
    script = batch_script(request, words, given.script)
    if not request.submit:
        print(script, end="")
        return ExitCode.OK
    return _submit(script)


def _submit(script: str) -> int:
    try:
        done = subprocess.run(["sbatch"], input=os.fsencode(script), timeout=_SUBMIT_S, check=False)
    except FileNotFoundError:
        raise OdysseyError("no sbatch on PATH", "submit where SLURM is, or print the script by leaving --submit out") from None
    except subprocess.TimeoutExpired:
        raise OdysseyError(f"sbatch did not answer within {_SUBMIT_S:g} s", "see `scontrol ping`") from None
    sys.stdout.flush()
    return ExitCode.OK if done.returncode == 0 else ExitCode.FAILED
