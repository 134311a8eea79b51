"""The display as people see it: boards folded from recorded events, printed at a fixed width."""

from __future__ import annotations

import io
import threading
import time
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launcher.joblog.events import (
    Cause,
    CauseKind,
    Event,
    GenerationStarted,
    Pausing,
    PlanChosen,
    Proposed,
    RankLost,
    Suspected,
)
from odyssey.plan.approximation import Approximation, LowRank
from odyssey.plan.worker import Worker
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position, Result
from odyssey_cli.display import screen as screen_module
from odyssey_cli.display.board import Board
from odyssey_cli.display.layout_grid import plan_grid
from odyssey_cli.display.progress import columns
from odyssey_cli.display.rank_state import RankState
from odyssey_cli.display.render import SHOW_RECOVERY_S, render
from odyssey_cli.display.screen import Screen
from tests import job_events


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def board_after(kind: str, nth: int = 1) -> Board:
    """The board when the `nth` event of `kind` has been applied."""
    board = Board()
    for event in job_events.job():
        board.apply(event)
        nth -= type(event.body).__name__ == kind
        if nth == 0:
            break
    return board


def text_of(board: Board, width: int = 80, height: int = 30, after: float = 0.0, ascii_only: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(render(board, board.now + after, width, height, ascii_only=ascii_only))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_while_the_ranks_start_it_says_how_far_they_are() -> None:
    assert text_of(board_after("RankStarted", 3)) == [
        "─" * 80,
        "odyssey  train.py --steps 40                                            starting",
        "step 0  lost 0 ranks  time 0:00",
        "",
        "3 of 4 ranks started",
    ]


def test_a_running_job_shows_its_layout_and_its_speed() -> None:
    assert text_of(board_after("Committed", 20)) == [
        "─" * 80,
        "odyssey  train.py --steps 40                                        generation 1",
        "step 20 of 40  loss 3.0500  samples/s 640  lost 0 ranks  time 0:02  left 0:01",
        "━━━━━━━━━━━━━━━───────────────  50 %   ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅ 50 ms a step",
        "",
        "layout       2 pipelines of 2 stages",
        "             stage 0           stage 1",
        "pipeline 0   ● 0  layers 0-3   ● 1  layers 4-7",
        "pipeline 1   ● 2  layers 0-3   ● 3  layers 4-7",
        "",
        "22:13:21  profile measured in 200 ms",
        "22:13:21  started: layout 2x2",
    ]


def test_a_lost_rank_is_marked_before_there_is_a_plan() -> None:
    lines = text_of(board_after("Paused", 2))

    assert "recovering" in lines[2]
    assert lines[7:9] == [
        "pipeline 0   ‖ 0  layers 0-3   ‖ 1  layers 4-7",
        "pipeline 1   ● 2  layers 0-3   ✕ 3  layers 4-7",
    ]
    assert "loss of rank 3 (SIGKILL)" in lines


def test_after_a_recovery_phases_and_candidates_stay_for_a_while() -> None:
    board = board_after("Committed", 30)

    assert text_of(board)[4:24] == [
        "",
        "layout       2 pipelines of 2 stages; 1 stage without a rank, whose",
        "             micro-batches others run",
        "             stage 0           stage 1",
        "pipeline 0   ● 0  layers 0-3   ● 1  layers 4-7",
        "pipeline 1   ● 2  layers 0-3   ✕ → 1  layers 4-7",
        "outside      ✕ 3 lost",
        "",
        "loss of rank 3 (SIGKILL)  recovered in 88 ms  cost 130 ms",
        "━" * 76,
        "■ detect 2.0 ms   ■ pause 11 ms   ■ plan 4.0 ms   ■ groups 61 ms   ■ move 10 ms",
        "",
        "   strategy  layout  step ±6 %  rate  transition   memory    score",
        "▸  reroute   2x2 -1      62 ms  81 %       83 ms  312 MiB  410 ±33",
        "≈  shrink    2x2         71 ms  70 %      163 ms  420 MiB  380 ±30",
        "   respawn   -               -     -           -        -        -",
        "reroute: best, 7.9 % more useful samples/s than shrink until the loss after the",
        "next",
        "≈ as good within the spread; next change expected in 1.0 h (--mtbf)",
        "",
    ]
    assert "loss of rank 3 (SIGKILL)  recovered in 88 ms  cost 130 ms" not in text_of(board, after=SHOW_RECOVERY_S)


def test_the_words_of_the_candidates_layouts_are_explained_where_there_is_room() -> None:
    board = board_after("Committed", 30)
    tall, flat = text_of(board, 110, height=40), text_of(board, 110, height=24)

    assert tall[-3:] == [
        "",
        "2x4: two pipelines of four stages; 2x1: two whole copies; 3+2: one of three stages, one of two",
        "-1: one stage has no rank, and others run its micro-batches",
    ]
    for lines in (flat, text_of(board, 110, height=40, after=SHOW_RECOVERY_S)):
        assert not any(line.startswith("2x4: ") for line in lines)


def test_spreads_give_way_first_and_the_marks_never() -> None:
    board = board_after("Committed", 30)

    def rows(width: int, ascii_only: bool = False) -> list[str]:
        lines = text_of(board, width, ascii_only=ascii_only)
        at = next(i for i, line in enumerate(lines) if line.startswith("   strategy"))
        return lines[at : at + 3]

    assert rows(66)[1] == "▸  reroute   2x2 -1      62 ms  81 %       83 ms  312 MiB  410 ±33"
    assert rows(60) == [
        "   strategy  layout   step  rate  transition   memory  score",
        "▸  reroute   2x2 -1  62 ms  81 %       83 ms  312 MiB    410",
        "≈  shrink    2x2     71 ms  70 %      163 ms  420 MiB    380",
    ]
    assert rows(48) == [
        "   strategy  layout   step  rate  score",
        "▸  reroute   2x2 -1  62 ms  81 %    410",
        "≈  shrink    2x2     71 ms  70 %    380",
    ]
    assert [line[0] for line in rows(80, ascii_only=True)] == [" ", ">", "~"]
    assert rows(80, ascii_only=True)[1].endswith("410 +-33")


def test_a_wide_terminal_has_room_for_the_reasons() -> None:
    lines = text_of(board_after("Committed", 30), width=140)

    assert any("no restarts are left (--max-restarts 0)" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("height", [8, 12, 24, 50])
def test_it_never_outgrows_the_terminal(width: int, height: int) -> None:
    for event_number in range(0, len(job_events.job()), 5):
        board = Board()
        for event in job_events.job()[: event_number + 1]:
            board.apply(event)
        lines = text_of(board, width, height)

        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 9)


def test_it_reads_without_unicode() -> None:
    for line in text_of(board_after("Committed", 30), ascii_only=True):
        assert line.isascii()


def test_any_beginning_of_a_log_gives_a_picture() -> None:
    board = Board()
    for event in job_events.job():
        board.apply(event)
        assert text_of(board)


def test_a_large_layout_is_cut_and_shows_the_pipelines_in_trouble() -> None:
    from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
    from odyssey.plan.plan import Plan

    n_pipelines, n_stages = 64, 16
    pipelines = tuple(
        Pipeline(tuple(Stage(p * n_stages + s, 2 * s, 2 * s + 2) for s in range(n_stages)), p, p + 1)
        for p in range(n_pipelines)
    )
    plan = Plan(1, "start", 0, 64, 1, 32, blocks_of(pipelines), ())
    console = Console(width=80, file=io.StringIO(), record=True)

    console.print(plan_grid(plan, {50 * n_stages: RankState.LOST}, 80, 6))

    lines = console.export_text().splitlines()
    assert len(lines) == 7
    assert any(line.startswith("pipeline 50   ✕") for line in lines)
    assert lines[-1].strip() == "and 58 more"


def test_what_a_rank_keeps_stands_behind_what_it_runs() -> None:
    from odyssey.plan.moves import Keep, keep_runs
    from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
    from odyssey.plan.plan import Plan

    pipeline = Pipeline((Stage(0, 0, 2), Stage(1, 2, 5), Stage(2, 5, 6)), 0, 1)
    keeps = keep_runs([Keep(0, 2, 5), Keep(1, 5, 6), Keep(2, 0, 2), Keep(2, 3, 4)])
    plan = Plan(1, "start", 0, 1, 1, 6, blocks_of([pipeline]), (), keep_runs=keeps)
    shown = {}
    for width in (100, 60, 30):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(plan_grid(plan, {}, width))
        shown[width] = console.export_text().splitlines()[-1].split("   ")[1:]
    assert [cell.strip() for cell in shown[100] if cell.strip()] == [
        "● 0  layers 0-1 +2-4",
        "● 1  layers 2-4 +5",
        "● 2  layer 5 +0-1,3",
    ]
    assert "● 0  0-1 +2-4" in [cell.strip() for cell in shown[60]]
    assert "+" not in "".join(shown[30])


def test_the_summary_of_a_job_counts_what_was_lost() -> None:
    from odyssey_cli.display.summary import summary

    board = board_after("JobEnded")

    assert summary(board, None) == (
        "40 steps in 0:04\nrecovered from the loss of 1 rank in 88 ms; planned ahead: 0 of 1\n"
        "130 ms lost in all, the work that was redone included"
    )


def test_the_summary_of_a_job_that_has_resumed_another_counts_its_own_steps() -> None:
    from odyssey_cli.display.summary import summary

    board = board_after("GenerationStarted")
    board.apply(Event(board.now, 1, "rank 0", Committed(0, 1, Result(Position(0, 0), "resume", (100_000.0,)), 0, 0.05)))
    approximate = msgspec.structs.replace(job_events.plan(), approximation=Approximation((Worker(1),), LowRank(4), ()))
    for step in range(100_000, 100_008):
        board.apply(job_events.committed(step, board.now + 2))
        if step == 100_004:
            board.apply(Event(board.now, 2, "agent", PlanChosen(approximate, "", ())))

    assert board.steps == 100_008
    assert summary(board, None) == "8 steps in 0:17\ngradients were approximate in 3 of 8 steps"


def test_of_a_recovery_behind_which_there_is_another_no_plans_are_kept() -> None:
    board = board_after("Committed", 40)
    told = board.n_lost, board.lost_s, board.planned_ahead

    board.apply(Event(job_events.START + 5, 3, "agent", Pausing((2,), "rank 2 lost: SIGKILL")))

    before, now = board.recoveries
    assert before.proposed == msgspec.structs.replace(proposed(), candidates=())
    assert before.plan is before.plan_before is None
    assert now.plan_before is board.plan is not None
    assert told == (board.n_lost - 1, board.lost_s, board.planned_ahead) == (1, pytest.approx(0.13), "planned ahead: 0 of 1")


def proposed() -> Proposed:
    return next(event.body for event in job_events.job() if isinstance(event.body, Proposed))


def test_the_ranks_lines_appear_above_the_live_area_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = threading.Event()

    def watched(*arguments: Any, **options: Any) -> Any:
        drawn.set()
        return render(*arguments, **options)

    monkeypatch.setattr("odyssey_cli.display.screen.render", watched)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=30, color_system=None, legacy_windows=False)

    with Screen(Board(), console, threading.Thread.join) as screen:
        for event in job_events.job():
            screen.watch(event)
        for i in range(200):
            screen.output(i % 4, "stdout", f"line {i} of ".encode())
        for i in range(4):
            screen.output(i, "stdout", b"the end\n")
        screen.output(2, "stderr", b"half a line")
        drawn.clear()
        assert drawn.wait(10)

    printed = file.getvalue()
    assert printed.count("the end") == 4
    assert "[rank 2] half a line" in printed
    assert "step 40" in printed


def test_a_display_that_fails_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, height=30, color_system=None)
    drawn = threading.Event()

    def failing(*_: Any, **__: Any) -> Any:
        drawn.set()
        return 1 / 0

    monkeypatch.setattr("odyssey_cli.display.screen.render", failing)

    with Screen(Board(), console, threading.Thread.join) as screen:
        screen.watch(job_events.job()[0])
        assert drawn.wait(10)
        screen.output(1, "stdout", b"still here\n")

    assert "the display failed, the job goes on: ZeroDivisionError" in file.getvalue()
    assert "[rank 1] still here" in file.getvalue()


@pytest.mark.parametrize("where", ["LineCutter.feed", "_coloured"])
def test_a_line_that_the_display_fails_of_holds_up_no_rank(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, height=30, color_system=None)
    works, failed, taken = attrgetter(where)(screen_module), threading.Semaphore(0), threading.Event()

    def failing(*arguments: Any) -> Any:
        if "odd" in str(arguments[-1]):
            failed.release()
            raise IndexError("an odd line")
        taken.set()
        return works(*arguments)

    monkeypatch.setattr(f"{screen_module.__name__}.{where}", failing)

    with Screen(Board(), console, threading.Thread.join) as screen:
        for _ in range(2):
            assert screen.output(0, "stdout", b"odd " * (screen_module.BACKLOG_BYTES // 4) + b"\n")
            assert failed.acquire(timeout=10)
            assert not screen.output(0, "stdout", b"")
        screen.output(1, "stdout", b"still here\n")
        assert taken.wait(10)

    assert file.getvalue().count("the display failed, the job goes on: IndexError: an odd line") == 1
    assert "[rank 1] still here" in file.getvalue()


def test_watching_costs_the_agent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, drawers = threading.Event(), set()

    def watched(*arguments: Any, **options: Any) -> Any:
        drawers.add(threading.get_ident())
        drawn.set()
        return render(*arguments, **options)

    monkeypatch.setattr("odyssey_cli.display.screen.render", watched)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    event: Event = job_events.job()[0]

    with Screen(Board(), console, threading.Thread.join) as screen:
        for _ in range(1000):
            screen.watch(event)
        drawn.clear()
        assert drawn.wait(10)

    assert threading.get_ident() not in drawers, "the agent's thread only queues what it has seen"


def test_while_no_step_is_finished_the_newest_line_of_it_replaces_the_one_before() -> None:
    board = Board()
    for time_s, reason in ((10.0, "no step finished for 10 s; rank 1: F0 for 9 s"), (20.0, "no step finished for 20 s")):
        board.apply(Event(time_s, 1, "agent", Suspected(reason)))

    assert [line.text for line in board.recent] == ["no step finished for 20 s"]


def test_a_script_that_does_not_say_how_long_it_runs_has_no_bar() -> None:
    board = board_after("Committed", 20)
    board.n_steps = None

    lines = text_of(board)

    assert lines[2:4] == [
        "step 20  loss 3.0500  samples/s 640  lost 0 ranks  time 0:02",
        "▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅ 50 ms a step",
    ]


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (70, "step 20 of 40  loss 3.0500  samples/s 640  time 0:02  left 0:01"),
        (60, "step 20 of 40  loss 3.0500  samples/s 640  left 0:01"),
        (50, "step 20 of 40  samples/s 640  left 0:01"),
        (30, "step 20 of 40  samples/s 640"),
    ],
)
def test_where_it_is_narrow_whole_figures_go(width: int, figures: str) -> None:
    assert text_of(board_after("Committed", 20), width)[2] == figures


def test_columns_stand_for_times_and_the_longest_is_the_highest() -> None:
    assert columns([1.0, 1.0, 1.0]) == "▅▅▅"
    assert columns([1.0, 1.0, 4.0, 0.0]) == "▃▃█▁"
    assert columns([0.0, 0.0, 0.0], ascii_only=True) == "___"


def test_of_a_rank_that_hung_the_time_until_that_was_known_is_a_phase() -> None:
    board = board_after("Committed", 20)
    at = board.now
    board.apply(Event(at + 10.05, 1, "agent", RankLost(3, Cause(CauseKind.HANG, "made no progress for 10 s"), True)))
    for event in job_events.job():
        if event.generation == 2 and not isinstance(event.body, Committed):
            board.apply(msgspec.structs.replace(event, time=event.time + 10))
            if isinstance(event.body, GenerationStarted):
                break

    assert any(line.startswith("■ detect 10 s   ■ pause 11 ms") for line in text_of(board))


def test_where_it_is_narrow_a_cause_is_cut_and_no_figure() -> None:
    board = board_after("Committed", 30)
    board.causes[3] = "does not answer, and was stopped by a signal"

    (title,) = (line for line in text_of(board, 60) if line.startswith("loss of rank 3"))

    assert len(title) == 60 and title.endswith("…  recovered in 88 ms  cost 130 ms")


def test_why_a_rate_is_above_100_percent_is_told() -> None:
    board = board_after("Committed", 30)
    assert not any("above 100 %" in line for line in text_of(board))
    assert board.recovery is not None
    slow = msgspec.structs.replace(job_events.START_ESTIMATE, step_s=0.065)
    board.recovery.plan_before = job_events.plan(1, None, slow)

    text = " ".join(text_of(board))

    assert (
        "rate above 100 %: at the same prices the layout before was not the fastest one, as all its ranks share 2 cores" in text
    )
    assert "105 %" in text
