"""All benchmarks, one after the other, then the page: `python -m benchmarks` (about a quarter of an hour on two cores)."""

from __future__ import annotations

import subprocess
import sys


def main() -> None:
    for name in ("recovery", "accuracy", "overhead", "summary"):
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
        if done.returncode != 0:
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
