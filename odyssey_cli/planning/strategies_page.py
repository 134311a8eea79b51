"""docs/strategies.md, from the strategies' own words and a worked-out example of each, and the pictures of these:
`python -m odyssey_cli.planning.strategies_page docs`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from textwrap import fill

import strategies
from odyssey.plan.form import form_of
from odyssey.plan.pipelines import spans_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import all_ranks_of
from odyssey_cli.display import quantities
from odyssey_cli.planning.strategy_examples import EXAMPLES, WorkedOut, work_out
from odyssey_cli.timeline import svg
from odyssey_cli.timeline.picture import Panel, Picture, headline, places_left, predicted
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.timeline import timeline_of
from strategies import Moment, Strategy

TIMES_S = (60.0, 600.0, 3600.0, 86400.0, 30 * 86400.0)
"""To the next loss, for what the model takes."""

ABOUT = """\
# Strategies

What can be done at the start of a job, when ranks are lost or slow, and when ranks come: each strategy proposes Plans, the
[performance model](internals/performance-model.md) prices them all, and the best one is taken, what it leaves for the next loss
included.
`--strategy NAME` asks one strategy after a loss, and the others only where that one has no Plan. What each would do, and at
what price, is the answer of `odyssey plan --fail 1`.

Each that is not for sharded models has an example: a step before and after, in one time scale, of a job of `configs/` on few
ranks with few micro-batches ([how to read it](operators/timeline.md#how-to-read-it)); and the prices of the plan before, of the
strategy's own, and of the best that others have. The model takes the one in bold.
"""

MOMENTS = {
    Moment.START: "a job starts",
    Moment.PROPOSE: "workers are lost or leave",
    Moment.GROW: "workers come",
    Moment.SLOW: "workers have become slow",
    Moment.PROTECT: "a layer would have one holder, or one node",
}
"""When a strategy is asked, for the page."""

HOW_TO_ADD_ONE = '''\
## A strategy of your own

is one file in `strategies/`, and nothing else has to know of it: the search, `--strategy`, `odyssey run --help`,
`odyssey plan`, the benchmarks and the tests that go through all strategies find it there. This one is whole, as
`strategies/standby.py`:

```python
"""Standby: ranks that stand by take the places of lost ones, and the layout stays as it is.

Their state comes from others that hold the layers. Where more are lost than stand by, what the others did is routed.
"""

import msgspec

from strategies.building.routing import routed
from strategies.building.taking_over import without_lost
from strategies.situation import Proposal, Situation

NAME = "standby"
SUMMARY = "Ranks that stand by take the places of lost ones, and the layout stays as it is."


def propose(situation: Situation) -> list[Proposal]:
    """The plan in force, with idle workers in places of lost ones."""
    if situation.plan is None or not situation.unused:
        return [Proposal(NAME, None, "no rank stands by")]
    stages = without_lost(situation, situation.plan)
    idle = iter(situation.unused)
    for row in stages:
        for s, stage in enumerate(row):
            if stage.worker is None:
                row[s] = msgspec.structs.replace(stage, worker=next(idle, None))
    return routed(situation, NAME, stages)
```

- The docstring is its story on this page. `NAME` is what the file is called, `SUMMARY` one sentence for `--help` and this page.
- `propose` is asked after each loss, and answers Plans or, without one, the reason that stands in the table. A reason names no
  worker by number: the table for one loss is that of all that are like it, found ahead. `situation` is all that it may look
  at: the plan in force, who is alive, who holds which layers, the profile. It starts nothing and sends nothing.
- `without_lost` are the stages of the plan in force, pipeline by pipeline, with None in the places of lost workers. Those
  get workers that are alive and have no work, for as long as there are any.
- `routed` makes the Plan: others run the stages that still have no worker, and where nobody could, that is the reason. What
  idle workers lack is moved to them, who sums gradients with whom follows from who holds what, and the Plan is proved.
- Its price is not its own matter: each Plan is priced by the model, and has its row beside all others.

`odyssey plan gpt3-medium-a100-32 --layout 4x7 --fail-ranks 1` shows it there, and `--strategy standby` asks it alone.

Other moments have functions of their own, in place of `propose` or beside it: `start` (before the first step, when there is no
Plan yet), `grow` (workers have come, and all that have work are there) and `slow` (workers compute slowly).
`protect(situation, plan)` is asked of a Plan in which some layer would have one holder, or one node, before it is taken: it
answers, way by way, what workers may keep of it (`Keep`s), and the search makes Plans of that. Only those with `propose` are
values of `--strategy`.

`strategies/situation/` says what it is given and answers, `strategies/building/` has what Plans are made with; its `compose`
refuses a [Plan](internals/plan.md) that contradicts itself or what the survivors hold. The engine runs any other.

A bug in it costs its row of the table, and not the job: where it raises, or returns what is no Proposal, the row says so with
file and line (`standby.py:22: ZeroDivisionError: division by zero`), people are told once, and the others decide. Where a
bug leaves no Plan at all, those pipelines that are whole do all the work. Only a file that is no strategy ends a job, at its
start.

That a job goes on as it was, where no worker of its Plan is lost, is no strategy (`strategies/search/unchanged.py`): it is what
all that is proposed then is measured against. Nor are smaller micro-batches and backwards in halves
(`cut_micro_batches.py`, `zero_bubble.py` there): they are made of the Plans that strategies have proposed.

This page and its pictures are made from these files: `python -m odyssey_cli.planning.strategies_page docs`, or `make picture`.
The examples are in `odyssey_cli/planning/strategy_examples.py`.
'''


def pages() -> dict[str, str]:
    """The page and its pictures, by their paths in docs/."""
    known = strategies.load_all()
    worked = {strategy.name: work_out(EXAMPLES[strategy.name]) for strategy in known if strategy.name in EXAMPLES}
    sections = [section(strategy, worked.get(strategy.name)) for strategy in known]
    pictures = {f"strategies/{name}.svg": svg.render(picture(name, its)) for name, its in worked.items()}
    return {"strategies.md": "\n".join([ABOUT, *sections, HOW_TO_ADD_ONE]), **pictures}


def section(strategy: Strategy, worked: WorkedOut | None) -> str:
    """Describe a strategy. `worked`: its example, None where it has none."""
    story = cleandoc(import_module(f"strategies.{strategy.name}").__doc__ or "")
    when = " and where ".join(text for moment, text in MOMENTS.items() if moment in strategy.answers)
    parts = [f"## {strategy.name}", f"**{strategy.summary}**", story, f"It is asked where {when}."]
    if worked is not None:
        parts.append(_wrapped(f"*When the model chooses it.* {worked.example.when}"))
        parts.append(_wrapped(f"*What it costs without losses.* {_costs(strategy, worked)}"))
        parts.append(f"![{picture(strategy.name, worked).title}](strategies/{strategy.name}.svg)")
        parts += [_wrapped(_job(worked)), _table(strategy.name, worked), *map(_wrapped, _choices(worked))]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return fill(text, 128, break_long_words=False, break_on_hyphens=False)


# -- in numbers --------------------------------------------------------------------------------------------------------


def _costs(strategy: Strategy, worked: WorkedOut) -> str:
    """In words; of what is done ahead of a loss in numbers, too."""
    costs, plan, bare = worked.example.costs, worked.before or worked.of(strategy.name).plan, worked.bare
    if not {Moment.START, Moment.PROTECT}.intersection(strategy.answers):
        return costs
    assert plan is not None and plan.estimate is not None and bare.estimate is not None
    mine, its = plan.estimate, bare.estimate
    if form_of(plan) == form_of(bare):
        return f"{costs} In the example nothing: with `--survive 0` the job starts with {form_of(bare)}, too."
    step = f"{quantities.seconds(mine.step_s)} a step in place of {quantities.seconds(its.step_s)}"
    memory = f"{quantities.size(mine.peak_bytes)} in place of {quantities.size(its.peak_bytes)}"
    more = quantities.percent(mine.step_s / its.step_s - 1)
    told = f"{costs} In the example {step} ({more} more), and {memory} on the fullest rank."
    return f"{told} {_forwards_ahead(plan, worked.found.profile)}"


def _forwards_ahead(plan: Plan, profile: Profile) -> str:
    """Why kept layers are not run ahead of a loss: of what that adds to a step the least that could be, where all idle time is
    filled; of what it saves at a loss the most, forwards of as many micro-batches as there are stages, down the pipeline."""
    assert plan.estimate is not None
    costs, computed = Costs(profile), timeline_of(plan, profile).times
    until_s = max(end_s for times in computed.values() for _, end_s in times[:-2])  # the last ones: commit, optimizer
    added_s, longest_s = 0.0, 0.0
    for worker, kept in plan.keeps.items():
        pipeline = plan.pipelines[plan.place[worker][0]]
        own, n_samples = pipeline.stages[plan.place[worker][1]], plan.micro_batch
        its_s = sum(costs.compute_s(kind, own.first, own.stop, n_samples) for kind in "FB")
        kept_s = sum(costs.compute_s("F", first, stop, n_samples) for first, stop in spans_of(kept))
        added_s = max(added_s, len(pipeline.micro_batches) * (its_s + kept_s) - until_s)
        longest_s = max(longest_s, costs.compute_s("F", own.first, own.stop, n_samples))
    saved_s = (2 * max(len(its.stages) for its in plan.pipelines) - 1) * longest_s
    text = "Forwards of kept layers are not run ahead, as Bamboo has it: they would"
    if added_s <= 0:
        return f"{text} fit into idle time here, and save {quantities.seconds(saved_s)} of a loss at most."
    every_s = plan.estimate.step_s * saved_s / added_s
    added = quantities.percent(added_s / plan.estimate.step_s)
    return (
        f"{text} add {added} to a step at least, and save {quantities.seconds(saved_s)} of a loss at most: losses would have"
        f" to come every {quantities.seconds(every_s)}."
    )


def _job(worked: WorkedOut) -> str:
    """`gpt3-medium-a100-32 on 4 ranks of 1 node, ...: rank 1 is lost.`"""
    example, profile = worked.example, worked.found.profile
    n_ranks = quantities.plural(example.n_nodes * example.ranks_per_node, "rank")
    where = f"{example.job} on {n_ranks} of {quantities.plural(example.n_nodes, 'node')}"
    batch = f"{example.n_micro_batches} micro-batches of {quantities.plural(profile.micro_batch, 'sequence')}"
    allowed = ", with `--allow-approximate`" if example.aim.approximate is not None else ""
    what = f"; {example.event}" if example.event else ""
    return f"{where}, {batch}, a loss expected in {quantities.seconds(worked.change.seconds)}{allowed}{what}."


def _table(name: str, worked: WorkedOut) -> str:
    """Before, with the strategy, and with the best of the others; of the start, with its next best."""
    mine = worked.of(name)
    others = (row for row in worked.table if row.plan is not None and (row.strategy != name or worked.before is None))
    other = next((row for row in others if row is not mine), None)
    rows = [f"| before |{_cells(worked.before)} |"] if worked.before is not None else []
    for row in sorted(filter(None, (mine, other)), key=worked.table.index):
        mark = "**" if row is worked.table[0] else ""
        assert row.plan is not None and row.estimate is not None
        rows.append(f"| {mark}{row.strategy}{mark} |{_cells(row.plan)} {quantities.seconds(row.estimate.transition.total_s)} |")
    return "\n".join(["| | layout | a step | memory of the fullest rank | transition |", "|---|---|---|---|---|", *rows])


def _cells(plan: Plan) -> str:
    assert plan.estimate is not None
    estimate = plan.estimate
    return f" {form_of(plan)} | {quantities.seconds(estimate.step_s)} | {quantities.size(estimate.peak_bytes)} |"


def _choices(worked: WorkedOut) -> list[str]:
    """What the model takes at other rates of losses: a line, or nothing of the start."""
    if worked.before is None:
        return []
    runs = [(name, [*map(quantities.seconds, its)]) for name, its in groupby(TIMES_S, worked.taken_at)]
    texts = [f"`{name}` {f'from {its[0]} to {its[-1]}' if len(its) > 1 else f'at {its[0]}'}" for name, its in runs]
    return [f"By the time to the next loss that is expected, the model takes {', '.join(texts)}."]


# -- in pictures -------------------------------------------------------------------------------------------------------


def picture(name: str, worked: WorkedOut) -> Picture:
    """A step before and after; of the start alone."""
    mine = worked.of(name).plan
    assert mine is not None
    title = f"{name}: {worked.example.event or 'the start'}"
    if worked.before is None:
        return Picture(title, (_panel("", worked, mine),))
    first = "unchanged" if worked.example.slow else "before"  # a slow rank is slow before anything is done
    return Picture(title, (_panel(first, worked, worked.before), _panel("after", worked, mine)))


def _panel(when: str, worked: WorkedOut, plan: Plan) -> Panel:
    """A step of this plan. A rank that is lost has a row until it is back."""
    lost = set(worked.example.lost).difference(all_ranks_of(plan.workers))
    places = places_left(lost, worked.before or plan, plan)
    strategy = "" if plan is worked.before else plan.strategy
    return predicted(headline(when, plan, strategy), plan, worked.found.profile, lost=places, slow=worked.example.slow)


def main(folder: Path) -> None:
    """Write the page and its pictures."""
    for name, text in pages().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
