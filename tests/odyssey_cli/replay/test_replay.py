"""Replays against what comes out by hand, and what must hold of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey_cli.__main__ import main
from odyssey_cli.replay.ledger import Doing, Ledger
from odyssey_cli.replay.policies import named
from odyssey_cli.replay.recorded import compare
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.traces import NodeEventKind, Trace
from perfmodel.profile.profile import write
from tests import job_events
from tests.examples import examples
from tests.launcher.coordinator.talk import Talk
from tests.replays import NEVER, assert_time_is_whole, assert_totals, drawn_traces, outcome, trace


def test_one_loss_of_four_workers_by_hand() -> None:
    """2x2, four micro-batches each: (4 + 2 - 1) turns of two layers' 6 s. Dropping a pipeline leaves (8 + 2 - 1) turns.

    A third of a step is done. Of that the other pipeline has half, of which 4 of 5 turns are micro-batches that are done; they
    are spared 8 of 9 turns of the first step.
    """
    found = outcome("shrink", "2x2", 4, 8, trace(4, 1002 + 54, (100, 3, NodeEventKind.LOST)), RestartCosts(every_s=NEVER))

    steps_after = (1002 + 54 - 102) / 54
    kept = 1 / 3 * 1 / 2 * 4 / 5 * 8 / 9
    useful = 3 * 30 + steps_after * 30 + kept * 30
    assert found.all_nodes_step_s == pytest.approx(30)
    assert_totals(found.totals, useful_s=useful, slower_s=steps_after * 24, redone_s=10 - kept * 30, transition_s=2)
    decision = found.result.decisions[-1]
    assert (decision.at_s, decision.what, decision.then) == (100, "node 3 lost", "shrink 1x2")
    assert (decision.n_ranks, decision.step_s, decision.pause_s) == (2, pytest.approx(54), pytest.approx(2))


def test_a_lost_state_goes_back_to_the_checkpoint_by_hand() -> None:
    """1x2 on two nodes: (4 + 2 - 1) turns of 6 s; on one: 4 turns of 12 s. A save of 2 s after 60 s of training."""
    restart_costs = RestartCosts(save_s=2, restart_s=10, every_s=60)
    found = outcome("auto", "1x2", 2, 4, trace(2, 112 + 96 + 2 + 48, (100, 1, NodeEventKind.LOST)), restart_costs)

    # 60 trained, 2 saved, 30 trained for nothing, 8 of a step; heard and paused after 0.75; 10 and 1.25 until it runs at 112
    expected = {"useful_s": 60 + 3 * 30, "slower_s": 3 * 18, "redone_s": 38}
    assert_totals(found.totals, **expected, transition_s=0.75, restart_s=11.25, checkpoint_s=4)
    assert found.result.n_returns == 1


def test_a_failed_process_comes_back_where_its_node_is_healthy() -> None:
    """The same layout, after 0.5 + 0.25 + 4 + 0.25 + 1 s. The pipeline that is whole keeps 4/5 of half of a third of a step,
    and is spared 4 of 5 turns of it."""
    kept_s = 30 / 3 / 2 * 4 / 5 * 4 / 5
    found = outcome("respawn", "2x2", 4, 8, trace(4, 106 + 30, (100, 3, NodeEventKind.FAILED)), RestartCosts(every_s=NEVER))

    assert_totals(found.totals, useful_s=4 * 30 + kept_s, redone_s=10 - kept_s, transition_s=6)
    assert found.result.decisions[-1].then == "respawn 2x2"


def test_a_second_loss_within_a_transition_begins_it_anew() -> None:
    """The others wait in vain for that rank until its loss is heard of at 101.1; then it is 0.25 + 0.25 + 1 s."""
    changes = ((100, 5, NodeEventKind.LOST), (100.6, 3, NodeEventKind.LOST))
    found = outcome("shrink", "3x2", 6, 12, trace(6, 200, *changes), RestartCosts(every_s=NEVER))

    assert [decision.then for decision in found.result.decisions] == ["initial 3x2", "shrink 1x2"]
    assert found.result.decisions[-1].what == "node 5 lost; node 3 lost"
    assert found.totals.transition_s == pytest.approx(101.1 - 100 + 1.5)


def test_a_loss_while_ranks_warm_up_takes_nothing_of_a_step() -> None:
    """The step of 10 s would begin at 100 s, and begins whole at 103 s."""
    ledger = Ledger(save_s=2)
    ledger.step_s = 10.0
    ledger.pause(100.0, Doing.TRANSITION)
    assert not ledger.cut_off(98.0)
    ledger.pause(103.0, Doing.TRANSITION)
    ledger.keep(5.0)
    assert ledger.under_way_until(104.0) == pytest.approx(113)


def test_a_node_that_returns_is_taken_in_behind_a_step() -> None:
    """Four nodes, one away from 100 to 200: its process has joined 4 s later, groups are built in 0.25 s more, and the others
    train to the end of that step."""
    changes = trace(4, 20_000.0, (100, 3, NodeEventKind.LOST), (200, 3, NodeEventKind.RETURNED))
    found = outcome("auto", "2x2", 4, 8, changes, RestartCosts(save_s=2, restart_s=10, every_s=NEVER))

    first, alone, again = found.result.decisions
    assert first.step_s == pytest.approx(30) and again.step_s is not None and again.step_s <= first.step_s
    assert alone.step_s is not None and alone.n_ranks < again.n_ranks == 4 and again.what == "taken in"
    kept = (10 - found.totals.redone_s) / 30
    n_steps = (again.at_s - (alone.at_s + alone.pause_s)) / alone.step_s + kept
    assert n_steps == pytest.approx(round(n_steps)) and 204.25 <= again.at_s < 204.25 + alone.step_s
    assert again.pause_s == pytest.approx(1.0), "warm-up alone: nobody is heard of or paused, and the groups are there"
    assert found.result.idle_node_s < 204 + 2 * alone.step_s
    assert 0 < kept <= 1 / 3 / 2, "of the pipeline that is whole"


def test_a_node_that_is_lost_again_before_it_is_taken_in_costs_the_others_nothing() -> None:
    changes = trace(4, 1000.0, (100, 3, NodeEventKind.LOST), (200, 3, NodeEventKind.RETURNED), (202, 3, NodeEventKind.LOST))
    found = outcome("auto", "2x2", 4, 8, changes, RestartCosts(save_s=2, restart_s=10, every_s=NEVER))

    assert len(found.result.decisions) == 2
    assert 10 - 30 / 3 / 2 <= found.totals.redone_s < 10, "of the pipeline that is whole something is kept"


@pytest.mark.parametrize("policy", ["auto", "torchrun"])
def test_a_node_that_returns_and_is_lost_at_one_moment_was_never_there(policy: str) -> None:
    lost, returned = NodeEventKind.LOST, NodeEventKind.RETURNED
    restart_costs, later = RestartCosts(save_s=2, restart_s=10, every_s=NEVER), (700, 0, NodeEventKind.FAILED)
    once = outcome(policy, "2x2", 4, 8, trace(4, 1000.0, (100, 3, lost), later), restart_costs)
    for at_s in (100, 400):
        changes = ((100, 3, lost), (at_s, 3, returned), (at_s, 3, lost), later)
        found = outcome(policy, "2x2", 4, 8, trace(4, 1000.0, *changes), restart_costs)
        assert found.result.stretches == once.result.stretches
        assert [decision.then for decision in found.result.decisions] == [d.then for d in once.result.decisions]


def test_a_node_that_returns_while_the_job_is_about_to_start_again_is_taken_in() -> None:
    """1x2 on two nodes: the job ends 0.75 s after the loss, and starts on the other node 10 s later."""
    changes = trace(2, 2000.0, (100, 1, NodeEventKind.LOST), (105, 1, NodeEventKind.RETURNED))
    found = outcome("auto", "1x2", 2, 4, changes, RestartCosts(save_s=2, restart_s=10, every_s=NEVER))

    assert [decision.n_ranks for decision in found.result.decisions] == [2, 1, 2]
    assert found.result.decisions[-1].what == "taken in"
    assert found.result.n_returns == 1


def test_a_node_without_work_is_idle_though_the_job_has_it() -> None:
    """One layer and two micro-batches: there is nothing for a third node."""
    found = outcome(
        "auto", "auto", 3, 2, trace(3, 1000.0, (100, 2, NodeEventKind.FAILED)), RestartCosts(every_s=NEVER), n_layers=1
    )

    assert {decision.n_ranks for decision in found.result.decisions} == {2}
    assert found.result.idle_node_s == pytest.approx(1000)


def test_without_enough_nodes_a_job_waits() -> None:
    changes = trace(1, 100, (40, 0, NodeEventKind.LOST), (70, 0, NodeEventKind.RETURNED))
    found = outcome("auto", "1x1", 1, 2, changes, RestartCosts(save_s=2, restart_s=10, every_s=NEVER))

    assert found.totals.waiting_s == pytest.approx(70 - 40 - 0.5)
    assert found.totals.redone_s == pytest.approx(40), "there never was a checkpoint"
    assert found.totals.useful_s == pytest.approx(100 - 70 - 10 - 1.25)


# -- under torchrun ----------------------------------------------------------------------------------------------------


def test_torchrun_by_hand() -> None:
    """2x1: two micro-batches of 12 s each; on one node four. A save of 2 s after 48 s of training, a restart takes 10 s."""
    restart_costs = RestartCosts(save_s=2, restart_s=10, every_s=48)
    changes = trace(2, 234, (101, 1, NodeEventKind.LOST), (200, 1, NodeEventKind.RETURNED))
    found = outcome("torchrun", "2x1", 2, 4, changes, restart_costs)

    # 48, saved, 48, saved at 100; lost; from 111 on 48 s, saved at 161, 39 s of a step when all start again; 24 s from 210 on
    assert_totals(found.totals, useful_s=96 + 24 + 24, slower_s=24, redone_s=1 + 39, restart_s=20, checkpoint_s=6)
    assert found.result.n_returns == 2
    assert [decision.pause_s for decision in found.result.decisions] == [0, 10, 10]


# -- what must hold of all ---------------------------------------------------------------------------------------------

POLICIES = [policy.name for policy in named(())]


@settings(max_examples=examples(25))
@given(policy=st.sampled_from(POLICIES), drawn=drawn_traces())
def test_useful_and_lost_time_are_all_of_it(policy: str, drawn: Trace) -> None:
    assert_time_is_whole(outcome(policy, "auto", 6, 12, drawn, RestartCosts(save_s=3, restart_s=20)))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a profile, 100 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write(job_events.profile(), tmp_path / "profile.json")
    return tmp_path


def test_seed_and_trace_give_the_same_bytes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drawn = ["replay", "correlated", "--mtbf", "3h", "--days", "1", "--transient", "0.4", "--seed", "5"]
    for name in ("a.json", "b.json"):
        assert main([*drawn, "--json", name]) == 0
    assert main([*drawn[:-1], "6", "--json", "c.json"]) == 0

    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes() != (folder / "c.json").read_bytes()
    report = json.loads((folder / "a.json").read_text())
    assert [policy["policy"] for policy in report["policies"]] == POLICIES
    assert report["n_losses"] > 0
    for policy in report["policies"]:
        assert sum(policy["totals"].values()) == pytest.approx(report["length_s"])
    capfd.readouterr()


def test_the_table_has_every_policy_the_best_first_and_fits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.csv").write_text("3600,3,lost\n7200,3,returned\n20000,0,lost\n90000,0,returned\n")

    assert main(["replay", "mine.csv", "--layout", "2x2"]) == 0

    out = capfd.readouterr().out
    assert out.startswith("trace  mine.csv: 2 losses in 25.0 h")
    rows = [line.split() for line in out.splitlines() if line.split("  ")[0] in POLICIES and "%" in line]
    assert sorted(row[0] for row in rows) == sorted(POLICIES)
    useful = [float(row[1]) for row in rows]
    assert useful == sorted(useful, reverse=True)
    assert max(map(len, out.splitlines())) <= 100
    assert "more than 100 %" not in out


def test_more_than_all_of_the_time_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "infinitehbd-400", "llama2-7b-h100-64", "--policy", "repartition"]) == 0

    out = capfd.readouterr().out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("repartition ") and "%" in line)
    assert float(row[1]) > 100
    assert "more than 100 %: after a failure a layout was taken that is faster than 8x8" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.csv"], "none.csv: No such file or directory"),
        (["exponential"], "exponential: how often? --mtbf is missing"),
        (["exponential", "--mtbf", "soon"], "--mtbf: expected a duration, got 'soon'"),
        (["exponential", "--mtbf", "1h", "--policy", "best"], "--policy: there is no 'best'"),
        (["exponential", "--mtbf", "1h", "--transient", "2"], "--transient: expected a share from 0 to 1, got 2"),
        (["exponential", "--mtbf", "1h", "--days", "0"], "--days: expected more than 0 and at most 115740, got 0"),
        (["exponential", "--mtbf", "1h", "--days", "1e9"], "--days: expected more than 0 and at most 115740, got 1e+09"),
        (["profile.json", "--repair", "1h"], "--repair is for failures that are drawn"),
        (["profile.json"], "profile.json: metadata: "),
        (["exponential", "--mtbf", "1h", "--json", "no/where.json"], "--json: no directory no"),
    ],
)
def test_what_cannot_be_meant_is_one_error(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert main(["replay", *arguments]) == 2

    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {error}") or error.endswith("metadata: ")
    assert lines[1].startswith("help: ") and len(lines) == 2


def record(folder: Path) -> Path:
    """The log of a coordinator that has lost a rank, written as the agent does."""
    talk = Talk()
    words = "start 2|join 0 1|profile|plan 0:0-4 / 1:0-4|ready 0 1|commit 0|lost 1 signal slot|paused 0 1|plan 0:0-4|ready 0"
    for said in words.split("|"):
        talk.say(said)
    talk.write_log(folder / "job")
    return folder / "job"


def test_a_recorded_job_takes_its_decisions_again(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = record(folder)

    assert main(["replay", str(job)]) == 0
    assert capfd.readouterr().out == f"{job}: 5 decisions came out the same\n"


def test_a_log_that_ends_anywhere_is_told_as_far_as_it_goes(folder: Path) -> None:
    """The agent was killed: what it decided last may be missing."""
    log = record(folder) / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)

    n_decisions = []
    for n in range(len(lines) + 1):
        log.write_bytes(b"".join(lines[:n]))
        n_decisions.append(compare(log.parent))

    assert [difference for _, difference in n_decisions] == [None] * (len(lines) + 1)
    assert n_decisions[-1] == (5, None)
    without = next(n for n, line in enumerate(lines) if b'"pausing"' in line)
    log.write_bytes(b"".join(lines[:without] + lines[without + 1 :]))
    assert compare(log.parent)[1] is not None, "a decision is missing in the middle"


def test_a_decision_that_comes_out_otherwise_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = record(folder) / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"lost":[1]', b'"lost":[0]'))

    assert main(["replay", str(log)]) == 1
    assert f"error: {log.parent}: decision 3 of 5 comes out otherwise: logged Pausing(lost=(0,)" in capfd.readouterr().err


def test_the_drawing_has_a_band_for_each_policy(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.csv").write_text("3600,3,lost\n7200,3,returned\n")

    assert main(["replay", "mine.csv", "--policy", "auto", "--policy", "shrink", "--svg", "a.svg"]) == 0

    root = ElementTree.fromstring((folder / "a.svg").read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"auto", "shrink"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 2
    capfd.readouterr()
