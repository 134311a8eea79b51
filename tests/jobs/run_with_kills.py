"""Runs a job through the agent and kills its ranks at the moments of a list: `run_with_kills.py CASE.json OUTCOME.json`.

A kill is a real SIGKILL (or SIGSTOP) to a real process, at a moment that an event of the job gives: a delay after the
commit of a step, or after a phase of a recovery began. The delays come from the case, so a case can be run again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher import agent
from launcher.events import Event, Pausing, PlanChosen, RankLost, RankStarted, UnitCommitted, Went
from launcher.options import RunOptions

N_SPARED = 3
"""A kill whose rank is dead already hits another one, as long as more than so many live."""
PHASES = {"pausing": Pausing, "plan": PlanChosen, "go": Went}


class Killer:
    """`kills`: {"on": "step" | "pausing" | "plan" | "go", "step": n or "nth": n, "delay_s": x, "ranks": [r], "stop": bool}."""

    def __init__(self, kills):
        self.waiting = list(kills)
        self.fired = []
        self.pids = {}
        self.seen = dict.fromkeys(PHASES, 0)

    def watch(self, event: Event) -> None:
        body = event.body
        if isinstance(body, RankStarted):
            self.pids[body.rank] = body.pid
        elif isinstance(body, RankLost):
            self.pids.pop(body.rank, None)
        elif isinstance(body, UnitCommitted) and body.result.kind == "step":
            self.fire("step", body.result.position[0] + 1)
        for name, kind in PHASES.items():
            if isinstance(body, kind):
                self.seen[name] += 1
                self.fire(name, self.seen[name])

    def fire(self, on, number):
        due = [kill for kill in self.waiting if kill["on"] == on and kill["number"] == number]
        self.waiting = [kill for kill in self.waiting if kill not in due]
        for kill in due:
            if kill["delay_s"] == 0:
                self.strike(kill)
            else:
                threading.Timer(kill["delay_s"], self.strike, [kill]).start()

    def strike(self, kill):
        for rank in kill["ranks"]:
            living = sorted(self.pids)
            if rank not in living and len(living) > N_SPARED:
                rank = living[rank % len(living)]
            pid = self.pids.get(rank)
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGSTOP if kill.get("stop") else signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended in the meantime
                self.fired.append({"on": kill["on"], "number": kill["number"], "rank": rank})


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    killer = Killer(case["kills"])
    options = RunOptions(**case["options"] | {"log_dir": Path(case["options"]["log_dir"])})
    code = agent.run(options, killer.watch, lambda rank, stream, data: None)
    Path(sys.argv[2]).write_text(json.dumps({"code": code, "fired": killer.fired}))


if __name__ == "__main__":
    main()
