"""Silent bugs of a transition, injected one by one: the gate refuses each, from what ranks read off their modules.

The kinds are those that systems which move training state have really had. Three ranks: rank 0 holds all layers, rank 1
gives up its own, rank 2 adopts them and is hit by the bug. Every report is made by the code that makes it in a rank.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from launcher.coordinator import gate
from odyssey.model.model import Model
from odyssey.plan.moves import Keep, Move, keep_runs, move_runs
from odyssey.plan.needs import Needs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction
from odyssey.plan.proof import prove
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.units import Position
from odyssey.runtime import proof
from odyssey.runtime.backend import Backend
from odyssey.runtime.data import MapStyle
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from odyssey.runtime.tally import Tally
from odyssey.runtime.transfer import Moved
from tests import models
from tests.moved import moved

CPU = torch.device("cpu")
POSITION = Position(3, 0)
ADOPTED = (1, 2)


def plan(*, is_alone=False, keeps=False):
    """Rank 2 takes layers 1 and 2 of four from rank 1, which keeps layer 0; the last layer shares a parameter with the first.
    `is_alone`: without rank 0, which holds everything a second time. `keeps`: rank 2 has them beside the last one, which it
    runs, and rank 1 goes on with them."""
    parts = (Stage(1, 0, 1), Stage(2, 1, 4))
    moves = tuple(Move(layer, 1, 2) for layer in ADOPTED)
    if keeps:
        pipelines = (Pipeline((Stage(0, 0, 4),), 0, 2), Pipeline((Stage(1, 0, 3), Stage(2, 3, 4)), 2, 4))
        reductions = (Reduction((0,), ()), Reduction(ADOPTED, (0,)), Reduction((3,), ()))
        kept = keep_runs([Keep(2, 1, 3)])
        its = Plan(2, "test", 3, 8, 2, 4, blocks_of(pipelines), reductions, ties=((0, 3),), move_runs=move_runs(moves))
        return prove(replace(its, keep_runs=kept), HELD_BEFORE)
    if is_alone:
        pipelines: tuple[Pipeline, ...] = (Pipeline(parts, 0, 4),)
        reductions = (Reduction((0,), ()), Reduction((1, 2, 3), ()), Reduction((), (0,)))
    else:
        pipelines = (Pipeline((Stage(0, 0, 4),), 0, 2), Pipeline(parts, 2, 4))
        reductions = (Reduction((0,), ()), Reduction((1, 2, 3), ()), Reduction((), (0,)))
    return prove(
        Plan(2, "test", 3, 8, 2, 4, blocks_of(pipelines), reductions, ties=((0, 3),), move_runs=move_runs(moves)), HELD_BEFORE
    )


HELD_BEFORE = {0: (0, 1, 2, 3), 1: (0, 1, 2), 2: (3,)}


class Rank:
    """A rank's side without processes: the model, and what it reports."""

    def __init__(self, number, held, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3)):
        self.number = number
        self.model = Model(
            partial(models.build_layers, "tied", n_blocks=2),
            optimizer,
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
            CPU,
            0,
        )
        self.model.hold_built(held)
        self.n_samples = 96
        self.global_batch = 8
        self.position = POSITION
        for step in range(3):
            self.step(step)

    def step(self, step, *, but=(), scale=1.0):
        """With gradients that are the same on all ranks; not of layers `but`, or of these so many times as large."""
        for number, shard in self.model.shards.items():
            if number in but and scale == 1.0:
                continue
            for i, parameter in enumerate(shard.trainable):
                generator = torch.Generator().manual_seed(1000 * step + 10 * number + i)
                parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
                parameter.grad *= scale if number in but else 1.0
            torch.manual_seed(1000 * step + number)
            shard.optimizer.step()
            shard.scheduler.step()

    def adopt(self, layer, source):
        self.model.adopt(layer, moved(source.model.export(layer)))

    def prepare(self, of):
        spec = ModelSpec((), (), (), self.global_batch, 2, self.n_samples, 0, "cpu")
        self.data = Prefetcher(MapStyle(models.TokenData(96), Sampler(self.n_samples, 0), of))
        self.job_spec = JobSpec(spec, models.token_loss, None, None, None, 0, None)
        groups = Groups(to_nobody, of.generation, Needs((self.number,)), self.number, CPU)
        self.engine = Engine(
            of, self.number, self.model, self.job_spec, Backend(), self.data, groups, (), Tally(of.n_layers, of.ties)
        )
        groups.release()

    def report(self):
        return proof.ready(
            self.engine, self.model, self.job_spec, self.data, self.position, groups_s=0.0, moves_s=0.0, moved=Moved()
        )


def transition(after=lambda rank: None, at_gate=lambda rank: None, *, is_alone=False, keeps=False, step=None):
    """What the gate says. `after`: what happens to rank 2 behind its adoptions; `at_gate`: when all is prepared. `step`: how
    rank 2 makes one that the others make before that."""
    the_plan = plan(is_alone=is_alone, keeps=keeps)
    ranks = {number: Rank(number, held) for number, held in HELD_BEFORE.items() if number or not is_alone}
    for layer in ADOPTED:
        ranks[2].adopt(layer, ranks[1])
    after(ranks[2])
    if step is not None:
        for number in (0, 1):
            ranks[number].step(3)
        step(ranks[2])
    for rank in ranks.values():
        rank.prepare(the_plan)
    at_gate(ranks[2])
    return gate.gate_problem(the_plan, {number: rank.report() for number, rank in ranks.items()}, POSITION, HELD_BEFORE)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_transition_without_a_bug_passes(is_alone):
    assert transition(is_alone=is_alone) is None


def weight(rank, layer=1):
    return rank.model.layers[layer].up.weight


def moments(rank, layer=1):
    return rank.model.shards[layer].optimizer.state[weight(rank, layer)]


@torch.no_grad()
def initial_value(rank):
    weight(rank).copy_(models.build_layers("tied", n_blocks=2)[1].up.weight)


@torch.no_grad()
def corrupted_value(rank):
    weight(rank)[3, 4] += 1e-15


@torch.no_grad()
def permuted_rows(rank):
    weight(rank).copy_(weight(rank).roll(1, 0))


@torch.no_grad()
def one_parameter_over_another(rank):
    weight(rank, 1).copy_(weight(rank, 2))


def stale_moment(rank):
    moments(rank)["exp_avg"].zero_()


def step_counter_reset(rank):
    moments(rank)["step"].zero_()


def silent_cast(rank):
    state = moments(rank)
    state["exp_avg_sq"] = state["exp_avg_sq"].float()


def dropped_tensor(rank):
    del moments(rank)["exp_avg_sq"]


def all_state_dropped(rank):
    del rank.model.shards[1].optimizer.state[weight(rank)]


def other_learning_rate(rank):
    rank.model.shards[2].optimizer.param_groups[0]["lr"] *= 1.0001


def scheduler_reset(rank):
    rank.model.shards[2].scheduler.last_epoch = 0


@torch.no_grad()
def other_buffer(rank):
    rank.model.layers[1].mask.logical_not_()


@pytest.mark.parametrize(
    "bug",
    [
        initial_value,
        corrupted_value,
        permuted_rows,
        one_parameter_over_another,
        stale_moment,
        step_counter_reset,
        silent_cast,
        dropped_tensor,
        all_state_dropped,
        other_learning_rate,
        scheduler_reset,
        other_buffer,
    ],
)
def test_state_that_is_not_the_sources_is_refused(bug):
    assert "differs between its holders" in (transition(after=bug) or "")


def test_the_source_that_lets_a_layer_go_is_the_witness_of_what_it_was():
    """Nobody else holds the layer under the plan."""
    assert "layer 1 differs between its holders" in (transition(after=corrupted_value, is_alone=True) or "")


def orphans(rank):
    """New Parameter objects in the module, an optimizer of the old ones."""
    layer = rank.model.layers[1]
    layer.up.weight = nn.Parameter(layer.up.weight.detach().clone())


def torn_tie(rank):
    embedding = rank.model.layers[0].token
    head = rank.model.layers[3].linear
    assert embedding.weight.device.type == "meta"
    head.weight = nn.Parameter(head.weight.detach().clone())


def foreign_parameter_stepped(rank):
    rank.model.shards[1].optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def other_optimizer_scheduled(rank):
    shard = rank.model.shards[1]
    shard.scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 2)


@pytest.mark.parametrize("bug", [orphans, torn_tie, foreign_parameter_stepped, other_optimizer_scheduled])
@pytest.mark.parametrize("moment", ["after", "at_gate"])
def test_what_would_not_train_the_modules_is_refused(bug, moment):
    """I9: Equal values are not enough: parameters, optimizer, scheduler and gradient buffers must be each other's own."""
    assert "rank 2 would not train what it holds" in (transition(**{moment: bug}) or "")


def gradient_elsewhere(rank):
    weight(rank).grad = torch.zeros_like(weight(rank))


def test_a_gradient_that_is_not_reduced_is_refused():
    problem = transition(at_gate=gradient_elsewhere)
    assert problem is not None and "the gradient of layers.1.up.weight is not reduced" in problem


def summed_in_another_order(rank):
    shard = rank.model.shards[1]
    up = rank.model.layers[1]._modules.pop("up")
    rank.model.layers[1]._modules["up"] = up
    shard.named = rank.model.parameters_of(1)
    shard.trainable = list(shard.named.values())


def lies_column_by_column(rank):
    parameter = weight(rank)
    parameter.data = parameter.data.t().contiguous().t()


def other_denominator(rank):
    rank.global_batch = 4


def data_cursor_reset(rank):
    rank.position = Position(0, 0)


def other_samples(rank):
    rank.n_samples = 95


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (summed_in_another_order, "are summed differently"),
        (lies_column_by_column, "are summed differently"),
        (other_denominator, "rank 2 divides by 4 samples"),
        (data_cursor_reset, "rank 2 stands at step 0, expected step 3"),
        (other_samples, "the samples or random numbers of the next step differ"),
    ],
)
def test_another_reduction_or_another_stream_is_refused(bug, words):
    assert words in (transition(after=bug) or "")


def test_a_layer_too_many_or_too_few_is_refused():
    def too_many(rank):
        rank.model.adopt(0, Rank(1, HELD_BEFORE[1]).model.export(0))

    def too_few(rank):
        rank.model.keep_only((1, 3))

    assert "rank 2 holds layer 0, against the plan" in (transition(at_gate=too_many) or "")
    assert "rank 2 would not train what it holds: shard 2: the gradient" in (transition(at_gate=too_few) or "")


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics, roughly."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += 1e-3 * torch.randn_like(parameter)


def test_an_optimizer_that_draws_random_numbers_draws_the_same_on_every_holder():
    ranks = [Rank(number, HELD_BEFORE[number], lambda params: Noisy(params, lr=0.1)) for number in (0, 1)]
    for rank in ranks:
        rank.prepare(plan())
        torch.rand(rank.number + 1)  # what else a rank has drawn does not matter
        rank.engine.gradients.zero()
        rank.engine.apply(1.0)
    digests = [dict(rank.report().digests)[0] for rank in ranks]
    assert digests[0] == digests[1]


# -- layers that rank 2 keeps and does not run -------------------------------------------------------------------------------


def as_the_others(rank):
    rank.step(3)


def missed(rank):
    rank.step(3, but=ADOPTED)


def missed_one(rank):
    rank.step(3, but=ADOPTED[:1])


def another_divisor(rank):
    rank.step(3, but=ADOPTED, scale=2.0)


def its_own_zero_alone(rank):
    """The others' gradients did not come: it steps with that of its own, which is none."""
    rank.step(3, but=ADOPTED, scale=0.0)


def rounded(rank):
    rank.step(3, but=ADOPTED, scale=1.0 + 2**-40)


def stepped_twice(rank):
    rank.step(3)
    rank.step(3)


def not_scheduled(rank):
    before = rank.model.shards[1].scheduler.last_epoch
    rank.step(3)
    rank.model.shards[1].scheduler.last_epoch = before


def test_kept_layers_that_are_stepped_with_the_others_pass():
    assert transition(keeps=True) is None
    assert transition(keeps=True, step=as_the_others) is None


@pytest.mark.parametrize(
    "step", [missed, missed_one, another_divisor, its_own_zero_alone, rounded, stepped_twice, not_scheduled]
)
def test_a_kept_layer_that_was_not_stepped_as_the_others_is_refused(step):
    assert "layer 1 differs between its holders" in (transition(keeps=True, step=step) or "")


@pytest.mark.parametrize(
    "bug", [initial_value, corrupted_value, stale_moment, dropped_tensor, other_learning_rate, other_buffer]
)
def test_a_kept_layer_that_is_not_what_its_source_had_is_refused(bug):
    assert "differs between its holders" in (transition(after=bug, keeps=True) or "")


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (gradient_elsewhere, "the gradient of layers.1.up.weight is not reduced"),
        (summed_in_another_order, "are summed differently"),
    ],
)
def test_a_kept_layer_that_would_not_be_reduced_as_the_others_is_refused(bug, words):
    moment = "at_gate" if bug is gradient_elsewhere else "after"
    assert words in (transition(**{moment: bug}, keeps=True) or "")
