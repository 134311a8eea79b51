"""Tasks of a node that wait for its agent; what SLURM will do to a step, and when, as far as it can be seen from inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from odyssey.errors import UsageError
from odyssey_cli.slurm.node_tasks import leading
from odyssey_cli.slurm.recipe import flaws, too_few_processors
from odyssey_cli.slurm.step import step_of
from odyssey_cli.slurm.time_limit import NEAR_S, end_in, tell_in_time
from tests import ROOT

SCRIPT = str(ROOT / "tests" / "models.py")


def task(local: int, n_tasks: int = 3) -> dict[str, str]:
    """The environment of a task of a step that only this process of the tests has."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "7",
        "SLURM_PROCID": str(local),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": str(n_tasks),
    }


def waits(local: int) -> subprocess.Popen[str]:
    """One of the other tasks."""
    command = [sys.executable, "-m", "odyssey_cli", "run", SCRIPT]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | task(local), stderr=subprocess.PIPE, text=True)


LEADS = """
import os, sys
from odyssey_cli.slurm.node_tasks import leading
from odyssey_cli.slurm.step import step_of
with leading(step_of(os.environ)) as others:
    print("leads", flush=True)
    sys.stdin.read()
    others.tell(int(sys.argv[1]))
"""


def leads(code: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LEADS, str(code)]
    agent = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | task(0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None and agent.stdout.readline() == "leads\n"
    return agent


def ignores(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


def places(agent: subprocess.Popen[str]) -> list[str]:
    """Names of the sockets that an agent holds: of that at which it listens, and again for each task that waits there."""
    found = psutil.Process(agent.pid).net_connections("unix")
    return [str(its.laddr) for its in found if str(its.laddr).startswith(f"@odyssey-{os.getuid()}-{os.getpid()}.7.")]


@pytest.mark.parametrize("code", [0, 143])
def test_other_tasks_exit_as_their_agent_does_and_heed_no_signal(code: int) -> None:
    agent = leads(code)
    others = [waits(1), waits(2)]
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for other in others:
        while not all(ignores(other.pid, number) for number in numbers):
            assert other.poll() is None
        for number in numbers:
            other.send_signal(number)
    agent.communicate("")
    assert [(other.wait(), other.communicate()[1]) for other in others] == [(code, "")] * 2
    assert agent.returncode == 0


def test_the_end_of_a_killed_agent_is_that_of_the_other_tasks() -> None:
    agent = leads(0)
    other = waits(1)
    while len(places(agent)) < 2:
        assert other.poll() is None
    agent.kill()
    agent.communicate()
    said = other.communicate()[1]
    assert other.returncode == 1
    assert "task 1: " in said and "Traceback" not in said


def test_a_second_agent_of_a_node_is_told_so() -> None:
    step = step_of(task(0))
    assert step is not None
    with leading(step), pytest.raises(UsageError, match="another agent runs for this node"), leading(step):
        pass
    with leading(step):
        pass  # the first has left nothing


STRANGER = """
import os, socket, sys
from odyssey_cli.slurm import node_tasks
from odyssey_cli.slurm.step import step_of
place = node_tasks._place(step_of(os.environ))
os.setuid(65534)
held = []
for end in ("", "0" * 16, "f" * 16, "0" * 16 + "\\n@" + place + "1" * 16):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + place + end)
    held[-1].listen(1)
print("there", flush=True)
for line in sys.stdin:
    for _ in range(20):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect("\\0" + line.strip())
    print("there", flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_at_the_place_of_an_agent_or_in_front_of_it_disturbs_nobody() -> None:
    """A process that binds the names that an agent may have, connects to it more often than there are tasks, and stays."""
    program = f"import os; os.getuid = lambda: {os.getuid()}\n{STRANGER}"  # it knows whom it means
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | task(0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdin is not None and stranger.stdout is not None
        assert stranger.stdout.readline() == "there\n"
        other = waits(1)
        agent = leads(7)
        stranger.stdin.write(f"{places(agent)[0][1:]}\n")
        stranger.stdin.flush()
        assert stranger.stdout.readline() == "there\n"
        late = waits(2)
        while len(places(agent)) < 3:
            assert (other.poll(), late.poll()) == (None, None)
        agent.communicate("")
        assert [(one.wait(), one.communicate()[1]) for one in (other, late)] == [(7, "")] * 2
        stranger.stdin.close()


# -- what srun was told ------------------------------------------------------------------------------------------------

RIGHT = ("-N4", "--kill-on-bad-exit=0", "--wait=0", "--no-kill")


@pytest.mark.parametrize(
    ("arguments", "environment", "config", "told"),
    [
        (RIGHT, {}, {}, []),
        (RIGHT, {"SLURM_KILL_BAD_EXIT": "1", "SLURM_WAIT": "60"}, {"KillOnBadExit": "1", "WaitTime": "30 sec"}, []),
        ((*RIGHT, "-K"), {}, {}, ["kill-on-bad-exit"]),
        ((*RIGHT, "-K0"), {}, {}, []),
        ((*RIGHT, "--kill-on-bad-exit"), {}, {}, ["kill-on-bad-exit"]),
        (("-K", "-k", "-W0"), {}, {}, ["kill-on-bad-exit"]),
        ((*RIGHT, "-W", "9"), {}, {}, ["9 s after the first"]),
        ((*RIGHT, "-W9"), {}, {}, ["9 s after the first"]),
        (("-N4",), {}, {}, ["no-kill"]),
        (("-N4",), {"SLURM_NO_KILL": "1"}, {}, []),
        (("-N4", "-k"), {"SLURM_KILL_BAD_EXIT": "1"}, {}, ["kill-on-bad-exit"]),
        (("-N4", "-k"), {}, {"KillOnBadExit": "1", "WaitTime": "30 sec"}, ["kill-on-bad-exit", "30 s after the first"]),
        (None, {}, {"KillOnBadExit": "0", "WaitTime": "0 sec"}, []),
        (None, {"SLURM_KILL_BAD_EXIT": "1"}, {"KillOnBadExit": "0"}, ["kill-on-bad-exit"]),
    ],
)
def test_what_ends_all_with_one_is_told(
    arguments: tuple[str, ...] | None, environment: Mapping[str, str], config: Mapping[str, str], told: list[str]
) -> None:
    found = flaws(arguments, environment, config)
    assert len(found) == len(told)
    assert all(word in text for word, text in zip(told, found, strict=True)), found


def test_an_agent_that_is_bound_to_fewer_processors_says_so() -> None:
    assert "share 1 of the 96" in too_few_processors(1, {"SLURM_CPUS_ON_NODE": "96"})
    assert too_few_processors(96, {"SLURM_CPUS_ON_NODE": "96"}) == ""
    assert too_few_processors(1, {}) == too_few_processors(1, {"SLURM_CPUS_ON_NODE": "many"}) == ""


# -- the end of time ---------------------------------------------------------------------------------------------------


def test_the_time_limit_is_told_when_it_is_near_and_where_it_has_moved_to() -> None:
    now = [1000.0]
    ends = iter([5000.0, 9000.0, 9000.0])
    said: list[str] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    tell_in_time(lambda: next(ends), said.append, now=lambda: now[0], sleep=sleep)

    assert slept == [4000.0 - NEAR_S, 4000.0]
    assert len(said) == 1 and said[0].endswith("in 300 s")


def test_a_job_without_a_limit_is_told_nothing() -> None:
    said: list[str] = []
    tell_in_time(lambda: None, said.append)
    assert said == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("JobId=4 TimeLimit=00:05:00 EndTime=2026-11-22T17:30:30 Deadline=N/A", datetime(2026, 11, 22, 17, 30, 30).timestamp()),
        ("JobId=4 TimeLimit=UNLIMITED EndTime=2027-11-22T17:30:30", None),
        ("JobId=4 TimeLimit=00:05:00 EndTime=Unknown", None),
        ("", None),
    ],
)
def test_the_end_of_a_job_is_read(text: str, expected: float | None) -> None:
    assert end_in(text) == expected
