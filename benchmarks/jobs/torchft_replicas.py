"""torchft's lighthouse and replica groups of a rank each: `python torchft_replicas.py N ARGUMENTS of torchft_gpt.py`.

A replica that is killed is started again at once, as fast as a process can be: less than what its own example's launcher takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

JOIN_MS, TICK_MS, HEARTBEAT_MS = 1000, 20, 1000
"""Short, so that survivors wait little for who may never come back."""


def main() -> int:
    n_replicas, arguments = int(sys.argv[1]), sys.argv[2:]
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=JOIN_MS, quorum_tick_ms=TICK_MS, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "WORLD_SIZE": str(n_replicas)}
    command = [sys.executable, str(Path(__file__).with_name("torchft_gpt.py")), *arguments]
    replicas = {}
    for rank in range(n_replicas):
        process = subprocess.Popen(command, env={**environment, "RANK": str(rank)})
        replicas[process.pid] = rank
    try:
        while replicas:
            pid, status = os.wait()
            rank = replicas.pop(pid)
            if os.WIFSIGNALED(status):
                process = subprocess.Popen(command, env={**environment, "RANK": str(rank)})
                replicas[process.pid] = rank
            elif status:
                return 1
    finally:
        for pid in replicas:
            os.kill(pid, 9)
    return 0


if __name__ == "__main__":
    sys.exit(main())
