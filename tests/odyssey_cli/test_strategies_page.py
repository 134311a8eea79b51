"""docs/strategies.md: it is what its script makes, each strategy has its picture, and the strategy that it shows is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import strategies
from odyssey.plan.form import form_of
from odyssey.plan.proof import prove
from odyssey_cli.__main__ import main
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.request import read
from odyssey_cli.planning.strategies_page import pages, section
from odyssey_cli.planning.strategy_examples import EXAMPLES
from strategies.search import best, initial_plan, search
from strategies.situation import Candidate, Situation
from tests import ROOT, job_events
from tests.dropped_in import TOY, DropIn, drop_in
from tests.planning import situation, without

__all__ = ["drop_in"]
DOCS = ROOT / "docs"


# -- the page ----------------------------------------------------------------------------------------------------------


def test_page_and_pictures_are_what_the_script_makes() -> None:
    made = pages()

    assert {path.relative_to(DOCS).as_posix() for path in (DOCS / "strategies").iterdir()} == made.keys() - {"strategies.md"}
    for name, text in made.items():
        assert (DOCS / name).read_text() == text, f"{name}: `python -m odyssey_cli.planning.strategies_page docs`"


def test_each_strategy_has_an_example_and_its_picture_on_the_page() -> None:
    names = {strategy.name for strategy in strategies.load_all() if not strategy.is_sharded}
    shown = re.findall(r"^!\[.+\]\(strategies/(\w+)\.svg\)$", (DOCS / "strategies.md").read_text(), re.MULTILINE)

    assert names == EXAMPLES.keys()
    assert sorted(names) == shown


def test_a_file_without_an_example_has_its_story_on_the_page(drop_in: DropIn) -> None:
    drop_in(TOY)

    text = section(strategies.load("toy"), None)

    assert text.startswith("## toy\n\n**The first pipeline that is whole does everything.**\n\nToy: the pipelines")


# -- the strategy that it shows ----------------------------------------------------------------------------------------


@pytest.fixture
def standby(drop_in: DropIn) -> Path:
    """The code block of the page, dropped in as it stands."""
    (code,) = re.findall(r"^```python\n(.+?)^```$", (DOCS / "strategies.md").read_text(), re.MULTILINE | re.DOTALL)
    return drop_in(code, "standby")


def after_loss(n_ranks: int, *lost: int) -> Situation:
    """The situation of a job in two pipelines of two stages; ranks 4 and up stand by."""
    of = job_events.profile()
    start = replace(situation(of, None, range(n_ranks)), n_spares=n_ranks - 4)
    chosen = best(initial_plan(start, "2x2"))
    assert chosen is not None and chosen.plan is not None
    return situation(of, chosen.plan, without(chosen.plan, *lost))


def row(table: list[Candidate]) -> Candidate:
    """The best of the strategy that the page shows."""
    return next(its for its in table if its.strategy == "standby")


def test_the_strategy_of_the_page_is_asked_and_priced_and_its_plan_is_proved(standby: Path) -> None:
    now = after_loss(5, 1)
    assert now.plan is not None

    found = row(search(now))

    assert found.plan is not None and found.estimate is not None and found.at_next_loss is not None
    assert found.estimate.step_s > 0 and found.estimate.transition.moves_s > 0
    prove(found.plan, now.held)
    assert found.plan.place == {(4 if worker == 1 else worker): place for worker, place in now.plan.place.items()}
    assert {move.target for move in found.plan.moves} == {4} and not found.plan.idle


def test_where_more_are_lost_than_stand_by_the_strategy_of_the_page_routes(standby: Path) -> None:
    found = row(search(after_loss(5, 1, 2), "standby"))

    assert found.plan is not None and form_of(found.plan).startswith("2x2 -1")


def test_where_nobody_stands_by_the_strategy_of_the_page_says_so(standby: Path) -> None:
    found = row(search(after_loss(4, 1)))

    assert found.plan is None and found.reason == "no rank stands by"


def test_the_strategy_of_the_page_is_a_value_of_the_option(standby: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "tests/jobs/train.py")

    assert read(["--strategy", "standby", script], {}, Command.RUN).options.strategy == "standby"
    assert main(["plan", "gpt3-medium-a100-32", "--layout", "4x7", "--fail-ranks", "1", "--strategy", "standby"]) == 0
    assert "standby, layout 4x7" in capfd.readouterr().out
