"""A strategy is one file: it is dropped in, and everything that knows all strategies knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.options import RunOptions
from odyssey.errors import OdysseyError
from odyssey.plan.form import form_of, layout_of
from odyssey_cli.__main__ import main
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.request import read
from perfmodel.profile.profile import write
from strategies.search import search
from tests import ROOT, job_events
from tests.dropped_in import TOY, drop_in
from tests.planning import first_plan, situation, without

__all__ = ["drop_in"]


def test_a_file_is_a_strategy_of_the_search(drop_in: Callable[[str], Path]) -> None:
    of = job_events.profile()
    plan = first_plan(of, "2x2", 4)
    lost = situation(of, plan, without(plan, 3))
    before = search(lost)
    drop_in(TOY)

    after = search(lost)

    assert [c.strategy for c in after if c.strategy != "toy"] == [c.strategy for c in before]
    alone = [c.plan for c in search(lost, "toy")]
    assert all(toy is not None and toy.strategy == "toy" and layout_of(toy) == "1x2" for toy in alone)
    assert {form_of(toy) for toy in alone if toy is not None} >= {"1x2"} and alone[-1] in [c.plan for c in after]


def test_a_file_is_a_value_of_the_option(drop_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    drop_in(TOY)
    script = str(ROOT / "tests/jobs/train.py")

    options: RunOptions = read(["--strategy", "toy", script], {}, Command.RUN).options

    assert options.strategy == "toy"
    assert main(["run", "--strategy", "toi", script]) == 2
    everyone = "auto, neighbour, redundant, repartition, reroute, respawn, shrink, toy"
    assert f"help: did you mean toy? one of: {everyone}\n" in capfd.readouterr().err


def test_a_file_has_its_sentence_in_the_help(drop_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    drop_in(TOY)

    assert main(["run", "--help"]) == 0

    assert "toy: The first pipeline that is whole does everything." in " ".join(capfd.readouterr().out.split())


def test_a_file_is_a_row_in_the_table_of_a_plan(
    drop_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drop_in(TOY)
    monkeypatch.setenv("COLUMNS", "100")
    write(job_events.profile(), tmp_path / "profile.json")

    assert main(["plan", str(tmp_path / "profile.json"), "--fail-ranks", "3", "--layout", "2x2"]) == 0

    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["toy", "1x2"] in [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('NAME = "toy"', "", "NAME: expected 'toy', as the file is called, it has none"),
        ('NAME = "toy"', 'NAME = "game"', "NAME: expected 'toy', as the file is called, got 'game'"),
        ("SUMMARY = ", "SUMMARY = None  # ", "SUMMARY: expected one sentence, a string, got None"),
        ("SUMMARY = ", 'SUMMARY = "a\\nb"  # ', "SUMMARY: expected one sentence, a string, got 'a\\nb'"),
        ("def propose", "def suggest", "expected one or more functions of start, propose, grow, slow, protect, it has none"),
        ("def propose", "propose = 7\n\n\ndef suggest", "propose: expected a function, got 7"),
    ],
)
def test_a_file_that_is_no_strategy_is_one_clear_error(
    right: str, wrong: str, said: str, drop_in: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = drop_in(TOY.replace(right, wrong))

    assert main(["run", "--help"]) == 1

    assert capfd.readouterr().err == f"error: {path}: {said}\nhelp: docs/strategies.md says what a strategy consists of\n"


def test_a_job_does_not_start_with_a_file_that_is_no_strategy(drop_in: Callable[[str], Path]) -> None:
    drop_in("")

    with pytest.raises(OdysseyError, match="NAME"):
        first_plan(job_events.profile(), "2x2", 4)
