"""docs/strategies.md: it is what its script makes, and each strategy has its picture."""

from __future__ import annotations

import re

import strategies
from odyssey_cli.planning.strategies_page import pages, section
from odyssey_cli.planning.strategy_examples import EXAMPLES
from tests import ROOT
from tests.dropped_in import TOY, DropIn, drop_in

__all__ = ["drop_in"]
DOCS = ROOT / "docs"


def test_page_and_pictures_are_what_the_script_makes() -> None:
    made = pages()

    assert {path.relative_to(DOCS).as_posix() for path in (DOCS / "strategies").iterdir()} == made.keys() - {"strategies.md"}
    for name, text in made.items():
        assert (DOCS / name).read_text() == text, f"{name}: `python -m odyssey_cli.planning.strategies_page docs`"


def test_each_strategy_has_an_example_and_its_picture_on_the_page() -> None:
    names = {strategy.name for strategy in strategies.load_all()}
    shown = re.findall(r"^!\[.+\]\(strategies/(\w+)\.svg\)$", (DOCS / "strategies.md").read_text(), re.MULTILINE)

    assert names == EXAMPLES.keys()
    assert sorted(names) == shown


def test_a_file_without_an_example_has_its_story_on_the_page(drop_in: DropIn) -> None:
    drop_in(TOY)

    text = section(strategies.load("toy"), None)

    assert text.startswith("## toy\n\n**The first pipeline that is whole does everything.**\n\nToy: the pipelines")
