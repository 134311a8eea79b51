"""docs/strategies.md, from the strategies' own words: `python -m strategies.search.page > docs/strategies.md`."""

from __future__ import annotations

from importlib import import_module
from inspect import cleandoc

import strategies

ABOUT = """\
# Strategies

What can be done when ranks are lost, or slow: each strategy proposes Plans, the [performance model](performance-model.md)
prices them all, and the best one is taken, what it leaves for the next loss included. `--strategy NAME` asks one strategy, and
the others only where that one has no Plan. What each would do, and at what price, is the answer of `odyssey plan --fail 1`.
"""

HOW_TO_ADD_ONE = """\
## A strategy of your own

is one file in `strategies/`, and nothing else has to know of it: the search, `--strategy`, `odyssey run --help`,
`odyssey plan`, the benchmarks and the tests that go through all strategies find it there. Its docstring is its story on this
page, and it has

    NAME = "fewest_moves"  # as the file is called: strategies/fewest_moves.py
    SUMMARY = "The survivors regroup so that as little state moves as can be."  # one sentence, for `--help` and this page

    def propose(situation: Situation) -> list[Proposal]:
        \"\"\"Plans, or the reason why there is none.\"\"\"

`strategies/situation/` says what it is given and answers, `strategies/building/` has what Plans are made with; its `compose`
refuses a [Plan](plan.md) that contradicts itself or what the survivors hold. The engine runs any other.

A bug in it costs its row of the table, and not the job: where it raises, or returns what is no Proposal, the row says so with
file and line (`fewest_moves.py:88: ZeroDivisionError: division by zero`), people are told once, and the others decide. Where a
bug leaves no Plan at all, those pipelines that are whole do all the work. Only a file that is no strategy ends a job, at its
start.

No strategy decides how a job starts (`strategies/search/initial.py`, by `--layout`), nor that it goes on as it was where no
worker of its Plan is lost (`strategies/search/unchanged.py`).

This page is written from these files: `python -m strategies.search.page > docs/strategies.md`.
"""


def page() -> str:
    """The whole of it."""
    parts = [ABOUT]
    for strategy in strategies.load_all():
        story = cleandoc(import_module(f"strategies.{strategy.name}").__doc__ or "")
        parts.append(f"## {strategy.name}\n\n**{strategy.summary}**\n\n{story}\n")
    return "\n".join([*parts, HOW_TO_ADD_ONE])


if __name__ == "__main__":
    print(page(), end="")
