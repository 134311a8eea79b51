"""All benchmarks, one after the other, then the page: `python -m benchmarks` (4 hours on two cores).

`python -m benchmarks launch restart` runs just these, with their own defaults, and writes the page anew. What has a result of
this very commit already is left out (but for `--again`), and what was cut goes on behind the cases that it has measured
(kept.py): the same command goes on where it stopped. One that fails, or comes to its limit, does not keep the others from being
run.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import report
from benchmarks.run import MEMORY, go_below
from launcher.host.kernel import set_subreaper
from launcher.host.orphans import end_descendants
from odyssey.codec import Malformed

LIMITS_S = {
    "coordinator": 300.0,
    "launch": 1200.0,
    "restart": 1800.0,
    "recovery": 3600.0,
    "resilient": 1800.0,
    "sharded": 900.0,
    "loss_curve": 600.0,
    "data": 300.0,
    "grow": 1800.0,
    "job_wall": 6000.0,
    "learning": 3600.0,
    "accuracy": 2400.0,
    "overhead": 2400.0,
    "hosts": 900.0,
    "agents": 900.0,
    "rehearsal": 5400.0,
    "strategies": 9000.0,
    "gain": 1200.0,
    "paper": 7200.0,
    "search": 1200.0,
    "horizon": 4800.0,
    "optimality": 2400.0,
    "moves": 600.0,
    "schedules": 3000.0,
    "summary": 300.0,
}
"""What each takes on two cores, about three times; time enough for all launchers of job_wall to be given up, and for no case of
schedules to be proved. The last one is run whichever others are."""
RESULTS = {"paper": ("paper", "paper-rehearsal")}
"""A benchmark that is not here has one result, of its own name."""
GRACE_S = 20.0
"""From SIGTERM to SIGKILL."""


def main(limits_s: Mapping[str, float] = LIMITS_S, root: Path = report.ROOT, package: str = "benchmarks") -> None:
    """Run `package.NAME` of `root` for all names, or those that are asked for."""
    *names, last = limits_s
    options = _parse_arguments(names)
    go_below("benchmarks", ends_with_parent=options.ends_with_parent)
    set_subreaper(True)
    commit, bad = report.commit_of(root), []
    for name in options.names or names:
        if not options.again and _is_made(name, root / package / "results", commit):
            _say(f"{name}: its result is of this commit, {commit}, already (--again makes it anew)")
        elif (why := _problem(f"{package}.{name}", limits_s[name], root)) is not None:
            _say(f"{name}: {why}")
            bad.append(f"{name}: {why}")
    if (why := _problem(f"{package}.{last}", limits_s[last], root)) is not None:
        bad.append(f"{last}: {why}")
    if bad:
        raise SystemExit("\n".join(["these did not come to their end:", *(f"  {line}" for line in bad)]))


def _is_made(name: str, results: Path, commit: str) -> bool:
    """Whether all that it measures by itself was measured at this commit."""
    for result in RESULTS.get(name, (name,)):
        try:
            found = report.read(results / f"{result}.json")
        except (FileNotFoundError, Malformed):
            return False
        if found.machine.commit != commit or not found.machine.is_at_a_commit or found.arguments:
            return False
    return True


def _problem(module: str, limit_s: float, root: Path) -> str | None:
    """Run it, in a session and folders of its own. Answers why it has not come to its end, None if it has."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=os.environ[MEMORY]) as memory:
        process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=root, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "TMPDIR": folder, MEMORY: memory},
        )  # fmt: skip
        try:
            if not _ends_within(process, limit_s):
                return f"not done after {limit_s:g} s"
        finally:
            _end(process)
    return None if process.returncode == 0 else f"exit code {process.returncode}"


def _ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Without looking again and again, which takes the cores of what is measured."""
    ended = os.pidfd_open(process.pid)
    try:
        return bool(select.select([ended], [], [], limit_s)[0])
    finally:
        os.close(ended)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it has started."""
    if not _ends_within(process, 0):
        process.send_signal(signal.SIGTERM)
        if not _ends_within(process, GRACE_S):
            process.kill()
    process.wait(GRACE_S)
    end_descendants()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="those whose result is of this commit, too")
    parser.add_argument("--ends-with-parent", action="store_true", help="with the process that has started this one")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(names)}")
    return options


if __name__ == "__main__":
    main()
