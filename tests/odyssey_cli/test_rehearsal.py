"""Rehearsals: real jobs whose ops and links only take time, and what is told of them."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launcher.agent.drills import parse as parse_drill
from launcher.coordinator.decided_again import replay
from launcher.joblog.events import (
    Body,
    Cause,
    CauseKind,
    Draining,
    Event,
    GenerationStarted,
    PlanChosen,
    Proposed,
    RankLost,
    RankStarted,
    SlotsReturned,
)
from odyssey.plan.estimate import Estimate, Transition
from odyssey.plan.plan import StateFrom
from odyssey.protocol.reports import Committed, Finished, Hello
from odyssey.protocol.units import Position, Result
from odyssey_cli.rehearsal.comparison import Generation, Rehearsal, generations, not_taken, show
from odyssey_cli.rehearsal.disturbance import Disturbance
from odyssey_cli.rehearsal.network import Interfaces, Network
from odyssey_cli.rehearsal.rehearse import came_too_late, changes_of, losses
from odyssey_cli.replay.traces import parse
from perfmodel.profile.catalog import load_job
from perfmodel.profile.profile import Link, Profile, scaled, write
from perfmodel.step.costs import Costs
from strategies.situation import Candidate
from tests import job_events
from tests.examples import examples
from tests.launchers import PATIENCE_S, Launcher, Scene, scene
from tests.planning import first_plan, price

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(120)

FAST = Link(1e-5, 1e10)
REHEARSE = Launcher("odyssey-rehearse", ("odyssey_cli", "rehearse"))
SMALL = ("gpt3-medium-a100-32", "--no-display", "--nodes=1", "--nproc-per-node=4", "--layout=2x2", "--speed=20")


def rehearse(scene: Scene, *arguments: str, patience_s: float = PATIENCE_S) -> tuple[list[dict], list[Event]]:
    """What `--json` tells of a rehearsal that went well, and the newest job's events."""
    out = scene.cwd / "rehearsal.json"
    run = scene.start(REHEARSE, *SMALL, f"--json={out}", *arguments).succeed(patience_s)
    assert "Traceback" not in run.stderr and "(rehearsed)" in run.stderr
    from launcher.joblog import reader

    folder = max(path for path in (scene.cwd / "odyssey-logs").iterdir() if path.is_dir())
    assert all(logged == taken for logged, taken in replay(folder / reader.NAME))
    return json.loads(out.read_text()), list(reader.events(folder / reader.NAME))


def test_a_loss_is_recovered_from_and_compared_with_what_was_predicted(scene: Scene) -> None:
    ((found,), events) = rehearse(scene, "--steps=6", "--drill=step=2 lose=1", "--jitter=0.1", "--slow=0=1.2")
    assert found["code"] == 0 and found["asked"] == "auto"
    assert found["generations"][1]["change"][0].startswith("rank 1 is lost: stage 1 of pipeline 0, ")
    first, second = found["generations"]
    assert first["layout"].startswith("2x2 split ") and first["n_workers"] == 4 and first["transition"] == {}
    assert second["n_workers"] <= 3 and first["n_steps"] + second["n_steps"] == 6
    assert {"pause", "search", "groups", "moves", "rest"} <= set(second["transition"])
    assert second["transition"]["moves"] > 0 or second["predicted_transition"]["moves"] == 0
    assert [event.body.rank for event in events if isinstance(event.body, RankLost)] == [1]


def test_a_rank_that_comes_back_is_taken_in_and_compared_with_what_was_predicted(scene: Scene) -> None:
    ((found,), events) = rehearse(scene, "--steps=40", "--drill=step=3 lose=1 step=5 join=1", "--speed=40")
    assert found["code"] == 0 and sum(one["n_steps"] for one in found["generations"]) == 40
    *_, without, grown = found["generations"]
    assert without["n_workers"] == 3 and grown["n_workers"] == 4 and grown["strategy"] == "expand"
    assert grown["change"][:1] == ["rank 1 taken in"]
    assert set(grown["transition"]) == {"pause", "groups", "moves", "warm_up", "rest"}
    predicted = grown["predicted_transition"]
    assert predicted["search"] == predicted["groups"] == predicted["spawn"] == 0 < predicted["moves"]
    assert [event.body.rank for event in events if isinstance(event.body, RankLost)] == [1]
    assert [event.body.ranks for event in events if isinstance(event.body, SlotsReturned)] == [(1,)]


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_lost_rank(scene: Scene) -> None:
    ((found,), _) = rehearse(scene, "--nproc-per-node=5", "--spares=1", "--steps=6", "--drill=step=2 lose=1")
    first, second = found["generations"]
    assert first["layout"].startswith("2x2 split ") and first["n_workers"] == 4
    assert second["n_workers"] == 4 and any(told.startswith("rank 4 takes layers ") for told in second["change"])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_thirty_two_ranks_lose_three_gain_two_and_lose_one(scene: Scene) -> None:
    large = ("--nodes=4", "--nproc-per-node=8", "--layout=8x4", "--speed=1", "--steps=60")
    drills = ("step=4 lose=3 lose=12 lose=21", "step=10 join=3 join=21", "step=50 lose=8")
    ((found,), events) = rehearse(scene, *large, *(f"--drill={drill}" for drill in drills), patience_s=500)
    assert found["code"] == 0 and sum(one["n_steps"] for one in found["generations"]) == 60
    assert {event.body.ranks for event in events if isinstance(event.body, SlotsReturned)} == {(3,), (21,)}
    assert {rank for event in events if isinstance(event.body, Draining) for rank in event.body.joined} == {3, 21}
    assert {event.body.rank for event in events if isinstance(event.body, RankLost)} == {3, 12, 21, 8}
    plans = [event.body.plan for event in events if isinstance(event.body, PlanChosen)]
    assert {*plans[-1].workers, *plans[-1].idle} == {*range(32)} - {12, 8}


@pytest.mark.soak
def test_each_strategy_that_is_asked_for_has_a_job_of_its_own(scene: Scene) -> None:
    found, _ = rehearse(
        scene, "--steps=5", "--drill=step=2 kill=1", "--strategy=respawn,reroute", "--max-restarts=1", "--speed=60"
    )
    assert [one["asked"] for one in found] == ["respawn", "reroute"]
    assert [one["generations"][1]["strategy"] for one in found] == ["respawn", "reroute"]  # behind it the lost rank may be back
    assert found[0]["generations"][-1]["n_workers"] == 4 and found[0]["generations"][-1]["transition"]["spawn"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["step=2 hang=3", "step=1 lose=0 lose=3", "step=1 lose=0,step=2 kill=3"])
def test_whatever_is_lost_the_rehearsal_goes_on(scene: Scene, fault: str) -> None:
    ((found,), _) = rehearse(scene, "--steps=5", *(f"--drill={one}" for one in fault.split(",")))
    assert found["code"] == 0 and sum(one["n_steps"] for one in found["generations"]) == 5


@pytest.mark.soak
def test_a_profile_with_ties_and_shared_interfaces_is_rehearsed(scene: Scene) -> None:
    profile = profile_with(5e9)
    cluster = msgspec.structs.replace(profile.cluster, ranks_per_node=1, intra_host=FAST, inter_host=FAST)
    tied = msgspec.structs.replace(profile, ties=((0, 25), (1, 2, 3)), tie_bytes=(10**8, 10**6), cluster=cluster)
    write(tied, scene.cwd / "tied.json")
    out = scene.cwd / "rehearsal.json"
    arguments = ("--nodes=4", "--nproc-per-node=1", "--layout=2x2", "--speed=20", "--steps=5", "--drill=step=2 lose=1")
    scene.start(REHEARSE, "tied.json", "--no-display", *arguments, f"--json={out}").succeed()
    (found,) = json.loads(out.read_text())
    assert found["code"] == 0 and len(found["generations"]) == 2


def test_an_interrupted_one_leaves_nothing(scene: Scene) -> None:
    run = scene.start(REHEARSE, *SMALL[:-1], "--speed=1", "--steps=1000")
    while "generation 1: go" not in run.stderr:
        assert run.process.poll() is None, run.story()
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert "Traceback" not in run.stderr and "interrupted by Ctrl-C" in run.stderr


def test_one_that_is_interrupted_before_a_plan_runs_shows_no_table(scene: Scene) -> None:
    run = scene.start(REHEARSE, *SMALL, "--steps=10", "--drill=step=2 lose=1")
    while "start gpt3-medium-a100-32" not in run.stderr:
        assert run.process.poll() is None, run.story()
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert "STEPS" not in run.stdout and "never fired" not in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("no-such-job",), "no job is called 'no-such-job'"),
        ((*SMALL, "--speed=0"), "--speed 0: expected a number from 0.01 to 100"),
        ((*SMALL, "--slow=9=2"), "--slow 9: there are ranks 0 to 3"),
        ((*SMALL, "--slow=much"), "--slow much: expected RANK=FACTOR"),
        ((*SMALL, "--spares=4"), "--spares 4: there are 4 ranks"),
        ((*SMALL, "--spares=1"), "--layout 2x2 takes 4 ranks, there are 4, of which 1 stands by"),
        ((*SMALL, "--spares=-1"), "--spares: expected at least 0, got -1"),
        ((*SMALL, "--strategy=reroute,hope"), "--strategy: unknown strategy 'hope'"),
        ((*SMALL, "--drill=step=1 lose=9"), "lose=9: there are ranks 0 to 3"),
        ((*SMALL, "--layout=3x9"), "--layout 3x9 takes 27 ranks, there are 4"),
        ((*SMALL, "--log-dir=/dev/null"), "--log-dir /dev/null: file exists"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_error(scene: Scene, arguments: tuple[str, ...], error: str) -> None:
    run = scene.start(REHEARSE, *arguments)
    assert run.end() in (1, 2)
    assert error in run.stderr and "Traceback" not in run.stderr, run.stderr


# -- what it is made of ------------------------------------------------------------------------------------------------


def profile_with(interface_bandwidth: float | None) -> Profile:
    profile = load_job("gpt3-medium-a100-32").profile
    cluster = msgspec.structs.replace(
        profile.cluster,
        ranks_per_node=2,
        nodes_per_host=1,
        intra_host=Link(1.0, 100.0),
        inter_host=Link(2.0, 10.0),
        interface_bandwidth=interface_bandwidth,
    )
    return msgspec.structs.replace(profile, cluster=cluster)


def test_messages_wait_for_their_pair_of_workers() -> None:
    network = Network(0, Costs(profile_with(None)), None)
    assert network.leave(1, 200.0, 5.0) == 5.0 + 2.0 + 1.0
    assert network.leave(1, 100.0, 6.0) == 7.0 + 1.0 + 1.0, "behind the one before"
    assert network.leave(2, 100.0, 6.0) == 6.0 + 10.0 + 2.0, "another pair, another host"


def test_the_ranks_of_a_host_share_its_interface(tmp_path: Path) -> None:
    path = str(tmp_path / "interfaces")
    Interfaces.make(path, 3)
    costs = Costs(profile_with(5.0))
    first, second, third = (Network(rank, costs, Interfaces.at(path, 3, 5.0)) for rank in (0, 1, 4))
    assert first.leave(2, 10.0, 0.0) == 2.0 + 2.0, "the interface is slower than the link"
    assert second.leave(3, 10.0, 1.0) == 4.0 + 2.0, "and busy"
    assert third.leave(2, 10.0, 3.0) == 6.0 + 2.0, "that of the target as well"
    assert second.leave(0, 100.0, 0.0) == 1.0 + 1.0, "not within the host"


@given(st.floats(0.01, 100))
@settings(max_examples=examples(20))
def test_at_another_speed_everything_takes_as_many_times_longer(speed: float) -> None:
    profile = load_job("gpt3-medium-a100-32").profile
    plan = first_plan(profile, "8x4", 32)
    usual, other = (price(plan, one, seconds_to_change=1e9) for one in (profile, scaled(profile, speed)))
    assert other.step_s * speed == pytest.approx(usual.step_s, rel=1e-9)
    assert other.transition.total_s * speed == pytest.approx(usual.transition.total_s, rel=1e-9)
    assert other.peak_bytes == usual.peak_bytes


@given(st.floats(0.1, 100), st.integers(1, 50), st.integers(1, 9), st.integers(0, 99))
def test_drawn_losses_leave_a_rank_and_are_the_same_for_a_seed(mtbf_s: float, n_steps: int, n_ranks: int, seed: int) -> None:
    drawn = losses(mtbf_s, 1.0, n_steps, n_ranks, seed)
    assert drawn == losses(mtbf_s, 1.0, n_steps, n_ranks, seed)
    ranks = [int(text.rpartition("=")[2]) for text in drawn]
    steps = [int(text.split()[0].removeprefix("step=")) for text in drawn]
    assert len(set(ranks)) == len(ranks) < n_ranks and all(0 <= rank < n_ranks for rank in ranks)
    assert steps == sorted(steps) and all(0 <= step < n_steps for step in steps)


def test_the_changes_of_a_trace_by_hand() -> None:
    text = "0,0,lost\n10,3,failed\n15,2,lost\n15.1,2,returned\n20,0,returned\n25,0,lost\n30,3,failed\n60,1,lost\n"
    trace = parse(f"{text}99,3,lost\n99.5,3,returned\n100,0,returned\n".encode(), "by hand").cut(4)
    assert trace.length_s == 100
    drills = ("step=0 lose=node0", "step=1 kill=node3", "step=1 lose=node2", "step=2 join=node2", "step=2 join=node0")
    drills += ("step=3 lose=node0", "step=3 kill=node3", "step=6 lose=node1", "step=9 lose=node3")
    assert changes_of(trace, 10) == drills
    assert [len(parse_drill(text, n_nodes=4, n_ranks_per_node=2)[0].ranks) for text in drills] == [2] * 9


def test_who_had_not_started_when_the_job_ended_came_too_late() -> None:
    model = next(event.body.model for event in job_events.job() if isinstance(event.body, Hello))
    bodies: list[Body] = [RankStarted(rank, 10 + rank, 0) for rank in range(3)]
    bodies += [Hello(rank, model) for rank in range(3)]
    bodies += [SlotsReturned((0, 1, 2, 3), "a drill"), RankStarted(1, 21, 0), RankStarted(2, 22, 0), Hello(2, model)]
    events = [Event(float(i), 1, "test", body) for i, body in enumerate(bodies)]
    assert came_too_late(events) == {1}, "0 lives, 2 has joined, and 3 was not started"
    assert came_too_late([*events, Event(20.0, 1, "test", Hello(1, model))]) == set()
    ended = [Event(20.0, 1, "test", Finished(0, Position(0, 0))), Event(21.0, 1, "test", Hello(1, model))]
    assert came_too_late([*events, *ended]) == {1}


def test_the_report_by_hand() -> None:
    plan = first_plan(load_job("gpt3-medium-a100-32").profile, "2x2", 4)
    plans = [
        msgspec.structs.replace(
            plan, generation=number, state_from=StateFrom.HOLDERS, estimate=Estimate(step_s, Transition(pause_s=1.0), 0, 0.0)
        )
        for number, step_s in ((1, 2.0), (2, 3.0), (3, 2.0))
    ]
    events: list[Event] = []

    def add(time: float, generation: int, body: object) -> None:
        events.append(Event(time, generation, "coordinator", body))

    def commit(time: float, generation: int, step: int) -> None:
        for rank in (0, 1):  # each tells; the first counts
            add(time + rank / 8, generation, Committed(rank, generation, Result(Position(step, 0), "step", (0.0,)), 8, 0.1))

    add(0, 1, PlanChosen(plans[0], "", ()))
    add(1, 1, GenerationStarted(None, None, None, 0.5, 0.0, None))
    for step, time in enumerate((4.0, 6.0, 9.0, 11.0)):
        commit(time, 1, step)
    add(11.5, 1, RankLost(3, Cause(CauseKind.SIGNAL, "SIGKILL", -9), True))
    add(12, 2, PlanChosen(plans[1], "", ()))
    add(14, 2, GenerationStarted(0.25, 0.5, 0.125, 0.25, 0.5, 1.5, None, 0.125))
    for step, time in enumerate((21.0, 25.0), start=4):
        commit(time, 2, step)
    add(25.5, 3, Draining((3,), "rank 3 has joined"))
    add(25.75, 3, PlanChosen(plans[2], "", ()))
    add(26, 3, GenerationStarted(None, None, None, 0.125, 0.25, None, rest_s=0.5, stood_s=1.0))
    for step, time in enumerate((29.0, 31.0), start=6):
        commit(time, 3, step)
    first, second, third = generations(events, 2.0)
    assert (first.step_s, first.predicted_step_s, first.n_steps, first.transition) == (4.0, 4.0, 4, {})
    assert (second.step_s, second.predicted_step_s, second.n_steps) == (8.0, 6.0, 2)
    assert second.predicted_transition["pause"] == 2.0 == second.predicted_transition_s
    shown = {"detect": 0.5, "pause": 1.0, "search": 0.25, "groups": 0.5, "moves": 1.0, "warm_up": 6.0, "rest": 0.25}
    assert second.transition == shown
    lost = plan.pipelines[1].stages[1]
    told = (f"rank 3 is lost: stage 1 of pipeline 1, layers {lost.first}-{lost.stop - 1}", "no layer moves")
    assert (first.change, second.change) == ((), told)
    assert third.transition == {"pause": 0.25, "groups": 0.25, "moves": 0.5, "warm_up": 2.0, "rest": 1.0}
    assert third.predicted_transition_s == 2.0 and (third.step_s, third.n_steps) == (4.0, 2)


def test_a_machine_that_keeps_ranks_waiting_is_told_of_by_hand() -> None:
    """Two ranks, four steps in two seconds, in which they wait 0.2 s and 0.6 s: 0.1 s of each step."""

    def text(waits: float) -> str:
        read = {11: iter((1.0, 1.0 + waits)), 12: iter((5.0, 5.0 + 3 * waits))}
        stolen = iter((7.0, 7.0 + 0.2 * (os.cpu_count() or 1)))
        disturbance = Disturbance(5, lambda pid: next(read[pid]), lambda: next(stolen))
        for rank in (0, 1):
            disturbance.watch(Event(0.0, 0, "agent", RankStarted(rank, 11 + rank, 0)))
        for step in range(5):
            body = Committed(0, 1, Result(Position(step, 0), "step", (0.0,)), 8, 0.1)
            disturbance.watch(Event(10 + step / 2, 1, "rank 0", body))
        return disturbance.text

    assert text(0.2).startswith(
        "disturbed: ranks waited 100 ms of each step of 500 ms for a processor, and the host had the processors elsewhere "
        "10 % of the time, so rehearsed times are too long"
    )
    assert text(0.005) == ""


def test_who_had_no_plan_is_told_with_the_reason() -> None:
    none = Candidate("redundant", None, None, "nobody keeps the layers of a lost stage")
    proposed = Proposed((*job_events.candidates(), none), 60.0, "", 0.1, False)
    chosen = PlanChosen(job_events.plan(2, 3), "best", ())
    events = [Event(1.0, 2, "agent", body) for body in (proposed, chosen)]

    assert not_taken("auto", events) == not_taken("reroute", events) == ()
    why = "generation 2: reroute ran, as redundant had no plan: nobody keeps the layers of a lost stage"
    assert not_taken("redundant", events) == (why,)


def test_below_the_table_stands_what_the_words_of_its_layouts_mean() -> None:
    ran = [Generation(i, "initial", form, 4, 0.1, 0.1, 9, {}, {}) for i, form in enumerate(("4x1", "3x1 cut"))]
    file = io.StringIO()

    show((Rehearsal("auto", 0, 32, (its,)) for its in ran), Console(file=file, width=110))

    title, _, *rows, whole, cut = file.getvalue().splitlines()[1:]
    assert (title.strip(), len(rows)) == ("STEPS", 2)
    assert whole.startswith("2x4: two pipelines of four stages; ") and cut.startswith("cut: smaller micro-batches, ")
