"""All benchmarks, one after the other, then the page: `python -m benchmarks` (about an hour and a half on two cores).

`python -m benchmarks launch restart` runs just these, with their own defaults, and writes the page anew.
"""

from __future__ import annotations

import subprocess
import sys

NAMES = (
    *("coordinator", "launch", "restart", "recovery", "job_wall", "accuracy", "overhead", "hosts", "agents"),
    *("rehearsal", "gain", "paper", "search", "horizon", "optimality", "moves", "schedules"),
)


def main() -> None:
    names = sys.argv[1:] or list(NAMES)
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in (*names, "summary"):
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
        if done.returncode != 0:
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
