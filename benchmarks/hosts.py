"""How soon a lost host is noticed, and the job goes on: `python -m benchmarks.hosts` (root, four minutes).

Three hosts that are network namespaces (tests/hosts/network.py), a rank on each. One is lost in each way, a member's and the
leading agent's. The clock is one, so the moment of the loss and the events of the survivors' logs can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from benchmarks.trial import ROOT, TrialError
from launcher.joblog import reader
from launcher.joblog.events import AgentLost, Body, Event, GenerationStarted, LeaderChanged
from odyssey.errors import OdysseyError
from odyssey.protocol.reports import Committed
from tests.hosts.network import Hosts, Impossible

DETECT_S = 3.0
N_HOSTS, LEADER, MEMBER = 3, 1, 3
N_STEPS_BEFORE = 10
PATIENCE_S = 90.0
ABOUT = (
    "Three hosts that are network namespaces on this machine, a rank of a Job on each; one is lost in each way. noticed: until "
    "the leading agent's log says so, or for the leading one itself until another agent leads; by its host at once, where only "
    "the agent was killed. transition: from then until the ranks that are left train again."
)


def _killed(hosts: Hosts, i: int) -> None:
    """The agent's process alone; its host says so to who asks."""
    for pid in hosts.pids(i):
        if "odyssey_cli" in Path(f"/proc/{pid}/cmdline").read_text() and "run" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
            return


WAYS: dict[str, Callable[[Hosts, int], None]] = {
    "agent killed": _killed,
    "power lost": Hosts.crash,
    "cable pulled": Hosts.cut,
    "frozen": Hosts.freeze,
}


def main() -> None:
    options = _parse_arguments()
    kept = Kept("hosts")
    console = Console(stderr=True)
    rows: list[dict[str, Cell]] = []
    for repeat in range(options.repeats):
        for way in WAYS:
            for who, host in (("member", MEMBER), ("leader", LEADER)):
                found = kept.once(f"{repeat} {way} {who}", Row, partial(measure, way, host))
                row: dict[str, Cell] = {"way": way, "who": who, "repeat": repeat, **found}
                rows.append(row)
                console.print(row, highlight=False)

    def of(who: str, key: str, *ways: str) -> list[float]:
        return [float(row[key] or 0) for row in rows if row["who"] == who and (not ways or row["way"] in ways)]

    silent = [way for way in WAYS if way != "agent killed"]
    summary = {
        "worst_detect_over_configured": max(of("member", "noticed s")) / DETECT_S,
        "killed_agent_noticed_s": median(of("member", "noticed s", "agent killed")),
        "leader_replaced_over_configured": median(of("leader", "noticed s", *silent)) / DETECT_S,
        "killed_leader_replaced_s": median(of("leader", "noticed s", "agent killed")),
        "transition_s": median(of("member", "transition s")),
        "transition_after_leader_s": median(of("leader", "transition s")),
    }
    kept.publish(ABOUT, summary, rows, options.results)


def measure(way: str, host: int) -> dict[str, Cell]:
    """One job, one loss."""
    with tempfile.TemporaryDirectory() as name, _job(Path(name)) as (hosts, folder):
        _wait_for(folder, lambda events: sum(isinstance(e.body, Committed) for e in events) > N_STEPS_BEFORE, LEADER)
        struck_at = time.time()
        WAYS[way](hosts, host)
        noticed: type[Body] = AgentLost if host == MEMBER else LeaderChanged
        others = [i for i in hosts.numbers if i != host]
        events = _wait_for(folder, lambda events: _went_after(events, noticed, struck_at) is not None, *others)
        found = _went_after(events, noticed, struck_at)
        assert found is not None
        return {"noticed s": found[0] - struck_at, "transition s": found[1] - found[0]}


def _went_after(events: list[Event], noticed: type, struck_at: float) -> tuple[float, float] | None:
    """When the loss was in the log, and when the next generation went."""
    at = next((e.time for e in events if isinstance(e.body, noticed) and e.time > struck_at), None)
    went = next((e.time for e in events if at is not None and isinstance(e.body, GenerationStarted) and e.time > at), None)
    return None if at is None or went is None else (at, went)


def _wait_for(folder: Path, condition: Callable[[list[Event]], bool], *hosts: int) -> list[Event]:
    """The log of the first of these hosts of which it is true. Raises TrialError."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for i in hosts:
            for log in (folder / f"logs{i}").glob(f"*/{reader.NAME}"):
                with contextlib.suppress(OdysseyError):
                    if condition(events := list(reader.events(log))):
                        return events
        time.sleep(0.2)
    said = "".join(f"h{path.name}: {path.read_text()[-800:]}\n" for path in sorted(folder.glob("out*")))
    raise TrialError(f"the job did not go on within {PATIENCE_S:g} s\n{said}")


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[tuple[Hosts, Path]]:
    """Raises SystemExit where there can be none."""
    try:
        hosts = Hosts(N_HOSTS, folder, 200 + os.getpid() % 50)
    except Impossible as error:
        raise SystemExit(f"hosts of namespaces cannot be made here: {error}") from None
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for i in hosts.numbers:
            flags = {"nnodes": f"1:{N_HOSTS}", "rdzv-backend": "c10d", "rdzv-endpoint": "h1:29400", "layout": f"{N_HOSTS}x1"}
            flags |= {"log-dir": str(folder / f"logs{i}"), "detect": f"{DETECT_S}s", "rdzv-conf": "last_call_timeout=60"}
            command = [sys.executable, "-m", "odyssey_cli", "run", *(f"--{key}={value}" for key, value in flags.items())]
            command += [str(ROOT / "tests" / "jobs" / "train.py"), "--steps", "100000", "--pause", "0.02"]
            with (folder / f"out{i}").open("wb") as out:
                agents.append(
                    subprocess.Popen(
                        hosts.command(i, command), cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)}, start_new_session=True,
                    )
                )  # fmt: skip
        yield hosts, folder
    finally:
        hosts.close()
        for agent in agents:
            agent.kill()  # of one whose host was not there yet
            agent.wait(PATIENCE_S)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
