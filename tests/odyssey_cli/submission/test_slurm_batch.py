"""`odyssey slurm`, and the batch scripts of configs/slurm: what they ask for, and what their exit code is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey.errors import UsageError
from odyssey_cli.command_line.typed_requests import BatchRequest
from odyssey_cli.commands import execute
from odyssey_cli.submission.batch import batch_script
from tests import ROOT

CONFIGS = ROOT / "configs" / "slurm"
SCRIPTS = sorted(CONFIGS.glob("*.sbatch"))
ON_A_NODE = ["--nodes", "4", "--gpus-per-node", "8", "--cpus-per-task", "96", "--time", "24h"]
ASKED = {
    "plain": [*ON_A_NODE, "odyssey", "run", "train.py"],
    "elastic": [*ON_A_NODE, "--elastic", "2", "odyssey", "run", "--max-restarts", "3", "train.py"],
    "preemptible": [
        *("--nodes", "2-4", *ON_A_NODE[2:-1], "12h", "--elastic", "2", "--requeue", "20"),
        *("odyssey", "run", "--max-restarts", "3", "train.py"),
    ],
}
"""How each of configs/slurm was made; the heterogeneous one was written by hand."""


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert execute(["slurm", *argv]) == 0
    return capsys.readouterr().out


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def srun_of(script: str) -> list[str]:
    text = script.replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


@pytest.mark.parametrize("name", sorted(ASKED))
def test_configs_are_what_the_command_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (CONFIGS / f"{name}.sbatch").read_text() == printed(capsys, *ASKED[name])


def test_configs_are_these() -> None:
    assert {path.stem for path in SCRIPTS} == {*ASKED, "heterogeneous"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_configs_are_shell_and_outlive_losses(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    parts = text.partition("\n\n")[0].split("#SBATCH hetjob")
    assert all("--no-kill" in options_of(part) and "--ntasks-per-node=1" in options_of(part) for part in parts)
    assert {"--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none"} <= set(srun_of(text))


@pytest.mark.parametrize(
    "words", [["train.py", "--lr", "3"], ["run", "train.py", "--lr", "3"], ["odyssey", "run", "train.py", "--lr", "3"]]
)
def test_a_command_is_a_script_or_a_whole_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words_of_srun = srun_of(printed(capsys, "--nodes", "2", *words))
    assert words_of_srun[words_of_srun.index("odyssey") :][:2] == ["odyssey", "run"]
    assert words_of_srun[-3:] == ["train.py", "--lr", "3"]


def test_arguments_come_to_the_script_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["a b", "$HOME", "it's", '"', "\\", "*"]
    assert srun_of(printed(capsys, "train.py", *odd))[-len(odd) :] == odd


@pytest.mark.parametrize(
    ("given", "expected"), [("90m", "01:30:00"), ("1d12h", "1-12:00:00"), ("30", "30"), ("2-0", "2-0"), ("10s", "00:01:00")]
)
def test_a_time_is_written_as_slurm_reads_it(given: str, expected: str) -> None:
    assert f"--time={expected}" in options_of(batch_script(BatchRequest(["x.py"], time=given), ["x.py"], "x.py"))


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--nodes", "x", "train.py"], "--nodes: expected N or MIN-MAX, got 'x'"),
        (["--nodes", "4-2", "train.py"], "--nodes: expected N or MIN-MAX"),
        (["--nodes", "2-4", "--elastic", "3", "train.py"], "--elastic 3: expected 1 to 2"),
        (["--time", "soon", "train.py"], "--time: expected a duration"),
        (["--signal", "USR1", "train.py"], "--signal: expected NAME@SECONDS"),
        (["--job-name", "a\nb", "train.py"], "does not fit on a line"),
        (["odyssey", "run", "--no-such", "train.py"], "no such option"),
        (["odyssey", "run", "--help"], "there is no script to run"),
    ],
)
def test_what_slurm_or_the_launcher_would_refuse_is_told_at_once(argv: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        execute(["slurm", *argv])


def test_a_host_without_slurm_cannot_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="no sbatch on PATH"):
        execute(["slurm", "--submit", "train.py"])


# -- the exit code of the script: with programs that stand for srun and scontrol ---------------------------------------


def run_script(folder: Path, script: str, srun: str, scontrol: str = "exit 1") -> tuple[int, str]:
    """Its exit code, and what was asked of scontrol."""
    for name, body in (("srun", srun), ("scontrol", f'echo "$@" >> {folder}/asked; {scontrol}'), ("sleep", "")):
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=False)
    asked = folder / "asked"
    return done.returncode, asked.read_text() if asked.exists() else ""


SUCCEEDED = 'echo \'{\n  "status": "succeeded"\' > odyssey-logs/7-0.json;'


@pytest.mark.parametrize(
    ("srun", "code"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        (f"{SUCCEEDED} exit 137", 0),
        (f"{SUCCEEDED.replace('succeeded', 'failed')} exit 137", 137),
    ],
)
def test_the_exit_code_is_that_of_the_training(tmp_path: Path, srun: str, code: int) -> None:
    assert run_script(tmp_path, batch_script(BatchRequest(["train.py"]), ["train.py"], "train.py"), srun) == (code, "")


@pytest.mark.parametrize(
    ("srun", "asked"),
    [("exit 143", "requeue 7\n"), ("exit 1", ""), (f"{SUCCEEDED} exit 143", ""), ("kill $PPID; exit 143", "requeue 7\n")],
)
def test_a_job_that_was_told_to_end_is_queued_again(tmp_path: Path, srun: str, asked: str) -> None:
    script = batch_script(BatchRequest(["train.py"], requeue=3), ["train.py"], "train.py")
    assert run_script(tmp_path, script, srun)[1] == asked


def test_a_job_is_not_queued_again_for_ever(tmp_path: Path) -> None:
    script = "SLURM_RESTART_COUNT=3\n" + batch_script(BatchRequest(["train.py"], requeue=3), ["train.py"], "train.py")
    assert run_script(tmp_path, script, "exit 143") == (143, "")


def test_the_help_names_every_option() -> None:
    command = [sys.executable, "-m", "odyssey_cli", "slurm", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CONFIGS.parents[1])
    assert "--elastic" in done.stdout and "COMMAND" in done.stdout
