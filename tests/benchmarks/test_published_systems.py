"""Policies like those of published systems against what comes out by hand, and the traces of their evaluations."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import paper
from benchmarks.published_systems import regrouped
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace
from tests.examples import examples
from tests.replays import NEVER, assert_time_is_whole, assert_totals, drawn_traces, outcome, trace


def test_varuna_saves_before_it_starts_again_for_more_nodes() -> None:
    restart_costs = RestartCosts(save_s=2, restart_s=10, every_s=NEVER)
    changes = trace(2, 216 + 24, (100, 1, NodeEventKind.LOST), (150, 1, NodeEventKind.RETURNED))
    found = outcome("varuna", "auto", 2, 4, changes, restart_costs)

    # all of the first 100 s is redone; 48 s steps from 110 on, the one that runs at 150 is done at 158; 24 s steps from 170 on
    useful = 24 + (240 - 170)
    assert_totals(found.totals, useful_s=useful, slower_s=24, redone_s=100, restart_s=20, checkpoint_s=2)


def test_oobleck_shortens_pipelines_and_copies_nothing_from_the_disk() -> None:
    changes = trace(6, 1000, (100, 5, NodeEventKind.LOST), (500, 5, NodeEventKind.RETURNED))
    found = outcome("oobleck", "2x3", 6, 12, changes, RestartCosts(every_s=NEVER))

    assert [decision.then for decision in found.result.decisions] == ["2x3", "3+2", "2x3"]
    assert found.totals.transition_s == pytest.approx(2 * 2.0), "the model has no bytes: the least that its artifact has"
    assert found.result.n_returns == 0 and found.totals.restart_s == 0


@pytest.mark.parametrize(
    ("rows", "spare", "expected"),
    [
        ([[0, 1, 2, 3], [4, 5], [6, 7, 8]], [], [[3, 4, 5], [0, 1, 2], [6, 7, 8]]),
        ([[0, 1, 2], [4, 5]], [9], [[4, 5, 9], [0, 1, 2]]),
        ([[0, 1, 2], [4, 5]], [], [[0, 1, 2, 4, 5]]),
        ([[0, 1], []], [], []),
    ],
    ids=["borrow", "spare", "merge", "too few"],
)
def test_oobleck_borrows_then_merges(rows: list[list[int]], spare: list[int], expected: list[list[int]]) -> None:
    assert sorted(map(sorted, regrouped(rows, spare, 3))) == sorted(map(sorted, expected))


def test_recycle_reroutes_and_takes_a_returned_node_in_its_old_place() -> None:
    changes = trace(4, 1000, (100, 3, NodeEventKind.LOST), (500, 3, NodeEventKind.RETURNED))
    found = outcome("recycle", "2x2", 4, 8, changes, RestartCosts(every_s=NEVER))
    alone = outcome("reroute", "2x2", 4, 8, changes, RestartCosts(every_s=NEVER))

    assert [decision.then for decision in found.result.decisions] == ["2x2", "2x2 -1", "2x2"]
    assert found.result.decisions[1].step_s == alone.result.decisions[1].step_s
    assert found.totals.restart_s == 0


@settings(max_examples=examples(25))
@given(policy=st.sampled_from(["varuna", "oobleck", "recycle"]), drawn=drawn_traces())
def test_useful_and_lost_time_are_all_of_it(policy: str, drawn: Trace) -> None:
    assert_time_is_whole(outcome(policy, "auto", 6, 12, drawn, RestartCosts(save_s=3, restart_s=20)))


def test_the_published_evaluations_lose_what_they_say() -> None:
    fallen = paper.falling(1800.0, seed=0)
    assert len({change.node for change in fallen.changes}) == fallen.n_losses == 16
    assert fallen.length_s == 17 * 1800.0

    back = paper.returning(1800.0, seed=0)
    n_away, away_s = 0, 0.0
    for change, until in pairwise([*back.changes, Change(back.length_s, 0, NodeEventKind.LOST)]):
        n_away += 1 if change.kind is NodeEventKind.LOST else -1
        away_s += n_away * (until.at_s - change.at_s)
    assert away_s / back.length_s == pytest.approx(2, abs=1)
