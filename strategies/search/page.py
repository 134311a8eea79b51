"""docs/strategies.md, from the strategies' own words: `python -m strategies.search.page > docs/strategies.md`."""

from __future__ import annotations

from importlib import import_module
from inspect import cleandoc

import strategies
from strategies import Moment

ABOUT = """\
# Strategies

What can be done at the start of a job, when ranks are lost or slow, and when ranks come: each strategy proposes Plans, the
[performance model](performance-model.md) prices them all, and the best one is taken, what it leaves for the next loss included.
`--strategy NAME` asks one strategy after a loss, and the others only where that one has no Plan. What each would do, and at
what price, is the answer of `odyssey plan --fail 1`.
"""

MOMENTS = {
    Moment.START: "a job starts",
    Moment.PROPOSE: "workers are lost or leave",
    Moment.GROW: "workers come",
    Moment.SLOW: "workers have become slow",
    Moment.PROTECT: "a layer would have one holder, or one node",
}
"""When a strategy is asked, for the page."""

HOW_TO_ADD_ONE = """\
## A strategy of your own

is one file in `strategies/`, and nothing else has to know of it: the search, `--strategy`, `odyssey run --help`,
`odyssey plan`, the benchmarks and the tests that go through all strategies find it there. Its docstring is its story on this
page, and it has

    NAME = "fewest_moves"  # as the file is called: strategies/fewest_moves.py
    SUMMARY = "The survivors regroup so that as little state moves as can be."  # one sentence, for `--help` and this page

    def propose(situation: Situation) -> list[Proposal]:
        \"\"\"Plans, or the reason why there is none.\"\"\"

or, for other moments, `start` in place of `propose` (before the first step, when there is no Plan yet), `grow` (workers have
come, and all that have work are there) or `slow` (workers compute slowly); or several of these. `protect(situation, plan)` is
asked of a Plan in which some layer would have one holder, or one node, before it is taken: it answers, way by way, what workers
may keep of it (`Keep`s), and the search makes Plans of that. Only those with `propose` are values of `--strategy`.

`strategies/situation/` says what it is given and answers, `strategies/building/` has what Plans are made with; its `compose`
refuses a [Plan](plan.md) that contradicts itself or what the survivors hold. The engine runs any other.

A bug in it costs its row of the table, and not the job: where it raises, or returns what is no Proposal, the row says so with
file and line (`fewest_moves.py:88: ZeroDivisionError: division by zero`), people are told once, and the others decide. Where a
bug leaves no Plan at all, those pipelines that are whole do all the work. Only a file that is no strategy ends a job, at its
start.

That a job goes on as it was, where no worker of its Plan is lost, is no strategy (`strategies/search/unchanged.py`): it is what
all that is proposed then is measured against. Nor are smaller micro-batches and backwards in halves (`uneven.py`, `split.py`
there): they are made of the Plans that strategies have proposed.

This page is written from these files: `python -m strategies.search.page > docs/strategies.md`.
"""


def page() -> str:
    """The whole of it."""
    parts = [ABOUT]
    for strategy in strategies.load_all():
        story = cleandoc(import_module(f"strategies.{strategy.name}").__doc__ or "")
        when = " and where ".join(text for moment, text in MOMENTS.items() if moment in strategy.answers)
        parts.append(f"## {strategy.name}\n\n**{strategy.summary}**\n\n{story}\n\nIt is asked where {when}.\n")
    return "\n".join([*parts, HOW_TO_ADD_ONE])


if __name__ == "__main__":
    print(page(), end="")
