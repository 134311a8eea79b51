"""The promise, kept under kills at random moments: `make test` runs some dozens of them, `make soak` five hundred."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from benchmarks import report
from tests import exactness
from tests.exactness import Case

LAYOUTS = {"2x2": 4, "2x4": 8, "4x2": 8, "3+2+3": 8}
STRATEGIES = ("auto", "reroute", "repartition", "shrink", "respawn")
VARIANTS = ("gpt", "tied", "frozen", "nested", "mlp")


def random_case(seed: int, n_kills: tuple[int, int] = (1, 4)) -> Case:
    """A layout, a strategy, a model, and so many kills: at random moments of steps, or inside a recovery."""
    rng = random.Random(seed)
    layout = rng.choice(list(LAYOUTS))
    n_ranks = LAYOUTS[layout]
    strategy = rng.choice(STRATEGIES)
    step = 0
    kills = []
    for number in range(rng.randint(*n_kills) if n_ranks == 8 or strategy == "respawn" else rng.randint(1, 2)):
        ranks = rng.sample(range(n_ranks), 2 if n_ranks == 8 and rng.random() < 0.15 else 1)
        if number and rng.random() < 0.35:
            phase, delay_s = rng.choice(("pausing", "plan", "go")), rng.choice((0, rng.uniform(0, 0.02)))
            nth = number if phase == "pausing" or rng.random() < 0.1 else number + 1  # the first plan is that of the start
            kills.append({"on": phase, "number": nth, "delay_s": delay_s, "ranks": ranks})
        else:
            step += rng.randint(1, 3)
            kills.append({"on": "step", "number": step, "delay_s": rng.uniform(0, 0.06), "ranks": ranks})
    return Case(
        seed=seed,
        n_ranks=n_ranks,
        layout=layout,
        strategy=strategy,
        variant=rng.choice(VARIANTS),
        max_restarts=8 if strategy == "respawn" else rng.choice((0, 0, 8)),
        kills=tuple(kills),
    )


SOME = {("2x2", "auto"), ("4x2", "reroute"), ("2x4", "repartition"), ("3+2+3", "shrink"), ("4x2", "respawn"), ("2x4", "auto")}
"""Quick; the rest is for the soak."""


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        pytest.param(layout, strategy, marks=() if (layout, strategy) in SOME else pytest.mark.soak)
        for layout in LAYOUTS
        for strategy in STRATEGIES
    ],
)
def test_a_killed_rank_changes_nothing(layout, strategy, tmp_path):
    n_ranks = LAYOUTS[layout]
    kills = ({"on": "step", "number": 4, "delay_s": 0.01, "ranks": [n_ranks - 1]},)
    restarts = 3 if strategy == "respawn" else 0
    case = Case(0, n_ranks, layout, strategy, variant="tied", steps=10, max_restarts=restarts, kills=kills)
    outcome = exactness.run(case, tmp_path)
    assert outcome.n_kills == 1 and not outcome.state_lost
    assert strategy in ("auto", outcome.strategies[0])


@pytest.mark.parametrize("seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.soak) for seed in range(24)])
def test_random_kills_change_nothing(seed, tmp_path):
    exactness.run(random_case(seed), tmp_path)


@pytest.mark.parametrize("phase", ["pausing", "plan", "go"])
def test_a_second_loss_during_the_recovery_changes_nothing(phase, tmp_path):
    kills = (
        {"on": "step", "number": 3, "delay_s": 0.005, "ranks": [7]},
        {"on": phase, "number": 1 if phase == "pausing" else 2, "delay_s": 0, "ranks": [2]},
    )
    outcome = exactness.run(Case(0, 8, "4x2", kills=kills, steps=8), tmp_path)
    assert outcome.n_kills == 2
    if phase != "go":
        assert "lost during recovery" in outcome.marks


def test_stages_that_need_no_gradient_train_on_and_survive(tmp_path):
    """Whole stages of frozen layers: no gradient comes back to say that what they have sent has arrived."""
    kills = ({"on": "step", "number": 3, "delay_s": 0.005, "ranks": [1]},)
    case = Case(0, 6, "2x3", "repartition", variant="prefix", global_batch=32, kills=kills, steps=8)
    outcome = exactness.run(case, tmp_path)
    assert outcome.strategies


def test_a_rank_that_stands_still_is_lost_and_changes_nothing(tmp_path):
    kills = ({"on": "step", "number": 3, "delay_s": 0.005, "ranks": [1], "stop": True},)
    outcome = exactness.run(Case(0, 4, "2x2", kills=kills, steps=8), tmp_path)
    assert outcome.strategies


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_five_hundred_random_kills_change_nothing(tmp_path):
    n_wanted = int(os.environ.get("ODYSSEY_SOAK_KILLS", "500"))
    seed = int(os.environ.get("ODYSSEY_SOAK_SEED", "1000"))
    first_seed, started_s = seed, time.monotonic()
    strategies: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    recoveries_s: list[float] = []
    n_kills = n_stops = 0
    while n_kills < n_wanted:
        outcome = exactness.run(random_case(seed, n_kills=(3, 6)), tmp_path / str(seed))
        seed += 1
        n_kills += outcome.n_kills
        n_stops += outcome.state_lost
        strategies.update(outcome.strategies)
        marks.update(outcome.marks)
        recoveries_s += outcome.recovery_s
    for mark in ("rolled forward", "redone", "lost during recovery", "paused in the script's own code"):
        assert marks[mark], f"no kill met the case {mark!r}: the kills do not test it"
    recoveries_s.sort()
    summary = {
        "kills": n_kills,
        "jobs": seed - first_seed,
        "jobs_stopped_because_state_was_lost": n_stops,
        "recoveries": len(recoveries_s),
        "recovery_median_s": recoveries_s[len(recoveries_s) // 2],
        "recovery_p99_s": recoveries_s[int(len(recoveries_s) * 0.99)],
        "minutes": (time.monotonic() - started_s) / 60,
    }
    rows: list[dict[str, report.Cell]] = [{"what": what, "count": n} for what, n in sorted((strategies + marks).items())]
    about = (
        "Kills at random moments of steps and of recoveries, over layouts, strategies and models; every job ended with the "
        "losses and parameters of the run in one process within 1e-10, or had lost the last holder of just the layers it named."
    )
    report.write(report.Report("soak", about, report.this_machine(), summary, rows), report.RESULTS)
