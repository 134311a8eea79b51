"""A job of one process, without a launcher, against a training loop that has none of our engine."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import odyssey
from odyssey.errors import JobError, NonFiniteLoss
from tests import models, reference
from tests.jobs.train import make_optimizer, make_scheduler


def arguments(variant, **changes):
    dropout = 0.0 if variant == "mlp" else 0.1
    given = {
        "layers": partial(models.build_layers, variant, n_blocks=3, dropout=dropout),
        "loss": models.loss_for(variant),
        "optimizer": make_optimizer,
        "data": models.data_for(variant, 40, torch.float64),
        "global_batch": 15,
        "micro_batch": 2,
        "seed": 3,
        "scheduler": make_scheduler,
        "clip_norm": 0.5,
    }
    return given | changes


def reference_of(given, steps):
    given = dict(given)
    layers, loss, optimizer, data = (given.pop(name) for name in ("layers", "loss", "optimizer", "data"))
    return reference.train(layers, loss, optimizer, data, steps=steps, **given)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_training_equals_a_plain_loop(variant):
    given = arguments(variant)
    job = odyssey.Job(**given)
    losses = [step.loss for step in job.steps(6)]
    expected_losses, expected = reference_of(given, 6)
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    state = job.state_dict()["model"]
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", ["tied", "shared"])
def test_a_saved_job_goes_on_as_if_it_had_not_stopped(tmp_path, variant):
    job = odyssey.Job(**arguments(variant))
    list(job.steps(3))
    job.save(tmp_path / "checkpoint")
    state = job.state_dict()
    expected = [step.loss for step in job.steps(6)]

    loaded = odyssey.Job(**arguments(variant))
    loaded.load(tmp_path / "checkpoint")
    assert loaded.next_step == 3
    assert [step.loss for step in loaded.steps(6)] == expected

    taken = odyssey.Job(**arguments(variant))
    taken.load_state_dict(state)
    assert [step.loss for step in taken.steps(6)] == expected


def test_a_micro_batch_that_is_larger_than_a_step_is_the_whole_step():
    """All that is measured and priced is of a micro-batch that there can be."""
    job = odyssey.Job(**arguments("mlp", global_batch=4, micro_batch=16))
    losses = [step.loss for step in job.steps(2)]
    assert job.plan.micro_batch == job._session._engine.computation.job_spec.spec.micro_batch == 4
    assert losses == [step.loss for step in odyssey.Job(**arguments("mlp", global_batch=4, micro_batch=4)).steps(2)]


def test_a_step_and_an_evaluation_are_means_of_what_micro_batches_weigh():
    def weight(target):
        return target.abs().sum()

    layer = torch.nn.Linear(16, 16, dtype=torch.float64)
    own = copy.deepcopy(layer)
    data = models.VectorData(10)
    job = odyssey.Job(
        lambda: [layer],
        lambda output, target: (torch.nn.functional.mse_loss(output, target), {"it": target.mean()}),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        data,
        global_batch=5,
        micro_batch=2,
        weight=weight,
    )
    (step,) = job.steps(1)
    total, seen, weights = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    ids = reference.step_sample_ids(0, 5, 10, 0)
    for start in range(0, 5, 2):
        inputs, target = (torch.stack(column) for column in zip(*map(data.__getitem__, ids[start : start + 2]), strict=True))
        its = float(weight(target))
        total = total + torch.nn.functional.mse_loss(own(inputs), target) * its
        seen, weights = seen + float(target.mean()) * its, weights + its
    (total / weights).backward()
    assert step.loss == pytest.approx(total.item() / weights, abs=1e-12)
    assert step.metrics["it"] == pytest.approx(seen / weights, abs=1e-12)
    torch.testing.assert_close(layer.weight, own.weight - own.weight.grad, rtol=0, atol=1e-12)
    everything = [torch.stack(column) for column in zip(*map(data.__getitem__, range(2)), strict=True)]
    expected = torch.nn.functional.mse_loss(layer(everything[0]), everything[1]).item()
    assert job.evaluate(models.VectorData(2)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("weight", [-1, float("nan"), None, torch.ones(2)])
def test_a_weight_that_cannot_be_meant_is_refused(weight):
    job = odyssey.Job(**arguments("mlp", weight=lambda target: weight))
    with pytest.raises(JobError, match="the weight of a micro-batch"):
        list(job.steps(1))


def test_a_step_that_weighs_nothing_ends_the_job():
    job = odyssey.Job(**arguments("mlp", weight=lambda target: 0))
    with pytest.raises(NonFiniteLoss):
        list(job.steps(1))


def test_a_state_of_another_model_is_refused(tmp_path):
    state = odyssey.Job(**arguments("mlp")).state_dict()
    with pytest.raises(JobError, match=r"layers\.0"):
        odyssey.Job(**arguments("gpt")).load_state_dict(state)
    with pytest.raises(JobError, match="no checkpoint"):
        odyssey.Job(**arguments("gpt")).load(tmp_path)


def test_evaluation_is_the_mean_over_all_samples_without_dropout():
    given = arguments("gpt")
    job = odyssey.Job(**given)
    data = models.data_for("gpt", 7, torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(given["seed"])
        layers = torch.nn.Sequential(*given["layers"]()).eval()
    with torch.no_grad():
        losses = [given["loss"](layers(data[i][0][None]), data[i][1][None]).item() for i in range(7)]
    assert job.evaluate(data) == pytest.approx(sum(losses) / 7, abs=1e-12)
    first = next(job.steps(1)).loss
    assert first == pytest.approx(reference_of(given, 1)[0][0], abs=1e-12), "training mode is back after an evaluation"


def test_weights_to_evaluate_with_are_for_a_whole_model():
    given = arguments("mlp")
    with pytest.raises(JobError, match="weights are given in a Job of layers"):
        odyssey.Job(**given).evaluate(given["data"], weights={})


def test_a_nan_loss_stops_before_it_is_applied():
    job = odyssey.Job(**arguments("mlp", loss=lambda output, target: output.mean() * float("nan")))
    before = job.state_dict()["model"]
    with pytest.raises(NonFiniteLoss, match="the loss of step 0 is nan"):
        next(job.steps(5))
    after = job.state_dict()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_autocast_keeps_parameters_in_float32():
    given = arguments(
        "gpt", layers=partial(models.build_layers, "gpt", n_blocks=1, dtype=torch.float32), autocast=torch.bfloat16
    )
    job = odyssey.Job(**given)
    losses = [step.loss for step in job.steps(4)]
    expected, _ = reference_of(given, 4)
    assert losses == pytest.approx(expected, rel=2e-3)
    assert all(t.dtype != torch.bfloat16 for t in job.state_dict()["model"].values())


def test_layers_given_as_functions_are_built_and_trained():
    given = arguments("mlp", layers=lambda: [partial(torch.nn.Linear, 16, 16, dtype=torch.float64)] * 3)
    job = odyssey.Job(**given)
    losses = [step.loss for step in job.steps(20)]
    assert losses[-1] < losses[0]


def with_hook(register):
    layer = torch.nn.Linear(4, 4)
    getattr(layer.weight, register)(lambda value: None)
    return layer


class Remembering(torch.nn.Identity):
    def get_extra_state(self):
        return 3


class InAList(torch.nn.Module):
    """Trained by plain torch, which puts no other parameters into a module."""

    def __init__(self, keep):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(16, dtype=torch.float64))
        self.kept = keep(self.weight)

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("keep", [lambda w: [w], lambda w: {"a": (3, [w])}, lambda w: [torch.nn.Parameter(w.detach())]])
def test_a_module_that_keeps_parameters_elsewhere_is_refused(keep):
    with pytest.raises(JobError, match=r"layers\(\)\[0\]\.0 keeps parameters in kept, a (list|dict)") as refused:
        odyssey.Job(**arguments("mlp", layers=lambda: [torch.nn.Sequential(InAList(keep))]))
    assert "ParameterList" in refused.value.help


class Listed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.eye(16, dtype=torch.float64) for _ in range(2))
        self.cell = torch.nn.GRU(16, 16, dtype=torch.float64)
        self.names = ["weights"]

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return self.cell(x)[0]


def test_what_torch_itself_keeps_parameters_in_is_trained():
    given = arguments("mlp", layers=lambda: [Listed()])
    job = odyssey.Job(**given)
    losses = [step.loss for step in job.steps(4)]
    assert losses == pytest.approx(reference_of(given, 4)[0], abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"layers": list}, "layers\\(\\) returned no layers"),
        ({"layers": lambda: [torch.nn.Linear(2, 2), 3]}, "layers\\(\\)\\[1\\] is a int"),
        ({"layers": lambda: [torch.nn.BatchNorm1d(16)]}, r"has running statistics \(BatchNorm1d\)"),
        ({"layers": lambda: [torch.nn.InstanceNorm1d(16, track_running_stats=True)]}, "running statistics .InstanceNorm1d"),
        ({"layers": lambda: [with_hook("register_hook")]}, r"layers\(\)\[0\]: parameter weight has a hook"),
        ({"layers": lambda: [with_hook("register_post_accumulate_grad_hook")]}, "parameter weight has a hook"),
        ({"layers": lambda: [torch.nn.Linear(16, 16), Remembering()]}, "layers\\(\\)\\[1\\] is a Remembering, which keeps"),
        ({"data": []}, "data has no samples"),
    ],
)
def test_what_cannot_be_trained_is_said_at_once(change, message):
    with pytest.raises(JobError, match=message):
        odyssey.Job(**arguments("mlp", **change))


class Noisy(torch.nn.Linear):
    """With noise on the gradient of its output."""

    def __init__(self, *, is_drawn_in_forward=False):
        super().__init__(16, 16, dtype=torch.float64)
        self.is_drawn_in_forward = is_drawn_in_forward

    def forward(self, x):
        output = super().forward(x)
        noise = torch.randn_like(output) if self.is_drawn_in_forward else None
        output.register_hook(lambda gradient: gradient + (torch.randn_like(gradient) if noise is None else noise))
        return output


def test_a_layer_that_draws_in_its_backward_is_refused():
    """Where layers are divided otherwise, other forwards come before it."""
    job = odyssey.Job(**arguments("mlp", layers=lambda: [torch.nn.Identity(), Noisy()]))
    with pytest.raises(JobError, match=r"a backward of layers 0\.Identity to 1\.Noisy draws random numbers") as refused:
        list(job.steps(1))
    assert "draw them in forward" in refused.value.help


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 16, dtype=torch.float64), torch.nn.Dropout(0.5))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [torch.nn.Identity(), Noisy(is_drawn_in_forward=True)],
        lambda: [torch.nn.Identity(), Checkpointed()],
        lambda: [Noisy()],
    ],
    ids=["drawn in forward", "drawn again as it was", "drawn behind the same forward always"],
)
def test_what_is_drawn_alike_under_all_plans_is_taken(layers):
    assert len(list(odyssey.Job(**arguments("mlp", layers=layers)).steps(2))) == 2


class Changing(torch.nn.Linear):
    def __init__(self, change):
        super().__init__(16, 16, dtype=torch.float64)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("cached", None, persistent=False)
        self.change = change

    def forward(self, x):
        with torch.no_grad():
            self.change(self)
        return super().forward(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda its: its.weight.clamp_(-1, 1), "the forward of layer 1.Changing changes its weight"),  # as of max_norm
        (lambda its: its.kept.add_(1), "layer 1.Changing changes its kept"),
        (lambda its: setattr(its, "kept", its.kept + 1), "layer 1.Changing changes its kept"),
        (lambda its: setattr(its, "cached", torch.ones(3)), "layer 1.Changing makes its cached"),
    ],
)
def test_a_layer_whose_forward_changes_it_is_refused_by_name(change, message):
    given = arguments("mlp", layers=lambda: [*models.build_layers("mlp"), Changing(change)][-2:])
    job = odyssey.Job(**given)
    with pytest.raises(JobError, match=message):
        next(job.steps(1))


def accuracy(output, target):
    return (output.argmax(-1) == target).double().mean()


def largest(output, target):
    return output.amax(-1).mean().item()


def with_them(loss):
    return lambda output, target: (
        loss(output, target),
        {"accuracy": accuracy(output, target), "largest": largest(output, target)},
    )


def test_a_step_tells_what_the_loss_tells_beside_it_and_its_learning_rate():
    """Fifteen samples in micro-batches of two: the last one has one."""
    given = arguments("gpt")
    told = []
    expected_losses, expected = reference_of(given | {"loss": told_to(told, given["loss"])}, 6)
    job = odyssey.Job(**given | {"loss": with_them(given["loss"])})
    steps = list(job.steps(6))
    assert [step.loss for step in steps] == pytest.approx(expected_losses, abs=1e-12)
    for step in steps:
        its = told[step.index * 8 : step.index * 8 + 8]
        assert step.metrics.keys() == {"accuracy", "largest"}
        for name, value in step.metrics.items():
            assert value == pytest.approx(sum(n * metrics[name] for n, metrics in its) / 15, abs=1e-12)
        assert step.lr == pytest.approx(3e-3 * min(1.0, (step.index + 1) / 5) * 0.98**step.index, rel=1e-15)
    for name, tensor in expected.items():
        torch.testing.assert_close(job.state_dict()["model"][name], tensor, rtol=0, atol=1e-10)


def told_to(told, loss):
    """The loss, which notes the metrics of each micro-batch."""

    def noting(output, target):
        metrics = {"accuracy": accuracy(output, target).item(), "largest": largest(output, target)}
        told.append((len(target), metrics))
        return loss(output, target)

    return noting


def test_an_evaluation_gives_metrics_beside_the_loss():
    given = arguments("gpt")
    job = odyssey.Job(**given | {"loss": with_them(given["loss"])})
    list(job.steps(2))
    data = models.data_for("gpt", 7, torch.float64)
    found = job.evaluate(data, metrics={"accuracy": accuracy, "largest": largest})
    with torch.random.fork_rng():
        torch.manual_seed(given["seed"])
        layers = given["layers"]()
    for layer, state in enumerate(layers):
        values = job.module(layer).state_dict()
        state.load_state_dict(values)
        assert job.module(layer).training, "as it was before the evaluation"
    whole = torch.nn.Sequential(*layers).eval()
    inputs, target = (torch.stack(column) for column in zip(*(data[i] for i in range(7)), strict=True))
    with torch.no_grad():
        output = whole(inputs)
    expected = {"accuracy": accuracy(output, target).item(), "largest": largest(output, target)}
    expected["loss"] = given["loss"](output, target).item()
    assert found == pytest.approx(expected, abs=1e-12)
    assert job.evaluate(data) == found["loss"]
    assert job.evaluate(data, metrics={}) == {"loss": found["loss"]}


def test_learning_rates_that_differ_are_not_one():
    def layers():
        return [torch.nn.Linear(16, 16, bias=bias, dtype=torch.float64) for bias in (False, True)]

    def optimizer(parameters):
        return torch.optim.SGD(parameters, 0.1 * len(parameters))

    job = odyssey.Job(**arguments("mlp", layers=layers, optimizer=optimizer, scheduler=None))
    assert next(job.steps(1)).lr is None
    assert next(odyssey.Job(**arguments("mlp", scheduler=None)).steps(1)).lr == 3e-3


def test_metrics_that_are_not_always_there_are_refused():
    calls = []

    def sometimes(output, target):
        calls.append(0)
        loss = torch.nn.functional.mse_loss(output, target)
        return (loss, {"it": 1.0}) if len(calls) % 3 else loss

    job = odyssey.Job(**arguments("mlp", loss=sometimes))
    with pytest.raises(JobError, match="not the same names in all micro-batches"):
        next(job.steps(1))


@pytest.mark.parametrize(
    ("metrics", "what"), [({"loss": largest}, "called 'loss'"), ({"it": lambda output, target: output}, "'it' has shape")]
)
def test_metrics_of_an_evaluation_that_are_none_are_refused(metrics, what):
    job = odyssey.Job(**arguments("mlp"))
    with pytest.raises(JobError, match=what):
        job.evaluate(models.data_for("mlp", 3), metrics=metrics)


def test_a_module_is_asked_for_by_its_layer():
    job = odyssey.Job(**arguments("mlp"))
    assert [type(job.module(layer)) for layer in (0, 4)] == [torch.nn.Sequential, torch.nn.Linear]
    with pytest.raises(JobError, match=r"module\(5\): the model has layers 0 to 4"):
        job.module(5)
