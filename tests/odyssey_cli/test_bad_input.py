"""What a user sees of `odyssey run` where the command, the script or a file is at fault: exit code and every line that counts.

All through the real command line. One `error:` says what is wrong, `help:` what to do where we know, the script's own
traceback comes once for each rank that raised, and none of ours.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from odyssey.runtime.data import fetch
from odyssey.tracebacks import users_frames
from tests import ROOT
from tests.agent_runs import TRAIN, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

LIMIT_S = 90
SCRIPT = """import os
import sys

import torch
from torch import nn

import odyssey

RANK = int(os.environ["RANK"])


class Data:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), index / 32), torch.zeros(4)


class Odd(nn.Linear):
    def forward(self, x):
        return strange(super().forward(x))


def layers():
    return [nn.Linear(4, 4), nn.Linear(4, 4), Odd(4, 4), nn.Linear(4, 4)]


def strange(x):
    return x


def after(step):
    pass


loss, global_batch = nn.functional.mse_loss, 8
FAULT
job = odyssey.Job(
    layers=layers,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=Data(),
    global_batch=global_batch,
    micro_batch=2,
)
for step in job.steps(20):
    after(step)
"""


class Said:
    """What one command said, and what it ended with."""

    def __init__(self, code: int, stderr: str) -> None:
        self.code, self.stderr = code, stderr
        lines = stderr.splitlines()
        self.errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        self.helps = [line.removeprefix("help: ") for line in lines if line.startswith("help: ")]
        ranks_own = re.sub(r"\n={20,}\n.*\n={20,}\n", "\n", stderr, flags=re.DOTALL)  # without the block at the end
        self.n_tracebacks = ranks_own.count("Traceback (most recent call last)")
        self.files = re.findall(r'File "([^"]+)"', stderr)

    def assert_one_error(self, code: int, error: str, help: str) -> None:
        """An error without any traceback. `error` and `help` are parts of the lines."""
        assert self.code == code, self.stderr
        assert len(self.errors) == 1 and error in self.errors[0], self.stderr
        assert len(self.helps) == 1 and help in self.helps[0], self.stderr
        assert self.n_tracebacks == 0, self.stderr

    def assert_script_raised(self, error: str, n_ranks: int = 1) -> None:
        """The script's own traceback from each of at most `n_ranks` that raised, and none of our frames in it."""
        assert self.code == 1, self.stderr
        assert len(self.errors) == 1 and re.fullmatch(rf"rank \d failed: {error}", self.errors[0]), self.stderr
        assert 1 <= self.n_tracebacks <= n_ranks, self.stderr
        assert not [file for file in self.files if Path(file).is_relative_to(ROOT) and ".venv" not in file], self.stderr


def odyssey_run(*arguments: object, folder: Path) -> Said:
    command = [sys.executable, "-m", "odyssey_cli", "run", "--log-dir", str(folder / "logs"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return Said(done.returncode, done.stderr)


@pytest.fixture
def run(nothing_left: None, tmp_path: Path) -> Callable[..., Said]:
    """Runs the script above with `fault` in its middle, which may define any of its names anew."""

    def run(fault: str, *options: object) -> Said:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("FAULT", fault))
        return odyssey_run(*options, script, folder=tmp_path)

    return run


Run = Callable[..., Said]

# -- the command ------------------------------------------------------------------------------------------------------


def test_a_missing_script(tmp_path: Path) -> None:
    said = odyssey_run("nothing.py", folder=tmp_path)
    said.assert_one_error(2, "no such script: nothing.py", "there is no such file in")
    assert len(said.stderr.splitlines()) == 2


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "inside.py").touch()
    said = odyssey_run(tmp_path, folder=tmp_path)
    said.assert_one_error(2, f"{tmp_path} is a directory, expected a script", f"{tmp_path}/inside.py")


@pytest.mark.parametrize(
    ("options", "error", "help"),
    [
        (["--nodes", "0"], "--nodes: expected at least 1, got 0", "--nodes 1"),
        (["--nodes", "2", "--layout", "2x2"], "--layout 2x2 takes 4 ranks, there are 2", "--nodes 4"),
        (["--profile", "none.json"], "--profile: none.json: No such file", "odyssey profile train.py"),
    ],
)
def test_options_that_cannot_be_meant(run: Run, options: Sequence[str], error: str, help: str) -> None:
    said = run("", *options)
    said.assert_one_error(2, error, help)
    assert len(said.stderr.splitlines()) == 2


def test_a_port_that_is_in_use(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = run("", "--master-port", port)
    said.assert_one_error(2, f"--master-port {port} is in use by process {os.getpid()}", "leave --master-port out")


# -- profiles ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the script without a fault."""
    folder = tmp_path_factory.mktemp("profile")
    path, script = folder / "profile.json", folder / "script.py"
    script.write_text(SCRIPT.replace("FAULT", ""))
    command = [sys.executable, "-m", "odyssey_cli", "profile", "--nodes", "2", "--log-dir", str(folder), "-o", str(path)]
    subprocess.run([*command, str(script)], cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=True)
    return path


@pytest.mark.parametrize("text", ['{"model": "script", "micro', "[]", '{"a": 1}', ""])
def test_a_profile_that_cannot_be_read(run: Run, tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(text)
    run("", "--profile", broken).assert_one_error(2, f"--profile: {broken}: ", "odyssey profile train.py")


def test_a_profile_of_another_model(run: Run, profile: Path) -> None:
    fault = "def layers():\n    return [nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)]"
    said = run(fault, "--nodes", 2, "--profile", profile)
    said.assert_one_error(1, "layers[1] of the profile of script is '1.Linear' with other", "odyssey profile train.py")
    assert "profile read, not measured" in said.stderr


@pytest.mark.parametrize("layout", ["auto", pytest.param("1x2", marks=pytest.mark.soak)])
def test_layers_that_do_not_fit_in_memory(run: Run, profile: Path, tmp_path: Path, layout: str) -> None:
    small = json.loads(profile.read_text())
    small["cluster"]["memory_bytes"] = 1000
    (tmp_path / "small.json").write_text(json.dumps(small))
    said = run("", "--nodes", 2, "--layout", layout, "--profile", tmp_path / "small.json")
    assert said.code == 1 and said.n_tracebacks == 0
    assert len(said.errors) == 1 and re.search(r"no plan for ranks 0 and 1: .*no split of 4 layers .* fits", said.errors[0])


# -- the script -------------------------------------------------------------------------------------------------------


def test_a_syntax_error_is_told_with_file_and_line(run: Run) -> None:
    said = run("def broken(:", "--nodes", 1)
    line = SCRIPT.splitlines().index("FAULT") + 1
    assert said.code == 2
    assert len(said.errors) == 1 and said.errors[0].endswith(f"script.py:{line}: SyntaxError: invalid syntax")


def test_all_ranks_raise_before_the_job(run: Run) -> None:
    run('raise ValueError("mine")', "--nodes", 2).assert_script_raised("ValueError: mine", n_ranks=2)


def test_one_rank_raises_before_the_job(run: Run) -> None:
    run('if RANK == 1:\n    raise ValueError("mine")', "--nodes", 3).assert_script_raised("ValueError: mine")


def test_a_layer_raises_when_it_is_measured(run: Run) -> None:
    said = run('def strange(x):\n    raise ValueError("mine")', "--nodes", 2)
    said.assert_script_raised("ValueError: mine")
    assert "in forward\n" in said.stderr and "in strange\n" in said.stderr


def test_a_layer_raises_in_mid_training_on_both_its_holders(run: Run) -> None:
    fault = """
calls = []
def strange(x):
    calls.append(x)
    if len(calls) > 30:
        raise ValueError("mine")
    return x
"""
    said = run(fault, "--nodes", 4, "--layout", "2x2")
    said.assert_script_raised("ValueError: mine", n_ranks=2)
    assert said.stderr.count("\nValueError: mine\n") == said.n_tracebacks, "tracebacks of two ranks are mixed"


def test_a_sample_raises(run: Run) -> None:
    fault = """
def bad(self, index):
    if index == 17:
        raise ValueError("mine")
    return torch.zeros(4), torch.zeros(4)
Data.__getitem__ = bad
"""
    run(fault, "--nodes", 2, "--layout", "2x1").assert_script_raised("ValueError: mine")


@pytest.mark.parametrize(
    ("value", "error", "help"),
    [
        ("(output - target).mean(1)", "the loss has shape (2,)", "return a scalar tensor, the mean over"),
        pytest.param("1.0", "the loss is a float", "return a scalar tensor, the mean over", marks=pytest.mark.soak),
        pytest.param(
            "(output - target).mean().detach()",
            "the loss has no gradient",
            "compute it from the output",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_with(run: Run, value: str, error: str, help: str) -> None:
    run(f"def loss(output, target):\n    return {value}", "--nodes", 2).assert_one_error(1, f"failed: {error}", help)


def test_samples_that_are_no_pairs(run: Run) -> None:
    said = run("Data.__getitem__ = lambda self, index: torch.zeros(4)", "--nodes", 2)
    said.assert_one_error(1, "a sample of data is a Tensor, expected a pair", "let data[i] be (input, target)")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("layers = [nn.Linear(4, 4)]", "layers is a list"),
        pytest.param("Data.__len__ = lambda self: 0", "data has no samples", marks=pytest.mark.soak),
        pytest.param("global_batch = 0", "global_batch is 0", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_cannot_be_meant(run: Run, fault: str, error: str) -> None:
    said = run(fault, "--nodes", 2)
    assert said.code == 1 and said.n_tracebacks == 0, said.stderr
    assert len(said.errors) == 1 and said.errors[0].endswith(f"failed: {error}"), said.stderr


def test_a_layer_that_returns_floats(run: Run) -> None:
    said = run("def strange(x):\n    return [1.0, 2.0]", "--nodes", 2)
    said.assert_one_error(1, "layer 2 passes on a float", "let layers return a tensor")


def test_a_loss_that_is_not_a_number(run: Run) -> None:
    said = run('def strange(x):\n    return x * float("nan")', "--nodes", 4, "--layout", "2x2")
    said.assert_one_error(1, "the loss of step 0 is nan", "lower the learning rate")
    assert "odyssey: 0 steps in" in said.stderr


def test_ranks_that_build_unequal_models(run: Run) -> None:
    said = run("def layers():\n    return [nn.Linear(4, 4) for _ in range(4 + RANK)]", "--nodes", 2)
    said.assert_one_error(1, "rank 1 built another model than rank 0: 5 layers, expected 4", "check what depends on the rank")


def test_more_pipelines_than_micro_batches(run: Run) -> None:
    said = run("global_batch = 4", "--nodes", 4, "--layout", "4x1")
    said.assert_one_error(1, "layout 4x1 has 4 pipelines for 2 micro-batches", "use a smaller micro-batch, or fewer pipelines")


def test_more_stages_than_layers(run: Run) -> None:
    said = run("", "--nodes", 5, "--layout", "1x5")
    said.assert_one_error(1, "layout 1x5 has more stages than the model has layers (4)", "use fewer stages")


@pytest.mark.parametrize(
    "fault",
    ["if RANK == 1:\n    sys.exit(3)", "def after(step):\n    if step.index == 3 and RANK == 1:\n        sys.exit(3)"],
    ids=["before the job", "in mid training"],
)
def test_one_rank_ends_with_an_exit_code(run: Run, fault: str) -> None:
    said = run(fault, "--nodes", 2, "--layout", "2x1")
    assert said.code == 1 and said.errors == ["rank 1 ended with exit code 3"] and said.n_tracebacks == 0


@pytest.mark.soak
def test_ranks_that_make_different_calls(run: Run) -> None:
    said = run("def after(step):\n    if RANK == 1:\n        job.evaluate(Data())", "--nodes", 2, "--layout", "2x1")
    by_the_ranks, by_the_agent = "rank 1 called evaluate(), the others steps()", "rank 0 called steps(), rank 1 evaluate()"
    said.assert_one_error(1, ": all ranks must call it", "let all ranks make the same calls in the same order")
    assert by_the_ranks in said.errors[0] or by_the_agent in said.errors[0], said.stderr


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.soak),
    ],
    ids=lambda v: str(v),
)
def test_a_signal_to_the_launcher_ends_a_training_job(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "odyssey_cli", "run", "--nodes", "4", "--layout", "2x2", "--log-dir", str(tmp_path)]
    command += [TRAIN, "--steps", "1000000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "stderr").open("w+") as stderr,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as launcher,
    ):
        assert launcher.stdout is not None
        for line in launcher.stdout:  # ended by the launcher's end
            if line.startswith("step 3 "):
                break
        everything = psutil.Process(launcher.pid).children(recursive=True)
        assert len(everything) >= 4
        launcher.send_signal(number)
        assert launcher.wait(LIMIT_S) == code
        _, alive = psutil.wait_procs(everything, timeout=30)
    assert alive == []
    said = (tmp_path / "stderr").read_text()
    assert "error:" not in said and "Traceback" not in said, said


# -- whose frames a user sees -----------------------------------------------------------------------------------------


def frames_of(data: object) -> list[str]:
    """Names of the functions in the traceback that a user gets of a sample that cannot be fetched."""
    try:
        fetch(data, [0])  # type: ignore[arg-type]
    except Exception as error:
        return [frame.name for frame in traceback.extract_tb(users_frames(error.__traceback__))]
    raise AssertionError("it can")


def test_a_traceback_has_our_frames_only_where_we_raised() -> None:
    class Raises:
        def __getitem__(self, index: int) -> object:
            raise KeyError(index)

    assert frames_of(Raises()) == ["frames_of", "__getitem__"]
    assert frames_of(None)[:2] == ["frames_of", "fetch"]
