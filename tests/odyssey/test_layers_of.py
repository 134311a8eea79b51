"""Whole models cut into layers: the chain computes what the model does, and what cannot be cut is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import odyssey
from odyssey.errors import JobError
from tests import models, reference
from tests.jobs.train import make_optimizer, make_scheduler

WIDTH, CONTEXT, N_TOKENS = 16, 8, 17


class Decoder(nn.Module):
    """A model as people write it: modules in a dict, positions and a factor in the forward, one mask, a tied head."""

    def __init__(self, dropout: float = 0.0, is_tied: bool = True) -> None:
        super().__init__()
        blocks = [MaskedBlock(WIDTH, 2, CONTEXT, dropout) for _ in range(3)]
        ends = {
            "token": nn.Embedding(N_TOKENS, WIDTH),
            "position": nn.Embedding(CONTEXT, WIDTH),
            "dropout": nn.Dropout(dropout),
        }
        self.body = nn.ModuleDict(ends | {"blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(WIDTH)})
        self.head = nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.register_buffer("scale", torch.tensor(3.0))
        self.double()
        if is_tied:
            self.head.weight = self.body.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] -> logits [batch, seq, token]."""
        hidden = self.body.token(ids) * self.scale + self.body.position(torch.arange(ids.shape[1]))
        hidden = self.body.dropout(hidden)
        mask = (ids != 0).unsqueeze(-1)
        for block in self.body.blocks:
            assert block.n_heads == 2
            hidden, _ = block(x=hidden, mask=mask)
        return self.head(self.body.norm(hidden)) / self.scale


class MaskedBlock(models.Block):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        return super().forward(x) * mask, None


class Points(nn.Module):
    """A chain with an nn.Sequential in it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.before(x)).square()


class Chain(nn.Module):
    """Three linear layers between an embedding and a head, for what some forward does wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_TOKENS, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, N_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Between(Chain):
    """There is something between the blocks: a module that all of them share, dropout and a factor."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = self.dropout(self.norm(block(hidden))) * 2
        return self.head(hidden)


def called(layers: list[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def values_and_gradients(compute: Any, model: nn.Module, given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    output = compute(given)
    output.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return output, gradients


IDS = torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize(
    ("model", "given"),
    [(Decoder(), IDS), (Points(), torch.ones(3, WIDTH)), (Between(), IDS)],
    ids=["decoder", "points", "between"],
)
def test_the_layers_compute_what_the_model_does(model, given):
    model.eval()
    expected, of_model = values_and_gradients(model, model, given)
    layers = odyssey.layers_of(model, given)
    assert len(layers) == 5
    found, of_layers = values_and_gradients(lambda value: called(layers, value), model, given)
    assert torch.equal(found, expected)
    assert of_layers.keys() == of_model.keys()
    assert all(torch.equal(of_layers[name], gradient) for name, gradient in of_model.items())


def test_dropout_between_blocks_is_drawn_in_training():
    layers = odyssey.layers_of(Between())
    hidden = layers[0](IDS)
    dropped = [layer(hidden)["hidden"].eq(0).any().item() for layer in layers[1:4]]
    assert dropped == [True, True, False], "behind the last block it is the last layer's"


def test_every_parameter_has_its_name_in_the_layer_that_needs_it():
    model = Decoder()
    names = [[name.removeprefix("model.") for name, _ in layer.named_parameters()] for layer in odyssey.layers_of(model)]
    assert names[0] == ["body.token.weight", "body.position.weight"]
    assert all(name.startswith("body.blocks.1.") for name in names[2])
    assert names[4] == ["body.norm.weight", "body.norm.bias", "head.weight"]
    of_blocks = [name for name, _ in model.body.blocks.named_parameters(prefix="body.blocks")]
    assert [name for its in names[1:4] for name in its] == of_blocks


def test_a_sequential_is_its_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert odyssey.layers_of(model) == [model[0], model[1], model[2]]


@pytest.mark.parametrize("build", [Decoder, lambda: Between(dropout=0.0).double()], ids=["decoder", "between"])
def test_training_in_layers_equals_training_the_whole(build):
    given = {"optimizer": make_optimizer, "data": models.TokenData(40), "global_batch": 15, "micro_batch": 2, "seed": 3}
    given |= {"scheduler": make_scheduler, "clip_norm": 0.5}
    job = odyssey.Job(layers=lambda: odyssey.layers_of(build()), loss=models.token_loss, **given)
    losses = [step.loss for step in job.steps(4)]
    rest = {name: value for name, value in given.items() if name not in ("optimizer", "data")}
    expected_losses, expected = reference.train(
        lambda: [build()], models.token_loss, given["optimizer"], given["data"], steps=4, **rest
    )
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    state = {f"layers.0.{name.partition('.model.')[2]}": tensor for name, tensor in job.state_dict()["model"].items()}
    assert state.keys() == expected.keys()
    assert reference.largest_difference(expected, state) < 1e-10


def test_parameters_random_numbers_and_modes_are_as_before():
    model = Decoder(dropout=0.5)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(tensor.eq(0).all() for tensor in values.values())
    model.body.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    layers = odyssey.layers_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert {name: module.training for name, module in model.named_modules()} == modes
    blocks = [layers[number].get_submodule(f"model.body.blocks.{number - 1}") for number in (1, 2, 3)]
    assert [block.training for block in blocks] == [True, False, True]
    assert isinstance(layers[0].get_submodule("model.body.dropout"), nn.Dropout)
    assert not isinstance(layers[1].get_submodule("model.body.dropout"), nn.Dropout), "drawn for nothing"
    model.eval()
    ids = torch.arange(8).reshape(2, 4)
    assert torch.equal(model(ids), called([layer.eval() for layer in layers], ids)), "the model is still whole"


class LookedInto(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        assert self.blocks[0].weight.shape == (WIDTH, WIDTH)
        return super().forward(ids)


class CalledTwice(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](self.blocks[0](self.blocks[0](self.embedding(ids))))))


class Residual(Chain):
    """The embedding comes back behind the blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.embedding(ids)[..., :1]


class Carried(Chain):
    """The embedding comes back in every block."""

    def forward(self, ids: Tensor) -> Tensor:
        first = hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden + first)
        return self.head(hidden)


class Gated(Chain):
    """Likewise, but for a gate that begins with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        given = self.gate(hidden)
        for block in self.blocks:
            hidden = block(hidden + given)
        return self.head(hidden)


def with_parameter() -> nn.Module:
    model = Chain()
    model.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
    return model


def with_unused() -> nn.Module:
    model = Chain()
    model.pooler = nn.Linear(2, 2)
    return model


def with_two_lists() -> nn.Module:
    model = Chain()
    model.others = nn.ModuleList([nn.Linear(2, 2)])
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Chain()


REFUSED = {
    Carried: "Carried computes something else when it is cut at blocks",
    LookedInto: "LookedInto does not run when it is cut at blocks: AttributeError: '_Exit' object has no attribute 'weight'",
    CalledTwice: "CalledTwice does not call its 3 blocks at blocks once each, one after the other",
    Gated: "Gated computes something else when it is cut at blocks",
    with_parameter: "Chain has parameters outside of the modules that it calls: positions",
    with_unused: "Chain does not call pooler, which has parameters",
    with_two_lists: "Chain has 2 lists of blocks: blocks, others",
    on_meta: "Chain is on the meta device, where nothing shows that its layers do what it does",
    lambda: nn.Linear(2, 2): "Linear has no nn.ModuleList or nn.Sequential of blocks",
    Points: "Points has no nn.Embedding, so that it is not known what it takes",
}


@pytest.mark.parametrize(("build", "message"), REFUSED.items(), ids=REFUSED.values())
def test_what_cannot_be_cut_is_refused_by_name(build, message):
    with pytest.raises(JobError) as caught:
        odyssey.layers_of(build())
    assert caught.value.what == message
    assert caught.value.help


def test_an_example_that_the_model_does_not_take_is_said():
    with pytest.raises(JobError, match=r"Chain does not take example: \w+Error"):
        odyssey.layers_of(Chain(), torch.ones(2))


def test_a_module_that_is_called_at_both_ends_is_in_both_layers():
    model = Residual()
    layers = odyssey.layers_of(model)
    held = [any(parameter is model.embedding.weight for parameter in layer.parameters()) for layer in layers]
    assert held == [True, False, False, False, True]


class LeftOut(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden if self.training and block is self.blocks[1] else block(hidden)
        return self.head(hidden)


def test_a_block_that_is_left_out_in_training_is_said():
    layers = odyssey.layers_of(LeftOut())
    with pytest.raises(JobError, match="LeftOut has left out a block"):
        called(layers, torch.zeros(2, 3, dtype=torch.int64))


class Checkpointed(Chain):
    """Its forward has a checkpoint around each block when it trains, and arithmetic before the first and behind each."""

    def __init__(self, is_reentrant: bool = False, n_together: int = 1, factor: float = 1.5) -> None:
        super().__init__()
        self.is_reentrant, self.n_together, self.factor = is_reentrant, n_together, factor

    def through(self, first: int, hidden: Tensor) -> Tensor:
        for block in self.blocks[first : first + self.n_together]:
            hidden = block(hidden).tanh() * self.factor
        return hidden

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) * 2
        for first in range(0, 3, self.n_together):
            if self.training:
                hidden = checkpoint(self.through, first, hidden, use_reentrant=self.is_reentrant)
            else:
                hidden = self.through(first, hidden)
        return self.head(hidden)


class CheckpointedBlocks(Chain):
    """The same, and a block is called with just what the one before gave."""

    def __init__(self, is_reentrant: bool = False) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.is_reentrant) if self.training else block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("build", [Checkpointed, CheckpointedBlocks])
def test_a_block_that_is_computed_again_in_the_backward_has_the_models_gradients(build, stops_early):
    """Micro-batches are under way at the same time, as in a pipeline."""
    model, batches = build().double(), [IDS, IDS + 3]
    with set_checkpoint_early_stop(stops_early):
        whole = [values_and_gradients(model, model, ids) for ids in batches]
        layers = odyssey.layers_of(model)
        found = [called(layers, ids) for ids in batches]
        for output, (expected, of_model) in zip(found, whole, strict=True):
            output.square().sum().backward()
            assert torch.equal(output, expected)
            assert all(torch.equal(p.grad, of_model[name]) for name, p in model.named_parameters())
            model.zero_grad()


@pytest.mark.parametrize("build", [Checkpointed, CheckpointedBlocks])
def test_a_reentrant_checkpoint_around_a_block_is_refused_by_name(build):
    layers = odyssey.layers_of(model := build(is_reentrant=True))
    hidden = layers[0](IDS)
    for layer in layers[1:4]:
        with pytest.raises(JobError, match=f"{build.__name__} calls a block, Linear, without gradients") as caught:
            layer(hidden)
        assert "use_reentrant=False" in caught.value.help
    model.requires_grad_(False)
    assert called(layers, IDS).shape == (2, 5, N_TOKENS), "there is nothing to train in them"


def test_a_checkpoint_around_several_blocks_is_refused_by_name():
    layers = odyssey.layers_of(Checkpointed(n_together=3))
    with pytest.raises(JobError, match="Checkpointed has a checkpoint around a block that cannot be"):
        called(layers, IDS).square().sum().backward()
