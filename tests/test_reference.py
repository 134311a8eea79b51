"""The oracle itself: against loops written out by hand, and its own promises."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests import models, reference


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def run(variant: str = "gpt", *, micro_batch: int = 2, steps: int = 3, dropout: float = 0.0, optimizer=adamw, **options):
    return reference.train(
        partial(models.build_layers, variant, n_blocks=2, dropout=dropout),
        models.loss_for(variant),
        optimizer,
        models.data_for(variant, 20),
        global_batch=8,
        micro_batch=micro_batch,
        seed=5,
        steps=steps,
        **options,
    )


def test_reference_equals_a_loop_over_whole_batches_written_by_hand():
    torch.manual_seed(5)
    model = nn.Sequential(*models.build_layers("mlp", n_blocks=2))
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = models.data_for("mlp", 20)
    order = []
    for epoch in range(2):
        order += torch.randperm(20, generator=torch.Generator().manual_seed(5 * 1_000_003 + epoch)).tolist()
    expected = []
    for step in range(4):
        batch = [data[i] for i in order[step * 8 : step * 8 + 8]]
        loss = nn.functional.mse_loss(model(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        expected.append(loss.item())

    losses, state = run(
        "mlp", steps=4, clip_norm=0.05, scheduler=lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.9)
    )

    assert losses == pytest.approx(expected, abs=1e-12)
    by_hand = {f"layers.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    assert reference.largest_difference(by_hand, state) < 1e-12


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_result_does_not_depend_on_the_micro_batch_even_if_it_does_not_divide_the_batch(variant):
    losses, state = run(variant, micro_batch=8)
    other_losses, other_state = run(variant, micro_batch=3)
    assert other_losses == pytest.approx(losses, abs=1e-10)
    assert reference.largest_difference(state, other_state) < 1e-10


def test_dropout_is_reproducible_and_changes_the_result():
    plain, dropped, again = (run(dropout=p)[0] for p in (0.0, 0.3, 0.3))
    assert dropped == again
    assert dropped[0] != pytest.approx(plain[0], abs=1e-6)


def test_tied_parameter_is_counted_and_stepped_once():
    layers = models.build_layers("tied", n_blocks=1)
    owned = reference.owned_parameters(layers)
    assert layers[0].token.weight in set(owned[0])
    assert layers[-1].linear.weight not in set(owned[-1])

    _, state = run("tied", optimizer=lambda params: torch.optim.SGD(params, lr=0.1), steps=1)
    torch.manual_seed(5)
    model = nn.Sequential(*models.build_layers("tied", n_blocks=2))
    batch = [models.data_for("tied", 20)[i] for i in reference.step_sample_ids(0, 8, 20, 5)]
    models.token_loss(model(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch])).backward()
    weight = model[0].token.weight
    assert torch.allclose(state["layers.0.token.weight"], weight - 0.1 * weight.grad, atol=1e-12)
    assert torch.equal(state["layers.0.token.weight"], state["layers.3.linear.weight"])


def test_frozen_parameters_and_buffers_do_not_change():
    torch.manual_seed(5)
    before = reference.state_of(models.build_layers("frozen", n_blocks=2))
    _, after = run("frozen")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith(("layers.0.", "layers.1.norm1.")) or name.endswith("mask") for name in changed)
    assert "layers.1.norm2.weight" in changed


def test_every_sample_is_used_once_an_epoch_across_steps():
    ids = [i for step in range(5) for i in reference.step_sample_ids(step, 8, 20, seed=1)]
    assert sorted(ids[:20]) == sorted(ids[20:]) == list(range(20))
    assert ids[:20] != ids[20:]


def test_nested_boundary_carries_integers_and_tensors_without_gradient():
    layers = models.build_layers("nested")
    hidden, rest = layers[0](torch.zeros(2, 8, dtype=torch.int64))
    assert hidden.requires_grad
    assert rest["ids"].dtype == torch.int64
    assert not rest["weight"].requires_grad
