"""A model that torch has sharded, in a script that runs alone, and what is refused of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import odyssey
from odyssey.errors import JobError
from odyssey.model.dtensors import is_divided, part_of, parts_in, taken_apart, whole_again
from tests.jobs.resilient import Points
from tests.moved import moved

GIVEN = {"global_batch": 8, "micro_batch": 4, "seed": 3}


@pytest.fixture(autouse=True)
def without_groups() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def sharded(mesh: DeviceMesh | None = None) -> nn.Sequential:
    model, mesh = net(), mesh or odyssey.shard_mesh(2)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run_of(model: nn.Module, loss: Any = None, **given: Any) -> odyssey.Job:
    def of_model(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return odyssey.resilient(model, optimizer, loss or of_model, Points("plain"), **(GIVEN | given))


def test_alone_it_trains_as_the_same_model_that_is_not_sharded() -> None:
    """To the last bit, and a file of the whole model has its own names."""
    plain, divided = run_of(net()), run_of(sharded())
    for one, other in zip(plain.steps(6), divided.steps(6), strict=True):
        assert one.loss == other.loss and one.grad_norm == other.grad_norm
    assert plain.evaluate(Points("plain")) == divided.evaluate(Points("plain"))
    expected, found = (job.model_state(job.state_dict()) for job in (plain, divided))
    assert list(found) == list(expected) == list(net().state_dict())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_state_is_taken_on_again() -> None:
    run = run_of(sharded())
    list(run.steps(2))
    state = run.state_dict()
    later = [step.loss for step in run.steps(4)]
    run.load_state_dict(state)
    assert [step.loss for step in run.steps(4)] == later


def test_other_weights_for_an_evaluation_are_sharded_as_the_model_is() -> None:
    model = sharded()
    run, whole = run_of(model), net()
    own = run.evaluate(Points("plain"))
    doubled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2)
    assert run.evaluate(Points("plain"), weights=doubled) == run_of(whole).evaluate(Points("plain"))
    assert run.evaluate(Points("plain")) == own
    with pytest.raises(JobError, match=r"0\.weight of weights is not sharded as the model is"):
        run.evaluate(Points("plain"), weights=whole)


@torch.no_grad()
def averaged(run: odyssey.Job, model: nn.Module, average: nn.Module, until: int) -> list[torch.Tensor]:
    """What the average has come to behind these steps."""
    for _ in run.steps(until):
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 0.1)
    return [part_of(mean).clone() for mean in average.parameters()]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def test_an_average_that_is_a_sharded_module_is_extra(tmp_path: Path) -> None:
    """What it is made of is compared, saved and taken on again; its `state_dict` is an OrderedDict."""
    mesh = odyssey.shard_mesh(2)
    model, average = sharded(mesh), sharded(mesh)
    run = run_of(model, extra=[average])
    early = averaged(run, model, average, 2)
    run.save(tmp_path)
    state = run.state_dict()
    later = averaged(run, model, average, 4)
    assert not are_equal(early, later)
    run.load_state_dict(state)
    assert are_equal(averaged(run, model, average, 4), later)
    run.load(tmp_path)
    assert are_equal(averaged(run, model, average, 4), later)


def test_the_state_of_a_module_is_taken_apart_and_put_together_as_what_it_loads() -> None:
    model = sharded()
    state = model.state_dict()
    assert not any(map(is_divided, parts_in(state).values()))
    apart = moved(taken_apart(state))
    assert not any(isinstance(value, torch.Tensor) for value in apart.values())
    again = whole_again(apart, model[0].weight)
    assert again._metadata == state._metadata
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(again)
    assert are_equal(list(map(part_of, model.parameters())), list(net().parameters()))


def test_what_the_script_switches_off_between_steps_is_on_in_each() -> None:
    """Sums are left out while gradients are accumulated by hand, which is not how they are here."""
    model, expected = sharded(), [step.loss for step in run_of(net()).steps(4)]
    found = []
    for step in run_of(model).steps(4):
        found.append(step.loss)
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
    assert found == expected


def test_a_model_that_is_sharded_in_part_is_refused() -> None:
    model = net()
    fully_shard(model[0], mesh=odyssey.shard_mesh(2))
    with pytest.raises(JobError, match=r"2\.weight is not sharded"):
        run_of(model)


def test_a_mesh_of_the_scripts_own_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(JobError, match="a mesh of its own"):
        run_of(model)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_mesh_of_no_ranks_is_refused(n: Any) -> None:
    with pytest.raises(JobError, match="shard_mesh"):
        odyssey.shard_mesh(n)


def test_there_is_one_mesh() -> None:
    odyssey.shard_mesh(2)
    with pytest.raises(JobError, match="there is a process group already"):
        odyssey.shard_mesh(2)


def test_other_collectives_among_those_who_have_a_copy_are_refused_by_name() -> None:
    model = sharded()

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = nn.functional.mse_loss(model(batch[0]), batch[1])
        dist.all_reduce(found.detach())
        return found

    with pytest.raises(JobError, match="allreduce"):
        list(run_of(model, loss).steps(1))
