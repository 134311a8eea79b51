"""Signals that are sent to every process of a job, as SLURM does it: ranks get them once, all others not at all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from launcher.host.group_signals import MEMORY_S, WITNESS_S, GroupSignals
from tests.fake_loop import FakeLoop
from tests.launchers import ODYSSEY_RUN, PATIENCE_S, Run, Scene, free_port, scene

__all__ = ["scene"]
FORWARD = "--forward-signals=SIGUSR1,SIGUSR2"

TELLS = """
import os, signal, sys

ready = os.open(os.environ["READY"], os.O_WRONLY)
gate = os.open("gate", os.O_RDONLY)
def tell(text):
    os.write(ready, f"{os.environ['RANK']} {text}\\n".encode())

def end_at_the_gate(number, _):
    tell(signal.Signals(number).name)
    os.read(gate, 1)  # not at once: a second request would be told, too
    os._exit(0)

for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: tell(signal.Signals(number).name))
signal.signal(signal.SIGTERM, end_at_the_gate)
"""
WAITS = TELLS + "tell('waits')\nwhile True: signal.pause()\n"
JOB = (
    TELLS
    + """
import torch, odyssey
data = [(torch.ones(4), torch.ones(4))] * 16
job = odyssey.Job(
    layers=lambda: [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data, global_batch=8, micro_batch=2,
)
for step in job.steps(1_000_000):
    if step.index == 3:
        tell("trains")
"""
)


@pytest.fixture
def let_go(scene: Scene) -> Iterator[Callable[[], None]]:
    """Have ranks go on that wait at the gate."""
    os.mkfifo(scene.cwd / "gate")
    held = [os.open(scene.cwd / "gate", os.O_RDWR)]

    def close() -> None:
        while held:
            os.close(held.pop())

    yield close
    close()


def send_to_all(agent: Run, pids: Sequence[int], number: signal.Signals) -> None:
    """However long it takes: the agent goes on when all have it."""
    agent.signal(signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, number)
    agent.signal(signal.SIGCONT)


def tree(scene: Scene) -> list[int]:
    return sorted(process.pid for process in scene.processes())


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def all_got(scene: Scene, number: signal.Signals) -> bool:
    """Both ranks, and nothing else was heard."""
    return sorted(scene.hear(2)) == [f"0 {number.name}", f"1 {number.name}"]


@pytest.mark.usefixtures("cold")
def test_a_signal_to_all_reaches_each_rank_once_and_ends_nobody(scene: Scene, let_go: Callable[[], None]) -> None:
    options = ["--nproc-per-node=2", FORWARD]
    run = scene.start(ODYSSEY_RUN, *options, scene.write("train.py", WAITS), env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    scene.hear(2)
    wait_for(lambda: len(tree(scene)) == 7)  # agent, reaper, zygote, store, timers, two ranks
    everybody = tree(scene)

    for _ in range(2):
        send_to_all(run, everybody, signal.SIGUSR1)
        assert all_got(scene, signal.SIGUSR1)
    run.signal(signal.SIGUSR2)  # to the agent alone: it passes it on, after whatever it made of those before
    assert all_got(scene, signal.SIGUSR2)
    assert tree(scene) == everybody

    send_to_all(run, everybody, signal.SIGTERM)
    assert all_got(scene, signal.SIGTERM)
    let_go()
    assert run.end() == 143
    assert scene.hears_nothing(0)


@pytest.mark.parametrize("is_leader_last", [True, False])
def test_agents_that_are_all_told_to_end_tell_each_others_ranks_nothing(
    scene: Scene, let_go: Callable[[], None], is_leader_last: bool
) -> None:
    """As on two nodes of a step, of which one is the last to hear of it."""
    where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    script = scene.write("train.py", WAITS)
    agents = [scene.start(ODYSSEY_RUN, *where, script) for _ in range(2)]
    scene.hear(2)
    member, leader = sorted(agents, key=lambda agent: "leading at" in agent.stderr)
    for agent in (member, leader) if is_leader_last else (leader, member):
        pid = agent.process.pid
        send_to_all(agent, [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))], signal.SIGTERM)
        time.sleep(2 * WITNESS_S)
    assert all_got(scene, signal.SIGTERM)
    let_go()
    assert [agent.end() for agent in agents] == [143, 143]
    assert scene.hears_nothing(0)


def test_a_second_request_to_all_takes_no_time_from_ranks_that_save(scene: Scene, let_go: Callable[[], None]) -> None:
    """As at a time limit of SLURM, which sends SIGTERM twice."""
    saves = """
def save(*_):
    tell("saves")
    os.read(gate, 1)
    tell("has saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("waits")
signal.pause()
"""
    run = scene.start(ODYSSEY_RUN, "--shutdown-timeout=1000", scene.write("train.py", TELLS + saves))
    scene.hear(1)
    agent_and_others = [pid for pid in tree(scene) if not is_rank(pid)]
    send_to_all(run, tree(scene), signal.SIGTERM)
    assert scene.hear(1) == ["0 saves"]
    send_to_all(run, agent_and_others, signal.SIGTERM)  # the rank's handler is none that is called within itself
    time.sleep(2 * WITNESS_S)
    let_go()
    assert scene.hear(1) == ["0 has saved"]
    assert run.end() == 143


@pytest.mark.usefixtures("cold")
def test_a_terminal_that_goes_takes_no_time_from_ranks_that_save(scene: Scene, let_go: Callable[[], None]) -> None:
    """Its shell sends SIGHUP to its jobs, and the kernel sends it once more as the shell ends."""
    save = "signal.signal(signal.SIGHUP, lambda *_: [tell('saves'), os.read(gate, 1), tell('has saved'), sys.exit(0)])\n"
    run = scene.start(
        ODYSSEY_RUN, "--shutdown-timeout=1000", scene.write("train.py", TELLS + save + "tell('waits')\nsignal.pause()")
    )
    scene.hear(1)
    run.signal(signal.SIGHUP)
    assert scene.hear(1) == ["0 saves"]
    run.signal(signal.SIGHUP)
    time.sleep(2 * WITNESS_S)
    let_go()
    assert scene.hear(1) == ["0 has saved"]
    assert run.end() == 129


def is_rank(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").endswith(b"-u train.py")


def test_a_job_and_its_planner_outlive_signals_to_all(scene: Scene, let_go: Callable[[], None]) -> None:
    options = ["--nodes=2", FORWARD, "--no-display"]
    run = scene.start(ODYSSEY_RUN, *options, scene.write("train.py", JOB))
    assert sorted(line.split()[1] for line in scene.hear(2)) == ["trains", "trains"]
    wait_for(lambda: any(is_planner_that_blocks(pid, signal.SIGUSR1) for pid in tree(scene)))
    everybody = tree(scene)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        send_to_all(run, everybody, number)
        assert all_got(scene, number)
    assert tree(scene) == everybody
    run.signal(signal.SIGTERM)
    assert all_got(scene, signal.SIGTERM)
    let_go()
    assert run.end() == 143
    assert scene.hears_nothing(0)


def is_planner_that_blocks(pid: int, number: signal.Signals) -> bool:
    """A process that has ended meanwhile, as forks on their way do, is none."""
    try:
        if b"launcher.planning.precompute" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    return bool(int(status["SigBlk"], 16) >> (number - 1) & 1)


# -- by itself ---------------------------------------------------------------------------------------------------------


class Told:
    """What is decided of signals, and a witness that a test tells what it was sent."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.waiting: set[int] = set()
        self.decided: list[tuple[int, bool]] = []
        self.broadcasts = GroupSignals(self.loop, self._witnessed, lambda *decided: self.decided.append(decided))

    def _witnessed(self) -> frozenset[int]:
        found = frozenset(self.waiting)
        self.waiting.clear()
        return found


def test_what_the_witness_has_is_decided_at_once() -> None:
    told = Told()
    told.waiting.add(10)
    told.broadcasts.arrived(10)
    assert told.decided == [(10, True)]


def test_what_the_witness_gets_a_moment_later_was_sent_to_all() -> None:
    told = Told()
    told.broadcasts.arrived(10)
    told.loop.pass_s(WITNESS_S / 2)
    assert told.decided == []
    told.waiting.add(10)
    told.loop.pass_s(WITNESS_S)
    assert told.decided == [(10, True)]


def test_the_same_signal_again_within_that_moment_is_one_request() -> None:
    told = Told()
    told.broadcasts.arrived(15)
    told.broadcasts.arrived(15)
    told.broadcasts.arrived(2)
    told.loop.pass_s(WITNESS_S)
    assert told.decided == [(15, False), (2, False)]
    told.broadcasts.arrived(15)
    told.loop.pass_s(WITNESS_S)
    assert told.decided == [(15, False), (2, False), (15, False)]


def test_what_the_witness_does_not_get_came_alone() -> None:
    told = Told()
    told.waiting.add(12)
    told.broadcasts.arrived(10)
    told.loop.pass_s(WITNESS_S)
    assert told.decided == [(10, False)]
    told.broadcasts.arrived(12)  # seen beside the other one, and remembered
    assert told.decided == [(10, False), (12, True)]
    told.loop.pass_s(MEMORY_S)
    told.broadcasts.arrived(12)
    told.loop.pass_s(WITNESS_S)
    assert told.decided == [(10, False), (12, True), (12, False)]
