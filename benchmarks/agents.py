"""What many agents cost: `python -m benchmarks.agents` (three minutes on two cores).

Jobs of 4 to 64 agents, processes of this machine, with 8 simulated ranks each (benchmarks/simulated_agents.py).
"""

from __future__ import annotations

import argparse
import math
import os
import selectors
import signal
import socket
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from benchmarks.simulated_agents import STEP_S, Agents, simulated
from tests.launchers import free_port

SIZES = 4, 8, 16, 32, 64
N_RANKS_EACH = 8
N_STEPS = 40
BARE_S = 120.0
"""For the bare connections, which take less than one."""
N_QUIET_STEPS = 20
"""In which nobody is behind, before any is counted: all processes of this machine share its cores."""
MESSAGES = "Committed", "AppendEntries", "Appended", "heartbeat", "beat"
ABOUT = (
    f"Jobs of agents with {N_RANKS_EACH} simulated ranks each, all on this machine: agents, their loops, links, consensus and "
    f"logs are real, a rank is the other end of its socket. Every {STEP_S:g} s all ranks commit a unit. Processor time of an "
    "agent's process, all threads, and messages between agents at their links, both for a step; of them heartbeats and beats "
    "(signs of life) come with time. Start: from the first agent's process until the last rank has joined; bare: as many "
    "processes make as many connections to one, and each hears an echo."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("agents")
    console = Console(stderr=True)
    rows: list[dict[str, Cell]] = []
    summary: dict[str, float] = {}
    for n in options.sizes:
        row = kept.once(str(n), Row, partial(measure, n))
        console.print(row, highlight=False)
        rows.append(row)
        summary[f"agent_cpu_ms_a_step_{n}"] = float(row["leader ms"] or 0)
    least, most = rows[0], rows[-1]
    n = int(most["agents"] or 0)
    summary |= {
        f"member_cpu_ms_a_step_{n}": float(most["member ms"] or 0),
        f"messages_a_step_{n}": float(most["messages"] or 0),
        f"start_s_{n}x{N_RANKS_EACH}": float(most["start s"] or 0),
        f"start_over_bare_{n}x{N_RANKS_EACH}": float(most["start s"] or 0) / float(most["bare s"] or 1),
    }
    if len(rows) > 1:
        more = float(most["leader ms"] or 0) / float(least["leader ms"] or 1)
        summary["agent_cpu_growth"] = math.log(more) / math.log(n / int(least["agents"] or 1))
    kept.publish(ABOUT, summary, rows, options.results)


def measure(n: int) -> dict[str, Cell]:
    """One job of `n` agents."""
    with tempfile.TemporaryDirectory() as folder, simulated(n, N_RANKS_EACH, Path(folder), free_port()) as its:
        its.until(lambda: its.have_joined)
        start_s, links = its.start_s, _sent(its)["links"]
        _until_quiet(its)
        cpu_s, sent, step = _cpu_s(its), _sent(its), its.step
        its.until(lambda: its.step == step + N_STEPS)
        cpu_s, sent = [after - before for before, after in zip(cpu_s, _cpu_s(its), strict=True)], _sent(its) - sent
    of_kind = {kind: sent[kind] / N_STEPS for kind in MESSAGES}
    row: dict[str, Cell] = {"agents": n, "ranks": n * N_RANKS_EACH, "leader ms": 1e3 * cpu_s[0] / N_STEPS}
    row |= {"member ms": 1e3 * sum(cpu_s[1:]) / (n - 1) / N_STEPS, "messages": sum(of_kind.values()), **of_kind}
    return row | {"frames": sent["frames"] / N_STEPS, "start s": start_s, "bare s": bare_s(n - 1, links // 2)}


def _until_quiet(its: Agents) -> None:
    """Everybody has heard of all that was decided, and answers each step."""
    n_answers, least = 0, N_QUIET_STEPS * (len(its.pids) - 1)
    while not least <= n_answers <= 1.5 * least:  # some more, to heartbeats; many more, to what came late
        before, end = _sent(its), its.step + N_QUIET_STEPS
        its.until(lambda at=end: its.step >= at)  # type: ignore[misc]
        n_answers = (_sent(its) - before)["Appended"]


def _cpu_s(its: Agents) -> list[float]:
    return [its.cpu_s(i) for i in range(len(its.pids))]


def _sent(its: Agents) -> Counter[str]:
    """By all agents."""
    return sum((Counter(its.sent(i)) for i in range(len(its.pids))), Counter())


def bare_s(n_processes: int, n_links: int) -> float:
    """As many forked processes connect to this one so often, and each connection hears an echo."""
    each = -(-n_links // n_processes)
    began = time.monotonic()
    pids: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server, selectors.DefaultSelector() as selector:
        try:
            pids.extend(_connects(server.getsockname(), each) for _ in range(n_processes))
            selector.register(server, selectors.EVENT_READ)
            _echo(server, selector, n_processes * each)
            return time.monotonic() - began
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _echo(server: socket.socket, selector: selectors.BaseSelector, left: int) -> None:
    """Until so many connections have come and gone. Raises TimeoutError."""
    deadline = time.monotonic() + BARE_S
    while left:
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{left} of the bare connections have not come and gone after {BARE_S:g} s")
        for key, _ in ready:
            if key.fileobj is server:
                selector.register(server.accept()[0], selectors.EVENT_READ)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if data := connection.recv(64):
                connection.sendall(data)
            else:
                selector.unregister(connection)
                connection.close()
                left -= 1


def _connects(address: tuple[str, int], n: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            connections = [socket.create_connection(address) for _ in range(n)]
            for connection in connections:
                connection.sendall(b"x" * 64)
                connection.recv(64)
                connection.close()
        finally:
            os._exit(0)
    return pid


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of agents, in ascending order")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
