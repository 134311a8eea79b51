"""What is handed to `odyssey.Job` and would train wrongly is refused, in words of what the script did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR

import odyssey
from odyssey.errors import AutocastError, JobError, OptimizerError, SchedulerError
from tests.agent_runs import nothing_left
from tests.odyssey_cli.test_bad_input import Run, run

__all__ = ["nothing_left", "run"]
pytestmark = pytest.mark.timeout(120)
foreign = nn.Parameter(torch.zeros(3))
other = torch.optim.SGD([foreign], lr=0.1)


class Data:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), index / 16), torch.zeros(4)


def job(**given: Any) -> odyssey.Job:
    whole: dict[str, Any] = {
        "layers": lambda: [nn.Linear(4, 4), lambda: nn.Linear(4, 4)],
        "loss": nn.functional.mse_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": Data(),
        "global_batch": 8,
        "micro_batch": 4,
    }
    return odyssey.Job(**whole | given)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda params: None, "returned nothing, which is no optimizer"),
        (lambda params: 0.1, "returned a float"),
        (lambda params: torch.optim.SGD, "returned a type"),
        (torch.optim.LBFGS, r"returned a LBFGS, whose step\(\) needs an argument"),
        (lambda params: torch.optim.SGD(params[:1], lr=0.1), r"leaves out layers\.0\.bias of"),
        (lambda params: torch.optim.SGD([foreign], lr=0.1), r"leaves out layers\.0\.weight and 1 more"),
        (lambda params: torch.optim.SGD([*params, foreign], lr=0.1), "steps 1 parameter that it was not given"),
        (lambda params: torch.optim.SGD([p.clone().detach() for p in params], lr=0.1), "leaves out"),
    ],
)
def test_an_optimizer_that_trains_other_parameters_is_refused(optimizer: Callable[..., Any], why: str) -> None:
    with pytest.raises(OptimizerError, match=why) as error:
        job(optimizer=optimizer)
    assert isinstance(error.value, JobError)
    assert error.value.help


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        (lambda optimizer: None, "returned nothing, which is no scheduler"),
        (lambda optimizer: optimizer, "is no scheduler"),
        (lambda optimizer: StepLR(other, 1), "of another optimizer"),
        (lambda optimizer: ReduceLROnPlateau(optimizer), "needs a loss"),
    ],
)
def test_a_scheduler_that_sets_nothing_is_refused(scheduler: Callable[..., Any], why: str) -> None:
    with pytest.raises(SchedulerError, match=why):
        job(scheduler=scheduler)


class Chain(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class OfAnyLength(Data):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4 + index), torch.zeros(4 + index)


class Unlike(Data):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return object(), torch.zeros(4)


@pytest.mark.parametrize(
    ("given", "what", "help"),
    [
        ({"layers": Chain()}, "layers is a Chain", "a function that returns the list"),
        ({"layers": Chain}, r"layers\(\) returned a Chain", "return the list of nn.Module"),
        ({"layers": lambda: None}, r"layers\(\) returned nothing", "return the list of nn.Module"),
        ({"layers": lambda: {"a": Chain()}}, r"layers\(\) returned a dict", "return the list of nn.Module"),
        ({"layers": lambda: [[Chain()]]}, r"layers\(\)\[0\] is a list", "return modules, or functions"),
        ({"data": Stream()}, "data has no samples", "at least one sample"),
        ({"data": iter([])}, "data is a list_iterator, which can be iterated over once", "begins anew each time"),
        ({"data": 7}, "data is a int, which has no samples", "IterableDataset"),
        ({"data": torch.utils.data.DataLoader(Data())}, "data is a DataLoader, which gives micro-batches", "give its dataset"),
        ({"independent_samples": "yes"}, "independent_samples is 'yes'", "True, False or 'to rounding'"),
    ],
)
def test_what_cannot_be_a_job_is_refused_with_a_way_out(given: dict[str, Any], what: str, help: str) -> None:
    with pytest.raises(JobError, match=what) as error:
        job(**given)
    assert help in error.value.help


@pytest.mark.parametrize(
    ("data", "what", "help"),
    [
        (OfAnyLength(), r"cannot be one micro-batch: \(float32\[\d+\], float32\[\d+\]\) and \(float32\[", "pad them"),
        (Unlike(), r"samples of data cannot be one micro-batch: default_collate", "tensors, arrays or numbers"),
    ],
)
def test_samples_that_are_no_micro_batch_are_refused(data: Data, what: str, help: str) -> None:
    with pytest.raises(JobError, match=what) as error:
        list(job(data=data).steps(1))
    assert help in error.value.help
    with pytest.raises(JobError, match=what):
        job().evaluate(data)


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(JobError, match="can only be iterated over"):
        job().evaluate(Stream())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, True, "bfloat16"])
def test_a_type_that_cannot_be_computed_in_is_refused(dtype: object) -> None:
    with pytest.raises(AutocastError):
        job(autocast=dtype)


def test_what_trains_as_it_is_meant_is_taken() -> None:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p], "lr": 0.1 * p.dim()} for p in params])

    torch.manual_seed(7)
    before = torch.get_rng_state()
    it = job(optimizer=optimizer, scheduler=lambda optimizer: ConstantLR(optimizer, 0.5), autocast=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(it.steps(2))) == 2


def test_a_frozen_layer_needs_no_optimizer() -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]

    assert len(list(job(layers=layers).steps(1))) == 1


RANK = "import os; own = int(os.environ['RANK'])\n"


@pytest.mark.parametrize(
    ("fault", "error", "help"),
    [
        (
            "make = torch.optim.SGD\ntorch.optim.SGD = lambda params, lr: make(params, lr=lr * (1 + 0.1 * own))",
            "rank 1 trains with SGD(lr=0.11000000000000001), rank 0 with SGD(lr=0.1)",
            "no learning rate that depends on the rank",
        ),
        (
            "def layers():\n    torch.manual_seed(own)\n    return [nn.Linear(4, 4), nn.Linear(4, 4)]",
            "rank 1 built layer 0 (0.Linear) with other values than rank 0",
            "let layers() depend on the seed only",
        ),
        (
            "def layer():\n    torch.manual_seed(own)\n    return nn.Linear(4, 4)\n"
            "def layers():\n    return [lambda: layer(), lambda: layer()]",
            "layer 0 differs between its holders",
            "let layers() and optimizer() depend on the seed only",
        ),
    ],
    ids=["learning rate", "values", "values of holders"],
)  # fmt: skip
def test_what_depends_on_the_rank_is_told_as_what_the_script_did(run: Run, fault: str, error: str, help: str) -> None:
    said = run(RANK + fault, "--nodes", 2, "--layout", "2x1")
    said.assert_one_error(1, error, help)


def test_values_that_a_rank_finds_when_it_comes_back_are_its_own_business(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "loaded"
    fault = (
        f"from pathlib import Path\nmark = Path({str(mark)!r})\n"
        "def layers():\n    built = [nn.Linear(4, 4), nn.Linear(4, 4)]\n"
        "    if mark.exists():\n        nn.init.zeros_(built[0].weight)\n    return built\n"
        "def after(step):\n    mark.touch()"
    )
    said = run(fault, "--nodes", 2, "--layout", "2x1", "--max-restarts", 1, "--strategy", "respawn", "--drill", "step=4 kill=1")
    assert said.code == 0, said.stderr
