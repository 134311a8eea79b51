"""The rule `split`: executable, within its cap, the same everywhere, and near the best that any order can do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.errors import PlanError
from odyssey.plan import split
from odyssey.plan.form import form_of
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, LayerWork, Plan, Route, Schedule, Work, decode, encode, under
from odyssey.plan.proof import prove
from odyssey.plan.schedule import Drop, dependency_order, program
from perfmodel.profile import catalog
from perfmodel.profile.profile import Profile
from perfmodel.step.timeline import timeline_of
from perfmodel.step.work import work_of
from strategies.building.compose import reductions
from strategies.search import best, initial_plan, search
from strategies.search.zero_bubble import LADDER
from strategies.situation import Aim, Objective
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, without

PLENTY = 10**12


def one_pipeline(work: Work, cuts: Sequence[int], shares: Sequence[int], cap: float | None, samples: int = 2) -> Plan:
    """As many pipelines as shares, all cut alike; the last micro-batch has one sample less."""
    n_stages, n_layers = len(cuts) - 1, cuts[-1]
    starts = [0, *accumulate(shares)]
    rows = [tuple(Stage(p * n_stages + s, a, b) for s, (a, b) in enumerate(pairwise(cuts))) for p in range(len(shares))]
    return prove(
        Plan(
            generation=0,
            strategy="test",
            step=0,
            global_batch=sum(shares) * samples - (samples > 1),
            micro_batch=samples,
            n_layers=n_layers,
            blocks=blocks_of(Pipeline(row, starts[p], starts[p + 1]) for p, row in enumerate(rows)),
            reductions=reductions([frozenset(stage.layers) for row in rows for stage in row], n_layers, ()),
            schedule=Schedule("split", cap, work),
        )
    )


def works(n_layers: int) -> st.SearchStrategy[Work]:
    us = st.integers(1, 40)
    rows = st.builds(
        lambda f, i, w, more, hop, act, out: LayerWork(1, f, max(1, i + w - more), i, w, hop, act, out, 7),
        *(
            us,
            st.integers(0, 40),
            st.integers(0, 40),
            st.integers(0, 3),
            st.integers(0, 20),
            st.integers(1, 50),
            st.integers(0, 9),
        ),
    )
    layers = st.lists(rows, min_size=n_layers, max_size=n_layers).map(tuple)
    return st.builds(Work, layers, st.integers(0, 3), st.sampled_from([120, 300, PLENTY]))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    n_layers = draw(st.integers(1, 6))
    inner = draw(st.sets(st.integers(1, max(1, n_layers - 1)), max_size=n_layers - 1)) if n_layers > 1 else set()
    shares = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cap = draw(st.sampled_from(LADDER))
    return one_pipeline(draw(works(n_layers)), [0, *sorted(inner), n_layers], shares, cap, draw(st.integers(1, 3)))


def kept(plan: Plan, worker: int) -> int:
    """The most that a worker keeps at once, counted along its program from the plan's own numbers."""
    work, place = plan.schedule.work, plan.place[worker]
    assert work is not None
    own = plan.pipelines[place[0]].stages[place[1]]
    layers = [layer for layer in work.layers for _ in range(layer.n)][own.first : own.stop]
    live: Counter[int] = Counter()
    most = 0
    for op in program(plan, worker):
        if isinstance(op, Compute) and op.kind in "FI":
            size = sum(layer.activation_bytes if op.kind == "F" else layer.output_bytes for layer in layers)
            live[op.micro_batch] += size * plan.samples.n_of(op.micro_batch) // plan.micro_batch
        elif isinstance(op, Drop):
            del live[op.micro_batch]
        most = max(most, sum(live.values()))
    return most


@given(plans())
def test_it_ends_and_runs_everything_once_in_the_order_that_the_halves_need(plan: Plan) -> None:
    done = dependency_order({worker: program(plan, worker) for worker in plan.workers})
    at = {str(op): i for i, (_, op) in enumerate(done) if isinstance(op, Compute)}
    ran = Counter(str(op) for _, op in done if isinstance(op, Compute))
    assert set(ran.values()) == {1}
    for pipeline in plan.pipelines:
        for k in pipeline.micro_batches:
            for s in range(len(pipeline.stages)):
                halves = [f"{s}{kind}{k}" for kind in "IW"] if f"{s}I{k}" in at else [f"{s}B{k}"]
                assert [at.pop(op) for op in (f"{s}F{k}", *halves)] == sorted(ran_at(done, s, k))
    assert not at, "and nothing else"


def ran_at(done: Sequence[tuple[int, object]], stage: int, micro_batch: int) -> Iterator[int]:
    for i, (_, op) in enumerate(done):
        if isinstance(op, Compute) and (op.stage, op.micro_batch) == (stage, micro_batch):
            yield i


@given(plans())
def test_a_worker_keeps_no_more_than_the_cap_times_what_1f1b_keeps(plan: Plan) -> None:
    """And no more than there is room for; but always one micro-batch."""
    work, cap = plan.schedule.work, plan.schedule.cap
    assert work is not None
    layers = [layer for layer in work.layers for _ in range(layer.n)]
    for worker in plan.workers:
        p, s = plan.place[worker]
        own = layers[plan.pipelines[p].stages[s].first : plan.pipelines[p].stages[s].stop]
        one = sum(layer.activation_bytes for layer in own)
        in_flight = min(len(plan.pipelines[p].stages) - s, len(plan.pipelines[p].micro_batches))
        room = work.room_bytes - sum(layer.state_bytes for layer in own)
        limit = room if cap is None else min(room, cap * in_flight * one)
        assert kept(plan, worker) <= max(limit, one)


@given(plans())
def test_at_the_cap_of_1f1b_it_keeps_no_more_than_1f1b_did(plan: Plan) -> None:
    """Against the program of 1F1B itself."""
    assert plan.schedule.work is not None
    at_one = msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, cap=1.0))
    full = msgspec.structs.replace(at_one, global_batch=plan.n_micro_batches * plan.micro_batch)
    plain = msgspec.structs.replace(full, schedule=Schedule("1f1b", None, plan.schedule.work))
    for worker in plan.workers:
        assert kept(full, worker) <= kept(plain, worker)


@given(plans())
def test_a_plan_survives_json_and_expands_alike(plan: Plan) -> None:
    copy = decode(encode(plan))
    assert copy == plan
    split._expanded.cache_clear()
    assert [program(copy, worker) for worker in copy.workers] == [program(plan, worker) for worker in plan.workers]


def test_other_processes_expand_the_same() -> None:
    """Whatever their hash seed is."""
    of, _ = catalog.load("gpt3-3.35b-a100-32")
    plan = first_plan(of, "4x8", 32)
    plan = msgspec.structs.replace(plan, schedule=Schedule("split", 1.5, work_of(of)))
    mine = "\n".join(" ".join(map(str, program(plan, worker))) for worker in plan.workers[:8])
    code = (
        "import sys; from odyssey.plan.plan import decode; from odyssey.plan.schedule import program\n"
        "plan = decode(sys.stdin.buffer.read())\n"
        "for worker in reversed(plan.workers[:8]): program(plan, worker)\n"
        "print('\\n'.join(' '.join(map(str, program(plan, worker))) for worker in plan.workers[:8]))"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], input=encode(plan), env=environment, stdout=subprocess.PIPE, check=True
        )
        assert done.stdout.decode().rstrip("\n") == mine


def test_pipelines_that_are_alike_share_one_expansion() -> None:
    work = Work((LayerWork(4, 10, 20, 10, 10, 1, 5, 1, 0),), 1, PLENTY)
    plan = one_pipeline(work, [0, 1, 2, 3, 4], [6] * 50, 1.5, samples=1)
    split._expanded.cache_clear()
    programs = [program(plan, worker) for worker in plan.workers]
    assert split._expanded.cache_info().misses == 1 and len(programs) == 200


def test_a_plan_under_another_schedule_is_the_plan_with_that_schedule() -> None:
    plan = first_plan(profile(4, 8), "2x4", 8)
    ruled = under(plan, Schedule("split", 2.0, work_of(profile(4, 8))))
    afresh = decode(encode(ruled))
    assert ruled == afresh and ruled.place == afresh.place and ruled.groups_of == afresh.groups_of
    assert [program(ruled, worker) for worker in ruled.workers] == [program(afresh, worker) for worker in afresh.workers]
    assert [program(ruled, worker) for worker in plan.workers] != [program(plan, worker) for worker in plan.workers]


def test_a_plan_under_the_rule_stays_small() -> None:
    of, _ = catalog.load("gpt3-3.35b-a100-32")
    plan = first_plan(of, "4x8", 32)
    ruled = msgspec.structs.replace(plan, schedule=Schedule("split", 2.0, work_of(of)))
    assert len(encode(ruled)) < len(encode(plan)) + 400
    assert sum(row.n for row in work_of(of).layers) == len(of.layers)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (Schedule("zigzag"), "schedule.rule: unknown rule 'zigzag'"),
        (Schedule("split", 2.0), "schedule.work knows 0 layers, the model has 2"),
        (
            Schedule("split", 0.5, Work((LayerWork(2, 1, 2, 1, 1, 0, 1, 1, 1),), 0, 9)),
            "schedule.cap must be at least 1, got 0.5",
        ),
    ],
)
def test_a_wrong_schedule_is_a_plan_error_that_names_the_field(schedule: Schedule, says: str) -> None:
    plan = msgspec.structs.replace(first_plan(profile(2, 4), "2x2", 4), schedule=schedule)
    with pytest.raises(PlanError, match=says):
        prove(plan)


def test_a_pipeline_with_routes_needs_explicit_orders() -> None:
    work = Work((LayerWork(2, 1, 2, 1, 1, 0, 1, 1, 1),), 0, PLENTY)
    plan = one_pipeline(work, [0, 1, 2], [2, 2], None, samples=1)
    routed = msgspec.structs.replace(plan, routes=(Route(0, 1, 3),))
    with pytest.raises(PlanError, match="pipeline 0 is routed elsewhere in part and has no explicit order"):
        program(routed, 0)


# -- against the best order ---------------------------------------------------------------------------------------------------


@lru_cache
def orders_of(n_micro_batches: int) -> tuple[str, ...]:
    """All orders of one worker that take alike micro-batches one after the other: F, then I, then W of each."""

    def extend(done: str) -> Iterator[str]:
        f, i, w = (done.count(kind) for kind in "FIW")
        if w == n_micro_batches:
            yield done
        for kind, may in (("F", f < n_micro_batches), ("I", i < f), ("W", w < i)):
            if may:
                yield from extend(done + kind)

    return tuple(extend(""))


def makespan(orders: Sequence[str], times: Sequence[dict[str, int]]) -> float:
    """When the last worker is done, by relaxation until nothing changes; infinite if they wait for each other."""
    ends: dict[tuple[int, str, int], float] = {}
    position, clock = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while position[s] < len(order):
                kind = order[position[s]]
                j = order[: position[s]].count(kind)
                needs = (s - 1, "F", j) if kind == "F" else (s + 1, "I", j)
                is_free = kind == "W" or (kind == "F" and s == 0) or (kind == "I" and s == len(orders) - 1)
                if not is_free and needs not in ends:
                    break
                clock[s] = max(clock[s], 0.0 if is_free else ends[needs]) + times[s][kind]
                ends[s, kind, j] = clock[s]
                position[s] += 1
                moved = True
    return max(clock) if position == [len(order) for order in orders] else float("inf")


def most_in_flight(order: str) -> int:
    return max(order[:i].count("F") - order[:i].count("W") for i in range(len(order) + 1))


@settings(max_examples=examples(25))
@given(data=st.data(), shape=st.sampled_from([(2, 2), (2, 3), (3, 2)]), cap=st.sampled_from([1.0, 1.5, 2.0, None]))
def test_it_is_near_the_best_of_all_orders_within_the_cap(
    data: st.DataObject, shape: tuple[int, int], cap: float | None
) -> None:
    """By trying them all, where deferring takes no memory of its own. Stages are alike, as layouts make them."""
    n_stages, n_micro_batches = shape
    f, i, w = (data.draw(st.integers(1, 4)) for _ in range(3))
    work = Work((LayerWork(n_stages, f, i + w, i, w, 0, 1000, 0, 0),), 0, PLENTY)
    plan = one_pipeline(work, range(n_stages + 1), [n_micro_batches], cap, samples=1)
    found = ["".join(op.kind for op in program(plan, s) if isinstance(op, Compute)).replace("B", "IW") for s in range(n_stages)]
    times = [{"F": f, "I": i, "W": w}] * n_stages
    room = [n_micro_batches if cap is None else int(cap * min(n_stages - s, n_micro_batches)) for s in range(n_stages)]
    allowed = [[order for order in orders_of(n_micro_batches) if most_in_flight(order) <= room[s]] for s in range(n_stages)]
    optimum = min(makespan(orders, times) for orders in product(*allowed))
    assert optimum <= makespan(found, times) <= 1.05 * optimum


# -- in the search ------------------------------------------------------------------------------------------------------------


def bubbly(w: float = 0.01, **options: object) -> Profile:
    """Eight layers whose activations take 100 bytes, eight micro-batches a step."""
    rows = [layer(str(i), 0.01, 0.01, w, activation_bytes=100, output_bytes=4) for i in range(8)]
    return profile(rows, 8, **options)  # type: ignore[arg-type]


def forms(of: Profile, layout: str, n_workers: int) -> list[str]:
    """What a job could start with, best first."""
    return [form_of(c.plan) for c in initial_plan(situation(of, None, range(n_workers)), layout) if c.plan is not None]


def test_a_job_starts_with_a_split_backward_where_bubbles_are_filled() -> None:
    assert forms(bubbly(), "2x4", 8) == ["2x4 split max", "2x4"]


@pytest.mark.parametrize(
    ("of", "layout"),
    [(bubbly(cores=2), "2x4"), (bubbly(w=0.0), "2x4"), (bubbly(), "8x1")],
    ids=["ranks share busy cores", "nothing can wait", "no pipelines"],
)
def test_a_job_starts_in_1f1b_where_nothing_is_gained(of: Profile, layout: str) -> None:
    assert forms(of, layout, 8) == [layout]


def test_more_memory_is_taken_only_as_far_as_there_is_some() -> None:
    """1F1B keeps four micro-batches of two layers at the first stage; there is room for hardly more than half as much again."""
    assert forms(bubbly(memory_bytes=100_000), "2x4", 8)[0] == "2x4 split max"
    tight = bubbly(memory_bytes=1250)
    chosen = best(initial_plan(situation(tight, None, range(8)), "2x4"))
    assert chosen is not None and chosen.plan is not None and chosen.estimate is not None
    assert chosen.plan.schedule.rule == "split" and chosen.estimate.peak_bytes <= 1250


@pytest.mark.parametrize("name", ["gpt3-3.35b-a100-32", "gpt3-medium-a100-32", "gpt3-6.7b-a100-32"])
def test_each_rung_is_at_least_as_fast_as_1f1b_and_the_price_knows_its_memory(name: str) -> None:
    job = catalog.load_job(name)
    plan = first_plan(job.profile, job.layout, job.n_ranks)
    plain = price(plan, job.profile, seconds_to_change=3600.0)
    steps = []
    for cap in LADDER:
        schedule = Schedule("split", cap, work_of(job.profile))
        rung = price(msgspec.structs.replace(plan, schedule=schedule), job.profile, seconds_to_change=3600.0)
        assert rung.peak_bytes <= job.profile.cluster.memory_bytes
        assert cap != 1.0 or rung.peak_bytes <= plain.peak_bytes * 1.02, "messages and weights are the rest"
        steps.append(rung.step_s)
    assert all(more <= less * 1.01 for more, less in pairwise(steps)) and max(steps) <= plain.step_s
    if name == "gpt3-3.35b-a100-32":  # as an independent simulation found before the rule was there
        assert steps[0] / plain.step_s == pytest.approx(0.89, abs=0.01)
        assert steps[1] / plain.step_s == pytest.approx(0.94, abs=0.01)


def test_the_price_is_that_of_the_schedule() -> None:
    """Pipelines of one shape under other caps are other cells; alike ones are simulated once."""
    of = bubbly()
    plan = first_plan(of, "2x4", 8)
    steps = {price(plan, of, seconds_to_change=1e9).step_s}
    for cap in (1.25, None):
        ruled = msgspec.structs.replace(plan, schedule=Schedule("split", cap, work_of(of)))
        timeline = timeline_of(ruled, of)
        assert set(timeline.times) == set(plan.workers[:4])
        steps.add(price(ruled, of, seconds_to_change=1e9).step_s)
        assert timeline.step_s in steps
    assert len(steps) == 3


def test_losses_under_the_rule_are_answered_by_every_strategy() -> None:
    """Whoever is routed gets explicit orders, all others keep the rule."""
    of = bubbly()
    start = best(initial_plan(situation(of, None, range(8)), "4x2"))
    assert start is not None and start.plan is not None and start.plan.schedule.rule == "split"
    plan = start.plan
    after = {c.strategy: c.plan for c in search(situation(of, plan, without(plan, 3), respawnable=[3])) if c.plan is not None}
    assert set(after) == {"repartition", "reroute", "respawn", "shrink"}
    for strategy, its in after.items():
        done = dependency_order({worker: program(its, worker) for worker in its.workers})
        forwards = Counter((op.stage, op.micro_batch) for _, op in done if isinstance(op, Compute) and op.kind == "F")
        assert set(forwards.values()) == {1}, strategy
    rerouted = after["reroute"]
    untouched = set(rerouted.workers) - {order.worker for order in rerouted.schedule.orders}
    assert untouched and all(program(rerouted, worker) == program(plan, worker) for worker in untouched)


@pytest.mark.parametrize(
    ("job", "n_workers", "global_batch"),
    [("gpt2-xl-v100-32", 32, 160), ("gpt2-xl-v100-32", 40, 200), ("gpt3-6.7b-a100-32", 40, 120)],
)
def test_no_plan_of_a_first_table_is_better_in_halves_than_the_one_that_is_taken(
    job: str, n_workers: int, global_batch: int
) -> None:
    """What may be gained in halves differs by a half from plan to plan: they are tried until none of the others can be best."""
    of = catalog.load_job(job).profile
    of = msgspec.structs.replace(of, global_batch=global_batch)
    start = situation(of, None, range(n_workers), aim=Aim(Objective.PAPER))
    table = initial_plan(start, "auto")
    chosen, work = best(table), work_of(of)
    assert chosen is not None and chosen.estimate is not None
    limit = of.cluster.memory_bytes
    for plan in (row.plan for row in table if row.plan is not None and row.plan.schedule.rule == "1f1b"):
        of_halves = price(under(plan, Schedule("split", None, work)), of, seconds_to_change=3600.0, node_of=start.node_of)
        if of_halves.peak_bytes <= limit:
            assert of_halves.step_s >= 0.999 * chosen.estimate.step_s
