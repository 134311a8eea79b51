"""A bug in one strategy, price or proof costs its row of the table, which says where it is: the others decide."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import strategies.search.table as tables
from launcher.coordinator.decided_again import replay
from launcher.joblog.events import Note, Proposed
from launcher.joblog.reader import events
from launcher.options import RunOptions
from launcher.planning.planner import Planner
from launcher.planning.precompute import Ask, Work, decode_candidates
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from odyssey_cli.__main__ import main
from perfmodel.profile.profile import write
from strategies import Moment, names
from strategies.search import answer, best, initial_plan, ranking, search
from strategies.situation import Candidate, Situation
from strategies.situation.faults import MAX_MESSAGE
from tests import ROOT, job_events
from tests.agent_runs import TRAIN, nothing_left
from tests.dropped_in import TOY, drop_in
from tests.planning import first_plan, situation, without

__all__ = ["drop_in", "nothing_left"]
pytestmark = pytest.mark.usefixtures("nothing_left")

LINE = TOY[: TOY.index("    alive = ")].count("\n") + 1
TOLD = f"toy failed, the others decide: toy.py:{LINE}: ZeroDivisionError: division by zero (this is a bug: please report it)"
BODY = TOY[TOY.index("    alive = ") :]
FAULTS = {
    "return 1 / 0": f"toy.py:{LINE}: ZeroDivisionError: division by zero",
    "return [Proposal(NAME, compose(situation, NAME, [[7]], [32]), '')]": (
        "compose.py:\\d+: AttributeError: 'int' object has no attribute 'worker'"
    ),
    "return propose(situation)": f"toy.py:{LINE}: RecursionError: maximum recursion depth exceeded.*",
    "raise MemoryError": f"toy.py:{LINE}: MemoryError",
    "raise KeyError('a\\nb\\x1b[2J\\udcff' + 'x' * 999)": f"toy.py:{LINE}: KeyError: .{{,{MAX_MESSAGE}}} … .*",
    "assert not situation.alive, 'nobody'": f"toy.py:{LINE}: AssertionError: nobody",
    "return None": "table.py:\\d+: TypeError: 'NoneType' object is not iterable",
    "return [None]": "toy.propose: expected a list of Proposals, got NoneType in it",
    "return [situation.plan]": "toy.propose: expected a list of Proposals, got Plan in it",
    "return [Proposal('game', None, 'no')]": "toy.propose: expected Proposals of toy, got one of 'game'",
    "return [Proposal(NAME, None, 7)]": "toy.propose: a Proposal that cannot be written: Expected `str`, got `int` .*",
    "return [Proposal(NAME, {}, '')]": "toy.propose: a Proposal that cannot be written: Object missing .*",
    "return [Proposal(NAME, None, object())]": "toy.propose: a Proposal that cannot be written: Encoding objects .*",
    "return [Proposal(NAME, situation.plan, '')]": "toy.propose: a Proposal with work for worker 3, which is not there",
    "yield 1": "toy.propose: expected a list of Proposals, got int in it",
}


def faulty(statement: str) -> str:
    return TOY.replace(BODY, f"    {statement}\n")


def lost(rank: int = 3) -> Situation:
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    return situation(of, plan, without(plan, rank))


def grown() -> Situation:
    """Four ranks have a plan, and a fifth has come."""
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    return situation(of, plan, range(5), held={**plan.holds, 4: frozenset()})


def slowed() -> Situation:
    """Four ranks have a plan, which runs, and one of them is slow."""
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    return replace(situation(of, plan, range(4)), slow={1: 2.0}, is_running=True)


def of_toy(table: list[Candidate] | tuple[Candidate, ...]) -> Candidate:
    (row,) = [row for row in table if row.strategy == "toy"]
    return row


@pytest.mark.parametrize(("statement", "said"), FAULTS.items(), ids=range(len(FAULTS)))
def test_a_strategy_that_fails_costs_its_row(drop_in: Callable[[str], Path], statement: str, said: str) -> None:
    before = search(lost())
    drop_in(faulty(statement))

    for after in (search(lost()), answer(lost()), answer(lost(), "toy")):
        row = of_toy(after)
        assert row.is_fault and row.plan is None and re.fullmatch(said, row.reason), row.reason
        assert [other for other in after if other is not row] == before


@pytest.mark.parametrize(
    ("moment", "asked"),
    [
        (Moment.START, lambda: initial_plan(situation(job_events.profile(), None, range(4)), "auto")),
        (Moment.PROPOSE, lambda: answer(lost())),
        (Moment.GROW, lambda: answer(grown())),
    ],
)
def test_a_strategy_that_fails_costs_its_row_at_any_moment(
    drop_in: Callable[[str], Path], moment: Moment, asked: Callable[[], list[Candidate]]
) -> None:
    before = asked()
    drop_in(faulty("return 1 / 0").replace("def propose", f"def {moment}"))

    after = asked()

    row = of_toy(after)
    assert row.is_fault and row.reason == f"toy.py:{LINE}: ZeroDivisionError: division by zero"
    assert before and [other for other in after if other is not row] == before


@pytest.mark.parametrize("moment", [moment for moment in Moment if moment is not Moment.PROTECT])
def test_a_strategy_is_asked_at_its_moments_only(drop_in: Callable[[str], Path], moment: Moment) -> None:
    drop_in(faulty("return [Proposal(NAME, None, 'asked')]").replace("def propose", f"def {moment}"))

    tables_of = {
        Moment.START: initial_plan(situation(job_events.profile(), None, range(4)), "2x2"),
        Moment.PROPOSE: answer(lost()),
        Moment.GROW: answer(grown()),
        Moment.SLOW: answer(slowed()),
    }

    assert [its for its, table in tables_of.items() if "asked" in [row.reason for row in table]] == [moment]
    assert ("toy" in names()) is (moment is Moment.PROPOSE)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("return 1 / 0", f"toy.py:{LINE}: ZeroDivisionError: division by zero"),
        ("return [[7]]", "protect: expected Keeps, got int among them"),
        ("return None", "protected.py:\\d+: TypeError: 'NoneType' object is not iterable"),
        ("return [[Keep(Worker(0), 0, 99)]]", "layers \\[0, 99\\) are kept, the model has .*"),
    ],
    ids=range(4),
)
def test_what_a_strategy_asks_to_keep_costs_its_row_where_it_is_wrong(
    drop_in: Callable[[str], Path], statement: str, said: str
) -> None:
    drop_in(
        faulty(f"from odyssey.plan.moves import Keep; from odyssey.plan.worker import Worker; {statement}").replace(
            "def propose(situation: Situation)", "def protect(situation: Situation, plan)"
        )
    )
    start = situation(job_events.profile(), None, range(4))
    row, others = of_toy(table := initial_plan(start, "1x4")), initial_plan(start, "2x2")
    assert row.plan is None and re.fullmatch(said, row.reason), row.reason
    assert best(table) is not None and best(others) is not None
    assert not [its for its in others if its.strategy == "toy"], "it is asked where a layer has one holder, or one node"


def test_a_start_with_another_layout_than_was_asked_for_is_no_plan(drop_in: Callable[[str], Path]) -> None:
    compose = "compose(situation, NAME, [[Stage(0, 0, len(situation.profile.layers))]], [n_micro_batches_of(situation)])"
    drop_in(
        faulty(f"return [Proposal(NAME, {compose}, '')]")
        .replace("def propose", "def start")
        .replace("from strategies.situation", "from odyssey.plan.pipelines import Stage\nfrom strategies.situation")
    )
    now = situation(job_events.profile(), None, range(4))

    row = of_toy(initial_plan(now, "2x2"))

    assert row.plan is None and not row.is_fault and row.reason == "layout 1x1, where 2x2 was asked for"
    assert of_toy(initial_plan(now, "1x1")).plan is not None


def test_a_plan_that_fails_in_its_price_costs_its_row(drop_in: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = search(lost())
    drop_in(TOY)
    real = tables.price

    def price(plan: Plan, *arguments: object, **options: object) -> object:
        return real(plan, *arguments, **options) if plan.strategy != "toy" else {}["toy"]  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "price", price)

    after = search(lost())

    assert of_toy(after).is_fault and of_toy(after).reason.endswith("KeyError: 'toy'")
    assert [row for row in after if row.strategy != "toy"] == before


@pytest.mark.parametrize(
    "part",
    ["with_cut_micro_batches", "in_halves", "protected", "improved", "prove", "are_as_good", "worth_spread", "Ahead"],
)
def test_whatever_fails_behind_the_strategies_the_job_goes_on(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("list index out of range")

    now = lost()
    assert not any(row.is_fault for row in search(now))
    monkeypatch.setattr(ranking if part == "are_as_good" else tables, part, fail)

    table = answer(now, "repartition") if part == "improved" else search(now)

    chosen = best(table)
    assert chosen is not None and chosen.plan is not None
    prove(chosen.plan, now.held)
    faults = [row.reason for row in table if row.is_fault]
    assert faults and all(reason.endswith("IndexError: list index out of range") for reason in faults)


def test_where_all_strategies_fail_the_whole_pipelines_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = lost(3)
    monkeypatch.setattr(tables, "_checked", lambda *_: 1 / 0)

    first, *others = answer(now, "reroute")

    assert first.strategy == "last-resort" and first.plan is not None and layout_of(first.plan) == "1x2"
    assert first.plan.workers == (0, 1) and first.plan.moves == () and first.plan.idle == (2,)
    assert first.estimate is not None and first.plan.estimate == first.estimate
    prove(first.plan, now.held)
    assert {row.strategy for row in others} >= {"reroute", "repartition", "respawn", "shrink"}
    assert all(row.is_fault for row in others)


def test_where_no_plan_has_a_price_the_whole_pipelines_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = lost(3)
    monkeypatch.setattr("perfmodel.price.price", None)
    monkeypatch.setattr(tables, "price", None)
    monkeypatch.setattr("strategies.search.last_resort.price", None)

    first = search(now)[0]

    assert first.strategy == "last-resort" and first.plan is not None and first.estimate is None
    assert "it has no price: last_resort.py:" in first.reason


def test_where_no_pipeline_is_whole_every_row_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    monkeypatch.setattr(tables, "_checked", lambda *_: 1 / 0)

    table = answer(situation(of, plan, without(plan, 0, 3)))

    assert best(table) is None
    assert table[0].strategy == "last-resort" and table[0].reason == "every pipeline has lost a worker"


def test_a_layout_that_fails_at_the_start_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    of = job_events.profile()
    now = situation(of, None, range(4))
    before = initial_plan(now, "auto")
    chosen = best(before)
    assert chosen is not None and chosen.plan is not None
    bad = layout_of(chosen.plan)
    real = tables.price

    def price(plan: Plan, *arguments: object, **options: object) -> object:
        return real(plan, *arguments, **options) if layout_of(plan) != bad else 1 / 0  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "price", price)

    table = initial_plan(now, "auto")

    other = best(table)
    assert other is not None and other.plan is not None and layout_of(other.plan) != bad
    assert {row.reason.partition(": ")[2] for row in table if row.is_fault} == {"ZeroDivisionError: division by zero"}


def test_a_start_that_fails_altogether_is_one_clear_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.initial.layouts", lambda *_, **__: 1 / 0)

    (row,) = initial_plan(situation(job_events.profile(), None, range(4)), "auto")

    assert row.is_fault and row.strategy == "initial" and "ZeroDivisionError" in row.reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_this_name", "toy.py:1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("NAME = 1 / 0", "toy.py:1: ZeroDivisionError: division by zero"),
        ("\ndef propose(:", "toy.py:2: SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_clear_error_at_the_start_and_a_row_later(
    text: str, said: str, drop_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    now = lost()
    drop_in(text)

    assert main(["run", "--help"]) == 1
    assert capfd.readouterr().err.startswith(f"error: strategy toy cannot be loaded: {said}\nhelp: docs/strategies.md")
    row = of_toy(search(now))
    assert row.is_fault and row.reason == f"strategy toy cannot be loaded: {said}"


def test_plans_found_ahead_have_the_row_too(drop_in: Callable[[str], Path]) -> None:
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    drop_in(faulty("return 1 / 0"))
    work = Work(Ask(1, None, False, replace(situation(of, plan, range(4)), held={})))

    while work:
        found = work.next()
        table = decode_candidates(found.candidates)
        assert len(found.lost) > 1 or (of_toy(table).is_fault and best(table) is not None)


def test_people_are_told_once(drop_in: Callable[[str], Path]) -> None:
    drop_in(faulty("return 1 / 0"))
    found = Proposed(tuple(search(lost())), 60.0, "test", 0.0, False)
    planner = Planner(
        RunOptions("train.py"),
        {},
        None,
        state=lambda: None,
        now=lambda: 0.0,
        feed=lambda _: None,  # type: ignore[arg-type]
    )

    (told,) = planner.untold_faults(found)

    assert told == TOLD
    assert planner.untold_faults(found) == []


def test_odyssey_plan_and_the_replay_tell_it(
    drop_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drop_in(faulty("return 1 / 0"))
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "profile.json"
    write(job_events.profile(), path)
    (tmp_path / "trace.csv").write_text("3600,1,lost\n90000,1,returned\n")

    assert main(["plan", str(path), "--fail-ranks", "3", "--layout", "2x2"]) == 0
    output = capfd.readouterr().out
    assert output.count(TOLD) == 1
    assert any(line.split()[:2] == ["toy", "-"] for line in output.splitlines())
    assert main(["replay", str(tmp_path / "trace.csv"), str(path), "--layout", "4x1", "--policy", "auto"]) == 0
    assert capfd.readouterr().out.count(TOLD) == 1


def test_a_real_job_goes_on_without_the_strategy_that_fails(tmp_path: Path) -> None:
    """Planned ahead or not: the whole program, with one file more."""
    for package in ("odyssey", "odyssey_cli", "launcher", "perfmodel", "strategies", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "strategies" / "toy.py").write_text(faulty("return 1 / 0"))
    drills = [word for step, rank in ((4, 2), (60, 3)) for word in ("--drill", f"step={step} kill={rank}")]
    arguments = ["--nodes", "4", "--layout", "4x1", "--log-dir", "logs", *drills, TRAIN, "--pause", "0.05", "--steps", "90"]
    ran = subprocess.run(
        [sys.executable, "-m", "odyssey_cli", "run", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    (log,) = (tmp_path / "logs").glob("*/events.jsonl")
    bodies = [event.body for event in events(log)]
    tables_of = [body.candidates for body in bodies if isinstance(body, Proposed)]
    assert len(tables_of) == 3 and all(of_toy(table).is_fault for table in tables_of[1:])
    notes = [body.text for body in bodies if isinstance(body, Note) and "toy failed" in body.text]
    assert notes == [TOLD]
    assert ran.stderr.count("toy failed") == 1 and "Traceback" not in ran.stderr
    assert all(logged == taken for logged, taken in replay(log))
