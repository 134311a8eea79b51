"""The parts that a rank is made of: samples and seeds, state as bytes, held layers, the split backward, boundaries."""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odyssey.errors import JobError
from odyssey.model.model import Model
from odyssey.model.packing import digest, digest_bytes
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.worker import Rank, worker_of
from odyssey.runtime.backend import Backend
from odyssey.runtime.boundary import Expectation, describe, flatten
from odyssey.runtime.data import MapStyle, layer_seed
from odyssey.runtime.layers import Layers
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from tests import models
from tests.jobs.train import make_optimizer, make_scheduler
from tests.moved import moved

CPU = torch.device("cpu")


# -- samples and seeds ----------------------------------------------------------------------------------------------------


@given(n_samples=st.integers(1, 40), global_batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_epoch_uses_every_sample_once(n_samples, global_batch, seed):
    sampler = Sampler(n_samples, seed)
    n_epochs = 3
    used: list[int] = []
    step = 0
    while len(used) < n_epochs * n_samples:
        used += sampler.ids(step * global_batch, (step + 1) * global_batch)
        step += 1
    for epoch in range(n_epochs):
        assert Counter(used[epoch * n_samples : (epoch + 1) * n_samples]) == Counter(range(n_samples))


def test_going_back_to_an_earlier_step_gives_the_same_samples():
    sampler = Sampler(10, 1)
    first = sampler.ids(0, 10)
    sampler.ids(95, 105)
    assert sampler.ids(0, 10) == first


def test_layer_seeds_differ_in_every_coordinate_and_never_change():
    seeds = {layer_seed(s, t, k, layer) for s in range(3) for t in range(5) for k in range(7) for layer in range(11)}
    assert len(seeds) == 3 * 5 * 7 * 11
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert layer_seed(0, 0, 0, 0) == 1195769770526638388, "checkpoints of older versions must redo steps with the same masks"


def one_stage_plan(n_layers=3, global_batch=8, micro_batch=2):
    stage = Stage(0, 0, n_layers)
    n = -(-global_batch // micro_batch)
    reductions = (Reduction(tuple(range(n_layers)), ()),)
    return prove(Plan(1, "test", 0, global_batch, micro_batch, n_layers, blocks_of((Pipeline((stage,), 0, n),)), reductions))


MICRO_BATCHES = [range(2 * k, 2 * k + 2) for k in range(4)]


class Failing:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise OSError("disk is gone")
        return torch.tensor(index), torch.tensor(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_error_of_a_dataset_reaches_who_asks_for_the_sample_and_nobody_else(num_workers):
    sampler, plan = Sampler(8, 0), one_stage_plan()
    bad = next(k for k in range(4) if 5 in sampler.ids(2 * k, 2 * k + 2))
    data = Prefetcher(MapStyle(Failing(), sampler, plan, num_workers=num_workers))
    data.want(0, MICRO_BATCHES)
    for k, positions in enumerate(MICRO_BATCHES):
        if k == bad:
            with pytest.raises(OSError, match="disk is gone") as raised:
                data.get(0, positions)
            assert "in data[5]" in f"{raised.value} {raised.value.__notes__ if num_workers == 0 else ''}"
        else:
            assert data.get(0, positions)[0].tolist() == sampler.ids(2 * k, 2 * k + 2)
    data.close()


def test_a_redone_step_finds_its_samples_again():
    sampler, plan = Sampler(8, 0), one_stage_plan()
    data = Prefetcher(MapStyle([(torch.tensor(i), torch.tensor(-i)) for i in range(8)], sampler, plan))
    for _ in range(2):
        data.want(0, MICRO_BATCHES)
        found = [data.get(0, positions)[1].tolist() for positions in MICRO_BATCHES]
        assert found == [[-i for i in sampler.ids(2 * k, 2 * k + 2)] for k in range(4)]
    data.want(1, MICRO_BATCHES)
    assert data.get(1, range(2))[0].tolist() == sampler.ids(8, 10)


def test_samples_are_the_same_however_a_step_is_cut_into_micro_batches():
    sampler, plan = Sampler(8, 0), one_stage_plan()
    data = Prefetcher(MapStyle([(torch.tensor(i), torch.tensor(-i)) for i in range(8)], sampler, plan))
    for cuts in ([0, 2, 4, 6, 8], [0, 2, 3, 5, 7, 8], [0, 1, 2, 4, 6, 8]):
        micro_batches = list(map(range, cuts, cuts[1:]))
        data.want(3, micro_batches)
        assert [i for its in micro_batches for i in data.get(3, its)[0].tolist()] == sampler.ids(24, 32)


class Gated(list):
    """Whose samples come one at a time, when they are let."""

    def __init__(self):
        super().__init__((torch.tensor(i), torch.tensor(-i)) for i in range(80))
        self.begun, self.let = SimpleQueue(), SimpleQueue()

    def __getitem__(self, index):
        self.begun.put(index)
        self.let.get()
        return super().__getitem__(index)


def test_a_new_plans_samples_come_first_and_those_of_the_old_one_no_more():
    gated, sampler, plan = Gated(), Sampler(80, 0), one_stage_plan(micro_batch=1)
    data = Prefetcher(MapStyle(gated, sampler, plan))
    data.want(0, [range(1), range(1, 2), range(2, 3)])
    assert gated.begun.get() == sampler.ids(0, 1)[0]

    data.want(0, [range(6, 7), range(1)])  # another plan, while the first sample of the old one is on its way
    for _ in range(4):
        gated.let.put(None)

    begun = [gated.begun.get() for _ in range(3)]
    assert begun == [sampler.ids(at, at + 1)[0] for at in (6, 8 + 6, 8)]
    assert data.get(0, range(6, 7))[0].tolist() == sampler.ids(6, 7)
    assert data.get(0, range(1))[0].tolist() == sampler.ids(0, 1)
    assert data.get(1, range(1))[0].tolist() == sampler.ids(8, 9)
    data.close()
    assert gated.begun.empty()


def test_a_step_that_is_gone_back_to_while_its_samples_are_on_their_way_has_them():
    gated, sampler, plan = Gated(), Sampler(80, 0), one_stage_plan(micro_batch=1)
    data = Prefetcher(MapStyle(gated, sampler, plan))
    data.want(3, [range(1)])
    gated.begun.get()

    data.want(7, [range(1)])
    data.want(3, [range(1)])
    for _ in range(2):
        gated.let.put(None)

    assert data.get(3, range(1))[0].tolist() == sampler.ids(24, 25)
    data.close()


def test_a_step_that_is_left_and_gone_back_to_at_any_moment_has_its_samples():
    """The thread that fetches may see what is wanted change between any two of its lines."""
    data = Prefetcher(MapStyle([(torch.tensor(i), torch.tensor(-i)) for i in range(8)], Sampler(8, 0), one_stage_plan()))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5000):
            for step in (0, 5, 0):
                data.want(step, MICRO_BATCHES[:1])
            assert data.get(0, range(2)) is not None
            data.want(5, MICRO_BATCHES[:1])
    finally:
        sys.setswitchinterval(interval)
        data.close()


# -- state as bytes -------------------------------------------------------------------------------------------------------

tensors = st.builds(
    lambda n, dtype, seed: (torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype),
    st.integers(0, 700),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
    st.integers(0, 1000),
)
states = st.recursive(
    tensors | st.integers() | st.text(max_size=5) | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b and type(a) is type(b)


@given(states, st.sampled_from([16, 48, 4096]))
def test_what_is_packed_unpacks_equal_and_has_the_same_digest(state, piece_bytes):
    copy = moved(state, piece_bytes)
    assert equal(state, copy)
    assert digest(copy) == digest(state)


@given(st.integers(1, 5000), st.data())
def test_a_digest_notices_any_changed_or_exchanged_word(n_words, data):
    words = torch.randint(-(2**62), 2**62, (2 * n_words,), generator=torch.Generator().manual_seed(n_words))
    before = digest_bytes(words.view(torch.uint8))
    i, j = data.draw(st.integers(0, 2 * n_words - 1)), data.draw(st.integers(0, 2 * n_words - 1))
    changed = words.clone()
    changed[i] += 1
    assert digest_bytes(changed.view(torch.uint8)) != before
    exchanged = words.clone()
    exchanged[i], exchanged[j] = words[j], words[i]
    assert (digest_bytes(exchanged.view(torch.uint8)) == before) == (words[i] == words[j]).item()


def test_a_digest_does_not_depend_on_the_order_of_a_dict():
    a, b = torch.ones(3), torch.zeros(3)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a}) != digest({"a": b, "b": a})


# -- held layers ----------------------------------------------------------------------------------------------------------


def model_of(variant, held):
    model = Model(partial(models.build_layers, variant, n_blocks=2), make_optimizer, make_scheduler, CPU, 0)
    model.hold_built(held)
    return model


def train_a_little(model):
    for shard in model.shards.values():
        for parameter in shard.trainable:
            parameter.grad = torch.ones_like(parameter)
        if shard.optimizer:
            shard.optimizer.step()
            shard.scheduler.step()


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_layer_that_moved_is_the_same_in_every_bit(variant):
    source, target = model_of(variant, range(4)), model_of(variant, ())
    train_a_little(source)
    for layer in (3, 0, 1):
        target.adopt(layer, moved(source.export(layer)))
    assert target.held == {0, 1, 3}
    for number in target.shards_of(target.held):
        assert digest(target.shard_state(number)) == digest(source.shard_state(number))
    train_a_little(source)
    train_a_little(target)
    for number in target.shards_of(target.held):
        assert digest(target.shard_state(number)) == digest(source.shard_state(number)), "and it goes on the same way"


def test_a_tied_parameter_is_one_object_wherever_both_layers_are_held():
    model = model_of("tied", range(4))
    assert model.ties == ((0, 3),)
    tie = len(model.layers)
    name = next(iter(model.shards[tie].named))
    model.keep_only((3,))
    assert set(model.shards) == {3, tie}
    assert list(model.shards[tie].named) == [name], "its name does not depend on which of its layers is held"
    other = model_of("tied", range(4))
    train_a_little(other)
    model.adopt(0, other.export(0))
    shared = [p for layer in (0, 3) for p in model.layers[layer].parameters() if p is model.shards[tie].named[name]]
    assert len(shared) == 2


def test_what_layers_share_is_one_object_for_those_that_are_held():
    """A module in several layers, with buffers of both kinds, and a tensor in several modules."""
    model = model_of("shared", range(4))
    assert model.ties == ((1, 2),)
    model.keep_only((1, 3))
    first, second = model.layers[1], model.layers[2]
    for tensor in (first.rotary.frequencies, first.rotary.positions, first.rotary.gain, first.mask):
        assert tensor.device.type == "cpu"
    assert second.mask.is_meta and second.qkv.weight.is_meta
    other = model_of("shared", range(4))
    model.adopt(2, moved(other.export(2)))
    assert not list(model.problems())
    assert second.mask is first.mask and second.rotary is first.rotary
    model.keep_only((2,))
    assert first.qkv.weight.is_meta and not second.rotary.frequencies.is_meta
    torch.testing.assert_close(second.rotary.frequencies, other.layers[2].rotary.frequencies, rtol=0, atol=0)
    model.keep_only(())
    assert {tensor.device.type for layer in model.layers for tensor in [*layer.parameters(), *layer.buffers()]} == {"meta"}


def test_a_layer_may_occur_more_than_once():
    def build():
        block = torch.nn.Linear(4, 4)
        return [block, torch.nn.Tanh(), block]

    model = Model(build, make_optimizer, make_scheduler, CPU, 0)
    model.hold_built((0,))
    assert list(model.shards) == [0, 3] and not model.layers[0].weight.is_meta
    other = Model(build, make_optimizer, make_scheduler, CPU, 0)
    other.hold_built((2,))
    train_a_little(other)
    model.keep_only(())
    model.adopt(2, moved(other.export(2)))
    model.adopt(0, moved(model.export(2) | {"progress": {}}))
    assert not list(model.problems()) and model.layers[0] is model.layers[2]
    assert digest(model.shard_state(3)) == digest(other.shard_state(3))


def test_what_functions_build_may_share_a_module_and_measuring_leaves_it_alone():
    def build():
        shared = torch.nn.Linear(4, 4)
        return [lambda: torch.nn.Sequential(shared, torch.nn.Tanh()), lambda: torch.nn.Sequential(shared)]

    model = Model(build, make_optimizer, make_scheduler, CPU, 0)
    train_a_little(model.copy_of((0,)))
    model.hold_built((1,))
    expected = Model(build, make_optimizer, make_scheduler, CPU, 0)
    expected.hold_built((1,))
    assert digest(model.shard_state(2)) == digest(expected.shard_state(2))


@pytest.mark.parametrize("by_functions", [False, True])
def test_modules_that_are_built_once_only_are_refused_when_they_are_wanted_again(by_functions):
    made = [torch.nn.Linear(4, 4) for _ in range(4)]
    layers = [lambda module=module: module for module in made] if by_functions else made
    model = Model(lambda: layers, make_optimizer, make_scheduler, CPU, 0)
    model.hold_built((0, 1))

    with pytest.raises(JobError, match=r"layer 2.Linear is wanted again") as refused:
        model.hold_built((2, 3))
    assert "build all modules anew" in refused.value.help


def test_layers_that_are_not_held_take_no_memory():
    model = model_of("gpt", (1,))
    for i, layer in enumerate(model.layers):
        devices = {tensor.device.type for tensor in [*layer.parameters(), *layer.buffers()]}
        assert devices == ({"cpu"} if i == 1 else {"meta"})


def test_layers_can_be_built_again_before_the_first_step():
    model = model_of("tied", (0, 1))
    before = digest(model.shard_state(1))
    model.hold_built((1, 2, 3))
    assert model.held == {1, 2, 3} and set(model.shards) == {1, 2, 3, len(model.layers)}
    assert digest(model.shard_state(1)) == before


def test_factories_are_called_only_where_their_layer_is_held():
    calls: list[str] = []

    def make(name):
        layer = torch.nn.Linear(4, 4)
        calls.append(f"{name} on {layer.weight.device.type}")
        return layer

    model = Model(lambda: [partial(make, "a"), partial(make, "b")], make_optimizer, None, CPU, 7)
    model.hold_built((1,))
    assert calls == ["a on meta", "b on meta", "b on cpu"]


class Scaled(torch.nn.Linear):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.scale = torch.tensor([2.0])

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_layer_that_a_function_builds_is_whole_wherever_it_comes():
    source, target = (Model(lambda: [Scaled, Scaled], make_optimizer, make_scheduler, CPU, 7) for _ in range(2))
    source.hold_built((0, 1))
    target.hold_built((1,))
    train_a_little(source)
    drawn = torch.get_rng_state()
    target.adopt(0, moved(source.export(0)))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(target.call(0, torch.ones(1, 4)), source.call(0, torch.ones(1, 4)))
    assert digest(target.shard_state(0)) == digest(source.shard_state(0)) and not list(target.problems())


def test_what_functions_draw_to_build_layers_is_not_taken_from_the_scripts_generators():
    def build():
        random.random()
        return torch.nn.Linear(4, 4)

    me = worker_of(Rank(0))
    layers = Layers(Model(lambda: [build], make_optimizer, None, CPU, 0), None, Backend(), None)
    plan = SimpleNamespace(state_from=StateFrom.SCRIPT, holds={me: {0}}, moved_to=())
    drawn = random.getstate()
    layers.take_on(plan, me, SimpleNamespace(needs=SimpleNamespace(movers=())))
    assert layers.held == {0} and random.getstate() == drawn


class Permuted(torch.nn.Linear):
    """With attributes that numpy and Python have drawn."""

    def __init__(self):
        super().__init__(100, 100)
        self.order = numpy.random.permutation(100)
        self.factors = torch.tensor([random.random() for _ in range(100)])

    def forward(self, x):
        return super().forward(x[:, self.order] * self.factors)


def test_a_layer_is_built_alike_everywhere_whatever_it_draws_from():
    source, target = (Model(lambda: [Permuted, Permuted], make_optimizer, None, CPU, 7) for _ in range(2))
    source.hold_built((0, 1))
    target.hold_built((1,))
    drawn = random.getstate(), digest(numpy.random.get_state()[1])
    target.adopt(0, moved(source.export(0)))
    assert (random.getstate(), digest(numpy.random.get_state()[1])) == drawn
    x = torch.arange(100.0).view(1, 100)
    for number in (0, 1):
        assert torch.equal(target.call(number, x), source.call(number, x))
    assert not torch.equal(target.layers[0].factors, target.layers[1].factors)


class Twice(torch.nn.Module):
    """Has one parameter, and one buffer, under two names each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        for linear in (self.first, self.second):
            linear.register_buffer("mask", torch.ones(4))
        self.second.mask = self.first.mask


def test_a_parameter_that_a_layer_has_twice_and_another_one_too_is_one_object():
    def build():
        layers = [Twice(), torch.nn.Tanh(), torch.nn.Linear(4, 4, bias=False)]
        layers[2].weight = layers[0].first.weight
        layers[2].register_buffer("mask", layers[0].first.mask)
        return layers

    source, target = (Model(build, make_optimizer, make_scheduler, CPU, 0) for _ in range(2))
    source.hold_built((0, 1, 2))
    target.hold_built(())
    train_a_little(source)
    for layer in (2, 0):
        target.adopt(layer, moved(source.export(layer)))
    (twice, _, last), tie = target.layers, len(target.layers)
    assert twice.first.weight is twice.second.weight is last.weight is next(iter(target.shards[tie].named.values()))
    assert twice.first.mask is twice.second.mask is last.mask
    assert not target.shards[0].named and not list(target.problems())
    assert target.specs[0].parameter_bytes == 0 and digest(target.shard_state(tie)) == digest(source.shard_state(tie))


class Gain(torch.nn.Parameter):
    """A parameter of a class of its own, which is made otherwise than torch's."""

    def __new__(cls, value, n):
        return super().__new__(cls, torch.full((n,), value))


def test_a_parameter_keeps_its_class_and_its_attributes_wherever_it_is():
    seen = []

    def build():
        layer = torch.nn.Linear(4, 4)
        layer.weight.no_decay = True
        layer.register_parameter("gain", Gain(2.0, 4))
        return [layer, torch.nn.Linear(4, 4)]

    def optimizer(parameters):
        seen.append([(isinstance(p, Gain), getattr(p, "no_decay", False)) for p in parameters])
        return make_optimizer(parameters)

    source, target = (Model(build, optimizer, None, CPU, 0) for _ in range(2))
    for make in (source.optimizers, partial(source.copy_of, (0,)), partial(source.hold_built, (0,))):
        make()
        assert seen.pop(0) == [(False, True), (False, False), (True, False)]
        seen.clear()
    target.hold_built(())
    target.adopt(0, moved(source.export(0)))
    assert seen == [[(False, True), (False, False), (True, False)]]
    assert torch.equal(target.layers[0].gain, torch.full((4,), 2.0))


def test_a_layer_tells_in_which_order_its_parameters_lie_in_memory():
    """Gradients are summed in this order. What changes nothing in it does not count."""

    def conv(size=3, form=torch.channels_last):
        return torch.nn.Conv2d(2, 3, size).to(memory_format=form)

    def digests(*layers):
        return [spec.digest for spec in Model(lambda: layers, make_optimizer, None, CPU, 0).specs]

    usual, last, built = digests(conv(form=torch.contiguous_format), conv(), conv)
    assert usual != last == built
    usual, last = digests(conv(1, torch.contiguous_format), conv(1))
    assert usual == last
    model = Model(lambda: [conv(), conv()], make_optimizer, None, CPU, 0)
    model.hold_built([0])
    model.adopt(1, moved(model.export(0)))
    assert model.layers[1].weight.stride() == model.layers[0].weight.stride() == (18, 1, 6, 2)


# -- boundaries -----------------------------------------------------------------------------------------------------------


def test_a_boundary_describes_any_nesting_and_smaller_micro_batches():
    value = (torch.zeros(4, 3), {"mask": torch.zeros(5, 5, dtype=torch.bool), "ids": torch.zeros(4, dtype=torch.int64)})
    expected = Expectation(describe(value, 2, 4), 3)
    room = expected.empty(CPU)
    assert [tuple(t.shape) for t in room] == [(3, 3), (4 - 1,), (5, 5)] or [tuple(t.shape) for t in room] == [
        (3, 3),
        (5, 5),
        (3,),
    ]
    assert set(expected.nest(room)[1]) == {"mask", "ids"}
    expected.check(room)
    with pytest.raises(JobError, match="layer 2 gave"):
        expected.check([t[:1] if t.dim() == 2 and t.shape == (3, 3) else t for t in room])


def test_a_layer_that_passes_on_something_else_than_tensors_is_named():
    with pytest.raises(JobError, match="layer 7 passes on a float"):
        flatten((torch.zeros(1), 0.5), 7)


def test_an_evaluation_leaves_every_module_in_the_mode_it_was_in():
    """A rank that joins has not evaluated: a part that the script keeps in evaluation mode must not differ there."""

    def build():
        layers = models.build_layers("mlp", n_blocks=2, dropout=0.5)
        layers[1][2].eval()
        return layers

    model = Model(build, make_optimizer, make_scheduler, CPU, 0)
    model.hold_built(range(4))
    before = [module.training for layer in model.layers for module in layer.modules()]
    with model.in_evaluation():
        assert not any(module.training for layer in model.layers for module in layer.modules())
    assert [module.training for layer in model.layers for module in layer.modules()] == before
