"""Several agents on one host: they meet, their ranks make one job, and whoever is lost is noticed at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests import ROOT, exactness, reference
from tests.agent_runs import TRAIN
from tests.descendants import Descendants
from tests.held import Held
from tests.launchers import PATIENCE_S, free_port

pytestmark = pytest.mark.timeout(120)

MEETS = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK"
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write(" ".join(("SEAT", *(os.environ[name] for name in names), str(int(total)))) + "\\n")
if "--wait" in sys.argv and os.environ["WORLD_SIZE"] != sys.argv[-1]:
    time.sleep(1000)
dist.barrier()
"""


class Agent:
    """One agent's process; its lines are read as they come."""

    def __init__(self, *arguments: str, on: Callable[[list[str]], list[str]] = list) -> None:
        """`on`: what has a command run on another host."""
        self.process = subprocess.Popen(
            on([sys.executable, "-m", "odyssey_cli", "run", *arguments]),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until(self, found: Callable[[str], bool]) -> str:
        """Read on until a line is found; fails with all that came before if none is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found(line):
                return line
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return self.process.wait()

    def close(self) -> None:
        """When all that it started has ended, so that nobody can write any more."""
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        self.process.stdout.close()

    def assignments(self, attempt: int = 0) -> set[str]:
        start = f"SEAT {attempt} "
        return {line[len(start) :].strip() for line in self.lines if line.startswith(start)}


def endpoint_port(agent: Agent) -> int:
    (endpoint,) = [its for its in agent.process.args if str(its).startswith("--rdzv-endpoint=")]  # type: ignore[union-attr]
    return int(str(endpoint).rpartition(":")[2])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents; afterwards no process of any of them is left."""
    agents: list[Agent] = []
    below = Descendants()
    script = tmp_path / "script.py"
    script.write_text(MEETS)
    port = free_port()

    def begin(
        *arguments: str,
        script: str = str(script),
        backend: str = "c10d",
        nnodes: str = "2",
        on: Callable[[list[str]], list[str]] = list,
        **options: object,
    ) -> Agent:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
        values = {"nnodes": nnodes, "rdzv-backend": backend, "log-dir": tmp_path / f"logs{len(agents)}"} | options
        flags = [f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}") for name, value in values.items()]
        agents.append(Agent(endpoint, *flags, script, *arguments, on=on))
        return agents[-1]

    yield begin
    for agent in agents:
        agent.process.kill()
        agent.process.wait(PATIENCE_S)
    below.wait(PATIENCE_S)  # an agent's reaper ends last
    left = below.end()
    below.close()
    for agent in agents:
        agent.close()
        print(*agent.lines, sep="", end="---\n")  # shown where the test has failed
    assert not left, left


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_agents_of_different_sizes_make_one_job(start: Callable[..., Agent], backend: str) -> None:
    first = start(backend=backend, nproc_per_node=2, node_rank=0)
    second = start(backend=backend, nproc_per_node=1, node_rank=1)
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 3 0 0 3", "1 3 0 1 3", "2 3 1 0 3"}


def test_a_late_agent_joins_at_once(start: Callable[..., Agent]) -> None:
    first = start("--wait", "2", nnodes="1:2", rdzv_conf="last_call_timeout=0")
    first.until(lambda line: line.startswith("SEAT 0 0 1"))
    second = start("--wait", "2", nnodes="1:2")
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 1 0 0 1", "0 2 0 0 2", "1 2 1 0 2"}


def test_a_surplus_agent_waits_and_its_end_is_no_failure(start: Callable[..., Agent]) -> None:
    first = start("--wait", "9")
    first.until(lambda line: "leading at" in line)
    second = start("--wait", "9")
    first.until(lambda line: line.startswith("SEAT"))
    surplus, left = start(), start()
    for agent in (surplus, left):
        agent.until(lambda line: "the job has all its 2 agents; this agent waits" in line)
    left.process.send_signal(signal.SIGINT)
    assert left.end() == 130
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == second.end() == 143, first.lines + second.lines
    assert surplus.end() == 0, surplus.lines


def test_two_jobs_that_share_a_host_and_a_port_do_not_take_each_others_agents(start: Callable[..., Agent]) -> None:
    """Each has an endpoint of its own. An agent of the first one listens where the second one's agents look first."""
    first = start("--wait", "9")
    first.until(lambda line: "leading at" in line)
    member = start("--wait", "9", local_addr="127.0.0.2")
    member.until(lambda line: line.startswith("SEAT"))
    given = {"rdzv_endpoint": f"127.0.0.2:{endpoint_port(first)}"}
    second = start(**given)
    second.until(lambda line: "leading at" in line)
    other = start(**given)
    assert [second.end(), other.end()] == [0, 0], second.lines + other.lines
    assert second.assignments() | other.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == member.end() == 143, first.lines + member.lines


@pytest.mark.soak
def test_a_surplus_agent_takes_the_place_of_one_that_is_lost(start: Callable[..., Agent]) -> None:
    first = start("--wait", "9", max_restarts=1)
    first.until(lambda line: "leading at" in line)
    lost = start("--wait", "9", max_restarts=1)
    lost.until(lambda line: line.startswith("SEAT 0"))
    surplus = start(max_restarts=1)
    surplus.until(lambda line: "this agent waits for a place" in line)
    lost.process.kill()
    surplus.until(lambda line: line.startswith("SEAT 1 1 2"))
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143


def test_a_killed_agent_is_noticed_though_no_rank_communicates(start: Callable[..., Agent]) -> None:
    first = start("--wait", "1", nnodes="1:2", max_restarts=1)
    first.until(lambda line: "leading at" in line)
    second = start("--wait", "1", nnodes="1:2", nproc_per_node=2, max_restarts=1)
    first.until(lambda line: line.startswith("SEAT 0 0 3"))
    second.process.kill()
    assert first.end() == 0, first.lines
    assert first.assignments(1) == {"0 1 0 0 1"}
    assert any("was lost (connection closed)" in line for line in first.lines)


def test_an_agent_that_comes_back_is_waited_for(start: Callable[..., Agent]) -> None:
    first = start("--wait", "9", backend="static", max_restarts=1, node_rank=0)
    second = start("--wait", "9", backend="static", max_restarts=1, node_rank=1)
    first.until(lambda line: line.startswith("SEAT 0"))
    second.process.kill()
    first.until(lambda line: "waiting up to" in line)
    start("--wait", "9", backend="static", max_restarts=1, node_rank=1)
    first.until(lambda line: line.startswith("SEAT 1 0 2"))
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143


def test_ranks_end_with_the_leading_agent(start: Callable[..., Agent]) -> None:
    agents = [start("--wait", "9", backend="static", node_rank=rank) for rank in range(2)]
    agents[1].until(lambda line: line.startswith("SEAT"))
    agents[0].process.kill()
    assert agents[1].end() == 1
    assert any("the leading agent at" in line and "is lost" in line for line in agents[1].lines)


def test_an_agent_of_another_job_is_refused(start: Callable[..., Agent]) -> None:
    first = start(backend="static", rdzv_id="a", node_rank=0)
    second = start(backend="static", rdzv_id="b", node_rank=1)
    assert second.end() == 1
    assert "its --rdzv-id is 'a', not 'b'" in "".join(second.lines)
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130


def test_a_port_that_something_else_holds_is_told(start: Callable[..., Agent]) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        agent = start(backend="static", node_rank=0, rdzv_endpoint=f"127.0.0.1:{stranger.getsockname()[1]}")
        assert agent.end() == 2
    assert f"in use by process {os.getpid()}" in "".join(agent.lines)


def test_after_the_loss_of_the_leading_agent_others_find_the_one_that_leads(start: Callable[..., Agent]) -> None:
    """One has waited for a place, and one would begin a job of its own at the endpoint."""
    given = {"nnodes": "2:3", "max_restarts": 9, "detect": "2s"}
    first = start("--wait", "9", **given)
    first.until(lambda line: "leading at" in line)
    others = [start("--wait", "9", **given) for _ in range(2)]
    for agent in (first, *others):
        agent.until(lambda line: line.startswith("SEAT 0 "))
    waiting = start("--wait", "9", **given)
    waiting.until(lambda line: "the job has all its 3 agents; this agent waits" in line)
    first.process.kill()
    waiting.until(lambda line: line.startswith("SEAT") and line.split()[3] == "3")
    late = start("--wait", "9", **given)
    late.until(lambda line: "the job of this endpoint goes on" in line)
    late.until(lambda line: "the job has all its 3 agents; this agent waits" in line)


N_STEPS = 60


def a_chain_of_two_agents(start: Callable[..., Agent], tmp_path: Path) -> tuple[Agent, Agent]:
    """Each has half of the model alone, and ten steps are done."""
    steps = ["--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS)]
    steps += ["--pause", "0.05", "--out", str(tmp_path / "out.pt")]
    given = {"script": TRAIN, "nproc_per_node": 2, "layout": "1x4", "protect": "none"}
    first = start(*steps, **given)
    first.until(lambda line: "leading at" in line)
    second = start(*steps, **given)
    first.until(lambda line: line.startswith("step 10 "))
    return first, second


def assert_trained_exactly(tmp_path: Path) -> None:
    _, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    assert reference.largest_difference(expected, torch.load(tmp_path / "out.pt")["state"]["model"]) < exactness.TOLERANCE


@pytest.mark.parametrize("how", ["signal", pytest.param("command", marks=pytest.mark.soak)])
def test_ranks_that_leave_hand_over_what_they_alone_hold(start: Callable[..., Agent], tmp_path: Path, how: str) -> None:
    first, second = a_chain_of_two_agents(start, tmp_path)
    if how == "signal":
        second.process.terminate()
    else:
        folder = next((tmp_path / "logs0").iterdir())
        for rank in ("2", "3"):
            subprocess.run([sys.executable, "-m", "odyssey_cli", "leave", rank, str(folder)], cwd=ROOT, check=True)
    first.until(lambda line: "have left" in line or "rank 3 has left" in line)
    assert first.end() == 0, first.lines
    assert second.end() == (128 + signal.SIGTERM if how == "signal" else 0), second.lines
    assert not [line for line in first.lines if "recovered in" in line], "nothing was lost"
    assert_trained_exactly(tmp_path)


def test_the_agent_that_leads_leaves_and_the_other_one_goes_on(start: Callable[..., Agent], tmp_path: Path) -> None:
    first, second = a_chain_of_two_agents(start, tmp_path)
    first.process.terminate()
    assert first.end() == 143, first.lines
    assert second.end() == 0, second.lines
    seen = first.lines + second.lines
    assert [line for line in second.lines if "agent 1 (" in line and "leads from now on" in line], seen
    assert not [line for line in seen if "is silent" in line], "its loss has not to be noticed"
    assert [int(line.split()[1]) for line in seen if line.startswith("step ")] == list(range(N_STEPS)), seen
    assert_trained_exactly(tmp_path)


@pytest.mark.parametrize("leader_first", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_job_whose_agents_are_all_told_to_end_ends(start: Callable[..., Agent], leader_first: bool) -> None:
    """By a signal to each agent alone: what its ranks hold is moved away for nobody."""
    given = {"script": TRAIN, "nnodes": "2", "layout": "1x2"}
    agents = [start("--steps", "100000", "--pause", "0.05", **given)]
    agents[0].until(lambda line: "leading at" in line)
    agents.append(start("--steps", "100000", "--pause", "0.05", **given))
    agents[0].until(lambda line: "generation 1: go" in line)
    for agent in agents if leader_first else reversed(agents):
        agent.process.terminate()
    assert [agent.end() for agent in agents] == [143, 143], [agent.lines for agent in agents]


def test_a_second_signal_to_the_agent_that_leads_ends_the_job(start: Callable[..., Agent]) -> None:
    """Meanwhile all ranks are in a long pause of their script."""
    given = {"script": TRAIN, "layout": "1x2"}
    steps = ["--steps", "100", "--pause", "60"]
    first = start(*steps, **given)
    first.until(lambda line: "leading at" in line)
    second = start(*steps, **given)
    first.until(lambda line: line.startswith("step 0 "))
    first.process.terminate()
    first.until(lambda line: "what the ranks here hold is moved away" in line)
    first.process.terminate()
    assert first.end() == second.end() == 143, first.lines + second.lines
    assert not [line for line in first.lines if "this agent leaves the job" in line and "moved" not in line], first.lines


@pytest.mark.soak
def test_who_is_told_to_leave_and_then_comes_to_lead_leaves(start: Callable[..., Agent]) -> None:
    """Agent 1, unless agent 2, which stands still until nobody leads, is elected before it: then agent 1 tells that one."""
    given = {"script": TRAIN, "nnodes": "3", "layout": "3x1", "detect": "2s"}
    steps = ["--steps", "100", "--pause", "0.1"]
    first = start(*steps, **given)
    first.until(lambda line: "leading at" in line)
    leaves = start(*steps, **given)
    leaves.until(lambda line: "joined the job" in line)
    stays = start(*steps, **given)
    first.until(lambda line: line.startswith("step 3 "))
    stays.process.send_signal(signal.SIGSTOP)
    first.process.send_signal(signal.SIGSTOP)
    leaves.process.terminate()
    leaves.until(lambda line: "what the ranks here hold is moved away" in line)
    first.process.kill()
    leaves.until(lambda line: "is silent: the ranks here stand still" in line)
    stays.process.send_signal(signal.SIGCONT)
    assert leaves.end() == 143, leaves.lines
    assert stays.end() == 0, stays.lines
    assert [line for line in stays.lines if "agent 2 (" in line and "leads from now on" in line], leaves.lines + stays.lines


@pytest.mark.soak
def test_a_job_goes_on_by_the_voice_of_an_agent_that_came_late(start: Callable[..., Agent]) -> None:
    """Two agents begin, of which the one that leads is lost: only with the third, which was taken in, are they most."""
    given = {"script": TRAIN, "nnodes": "2:3", "nproc_per_node": 2, "layout": "2x2", "detect": "2s"}
    given |= {"rdzv_conf": "last_call_timeout=1", "survive_nodes": 1}
    steps = ["--steps", "200", "--pause", "0.1"]
    first = start(*steps, **given)
    first.until(lambda line: "leading at" in line)
    second = start(*steps, **given)
    first.until(lambda line: line.startswith("step 3 "))
    late = start(*steps, **given)
    first.until(lambda line: "joined; ranks 4 and 5 start there" in line)
    first.until(lambda line: "ranks 4 and 5 have joined" in line)
    step = int(first.until(lambda line: line.startswith("step ")).split()[1])
    first.until(lambda line: line.startswith(f"step {step + 5} "))  # which all three have decided
    first.process.kill()
    first.process.wait()
    assert second.end() == late.end() == 0, second.lines + late.lines
    seen = second.lines + late.lines
    assert [line for line in seen if line.startswith("step 199 ")], seen
    assert not [line for line in seen if "cut off for too long" in line], seen


def test_ranks_that_end_while_nobody_leads_are_known_to_who_leads_next(start: Callable[..., Agent]) -> None:
    given = {"nnodes": "2:3", "max_restarts": 9, "detect": "2s", "rdzv_conf": "last_call_timeout=60"}
    first = start("--wait", "2", **given)
    first.until(lambda line: "leading at" in line)
    others = [start("--wait", "2", **given) for _ in range(2)]
    for agent in (first, *others):
        agent.until(lambda line: line.startswith("SEAT 0 "))
    ranks = [child for agent in others for child in psutil.Process(agent.process.pid).children() if "--wait" in child.cmdline()]
    first.process.kill()
    first.process.wait()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    assert [agent.end() for agent in others] == [0, 0], others[0].lines + others[1].lines
    told = "".join((*others[0].lines, "---\n", *others[1].lines))
    assert others[0].assignments(1) | others[1].assignments(1) == {"0 2 0 0 2", "1 2 1 0 2"}, told


@pytest.mark.soak
def test_an_agent_that_is_told_to_end_does_not_come_again(start: Callable[..., Agent]) -> None:
    given = {"nnodes": "1:2", "max_restarts": 9, "rdzv_conf": "last_call_timeout=60"}
    first = start("--wait", "9", **given)
    first.until(lambda line: "leading at" in line)
    second = start("--stubborn", "--wait", "9", **given)
    second.until(lambda line: line.startswith("SEAT 0 "))
    second.process.send_signal(signal.SIGTERM)
    first.until(lambda line: "was lost (terminated by SIGTERM)" in line)
    first.until(lambda line: line.startswith("SEAT 1 "))
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    assert not any("asks to join again" in line for line in second.lines), second.lines


def test_an_agent_that_leaves_has_a_voice_until_the_others_have_decided_without_it(start: Callable[..., Agent]) -> None:
    """The leading one of four stands still, so nothing is decided, and is lost: those that stay are half, and not enough."""
    given = {"nnodes": "2:4", "max_restarts": 9, "detect": "2s", "rdzv_conf": "last_call_timeout=60"}
    first = start("--wait", "2", **given)
    first.until(lambda line: "leading at" in line)
    leaves, *stay = others = [start("--wait", "2", **given) for _ in range(3)]
    for agent in (first, *others):
        agent.until(lambda line: line.startswith("SEAT 0 "))
    first.process.send_signal(signal.SIGSTOP)
    leaves.process.terminate()
    leaves.until(lambda line: "this agent leaves the job" in line)
    first.process.kill()
    assert [agent.end() for agent in stay] == [0, 0], stay[0].lines + stay[1].lines
    assert leaves.end() == 143, leaves.lines


@pytest.mark.parametrize("leads", [True, False])
def test_an_agent_waits_for_ranks_that_are_ending_their_scripts(
    start: Callable[..., Agent], tmp_path: Path, leads: bool
) -> None:
    """They save, for instance. SIGTERM to one agent is nothing that has the others' end, either, nor has its ranks lost."""
    held, script = [Held(tmp_path / f"held{rank}", 0) for rank in range(2)], tmp_path / "ends_slowly.py"
    script.write_text(f"import atexit, fcntl, os, runpy\natexit.register(lambda: fcntl.flock(open({str(tmp_path / 'held')!r} + "
                      f"os.environ['RANK']), fcntl.LOCK_SH))\nrunpy.run_path({TRAIN!r}, run_name='__main__')\n")  # fmt: skip
    given = {"script": str(script), "layout": "2x1"}
    first = start("--steps", "5", **given)
    first.until(lambda line: "leading at" in line)
    second = start("--steps", "5", **given)
    first.until(lambda line: line.startswith("step 4 "))
    deadline = time.monotonic() + PATIENCE_S
    while sum(log.read_text().count('"rank_finished"') for log in tmp_path.glob("logs*/*/events.jsonl")) < 4:
        assert time.monotonic() < deadline, first.lines
        time.sleep(0.02)
    told, other = (first, second) if leads else (second, first)
    told.process.terminate()
    told.until(lambda line: "ranks are ending their scripts, and this agent ends with them" in line)
    held[0 if leads else 1].release()
    if not leads:
        other.until(lambda line: "agent 1 " in line and "(terminated by SIGTERM); its ranks had ended" in line)
    held[1 if leads else 0].release()
    assert (first.end(), second.end()) == (0, 0 if leads else 143), first.lines + second.lines
    assert not [line for line in first.lines if " lost: " in line], first.lines


def test_a_job_recovers_from_the_loss_of_an_agent(start: Callable[..., Agent], tmp_path: Path) -> None:
    held = Held(tmp_path / "held", 3)
    given = {"script": TRAIN, "backend": "static", "nproc_per_node": 2, "layout": "2x2", "survive_nodes": 1}
    agents = [start("--steps", "20", *held.arguments, node_rank=rank, **given) for rank in range(2)]
    agents[0].until(lambda line: line.startswith("step 3 "))
    agents[1].process.kill()
    held.release()
    agents[0].until(lambda line: "recovered in" in line)
    assert agents[0].end() == 0, agents[0].lines
    steps = [int(line.split()[1]) for line in agents[0].lines if line.startswith("step ")]
    assert steps == sorted(set(steps)) and steps[-1] == 19


@pytest.mark.soak
def test_a_stopped_rank_of_another_agent_is_lost(start: Callable[..., Agent]) -> None:
    """The leading agent cannot see it: the rank's own agent tells."""
    given = {"script": TRAIN, "backend": "static", "nproc_per_node": 2, "layout": "2x2"}
    agents = [start("--steps", "60", node_rank=rank, **given) for rank in range(2)]
    agents[0].until(lambda line: line.startswith("step 3 "))
    children = psutil.Process(agents[1].process.pid).children()
    max((child for child in children if TRAIN in child.cmdline()), key=lambda child: child.pid).suspend()
    assert agents[0].end() == 0, agents[0].lines
    assert agents[1].end() == 0, agents[1].lines
    steps = [int(line.split()[1]) for line in agents[0].lines if line.startswith("step ")]
    assert steps == list(range(60))
    assert any("recovered in" in line for line in agents[0].lines), agents[0].lines


@pytest.mark.soak
def test_a_stopped_zygote_of_another_agent_is_replaced(start: Callable[..., Agent]) -> None:
    first = start(backend="static", node_rank=0)
    second = start(backend="static", node_rank=1)
    _zygote_of(second).suspend()
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}
    assert any("forked from was stopped by a signal; another one is started" in line for line in second.lines)


@pytest.mark.soak
def test_a_stopped_store_is_replaced_while_agents_are_waited_for(start: Callable[..., Agent]) -> None:
    first = start(backend="static", node_rank=0)
    store = _store_of(first)
    store.suspend()
    second = start(backend="static", node_rank=1)
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}


def _zygote_of(agent: Agent) -> psutil.Process:
    while True:
        for child in psutil.Process(agent.process.pid).children():
            if "zygote/server.py" in " ".join(child.cmdline()):
                return child


def _store_of(agent: Agent) -> psutil.Process:
    while True:
        for child in psutil.Process(agent.process.pid).children():
            try:
                is_zygote = "zygote/server.py" in " ".join(child.cmdline())
                connections = child.net_connections() if is_zygote else []
            except psutil.Error:
                continue
            if any(connection.status == psutil.CONN_LISTEN for connection in connections):
                return child
