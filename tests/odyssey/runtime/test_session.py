"""The rank's side of the recovery protocol: real rank processes that get exactly the orders that a test sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.plan import Plan, StateFrom
from odyssey.protocol.orders import Follow, Go, Pause, Prepare
from odyssey.protocol.reports import Broken, Committed, Failed, Hello, Paused, Ready
from odyssey.protocol.units import Position
from tests import ROOT, exactness, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.exactness import EXACT, N_STEPS
from tests.held import Held
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def agent_of(forks: Forks, nothing_left: None) -> Iterator[Callable[..., MiniAgent]]:
    """Makes agents, whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(n_ranks: int, *arguments: object) -> MiniAgent:
            agent = MiniAgent(forks, n_ranks, Path(TRAIN), *map(str, arguments))
            stack.callback(agent.close)
            return agent

        yield make


@pytest.fixture
def held(nothing_left: None, tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "hold", 2)
    yield held
    held.release()


@pytest.fixture
def later(nothing_left: None, tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path / "later", 3)
    yield held
    held.release()


def assert_exact(out: Path, model: str = "gpt") -> None:
    """The leader wrote what the undisturbed run in one process ends with."""
    losses, expected = exactness.expected_of(model, N_STEPS, 15, 2)
    result = torch.load(out)
    state = result["state"]["model"]
    assert set(state) == set(expected)
    assert reference.largest_difference(expected, state) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


def digests(ready: dict[int, Ready]) -> dict[int, dict[int, str]]:
    return {rank: dict(report.digests) for rank, report in ready.items()}


def gate_after_three_steps(agent: MiniAgent, held: Held) -> dict[int, Ready]:
    """Train three steps, then stand at the gate of the same plan as generation 2: Ready with optimizer state, no Go."""
    agent.start("2x2")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    paused = agent.pause()
    assert {report.phase for report in paused.values()} == {"between"}
    assert agent.plan is not None
    agent.send_prepare(replace(agent.plan, generation=agent.generation, step=3, state_from=StateFrom.HOLDERS))
    held.release()
    return agent.wait_ready()


def test_a_reroute_changes_no_survivors_state(agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path) -> None:
    agent = agent_of(4, *EXACT, *held.arguments, "--out", tmp_path / "out.pt")
    before = digests(gate_after_three_steps(agent, held))
    agent.kill(3)

    plan = agent.replan("reroute", agent.pause())
    ready = agent.prepare(plan)

    assert plan.strategy == "reroute" and plan.routes and not plan.moves
    assert digests(ready) == {rank: before[rank] for rank in (0, 1, 2)}
    assert all(report.moved_bytes == 0 for report in ready.values())
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_a_stage_that_is_cut_among_its_hosts_goes_on_exactly(
    agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path
) -> None:
    agent = agent_of(4, *EXACT, *held.arguments, "--out", tmp_path / "out.pt")
    agent.start("3+1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    agent.kill(3)

    plan = agent.replan("reroute", agent.pause())
    agent.send_prepare(plan)
    held.release()
    agent.wait_ready()

    assert [stage.worker for stage in plan.pipelines[1].stages] == [None, None, None]
    assert {route.worker for route in plan.routes} == {0, 1, 2}
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


@pytest.mark.parametrize("way", ["read", pytest.param("sent", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"))])
def test_a_moved_layer_arrives_as_it_left(agent_of: Callable[..., MiniAgent], held: Held, way: str, tmp_path: Path) -> None:
    arguments = ["--unreadable"] if way == "sent" else []
    agent = agent_of(4, *EXACT, *arguments, *held.arguments, "--out", tmp_path / "out.pt")
    before = digests(gate_after_three_steps(agent, held))
    agent.kill(3)

    plan = agent.replan("repartition", agent.pause())
    ready = agent.prepare(plan)

    after = digests(ready)
    assert plan.strategy == "repartition" and plan.moves
    for move in plan.moves:
        assert after[move.target][move.layer] == before[move.source][move.layer], move
    assert sum(report.moved_bytes for report in ready.values()) > 0
    receivers = {move.target for move in plan.moves}
    assert all((report.moved_bytes > 0) == (rank in receivers) for rank, report in ready.items())
    assert all(report.read_bytes == report.moved_bytes * (way == "read") for report in ready.values())
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_a_rank_that_is_killed_while_it_is_read_is_a_loss(
    agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path
) -> None:
    file = tmp_path / "armed"
    agent = agent_of(3, *EXACT, "--kill-source", file, *held.arguments, "--out", tmp_path / "out.pt")
    agent.start("3x1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    agent.kill(2)
    plan = agent.replan("respawn", agent.pause(), respawnable=(2,))
    agent.spawn(2)
    agent.wait(Hello, 2)
    file.touch()
    agent.send_prepare(plan)
    held.release()
    agent.wait(Broken, 2)

    (killed,) = [int(each.suffix[1:]) for each in tmp_path.glob("armed.*")]
    assert killed in {move.source for move in plan.moves}
    agent.kill(killed)
    ready = agent.prepare(agent.replan("shrink", agent.pause()))

    assert set(ready) == {0, 1, 2} - {killed} and not any(report.problem for report in ready.values())
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_orders_of_an_older_generation_are_refused(agent_of: Callable[..., MiniAgent], tmp_path: Path) -> None:
    """I4."""
    agent = agent_of(2, *EXACT, "--out", tmp_path / "out.pt")
    agent.start("2x1")
    first = agent.plan
    assert first is not None
    agent.pause()
    paused = agent.pause()
    assert {report.generation for report in paused.values()} == {3}

    agent.send_prepare(replace(first, generation=2))
    agent.order(Go(2))
    agent.prepare(replace(first, generation=3))

    # Orders are obeyed in their order, so what generation 2 would have brought came before this answer.
    for reports in agent.heard.values():
        assert [report.generation for report in reports if isinstance(report, Ready)] == [1, 3]
        assert not [report for report in reports if isinstance(report, Committed)]
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_a_rank_that_joins_late_replays_and_is_exact(agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path) -> None:
    """The step before it, and the evaluation behind that step, are replayed; it takes part from the next unit on."""
    (tmp_path / "told").mkdir()
    arguments = (*EXACT, "--eval-every", "3", "--told", tmp_path / "told", *held.arguments, "--out", tmp_path / "out.pt")
    agent = agent_of(2, *arguments)
    agent.start("2x1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.kind == "evaluate")
    agent.kill(1)
    paused = agent.pause()
    assert [result.kind for result in agent.results] == ["step", "evaluate"]

    plan = agent.replan("respawn", paused, respawnable=(1,))
    assert plan.spawned == (1,) and plan.moves
    agent.spawn(1)
    agent.wait(Hello, 1)
    agent.send_prepare(plan)
    held.release()
    ready = agent.wait_ready()

    assert {report.position for report in ready.values()} == {Position(3, 1)}
    assert digests(ready)[0] == digests(ready)[1]
    agent.go()
    finished = agent.finish()
    assert finished[0].position == finished[1].position
    committed = [report.result for report in agent.heard[1] if isinstance(report, Committed)]
    assert committed[0].position == Position(3, 1) and committed[0].kind == "step"
    assert_exact(tmp_path / "out.pt")
    exactness.assert_told(tmp_path / "told", [0, 1], exactness.told_of("gpt", N_STEPS, 15, 2, 3), late=[1])
    told = json.loads((tmp_path / "told" / "1").read_text())
    assert told["steps"].keys() == {"2", "3", "4", "5"} and told["evaluations"].keys() == {"2", "5"}


def test_a_rank_that_joins_behind_the_last_step_leaves_the_loop(agent_of: Callable[..., MiniAgent], tmp_path: Path) -> None:
    """The evaluation that it replays is the one behind the loop."""
    held = Held(tmp_path / "hold", N_STEPS)
    agent = agent_of(2, *EXACT, "--eval-behind", *held.arguments, "--out", tmp_path / "out.pt")
    agent.start("2x1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.kind == "evaluate")
    agent.kill(1)
    paused = agent.pause()
    assert [result.kind for result in agent.results] == ["step", "evaluate"]
    plan = agent.replan("respawn", paused, respawnable=(1,))
    agent.spawn(1)
    agent.wait(Hello, 1)
    agent.send_prepare(plan)
    held.release()
    agent.wait_ready()
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_a_rank_that_receives_its_layers_twice_trains_them(
    agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path
) -> None:
    """A second rank is lost when a respawned one has its layers already: the next plan moves them to it again."""
    agent = agent_of(4, *EXACT, *held.arguments, "--out", tmp_path / "out.pt")
    gate_after_three_steps(agent, held)
    agent.kill(3)
    paused = agent.pause()
    agent.spawn(3)
    agent.wait(Hello, 3)
    agent.prepare(agent.replan("respawn", paused, respawnable=(3,)))
    assert agent.plan is not None
    layers = agent.plan.holds[3]

    agent.pause()
    again = replace(agent.plan, generation=agent.generation)
    assert {move.layer for move in again.moves} == layers
    ready = agent.prepare(again)

    assert all(not report.problem for report in ready.values())
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_what_is_summed_of_a_unit_that_others_have_passed_is_nothing_of_the_next(
    agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path
) -> None:
    """I2: Rank 1 takes the unit over while it prepares, and is paused before the others have come: it is at the next unit then,
    of which nobody may take what is in its gradients for a part."""
    agent = agent_of(3, *EXACT, *held.arguments, "--at-commit", 1, 3, "lose", "--out", tmp_path / "out.pt")
    agent.start("1x3")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    held.release()
    agent.wait(Committed, 0, 2, when=lambda report: report.result.position == Position(3, 0))
    agent.wait(Broken, 1)
    paused = agent.pause()
    assert (paused[1].position, paused[1].phase) == (Position(3, 0), "contributed")
    assert [its.samples for its in paused[1].summed] == [((0, 15),)]

    assert agent.plan is not None
    plan = replace(agent.plan, generation=agent.generation, step=4, state_from=StateFrom.HOLDERS)
    agent.order(Prepare(plan.generation, plan, agent.results, agent.boundaries), 1)
    while agent.ping(1)[1].position != Position(4, 0):
        pass
    paused = agent.pause()

    assert (paused[1].position, paused[1].summed) == (Position(4, 0), ())
    agent.prepare(replace(plan, generation=agent.generation))
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


def test_idle_ranks_follow_and_end_with_the_others(agent_of: Callable[..., MiniAgent], tmp_path: Path) -> None:
    agent = agent_of(3, *EXACT, "--eval-every", "2", "--out", tmp_path / "out.pt")
    ready = agent.start("1x2")
    assert agent.plan is not None and agent.plan.idle == (2,)
    assert ready[2].digests == () and ready[2].samples == ()
    agent.go()
    finished = agent.finish()
    assert finished[2].position == finished[0].position
    assert not [report for report in agent.heard[2] if isinstance(report, Committed)]
    assert_exact(tmp_path / "out.pt")


def without_go(agent: MiniAgent, held: Held) -> Plan:
    """Rank 3 is lost behind step 2, and rank 2 idles in the next plan, with what it held: Go reaches the others only."""
    agent.start("2x2")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    agent.kill(3)
    plan = agent.replan("shrink", agent.pause())
    agent.send_prepare(plan)
    held.release()
    ready = agent.wait_ready()
    assert plan.idle == (2,) and ready[2].digests
    agent.order(Go(agent.generation), *plan.workers)
    return plan


@pytest.mark.parametrize("follows", [True, False])
def test_an_idle_rank_that_go_has_not_reached_lets_its_layers_go_with_the_first_unit(
    agent_of: Callable[..., MiniAgent], held: Held, later: Held, tmp_path: Path, follows: bool
) -> None:
    """I9: They are behind what the others have trained, and would be taken for the same once it stands where those do."""
    agent = agent_of(4, *EXACT, *held.arguments, *later.arguments, "--out", tmp_path / "out.pt")
    plan = without_go(agent, held)
    agent.wait(Committed, 0, 1, when=lambda report: report.result.position == Position(3, 0))
    if follows:
        agent.order(Follow(agent.generation, agent.results[-1]), 2)
        while agent.ping(2)[2].position != Position(4, 0):
            pass
    paused = agent.pause()
    assert (paused[2].position, paused[2].phase) == ((Position(4, 0), "between") if follows else (Position(3, 0), "idle"))
    assert bool(paused[2].held) is not follows

    agent.send_prepare(replace(plan, generation=agent.generation, step=4, move_runs=()))
    later.release()

    ready = agent.wait_ready()
    assert ready[2].position == Position(4, 0) and not ready[2].digests
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt")


@pytest.mark.parametrize("where", ["waiting for a plan", "at the gate", "in the script's own code", "waiting for a rank"])
def test_the_end_of_its_socket_ends_a_rank(agent_of: Callable[..., MiniAgent], held: Held, where: str) -> None:
    agent = agent_of(2, *EXACT, *held.arguments)
    if where == "waiting for a plan":
        agent.wait(Hello)
    else:
        agent.start("2x1")
    if where == "in the script's own code":
        agent.go()
        agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    elif where == "waiting for a rank":
        agent.order(Go(1), 0)
    assert agent.leave(0) == -signal.SIGKILL


def test_a_rank_builds_nothing_anew_once_a_unit_is_final(agent_of: Callable[..., MiniAgent], held: Held) -> None:
    agent = agent_of(2, *EXACT, *held.arguments)
    agent.start("2x1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    agent.pause()
    assert agent.plan is not None and agent.plan.state_from is StateFrom.SCRIPT

    agent.send_prepare(replace(agent.plan, generation=agent.generation, step=3))
    held.release()

    assert all("builds layers anew that have been trained" in failed.error for failed in agent.wait(Failed).values())


def test_a_pause_is_answered_from_the_scripts_own_code(agent_of: Callable[..., MiniAgent], held: Held, tmp_path: Path) -> None:
    agent = agent_of(2, *EXACT, *held.arguments, "--out", tmp_path / "out.pt")
    agent.start("2x1")
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))

    agent.order(Pause(2))
    paused = agent.wait(Paused)  # the script waits for us meanwhile

    layers = tuple(range(6))
    assert {(report.position, report.phase, report.held) for report in paused.values()} == {(Position(3, 0), "between", layers)}


def test_a_rank_that_was_paused_in_its_action_does_not_pass_the_unit_alone(
    agent_of: Callable[..., MiniAgent], tmp_path: Path
) -> None:
    """I2, I5: It needs no other rank for the commit point, and has told from the action that it has not come to it."""
    os.mkfifo(tmp_path / "hold")
    agent = agent_of(2, *EXACT, "--out", tmp_path / "out.pt", "--hold-once", tmp_path / "hold")
    agent.start("1x1")
    agent.go()
    with (tmp_path / "hold").open("wb"):  # opens when the action does
        paused = agent.pause()
    assert (paused[0].position, paused[0].phase) == (Position(N_STEPS, 0), "between")

    assert agent.plan is not None
    plan = replace(agent.plan, generation=agent.generation, step=N_STEPS, state_from=StateFrom.HOLDERS)
    ready = agent.prepare(plan)

    assert ready[0].position == Position(N_STEPS, 0)
    agent.go()
    agent.finish()  # the action has been completed: opened again, the pipe would never end
    once = [report for report in agent.heard[0] if isinstance(report, Committed) and report.result.kind == "once_with_state"]
    assert [report.generation for report in once] == [2]
    assert_exact(tmp_path / "out.pt")


def test_an_action_is_not_done_again_when_the_rank_that_did_it_has_no_work_any_more(
    agent_of: Callable[..., MiniAgent], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "hold")
    agent = agent_of(4, *EXACT, "--out", tmp_path / "out.pt", "--hold-once", tmp_path / "hold")
    agent.start("2x2")
    agent.go()
    with (tmp_path / "hold").open("wb"):  # opens when the action of rank 0 does
        agent.kill(1)
        paused = agent.pause()
    assert (paused[0].position, paused[0].phase) == (Position(N_STEPS, 0), "between")
    plan = agent.replan("shrink", paused)
    assert plan.idle == (0,)

    ready = agent.prepare(plan)

    assert {rank: report.has_acted for rank, report in ready.items()} == {0: True, 2: False, 3: False}
    agent.go()
    agent.finish()  # opened again, the pipe would never end
    assert_exact(tmp_path / "out.pt")


# -- states that outlive the job --------------------------------------------------------------------------------------

CHECKPOINTED = ROOT / "tests/jobs/checkpointed.py"


def odyssey_run(folder: Path, options: list[str], arguments: list[str]) -> str:
    """One job of tests/jobs/checkpointed.py through the real launcher, which must end well; returns its stderr."""
    command = [sys.executable, "-m", "odyssey_cli", "run", "--no-display", "--log-dir", str(folder / "logs"), *options]
    command += [str(CHECKPOINTED), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the state after three steps under 2x2: `folder` of job.save, `file` of job.state_dict."""
    path = tmp_path_factory.mktemp("saved")
    arguments = ["--model", "tied", "--steps", "3", "--save-folder", str(path / "folder"), "--out", str(path / "file")]
    odyssey_run(path, ["--nodes", "4", "--layout", "2x2"], arguments)
    return path


@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        ("folder", ["--nodes", "3", "--layout", "1x3"], "layout 1x3"),
        pytest.param("folder", ["--nodes", "4", "--layout", "3+1"], "layout 3+1", marks=pytest.mark.soak),
        pytest.param("file", ["--nodes", "3", "--layout", "1x3"], "layout 1x3", marks=pytest.mark.soak),
        pytest.param(
            "file",
            ["--nodes", "4", "--layout", "3+1", "--drill", "step=5 kill=3"],
            "rank 3 lost",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "folder",
            ["--nodes", "2", "--layout", "2x1", "--strategy", "respawn", "--max-restarts", "1", "--drill", "step=5 kill=1"],
            "plan respawn",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_saved_state_goes_on_exactly_under_another_layout(
    saved: Path, tmp_path: Path, form: str, options: list[str], said: str
) -> None:
    out, n_steps = tmp_path / "out", 60 if "--drill" in options else 8  # an agent that is busy may be steps behind with a drill
    arguments = ["--model", "tied", "--steps", str(n_steps), f"--load-{form}", str(saved / form), "--out", str(out)]
    assert said in odyssey_run(tmp_path, options, arguments)

    losses, expected = exactness.expected_of("tied", n_steps, 15, 2)
    state = torch.load(out)
    assert state["step"] == n_steps
    assert reference.largest_difference(expected, state["model"]) < exactness.TOLERANCE
    continued = torch.load(out.with_suffix(".losses"))
    assert max(continued) == n_steps - 1 and 0 not in continued
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in continued.items())
