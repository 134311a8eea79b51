"""When SLURM ends the job: told once, shortly before. `scontrol update` may have moved it meanwhile, so it is asked again."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from datetime import datetime

NEAR_S = 300.0
"""Before the end: what is left to save."""
ASK_S = 10.0
"""For `scontrol` to answer."""


def tell_in_time(
    end_of: Callable[[], float | None],
    tell: Callable[[str], None],
    *,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when it is told, or where no end is known. `end_of`: seconds since the epoch, as it is known now."""
    while (end := end_of()) is not None:
        left_s = end - now()
        if left_s <= NEAR_S:
            at = datetime.fromtimestamp(end)
            tell(f"SLURM's time limit is near: this job ends at {at:%H:%M:%S}, in {max(left_s, 0):.0f} s")
            return
        sleep(left_s - NEAR_S)


def job_end(job_id: int) -> float | None:
    """By `scontrol show job`; None for a job without a limit, and where it cannot be asked."""
    command = ["scontrol", "--oneliner", "show", "job", str(job_id)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return end_in(done.stdout)


def end_in(text: str) -> float | None:
    """Seconds since the epoch: `EndTime=2026-11-22T17:45:00`, which is local time; None for `Unknown`, and years from now."""
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", text)
    limit = re.search(r"\bTimeLimit=(\S+)", text)
    if found is None or limit is None or limit[1] == "UNLIMITED":
        return None
    return datetime.fromisoformat(found[1]).timestamp()
