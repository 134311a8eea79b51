"""Folders of checkpoints: whole at every moment, verified when they are read, and told of when they are not."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import odyssey
from odyssey.checkpoints import folder as folders
from odyssey.errors import JobError
from tests import ROOT
from tests.jobs.killed_saves import flat, is_equal
from tests.jobs.resilient import Points
from tests.odyssey.test_local_job import arguments


def job(**changes: object) -> odyssey.Job:
    return odyssey.Job(**arguments("tied", **changes))


def trained(folder: Path, *steps: int, keep: int = 2) -> list[dict]:
    """Save at each of `steps`; the states."""
    trained = job()
    states = []
    for step in steps:
        list(trained.steps(step))
        trained.save(folder, keep=keep)
        states.append(flat(trained.state_dict()))
    return states


def loaded(folder: Path) -> dict:
    other = job()
    other.load(folder)
    return flat(other.state_dict())


@pytest.mark.timeout(600)  # a process for each operation
@pytest.mark.parametrize("what", ["next", pytest.param("same", marks=pytest.mark.soak)])
def test_a_kill_before_any_operation_of_a_save_leaves_the_old_or_the_new_one(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "tests/jobs/killed_saves.py"), str(tmp_path), what]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "nor does torch warn of anything"
    kills = [json.loads(line[line.rindex("{") :]) for line in done.stdout.splitlines()]
    found = [kill["found"] for kill in kills]
    assert len(kills) > 15 and found == sorted(found, reverse=True), (
        "the old state up to some operation, the new one from there"
    )
    assert {tuple(one) for one in found} == {("old",), ("new",)}
    assert all(len(kill["left"]) == 1 and kill["left"][0].startswith("step-") for kill in kills), "the next save tidies up"


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    states = trained(tmp_path, 1, 2, 3, 4)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-000003", "step-000004"]
    assert is_equal(loaded(tmp_path), states[3])
    assert is_equal(loaded(tmp_path / "step-000003"), states[2]), "one of them can be asked for"
    trained(tmp_path, 5, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-000005"]


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    trained(tmp_path, 2, 3)
    again = job()
    list(again.steps(1))
    again.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000003"]
    assert job(resume=tmp_path).next_step == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a byte of a part": (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp is not what was written: its digest differs"),
    "a byte of the metadata": (lambda path: flip(path / ".metadata"), ".metadata is not what was written: its digest differs"),
    "a short part": (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes of"),
    "no part": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp: No such file or directory"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file or directory"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 50), "manifest.json is not one"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("how", ["load", "resume"])
def test_a_damaged_one_is_told_and_the_one_before_is_used(
    damage: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    states = trained(tmp_path, 2, 3)
    hurt, said = DAMAGES[damage]
    hurt(tmp_path / "step-000003")

    other = job(resume=tmp_path if how == "resume" else None)
    if how == "load":
        other.load(tmp_path)

    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"odyssey: {tmp_path}: step-000003: {said}") and line.endswith("; going on from step-000002")
    assert is_equal(flat(other.state_dict()), states[0])
    hurt(tmp_path / "step-000002")
    with pytest.raises(JobError, match=r"no checkpoint there is whole: step-000003: .*; step-000002: ") as error:
        loaded(tmp_path)
    assert "remove this one" in error.value.help


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("Input/output error"), KeyError("a bug")])
def test_one_that_torch_cannot_read_is_told_and_the_one_before_is_used(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says so by what is no Exception, whatever it was."""
    states = trained(tmp_path, 2, 3)
    read_data = FileSystemReader.read_data

    def failing(reader: FileSystemReader, *arguments: Any) -> Any:
        if Path(reader.path).name == "step-000003":
            raise error
        return read_data(reader, *arguments)

    monkeypatch.setattr(FileSystemReader, "read_data", failing)
    if isinstance(error, KeyError):
        with pytest.raises(KeyError, match="a bug"):
            loaded(tmp_path)
        return
    assert is_equal(loaded(tmp_path), states[0])
    (line,) = capfd.readouterr().err.splitlines()
    what = f"step-000003: it cannot be read: {error}"
    assert line == f"odyssey: {tmp_path}: {what}; going on from step-000002"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": arguments("gpt")["layers"]}, "optimizer"),  # the same names and shapes, without the tie
        (
            {"layers": arguments("mlp")["layers"], "data": arguments("mlp")["data"], "loss": arguments("mlp")["loss"]},
            "layers.0",
        ),
        ({"layers": lambda: arguments("tied")["layers"](n_blocks=2)}, "layers.3|layer 4"),
        ({"layers": lambda: arguments("tied")["layers"](dtype=torch.float32)}, "float64 for layers.0.* float32"),
        ({"optimizer": torch.optim.SGD}, "an optimizer with settings"),
        ({"optimizer": torch.optim.Adamax}, "an optimizer with settings"),  # which has none that AdamW lacks
        ({"scheduler": None}, "the state has a scheduler, the job has none"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(changes: dict, message: str | None, tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(JobError, match=message):
        job(**changes).load(tmp_path)
    with pytest.raises(JobError, match=message):
        job(**changes, resume=tmp_path)


def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".metadata").touch()
    fresh = job()
    for path, message in ((file, "Not a directory"), (theirs, "without a manifest.json"), (tmp_path, "no checkpoint")):
        with pytest.raises(JobError, match=message):
            fresh.load(path)
    with pytest.raises(JobError, match="Not a directory"):
        fresh.save(file / "below")
    fresh.save(tmp_path / "folder")
    with pytest.raises(JobError, match="it is itself a checkpoint"):
        fresh.save(tmp_path / "folder" / "step-000000")
    with pytest.raises(JobError, match="keep is 0"):
        fresh.save(tmp_path / "folder", keep=0)


@pytest.mark.parametrize("comes", ["before", "while it is saved"])
def test_a_folder_of_someone_elses_with_the_name_of_a_checkpoint_stays_and_the_save_says_so(
    comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "step-000002" / "model.pt"

    def come() -> None:
        theirs.parent.mkdir()
        theirs.write_text("theirs")

    (saved := job()).save(tmp_path)
    list(saved.steps(2))
    if comes == "before":
        come()
        monkeypatch.setattr(FileSystemWriter, "write_data", None)
    else:
        complete = folders.complete
        monkeypatch.setattr(folders, "complete", lambda *args, **options: (complete(*args, **options), come()))
    with pytest.raises(JobError, match=r"step-000002: it is there without a manifest\.json") as error:
        saved.save(tmp_path)
    monkeypatch.undo()
    assert "another folder" in error.value.help
    assert sorted(os.listdir(tmp_path)) == ["step-000000", "step-000002"], "what was written in vain is gone"
    for step in (3, 4):
        list(saved.steps(step))
        saved.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000003", "step-000004"]
    assert theirs.read_text() == "theirs"


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A full disk, as far as this process can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("size_bytes", [0, 1000, 10000])
def test_a_full_disk_is_one_clear_error_and_training_can_go_on(size_bytes: int, tmp_path: Path) -> None:
    saved = job()
    list(saved.steps(1))
    saved.save(tmp_path)
    state = flat(saved.state_dict())
    list(saved.steps(2))
    with pytest.raises(JobError, match="the checkpoint cannot be written: File too large") as error, largest_file(size_bytes):
        saved.save(tmp_path)
    assert "make room" in error.value.help
    assert os.listdir(tmp_path) == ["step-000001"]
    assert is_equal(loaded(tmp_path), state)
    list(saved.steps(3))
    saved.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000003"]


def test_a_job_resumes_or_begins(tmp_path: Path) -> None:
    undisturbed = [step.loss for step in job().steps(4)]
    first = job(resume=tmp_path / "not" / "there")
    assert first.next_step == 0
    assert [step.loss for step in first.steps(2)] == undisturbed[:2]
    first.save(tmp_path)
    second = job(resume=tmp_path)
    assert second.next_step == 2
    assert [step.loss for step in second.steps(4)] == undisturbed[2:]


class Odd(torch.optim.SGD):
    """Keeps what torch's own do not: empty and nested values, keys that are no text, counts, state of no parameter."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["empty"], state["nothing"], state["count"] = {}, None, state.get("count", 0) + 1
                state[7], state["a/b"] = parameter.detach() * 2, {2: parameter.detach() * 3, (1, 2): "pair"}
                state["rest"] = parameter.detach() / 2
                state["nested"] = {"list": [parameter.detach().float(), []], "wide": parameter.detach().double() / 3}
        self.state["shared"] = {"count": self.state["shared"].get("count", 0) + 1}


class Counting(torch.optim.SGD):
    """It makes a setting of its groups in its first step, as Adan does, and some of apex."""

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] /= group["step"]
        super().step()


@pytest.mark.parametrize("optimizer", [Odd, Counting, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_comes_back_bit_for_bit(optimizer: type, dtype: torch.dtype, tmp_path: Path) -> None:
    changes = {
        "layers": lambda: arguments("tied")["layers"](dtype=dtype),
        "optimizer": lambda parameters: optimizer(parameters, lr=1e-2),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),  # its milestones are a Counter
    }
    first = job(**changes)
    list(first.steps(2))
    first.save(tmp_path)
    second = job(**changes, resume=tmp_path)
    assert is_equal(flat(first.state_dict()), flat(second.state_dict()))
    assert [step.loss for step in first.steps(4)] == [step.loss for step in second.steps(4)]
    assert is_equal(flat(first.state_dict()), flat(second.state_dict()))


def own(folder: Path) -> odyssey.Job:
    """A job of a model whose names have slashes, and are what keys of a checkpoint end with."""
    torch.manual_seed(3)
    net = nn.Sequential(OrderedDict({"en/de": nn.Linear(6, 4), "state/rest": nn.Linear(4, 1)})).double()
    net.register_parameter("model/rest", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(net(batch[0]), batch[1])

    return odyssey.resilient(net, optimizer, loss, Points("plain"), global_batch=8, micro_batch=4, resume=folder)


def test_names_may_have_slashes(tmp_path: Path) -> None:
    first = own(tmp_path)
    list(first.steps(2))
    first.save(tmp_path)
    second = own(tmp_path)
    assert second.next_step == 2
    assert is_equal(flat(first.state_dict()), flat(second.state_dict()))
    assert [step.loss for step in first.steps(4)] == [step.loss for step in second.steps(4)]
