"""A shard's optimizer state arrives as it was, bit for bit, and goes on as it would have: every optimizer of torch.optim."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from odyssey.model.packing import digest
from odyssey.model.state_shard import StateShard
from tests.moved import moved

CPU = torch.device("cpu")
NOT_FOR_A_STEP_WITHOUT_ARGUMENTS = {"LBFGS": "needs a closure", "SparseAdam": "needs sparse gradients"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def ways_of(kind):
    """The settings that make an optimizer keep other state: implementations, momentum, amsgrad, centered, capturable."""
    known = inspect.signature(kind).parameters
    ways = [{}]
    ways += [{name: True} for name in ("foreach", "fused", "amsgrad", "centered") if name in known]
    ways += [{"momentum": 0.9, **way} for way in ({}, {"foreach": True}) if "momentum" in known and set(way) <= set(known)]
    return ways


def optimizers():
    return list(_optimizers())


def _optimizers():
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            ways = [] if name in NOT_FOR_A_STEP_WITHOUT_ARGUMENTS else ways_of(kind)
            yield from (pytest.param(kind, way, id="-".join([name, *way])) for way in ways)


class Odd(torch.optim.Optimizer):
    """Keeps what an optimizer may keep: numbers, text, None, lists, tuples, other dtypes, something of no parameter, and a
    setting that it makes in its first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "names": ["a", "b"], "scale": torch.ones((), dtype=torch.float16)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["scale"] += 1
            group["n_steps"] = group.get("n_steps", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["note"] = f"step {state['count']}"
                state["nothing"] = None
                state["pair"] = (state["count"], torch.full((2,), float(state["count"]), dtype=torch.float64))
                state["history"] = [*state.get("history", []), p.detach().float().sum()]
                state["mask"] = p > 0
                state["sum"] = state.get("sum", torch.zeros_like(p, dtype=torch.float32)) + p.grad.float()
                p -= group["lr"] * p.grad * state["count"]
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


def shard_of(make, dtype):
    """Of two parameters, one of which lies in memory column by column."""
    generator = torch.Generator().manual_seed(3)
    named = {
        "weight": nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype)),
        "other": nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype).t()),
    }
    return StateShard(named, make, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))


def train(shard, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in shard.trainable:
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
        shard.optimizer.step()
        shard.scheduler.step()


def assert_moves_exactly(make, dtype):
    source, target = shard_of(make, dtype), shard_of(make, dtype)
    train(source, 0, 3)
    state = {"values": {name: p.detach() for name, p in source.named.items()}, "progress": source.progress()}

    arrived = moved(state)
    with torch.no_grad():
        for name, parameter in target.named.items():
            parameter.copy_(arrived["values"][name])
    target.load_progress(arrived["progress"])

    assert digest(target.state_by_name(target.named)) == digest(source.state_by_name(source.named))
    assert digest(target.progress()) == digest(source.progress())
    train(source, 3, 6)
    train(target, 3, 6)
    assert digest({name: p.detach() for name, p in target.named.items()}) == digest(
        {name: p.detach() for name, p in source.named.items()}
    ), "it goes on the same way"
    assert digest(target.progress()) == digest(source.progress())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "way"), optimizers())
def test_the_state_of_every_optimizer_arrives_bit_for_bit(kind, way, dtype):
    assert_moves_exactly(lambda params: kind(params, lr=0.01, **way), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_state_of_a_users_own_optimizer_arrives_bit_for_bit(dtype):
    assert_moves_exactly(Odd, dtype)


def test_what_a_hook_has_a_part_in_lies_in_memory_as_the_parameter_does():
    def make(params):
        optimizer = torch.optim.Adam(params, fused=True)
        optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
        return optimizer

    assert_moves_exactly(make, torch.float32)


def test_what_an_optimizer_does_with_its_state_by_itself_is_left_to_it():
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "own": self.own}

        def load_state_dict(self, state_dict):
            self.own = state_dict.pop("own") + 1
            super().load_state_dict(state_dict)

    source, target = shard_of(lambda params: Own(params, lr=0.1), torch.float32), shard_of(Own, torch.float32)
    source.optimizer.own = 4
    target.load_progress(source.progress())
    assert target.optimizer.own == 5
    assert target.optimizer.param_groups[0]["lr"] == 0.1


def test_loading_leaves_what_was_given_alone():
    source, target = shard_of(torch.optim.Adam, torch.float32), shard_of(torch.optim.Adam, torch.float32)
    train(source, 0, 1)
    before = digest(source.progress())
    target.load_progress(source.progress())
    train(target, 1, 3)
    assert digest(source.progress()) == before
