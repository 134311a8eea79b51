"""The agent's way to a report on its own host: by a child process, as the agent does not import torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from launcher.host.fitness.findings import HostReport, name
from odyssey.codec import Malformed, Packed

_reports = Packed(HostReport)
_MOST_BYTES = 1 << 16
"""What a pipe takes at once: a report is a few KiB."""


def report(n_ranks: int, log_dir: Path, environment: Mapping[str, str], limit_s: float) -> HostReport:
    """What is wrong is in it, also that there was no answer within this time."""
    path = [str(Path(__file__).parents[3]), *sys.path]  # `launcher` means ours, wherever we are run
    reading, writing = os.pipe()
    program = f"import sys; sys.path[:] = {path!r}; from launcher.host.fitness.child import main; main()"
    arguments = [str(n_ranks), str(log_dir), str(writing), str(os.getpid())]
    problem = ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
            env=environment,
            timeout=limit_s,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            problem = f"exit code {done.returncode}: {last}"
    except subprocess.TimeoutExpired:
        problem = f"no answer within {limit_s:g} s"
    except OSError as error:
        problem = str(error.strerror or error)
    finally:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read(_MOST_BYTES)
    if not problem:
        try:
            found: HostReport = _reports.decode(answer)
            return found
        except Malformed as error:
            problem = str(error)
    return HostReport(name(socket.gethostname()), n_ranks, problem=name(problem))


def main() -> None:
    """In the child: measure, and answer through the pipe."""
    from launcher.host.fitness.measure_host import measure_host
    from launcher.host.kernel import die_with_parent

    n_ranks, log_dir, writing, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.write(int(writing), msgspec.msgpack.encode(measure_host(int(n_ranks), Path(log_dir))))
