"""A model, an optimizer and a loss of the script's own, in one process: trained as by a plain loop, and refused by name."""

from __future__ import annotations

import ast
import difflib
import math
import threading
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import odyssey
from odyssey.errors import JobError, NonFiniteLoss
from odyssey.model.optimizers import as_one
from odyssey.model.packing import digest
from odyssey.model.script_model import ScriptModel
from odyssey.runtime.computation import on_device
from tests import ROOT, resilient_reference
from tests.jobs import resilient as job
from tests.moved import moved
from tests.resilient_reference import differences


def mean_of(net: nn.Module, batch: object, variant: str) -> torch.Tensor:
    total, n = job.total_of(net, batch, variant)
    return total / n


def begun(variant: str):
    """The script's objects, and what trains them."""
    net = job.ready(job.model(variant), variant)
    optimizers = job.optimizers(net, variant)
    loop = job.Loop(net, optimizers[0], variant)
    run = odyssey.resilient(
        net,
        optimizers if len(optimizers) > 1 else optimizers[0],
        lambda batch: mean_of(net, batch, variant),
        job.Points(variant),
        global_batch=job.GLOBAL_BATCH,
        micro_batch=job.MICRO_BATCH,
        scheduler=job.scheduler(optimizers[0], variant),
        extra=loop.extra,
        collate=job.padded if variant in ("padded", "tokens") else None,
        weight=(lambda batch: batch["lengths"].sum()) if variant == "tokens" else None,
        seed=job.SEED,
        clip_norm=0.5 if variant in ("plain", "scaled") else None,
        scaler=loop.scaler,
        sampler=job.sampler_of(variant),
    )
    return net, optimizers, loop, run


@pytest.mark.parametrize("variant", job.VARIANTS)
def test_training_equals_a_plain_loop_and_the_objects_stay_the_scripts_own(variant):
    net, optimizers, loop, run = begun(variant)

    def objects():
        return [
            *net.parameters(),
            *net.buffers(),
            *(p for its in optimizers for group in its.param_groups for p in group["params"]),
        ]

    own = objects()
    losses = {}
    for step in run.steps(job.N_STEPS):
        losses[step.index] = step.loss
        loop.behind(step.index, step.loss)
    validation = run.evaluate(job.Points(variant))
    found = {"losses": losses, "state": job.state(net, optimizers, loop), "validation": validation}
    assert differences(variant, {0: found})[0] < 1e-10
    assert all(one is other for one, other in zip(own, objects(), strict=True))


@pytest.mark.parametrize("variant", ["plain", "batchnorm", "padded", "tokens"])
def test_metrics_change_nothing_and_are_the_means_over_all_samples(variant):
    """A metric of the loss is its double here, and one of an evaluation the loss itself, from the batch."""
    net = job.model(variant)
    optimizer = job.optimizer(net, variant)

    def loss(batch):
        found = mean_of(net, batch, variant)
        return found, {"double": 2 * found, "number": found.item()}

    run = odyssey.resilient(
        net,
        optimizer,
        loss,
        job.Points(variant),
        global_batch=job.GLOBAL_BATCH,
        micro_batch=job.MICRO_BATCH,
        scheduler=job.scheduler(optimizer, variant),
        collate=job.padded if variant in ("padded", "tokens") else None,
        weight=(lambda batch: batch["lengths"].sum()) if variant == "tokens" else None,
        seed=job.SEED,
        clip_norm=0.5 if variant == "plain" else None,
    )
    losses = {}
    for step in run.steps(job.N_STEPS):
        losses[step.index] = step.loss
        assert step.metrics == pytest.approx({"double": 2 * step.loss, "number": step.loss}, abs=1e-12, rel=0)
        assert step.lr == 0.003 * (0.5 ** (step.index // 4) if variant == "plain" else 1.0)
    found = run.evaluate(job.Points(variant), metrics={"same": lambda batch: mean_of(net, batch, variant)})
    assert found.keys() == {"loss", "same"} and found["same"] == pytest.approx(found["loss"], abs=1e-12, rel=0)
    loop = job.Loop(net, optimizer, variant)
    trained = {"losses": losses, "state": job.state(net, [optimizer], loop), "validation": found["loss"]}
    trained["state"] |= {name: value for name, value in reference_of(variant).items() if name.startswith("average.")}
    assert differences(variant, {0: trained})[0] < 1e-10


def test_a_batch_weighs_what_it_did_before_the_loss_changed_it():
    net = job.model("tokens")
    optimizer = job.optimizer(net, "tokens")
    loop = job.Loop(net, optimizer, "tokens")

    def loss(batch):
        found = mean_of(net, batch, "tokens")
        batch.pop("points")
        batch["lengths"].zero_()
        return found

    run = odyssey.resilient(
        net,
        optimizer,
        loss,
        job.Points("tokens"),
        global_batch=job.GLOBAL_BATCH,
        micro_batch=job.MICRO_BATCH,
        collate=job.padded,
        weight=lambda batch: batch["lengths"][: len(batch["points"])].sum(),
        seed=job.SEED,
    )
    losses = {step.index: step.loss for step in run.steps(job.N_STEPS)}
    state = job.state(net, [optimizer], loop)
    found = {"losses": losses, "state": state, "validation": run.evaluate(job.Points("tokens"))}
    assert differences("tokens", {0: found})[0] < 1e-10
    assert run.evaluate(job.Points("tokens"), {"whole": lambda batch: float("points" in batch)})["whole"] == 1


def test_means_over_samples_that_all_weigh_nothing_are_no_numbers():
    net = nn.Linear(2, 1)

    def loss(batch):
        found = net(batch).mean()
        return found, {"same": found}

    run = odyssey.resilient(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        loss,
        [torch.ones(2)] * 4,
        global_batch=4,
        micro_batch=2,
        weight=lambda batch: 0,
    )
    found = run.evaluate([torch.ones(2)] * 4, {"one": lambda batch: 1.0})
    assert found.keys() == {"loss", "one"} and all(map(math.isnan, found.values()))
    with pytest.raises(NonFiniteLoss):
        list(run.steps(1))


def reference_of(variant):
    return resilient_reference.trained(variant)["state"]


def other_weights(net: nn.Module, how: str):
    """A model of the same form with other values, as a script may give it."""
    torch.manual_seed(11)
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    for tensor in [*average.module.parameters(), *average.module.buffers()]:
        tensor.detach().add_(torch.rand_like(tensor) if tensor.is_floating_point() else 1)
    named = {**dict(average.module.named_parameters()), **dict(average.module.named_buffers())}
    ways = {"averaged": average, "module": average.module, "named": named, "function": lambda: named, "state": None}
    return average.module, average.module.state_dict() if how == "state" else ways[how]


@pytest.mark.parametrize("how", ["averaged", "module", "named", "function", "state"])
def test_other_weights_are_in_the_model_for_an_evaluation_alone(how):
    net, _, _, run = begun("batchnorm")
    list(run.steps(2))
    other, weights = other_weights(net, how)
    before = digest(run._model.shard_state(0))
    own = run.evaluate(job.Points("batchnorm"))
    metrics = {"same": lambda batch: mean_of(net, batch, "batchnorm")}
    found = run.evaluate(job.Points("batchnorm"), metrics, weights=weights)
    assert found["loss"] == pytest.approx(resilient_reference.validated(other.eval(), "batchnorm"), abs=1e-12, rel=0)
    assert found["same"] == pytest.approx(found["loss"], abs=1e-12, rel=0) and found["loss"] != own
    assert digest(run._model.shard_state(0)) == before


def test_an_evaluation_that_fails_leaves_the_models_own_weights():
    net, _, _, run = begun("average")
    before = digest(run._model.shard_state(0))
    _, weights = other_weights(net, "module")

    def metric(batch):
        assert digest(run._model.shard_state(0)) != before
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run.evaluate(job.Points("average"), {"failing": metric}, weights=weights)
    assert digest(run._model.shard_state(0)) == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"0.bias": None}, "weights has no 0.bias"),
        ({"module.0.bias": torch.zeros(16)}, "weights has module.0.bias, which the model has not"),
        ({"0.bias": torch.zeros(1)}, "0.bias of weights has shape (1,), expected (16,)"),
        ({"0.bias": [0.0]}, "0.bias of weights is a list"),
        (3, "weights is a int"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(changes, what):
    net, _, _, run = begun("average")
    before = digest(run._model.shard_state(0))
    weights = changes
    if isinstance(changes, dict):
        weights = {name: value for name, value in {**net.state_dict(), **changes}.items() if value is not None}
    with pytest.raises(JobError) as raised:
        run.evaluate(job.Points("average"), weights=weights)
    assert what in raised.value.what and raised.value.help
    assert digest(run._model.shard_state(0)) == before


@pytest.mark.parametrize("variant", ["batchnorm", "average", "plateau", "scaled", "several"])
def test_what_is_loaded_has_all_that_was_saved(variant, tmp_path):
    _, _, loop, run = begun(variant)
    for step in run.steps(5):
        loop.behind(step.index, step.loss)
    run.save(tmp_path)
    state = run.state_dict()
    told = digest(state)
    for step in run.steps(7):
        loop.behind(step.index, step.loss)
    assert digest(state) == told, "what was given is the caller's own"
    for name, values in state["optimizer"]["0"]["state"].items():
        form = state["model"][name].shape
        assert all(value.shape == form for value in values.values() if isinstance(value, torch.Tensor) and value.dim())
    net, optimizers, loop, run = begun(variant)
    run.load(tmp_path)
    losses = {}
    for step in run.steps(job.N_STEPS):
        losses[step.index] = step.loss
        loop.behind(step.index, step.loss)
    found = {"losses": losses, "state": job.state(net, optimizers, loop), "validation": run.evaluate(job.Points(variant))}
    assert differences(variant, {0: found})[0] < 1e-10
    _, _, _, other = begun("plain" if variant != "plain" else "plateau")
    with pytest.raises(JobError, match=r"extra objects|has no|the state has|settings"):
        other.load_state_dict(state)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_model_in_channels_last_trains_as_a_plain_loop(is_fused, tmp_path):
    """Torch's fused kernels take from parameter, gradient and state what is at the same place in memory."""

    def made():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1)).double()
        net = net.to(memory_format=torch.channels_last)
        return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=is_fused)

    generator = torch.Generator().manual_seed(2)
    data = torch.randn(8, 3, 4, 4, generator=generator, dtype=torch.float64)

    def begun():
        net, optimizer = made()
        run = odyssey.resilient(net, optimizer, lambda x: net(x).square().mean(), data, global_batch=8, micro_batch=4)
        return net, run

    expected, optimizer = made()
    for _ in range(6):
        optimizer.zero_grad()
        expected(data).square().mean().backward()
        optimizer.step()
    net, run = begun()
    list(run.steps(2))
    run.save(tmp_path)
    net, run = begun()
    run.load(tmp_path)
    list(run.steps(4))
    run.load_state_dict(run.state_dict())
    list(run.steps(6))
    for found, value in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)
        assert found.stride() == value.stride()


def test_several_optimizers_may_load_what_they_were(tmp_path):
    """As a warm start does, behind `odyssey.resilient`: torch puts other groups and states in the place of theirs."""

    def warmed():
        net, optimizers, loop, run = begun("several")
        for its in optimizers:
            its.load_state_dict(its.state_dict())
        return net, optimizers, loop, run

    *_, run = warmed()
    list(run.steps(5))
    run.save(tmp_path)
    net, optimizers, loop, run = warmed()
    run.load(tmp_path)
    losses = {step.index: step.loss for step in run.steps(job.N_STEPS)}
    found = {"losses": losses, "state": job.state(net, optimizers, loop), "validation": run.evaluate(job.Points("several"))}
    assert differences("several", {0: found})[0] < 1e-10


def test_several_optimizers_have_the_groups_and_states_of_their_parts():
    first, second = (torch.optim.SGD(parameters, 0.1, momentum=0.9) for parameters in (PARAMETERS[:2], PARAMETERS[2:3]))
    both = as_one([first, second])
    second.add_param_group({"params": PARAMETERS[3:], "lr": 0.2})
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.1, 0.2]
    second.state["own"] = {"n": 1}
    both.state[PARAMETERS[3]] = {"m": 2}
    assert dict(second.state) == {"own": {"n": 1}, PARAMETERS[3]: {"m": 2}} and not first.state
    assert dict(both.state) == dict(second.state)
    first.state["all"] = 3
    both.state.clear()
    assert not first.state and not second.state


def whole(variant: str) -> tuple[nn.Module, torch.optim.Optimizer, job.Loop, ScriptModel]:
    net = job.model(variant)
    optimizer = job.optimizer(net, variant)
    loop = job.Loop(net, optimizer, variant)
    held = ScriptModel(net, lambda batch: mean_of(net, batch, variant), optimizer, None, loop.extra)
    held.hold_built([0])
    return net, optimizer, loop, held


def trained(held: ScriptModel, optimizer: torch.optim.Optimizer, loop: job.Loop) -> None:
    data = job.Points("plain")
    held.call(0, torch.utils.data.default_collate([data[i] for i in range(4)])).backward()
    optimizer.step()
    optimizer.zero_grad()
    loop.behind(4, 0.5)


@pytest.mark.parametrize("variant", ["batchnorm", "average", "plateau", "frozen", "eased"])
def test_a_state_arrives_exactly_and_what_measures_changes_nothing(variant):
    net, optimizer, loop, held = whole(variant)
    trained(held, optimizer, loop)
    state = digest(held.shard_state(0))
    with held.unchanged():
        copies = held.copy_of([0])
        trained(copies, copies.shards[0].optimizer, job.Loop(job.model(variant), optimizer, "plain"))
        assert digest(copies.shard_state(0)) != state
    assert digest(held.shard_state(0)) == state

    its_net, _, its_loop, other = whole(variant)
    its_loop.behind(0, 0.1)
    for parameter in its_net.parameters():
        parameter.grad = torch.ones_like(parameter)  # as a backward of its script's own leaves
    other.replay.joining()
    other.adopt(0, moved(held.export(0)))
    assert digest(other.shard_state(0)) == state
    assert its_net[1].__dict__.get("p") == net[1].__dict__.get("p")
    assert not any(parameter.grad is not None for parameter in its_net.parameters()), "others' sums do not go on with it"
    for pass_a_unit in (other.replay.replaying, other.replay.replaying, other.replay.replayed):
        its_loop.behind(4, 0.5)  # as a script does for a unit of the others
        pass_a_unit()
        assert digest(other.shard_state(0)) == state
    its_loop.behind(4, 0.5)
    now = digest(other.shard_state(0))
    other.replay.replaying()
    assert digest(other.shard_state(0)) == now


def test_an_attribute_that_is_what_it_was_at_first_arrives_too():
    """A rank that has joined does once more what the loop does behind a step, which the others have undone since."""
    net, _, _, held = whole("eased")
    its_net, _, _, other = whole("eased")
    other.replay.joining()
    other.adopt(0, moved(held.export(0)))
    its_net[1].p = 0.05
    other.replay.replayed()
    assert its_net[1].p == net[1].p == 0.2


def test_a_state_that_comes_and_goes_before_the_script_has_caught_up_is_not_waited_for():
    """The next plan leaves the rank out, and perhaps the one behind that does not."""
    state = moved(whole("average")[3].export(0))
    _, _, its_loop, other = whole("average")
    other.replay.joining()
    other.adopt(0, state)
    other.keep_only(())
    its_loop.behind(0, 0.1)
    other.replay.replaying()
    other.adopt(0, state)
    came = digest(other.shard_state(0))
    its_loop.behind(1, 0.1)
    other.replay.replayed()
    assert digest(other.shard_state(0)) == came


class Slow(torch.optim.SGD):
    """An optimizer around another, with attributes of its own: of each two steps it takes the second."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.inner, self.param_groups, self.n_steps, self.taken = inner, inner.param_groups, 0, []
        self.me = self

    def step(self, closure: None = None) -> None:
        self.n_steps += 1
        if self.n_steps % 2 == 0:
            self.taken.append(self.me.n_steps)
            self.inner.step()


class Floored(torch.optim.SGD):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.floor = 0.0

    def step(self, closure: None = None) -> None:
        assert self.floor == 0.0
        super().step()


@pytest.mark.parametrize("kind", ["one", "wrapped", "several"])
def test_what_measures_has_an_optimizer_with_all_that_the_scripts_own_has(kind):
    net = nn.Linear(2, 1, bias=False) if kind == "one" else nn.Linear(2, 1)
    parts = [Slow(Floored(net.parameters())) if kind == "wrapped" else Floored([p]) for p in net.parameters()]
    own = as_one(parts if kind == "several" else parts[:1])
    scheduler = torch.optim.lr_scheduler.StepLR(parts[0], 1)
    held = ScriptModel(net, lambda batch: net(batch).mean(), own, scheduler, ())
    held.hold_built([0])
    before, state = [p.detach().clone() for p in net.parameters()], digest(held.shard_state(0))
    with held.unchanged():
        twin = held.copy_of([0]).shards[0].optimizer
        for _ in range(2):
            held.call(0, torch.ones(3, 2)).backward()
            twin.step()
        assert not any(torch.equal(p, value) for p, value in zip(net.parameters(), before, strict=True))
    assert digest(held.shard_state(0)) == state
    if kind == "wrapped":
        assert (own.n_steps, own.taken) == (0, []) and (twin.n_steps, twin.taken) == (2, [2])
        assert twin.param_groups is twin.inner.param_groups and twin.me is twin


def test_an_optimizer_that_cannot_be_copied_is_refused_by_name():
    net = nn.Linear(2, 1)
    optimizer = Floored(net.parameters())
    optimizer.lock = threading.Lock()
    held = ScriptModel(net, lambda batch: net(batch).mean(), optimizer, None, ())
    with pytest.raises(JobError, match="lock of optimizer, a Floored, cannot be copied"):
        held.copy_of([0])


NET = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
PARAMETERS = list(NET.parameters())
GOOD = torch.optim.SGD(PARAMETERS, 0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(PARAMETERS, 0.1), 2)


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {"n": 3}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": nn.Sequential(NET, Remembering(2, 2))}, "model.1 is a Remembering, which keeps a state of its own"),
        ({"model": lambda x: x}, "model is a function"),
        ({"model": nn.DataParallel(NET)}, "model is wrapped in DataParallel"),
        ({"model": DistributedDataParallel.__new__(DistributedDataParallel)}, "model is wrapped in DistributedDataParallel"),
        ({"model": nn.Identity()}, "no device, as it has no parameters"),
        ({"model": nn.Linear(2, 2, device="meta")}, "optimizer leaves out weight and 1 more|model is on meta"),
        ({"optimizer": "adam"}, "optimizer is a str"),
        ({"optimizer": torch.optim.LBFGS(PARAMETERS)}, "LBFGS, whose step() needs an argument"),
        ({"optimizer": [GOOD, "adam"]}, "a list of other things than optimizers"),
        ({"optimizer": [GOOD, torch.optim.SGD(PARAMETERS[:1], 0.1)]}, "stepped by more than one optimizer"),
        ({"optimizer": [torch.optim.SGD(PARAMETERS[:1], 0.1), torch.optim.SGD(PARAMETERS[1:2], 0.1)]}, "leaves out"),
        ({"optimizer": torch.optim.SGD(PARAMETERS[:1], 0.1)}, "optimizer leaves out 0.bias and 2 more"),
        ({"optimizer": torch.optim.SGD([*PARAMETERS, nn.Parameter(torch.ones(1))], 0.1)}, "parameters that model has not"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(GOOD)}, "ReduceLROnPlateau, which needs a loss"),
        ({"scheduler": SCHEDULER}, "StepLR that is not of optimizer"),
        ({"extra": [3]}, "a int has no state_dict() and load_state_dict()"),
        ({"data": []}, "data has no samples"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"autocast": torch.float16}, "needs a gradient scaler"),
        ({"scaler": 65536.0}, "scaler is a float"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(changes, what):
    data = [(torch.ones(2), torch.ones(2))] * 4
    given = {"model": NET, "optimizer": GOOD, "loss": lambda batch: NET(batch[0]).sum(), "data": data}
    given |= {"global_batch": 4, "micro_batch": 2}
    with pytest.raises(JobError) as raised:
        odyssey.resilient(**given | changes)
    assert any(each in raised.value.what for each in what.split("|")), raised.value.what
    assert raised.value.help


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_hook_that_changes_what_a_rank_has_summed_is_refused(is_begun):
    """One rank may have two micro-batches to sum, where two ranks had one each."""
    net = nn.Linear(2, 1)
    net.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    net.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([net.weight], 0.1)

    def train():
        run = odyssey.resilient(net, optimizer, lambda x: net(x).sum(), [torch.ones(2)] * 4, global_batch=4, micro_batch=2)
        for _ in run.steps(2):
            register()

    def shrink(parameter):
        parameter.grad.mul_(0.1)

    def register():
        net.weight.register_post_accumulate_grad_hook(shrink)

    if not is_begun:
        register()
    with pytest.raises(JobError, match="parameter weight has a hook behind the sum of its gradient"):
        train()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        self.n_calls += 1
        return self.linear(x)


def replacing(net, x):
    """It puts another buffer in the place of its own."""
    net.n_calls = net.n_calls + 1
    return net.linear(x).sum()


def making(net, x):
    """It makes a cache at the first call."""
    net.linear.register_buffer("made", torch.ones(1), persistent=False)
    return (net.linear(x) * net.linear.made).sum()


def clamping(net, x):
    """It does what an embedding does with `max_norm`."""
    with torch.no_grad():
        net.linear.weight.clamp_(-1, 1)
    return net.linear(x).sum()


def zeroing(net, x):
    """It is the body of a loop that was moved into the loss."""
    torch.optim.SGD(net.parameters(), 0.1).zero_grad()
    return net(x).sum()


def zeroing_in_place(net, x):
    torch.optim.SGD(net.parameters(), 0.1).zero_grad(set_to_none=False)
    return net(x).sum()


def going_back(net, x):
    net(x).sum().backward()
    return net(x).sum()


def forgetting(net, x):
    """Its hook lets gradients go, as one does that steps an optimizer in the backward."""
    if not net.linear.weight._post_accumulate_grad_hooks:
        net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return net(x).sum()


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda net, x: net(x).sum().item(), "loss(batch) returned a float"),
        (lambda net, x: net(x), "loss(batch) has shape (2, 1)"),
        (lambda net, x: net(x).sum().detach(), "loss(batch) has no gradient"),
        (lambda net, x: net(x).sum(), "loss(batch) changes the model's buffer n_calls"),
        (replacing, "loss(batch) changes the model's buffer n_calls"),
        (making, "loss(batch) makes the model's buffer linear.made"),
        (clamping, "loss(batch) changes the model's parameter linear.weight"),
        (zeroing, "loss(batch) changes the model's gradient of linear.weight"),
        (zeroing_in_place, "loss(batch) changes the model's gradient of linear.weight"),
        (going_back, "loss(batch) changes the model's gradient of linear.weight"),
        (forgetting, "the gradient of layers.0.model.linear.weight was replaced within a step"),
    ],
)
def test_a_loss_that_would_not_train_is_refused_by_name(loss, what):
    net = Counting()
    if "buffer" not in what:
        net.n_calls = None
        net.forward = net.linear.forward
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = odyssey.resilient(net, optimizer, lambda x: loss(net, x), [torch.ones(2)] * 4, global_batch=4, micro_batch=2)
    with pytest.raises(JobError) as raised:
        list(run.steps(1))
    assert what in raised.value.what


def test_a_step_whose_loss_is_no_number_leaves_running_statistics_as_they_were():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    samples, factor = [torch.rand(2) for _ in range(8)], torch.ones(())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = odyssey.resilient(net, optimizer, lambda x: net(x).square().mean() * factor, samples, global_batch=8, micro_batch=4)
    next(run.steps(1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    factor.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss):
        next(run.steps(2))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("how", ["unfrozen", "frozen", "replaced"])
def test_a_model_that_becomes_another_one_is_told(how):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    run = odyssey.resilient(net, optimizer, lambda x: net(x).sum(), [torch.ones(2)] * 4, global_batch=4, micro_batch=2)
    steps = run.steps(3)
    next(steps)
    if how == "unfrozen":
        net[0].bias.requires_grad_(True)
        optimizer.add_param_group({"params": [net[0].bias]})
    elif how == "frozen":
        net[1].bias.requires_grad_(False)
    else:
        net[1] = nn.Linear(2, 1)
    with pytest.raises(JobError) as raised:
        next(steps)
    assert "other parameters are to be trained than when the job began" in raised.value.what


def test_parameters_that_come_to_lie_otherwise_in_memory_are_told():
    """Before the first step they may: gradients are made by them then."""
    net = nn.Conv2d(2, 2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = odyssey.resilient(net, optimizer, lambda x: net(x).sum(), [torch.ones(2, 2, 2)] * 4, global_batch=4, micro_batch=2)
    net.to(memory_format=torch.channels_last)
    steps = run.steps(3)
    next(steps)
    net.to(memory_format=torch.contiguous_format)
    with pytest.raises(JobError, match="weight lies in memory otherwise than when the job began"):
        next(steps)


def code_of(name):
    """Lines of an example, without its docstring."""
    text = (ROOT / "examples" / name).read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def test_an_exact_script_is_ten_new_lines_and_the_page_shows_them():
    before, after = code_of("train_ddp.py"), code_of("train_resilient.py")
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[3:]
    found = ["@@" if line.startswith("@@") else line for line in lines]
    new = [line for line in found if line.startswith("+") and line != "+"]
    assert len(new) == 10, "\n".join(new)
    assert "\n".join(["```diff", *found, "```"]) in (ROOT / "docs" / "own-model.md").read_text()


class Encoded(UserDict[str, torch.Tensor]):
    """It is like BatchEncoding of Transformers, of which torch's pytrees know nothing."""

    def to(self, device: torch.device, *, non_blocking: bool) -> Encoded:
        self.data = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.data.items()}
        return self


def test_a_batch_of_a_class_of_others_goes_to_the_device():
    batch = {"text": Encoded(ids=torch.zeros(2, 3)), "target": torch.zeros(2), "names": ["a", "b"]}
    there = on_device(batch, torch.device("meta"))
    assert there["text"]["ids"].is_meta and there["target"].is_meta
    assert there["names"] == ["a", "b"]
