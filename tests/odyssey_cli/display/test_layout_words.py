"""Layouts in words, held against plans made by hand."""

from __future__ import annotations

import pytest

from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, ComputeOrder, Plan, Schedule
from odyssey_cli.display.layout_words import in_words, legend, wrapped
from tests import job_events

PLAIN = Schedule()


def plan(lengths: tuple[int, ...], schedule: Schedule = PLAIN) -> Plan:
    """Pipelines with so many stages, and one micro-batch each."""
    pipelines, first = [], 0
    for p, n in enumerate(lengths):
        stages = tuple(Stage(first + s, 12 // n * s, 12 // n * (s + 1)) for s in range(n))
        pipelines.append(Pipeline(stages, p, p + 1))
        first += n
    return Plan(1, "start", 0, len(lengths), 1, 12, blocks_of(pipelines), (), schedule=schedule)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ((4,) * 8, "8 pipelines of 4 stages"),
        ((1, 1, 1), "3 whole copies"),
        ((1,), "1 whole copy"),
        ((3, 4, 4), "1 pipeline of 3 stages + 2 pipelines of 4 stages"),
        ((4, 4, 1), "2 pipelines of 4 stages + 1 whole copy"),
    ],
)
def test_pipelines_are_counted_by_their_length(lengths: tuple[int, ...], words: str) -> None:
    assert in_words(plan(lengths)) == words


def test_stages_without_a_rank_and_schedules_are_said() -> None:
    assert in_words(job_events.plan(2, 3)) == "2 pipelines of 2 stages; 1 stage without a rank, whose micro-batches others run"
    assert in_words(plan((2, 2), Schedule("split", 1.5))) == "2 pipelines of 2 stages; backward in halves"


def test_backwards_in_halves_in_the_order_of_a_worker_are_said() -> None:
    whole = Schedule(orders=(ComputeOrder(0, (Compute("F", 0, 0), Compute("B", 0, 0))),))
    halves = Schedule(orders=(ComputeOrder(0, (Compute("F", 0, 0), Compute("I", 0, 0), Compute("W", 0, 0))),))

    assert ["halves" in in_words(plan((2, 2), schedule)) for schedule in (whole, halves)] == [False, True]


def test_further_lines_stand_below_the_first_word() -> None:
    assert wrapped("layout  ", plan((4, 4, 1)), 32) == "layout  2 pipelines of 4 stages\n        + 1 whole copy"


def test_the_legend_has_the_words_that_there_are() -> None:
    assert [line.partition(":")[0] for line in legend(["8x4", "7x4 cut", "8x4 -1 split max"])] == ["2x4", "-1", "cut", "split"]
    assert len(legend(["8x4"])) == 1
