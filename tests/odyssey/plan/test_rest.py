"""The rest of a step: cut anywhere, any number of times, and in the end every layer has every sample's gradient once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import StateLost
from odyssey.plan.buckets import buckets
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.rest import Part, Rest, Summed, kept_layers, left, rest_of_step, rest_plan, summed_of
from odyssey.plan.schedule import Reduce, dependency_order, program
from odyssey.runtime.tally import Tally
from perfmodel.profile.profile import Profile
from strategies.search import search
from tests.examples import examples
from tests.planning import first_plan, layer, profile, situation, without

OTHERS = -1
"""In a sum: others have been added to it."""


@dataclass
class Rank:
    """What a worker's parameters have summed: layer or tie -> (the layer that it came by, sample), how often."""

    tally: Tally
    sums: defaultdict[str | int, Counter[tuple[int, int]]] = field(default_factory=lambda: defaultdict(Counter))


class Model:
    """Parameters of ranks, as the samples that their gradients are of."""

    def __init__(self, n_layers: int, ties: tuple[tuple[int, ...], ...]) -> None:
        self.n_layers, self.ties = n_layers, ties
        self.ranks: defaultdict[int, Rank] = defaultdict(lambda: Rank(Tally(n_layers, ties)))

    def parameters(self, layer: int) -> list[str | int]:
        return [layer, *(f"tie {t}" for t, tie in enumerate(self.ties) if layer in tie)]

    def run(self, plan: Plan, n_ops: int | None) -> int:
        """So many ops of a step, in an order in which they may come; how many there are."""
        done = dependency_order({worker: program(plan, worker) for worker in plan.workers})
        for worker, op in done[:n_ops]:
            if isinstance(op, Compute) and op.kind == "F" and plan.is_last(op.micro_batch, op.stage):
                if self.n_layers - 1 not in plan.samples.summed(op.micro_batch):
                    self.ranks[worker].tally.losses[plan.samples.positions(op.micro_batch)] = torch.ones(())
            elif isinstance(op, Compute) and op.kind in "BW":
                self.add(worker, plan, op)
            elif isinstance(op, Reduce) and len(plan.reduce[op.group].workers) > 1 and n_ops is not None:
                for bucket in buckets(plan, op.group, [8] * self.n_layers, [8] * len(self.ties)):
                    self.ranks[worker].tally.reducing(bucket)
                    for what in (*bucket.layers, *(f"tie {t}" for t in bucket.ties)):
                        self.ranks[worker].sums[what][OTHERS, OTHERS] += 1
        return len(done)

    def add(self, worker: int, plan: Plan, op: Compute) -> None:
        rank, positions = self.ranks[worker], plan.samples.positions(op.micro_batch)
        layers = set(plan.layer_range(op.micro_batch, op.stage).layers) - plan.samples.summed(op.micro_batch)
        with rank.tally.adding(layers, positions):
            for own in layers:
                for parameter in self.parameters(own):
                    rank.sums[parameter].update((own, position) for position in positions)

    def go_on(self, plan: Plan, rest: Rest | None) -> None:
        """As sessions do: what is not kept is forgotten, and what moves comes without gradients."""
        for worker, rank in list(self.ranks.items()):
            kept = frozenset() if rest is None else rest.layers & kept_layers(rank.tally.summed(), plan, worker)
            rank.tally.keep(kept)
            stay = {parameter for layer in kept for parameter in self.parameters(layer)}
            rank.sums = defaultdict(Counter, {what: sums for what, sums in rank.sums.items() if what in stay})

    def check(self, plan: Plan) -> None:
        """Every sample has come to every layer's own parameters, and by every layer to what it shares, once."""
        everything = Counter(range(plan.global_batch))
        for own in range(self.n_layers):
            for parameter in self.parameters(own):
                found: Counter[int] = Counter()
                for worker in plan.holders[own] if parameter == own else plan.workers:
                    its = self.ranks[worker].sums[parameter]
                    assert OTHERS not in {by for by, _ in its}
                    found.update({position: n for (by, position), n in its.items() if by == own})
                assert found == everything, f"{parameter} by layer {own}"
        counted = [positions for worker in plan.workers for positions in self.ranks[worker].tally.losses]
        assert Counter(position for positions in counted for position in positions) == everything


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Profile, Plan]:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    n_layers = draw(st.integers(max(lengths), 6))
    seconds = st.sampled_from([0.3, 1.0])
    rows = [layer(str(i), draw(seconds), draw(seconds), draw(seconds), parameter_bytes=8) for i in range(n_layers)]
    ties = draw(st.sampled_from([(), ((0, n_layers - 1),), ((0, n_layers // 2), (n_layers // 2, n_layers - 1))]))
    ties = tuple(tie for tie in ties if len(set(tie)) == 2)
    batch = len(lengths) * 2 * draw(st.integers(1, 4)) - draw(st.integers(0, 1))
    of = profile(rows, batch, 2, ties=ties, tie_bytes=(8,) * len(ties))
    of = replace(of, uncut=draw(st.sampled_from([of.uncut, ""])))
    return of, first_plan(of, "+".join(map(str, lengths)), sum(lengths))


@settings(max_examples=examples(150), deadline=None)
@given(jobs(), st.data())
def test_a_step_that_is_cut_again_and_again_sums_every_sample_once(job: tuple[Profile, Plan], data: st.DataObject) -> None:
    """I6."""
    of, plan = job
    model = Model(plan.n_layers, of.ties)
    running: Plan = plan
    for _ in range(data.draw(st.integers(1, 4))):
        n_ops = len([op for worker in running.workers for op in program(running, worker)])
        model.run(running, data.draw(st.integers(0, n_ops)))
        lost = data.draw(st.sets(st.sampled_from(plan.workers), max_size=2))
        alive = without(plan, *lost)
        try:
            candidates = [c.plan for c in search(situation(of, plan, alive)) if c.plan is not None]
        except StateLost:
            return
        for worker in lost:
            model.ranks.pop(worker, None)
        plan = data.draw(st.sampled_from(candidates))
        rest = rest_of_step(plan, {worker: rank.tally.summed() for worker, rank in model.ranks.items()})
        model.go_on(plan, rest)
        running = plan if rest is None else rest_plan(plan, rest)
        event(f"{plan.strategy}: {'all is run again' if rest is None else 'something is kept'}")
    model.run(running, None)
    model.check(plan)


def two_pipelines(n_micro_batches: int, *, lost: bool = False) -> Plan:
    half = n_micro_batches // 2
    stages = [(Stage(0, 0, 2), Stage(1, 2, 4)), (Stage(2, 0, 2), Stage(3, 2, 4))]
    if lost:
        return replace(_plan(n_micro_batches), blocks=blocks_of((Pipeline(stages[0], 0, n_micro_batches),)))
    pipelines = Pipeline(stages[0], 0, half), Pipeline(stages[1], half, n_micro_batches)
    return replace(_plan(n_micro_batches), blocks=blocks_of(pipelines))


def _plan(n_micro_batches: int) -> Plan:
    return first_plan(profile(4, n_micro_batches), "2x2", 4)


def test_the_samples_of_an_intact_pipeline_are_kept_and_those_in_flight_add_to_its_first_stage_only() -> None:
    """The last stage of pipeline 0 is one micro-batch ahead; that of pipeline 1 is lost, and so it is let go."""
    summed = {0: (Summed(0, 2, ((0, 2),)),), 1: (Summed(2, 4, ((0, 3),)),), 2: (Summed(0, 2, ((4, 6),)),)}
    rest = rest_of_step(two_pipelines(8, lost=True), summed)
    assert rest is not None
    assert rest.summed == (Summed(0, 2, ((0, 2),)), Summed(2, 4, ((0, 3),)))
    assert sorted((part.first, part.stop) for part in rest.parts) == [(i, i + 1) for i in range(2, 8)]
    plan = rest_plan(two_pipelines(8, lost=True), rest)
    in_flight = next(part for part in rest.parts if part.first == 2)
    assert plan.samples.summed(in_flight.micro_batch) == {2, 3}
    assert plan.samples.positions(in_flight.micro_batch) == range(2, 3) and plan.samples.number(in_flight.micro_batch) == 2


def test_what_is_missing_is_spread_over_all_pipelines() -> None:
    """All that is left is of the first pipeline."""
    summed = {worker: (Summed(0, 2, ((4, 8),)),) if worker == 2 else (Summed(2, 4, ((4, 8),)),) for worker in (2, 3)}
    rest = rest_of_step(two_pipelines(8), summed)
    assert rest is not None
    assert rest.parts == (Part(0, 0, 1), Part(2, 2, 3), Part(4, 1, 2), Part(6, 3, 4))


def test_two_ranks_that_have_summed_the_same_are_found() -> None:
    summed = {worker: (Summed(0, 2, ((3, 5),)),) for worker in (0, 2)}
    with pytest.raises(ValueError, match="layer 0 has the gradient of sample 3 of the step twice"):
        rest_of_step(two_pipelines(8), summed)
    with pytest.raises(ValueError, match=r"rank 0 has gradients of samples \[\(7, 9\)\] of 8"):
        rest_of_step(two_pipelines(8), {0: (Summed(0, 2, ((7, 9),)),)})


def test_an_op_that_ends_in_an_exception_leaves_nothing_that_is_worth_anything() -> None:
    tally = Tally(4, ())
    with tally.adding(range(2), range(3)):
        pass
    assert tally.summed() == (Summed(0, 2, ((0, 3),)),)
    with pytest.raises(KeyError), tally.adding(range(2), range(3, 6)):
        raise KeyError
    assert tally.summed() == ()


def test_losses_and_metrics_stay_with_the_samples_that_the_last_layer_keeps() -> None:
    tally, one = Tally(4, ()), torch.ones(())
    for layers, samples in ((range(4), range(2)), (range(2), range(2, 4)), (range(4), range(4, 5))):
        tally.count(samples, 2 * one, {"it": one}, len(samples))
        with tally.adding(layers, samples):
            pass
    assert {its: float(metrics["it"]) for its, metrics in tally.metrics.items()} == {
        range(2): 2,
        range(2, 4): 2,
        range(4, 5): 1,
    }
    tally.keep(frozenset({1, 3}))
    assert tally.metrics.keys() == tally.losses.keys() == {range(2), range(4, 5)}
    tally.keep(frozenset({1}))
    assert not tally.metrics and not tally.losses


def test_layers_that_share_a_parameter_are_kept_together_or_not_at_all() -> None:
    assert left({0, 1, 2, 5}, {5}, [(0, 5), (0, 2)]) == {1}
    assert left({0, 1}, {5}, [(0, 5)]) == {1}
    assert left({0, 1}, {7}, [(0, 5)]) == {0, 1}


def test_what_is_alike_is_written_once() -> None:
    spans = {0: [(2, 3), (0, 2)], 1: [(0, 3)], 3: [(0, 3)], 4: [(1, 2), (4, 5)]}
    assert summed_of(spans) == (
        Summed(0, 2, ((0, 3),)),
        Summed(3, 4, ((0, 3),)),
        Summed(4, 5, ((1, 2), (4, 5))),
    )
