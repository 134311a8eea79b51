"""Redirects, tee, filters, prefixes, the log tree, error files and the plug-ins: as under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launchers import PROBE, Launcher, Scene, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

SPEAK = """
import os, sys
rank = os.environ["RANK"]
print(f"rank {rank} has an apple")
print(f"rank {rank} has a bean")
print(f"rank {rank} warns of a pear", file=sys.stderr)
print(f"rank {rank} ends without a line's end", end="")
"""


def outs(rank: int) -> str:
    return f"rank {rank} has an apple\nrank {rank} has a bean\nrank {rank} ends without a line's end"


def errs(rank: int) -> str:
    return f"rank {rank} warns of a pear\n"


def tree(log_dir: Path) -> set[str]:
    """Files below the job's folder, as torchrun names them; those of our own beside them are left out."""
    (job,) = log_dir.iterdir()
    return {str(path.relative_to(job)) for path in job.glob("attempt_*/**/*") if path.is_file()}


def lines(text: str) -> list[str]:
    """What ranks said, in no order: that of different ranks is chance."""
    return sorted(
        line for line in text.splitlines() if "rank " in line and ("has " in line or "warns" in line or "ends" in line)
    )


@under_both
def test_without_redirects_output_is_as_the_script_wrote_it(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, "--log-dir", "logs", "--rdzv-id=7", "--rdzv-endpoint=localhost:0", "--rdzv-backend=c10d",
                      scene.write("speak.py", SPEAK)).succeed()  # fmt: skip
    assert run.stdout == outs(0)
    assert errs(0) in run.stderr
    (job,) = (scene.cwd / "logs").iterdir()
    assert job.name.startswith("7_")
    assert (job / "attempt_0/0").is_dir() and tree(scene.cwd / "logs") == set()


@under_both
def test_redirects_go_to_files_and_tee_to_both(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(
        launcher, "--nproc-per-node=2", "--log_dir=logs/deep", "-r", "1", "-t2", scene.write("speak.py", SPEAK)
    ).succeed()
    (job,) = (scene.cwd / "logs/deep").iterdir()
    assert tree(scene.cwd / "logs/deep") == {f"attempt_0/{rank}/std{name}.log" for rank in (0, 1) for name in ("out", "err")}
    for rank in (0, 1):
        folder = job / "attempt_0" / str(rank)
        assert (folder / "stdout.log").read_text() == outs(rank)
        assert (folder / "stderr.log").read_text() == errs(rank)
        assert run.stderr.count(f"[default{rank}]:{errs(rank)}") == 1
    assert run.stdout == ""
    assert lines(run.stderr) == [f"[default{rank}]:{errs(rank).strip()}" for rank in (0, 1)]


@under_both
def test_streams_filters_and_prefixes_by_rank(scene: Scene, launcher: Launcher) -> None:
    """Local rank 0 alone comes to the console, in part; files and filtered files hold what was asked for."""
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} of host, ${local_rank} ${unknown}> "}
    run = scene.start(
        launcher, "--nproc-per-node=2", "--role=actor", "--log-dir=logs", "--tee=0:3,1:1", "--redirects=1:2",
        "--local-ranks-filter=0", "--duplicate-stdout-filters=apple,cherry", "--duplicate_stderr_filters", "pear",
        scene.write("speak.py", SPEAK), env=env,
    ).succeed()  # fmt: skip
    (job,) = (scene.cwd / "logs").iterdir()
    for rank in (0, 1):
        assert (job / f"attempt_0/{rank}/stdout.log").read_text() == outs(rank)
        assert (job / f"attempt_0/{rank}/stderr.log").read_text() == errs(rank)
    prefix = "<actor 0 of host, 0 ${unknown}> "
    assert lines(run.stdout) == sorted(prefix + line for line in outs(0).splitlines())
    assert lines(run.stderr) == [prefix + errs(0).strip()]
    filtered = (job / "attempt_0/filtered_stdout.log").read_text()
    assert filtered == f"{prefix}rank 0 has an apple\n"
    assert (job / "attempt_0/filtered_stderr.log").read_text() == prefix + errs(0)


@under_both
def test_the_filter_silences_other_ranks_without_tee_too(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(
        launcher, "--nproc-per-node=2", "--local_ranks_filter", "1", "--standalone", scene.write("speak.py", SPEAK)
    ).succeed()
    assert lines(run.stdout) == sorted(outs(1).splitlines())
    assert lines(run.stderr) == [errs(1).strip()]


@under_both
def test_no_log_folder_if_none_is_wanted(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, "--log-dir=/dev/null", PROBE).succeed()
    assert run.stdout == ""
    assert scene.probe().env["TORCHELASTIC_ERROR_FILE"] == ""
    assert list(scene.cwd.iterdir()) == []


RECORDED = """
import os, signal, sys
sys.path.insert(0, os.path.dirname(__file__))
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("the root of it")
    signal.pause()

main()
"""


@under_both
def test_recorded_exceptions_are_kept_and_copied_to_the_launchers_error_file(scene: Scene, launcher: Launcher) -> None:
    copied = scene.cwd / "root cause.json"
    run = scene.start(
        launcher, "--nproc-per-node=2", "--log-dir=logs", scene.write("recorded.py", RECORDED),
        env={"TORCHELASTIC_ERROR_FILE": str(copied)},
    ).fail()  # fmt: skip
    (job,) = (scene.cwd / "logs").iterdir()
    for file in (job / "attempt_0/1/error.json", copied):
        message = json.loads(file.read_text())["message"]
        assert message["message"] == "RuntimeError: the root of it"
        assert 'raise RuntimeError("the root of it")' in message["extraInfo"]["py_callstack"]
        assert int(message["extraInfo"]["timestamp"]) > 1_700_000_000
    assert json.loads(copied.read_text())["message"]["errorCode"] == 1
    after_the_cause = run.stderr.partition("Root Cause")[2]
    assert "the root of it" in after_the_cause and "rank" in after_the_cause


PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

class Elsewhere(DefaultLogsSpecs):
    def reify(self, envs):
        destination = super().reify(envs)
        for local_rank, env in envs.items():
            env["FROM_THE_PLUGIN"] = f"{local_rank} of {len(envs)}"
            destination.stdouts[local_rank] = os.path.join(os.environ["PLUGIN_DIR"], f"out{local_rank}")
        return destination
"""


@under_both
def test_plug_ins_for_logs_and_events_are_found_by_name(scene: Scene, launcher: Launcher) -> None:
    scene.write("plugins/elsewhere.py", PLUGIN)
    scene.write("plugins/elsewhere-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    scene.write("plugins/elsewhere-1.0.dist-info/entry_points.txt", "[torchrun.logs_specs]\nelsewhere = elsewhere:Elsewhere\n")
    env = {"PYTHONPATH": str(scene.cwd / "plugins"), "PLUGIN_DIR": str(scene.cwd)}
    script = scene.write("speak.py", SPEAK + 'print(os.environ["FROM_THE_PLUGIN"])')
    run = scene.start(
        launcher,
        "--nproc-per-node=2",
        "--log-dir=logs",
        "--logs-specs=elsewhere",
        "--event-log-handler=console",
        script,
        env=env,
    ).succeed()
    for rank in (0, 1):
        assert (scene.cwd / f"out{rank}").read_text() == f"{outs(rank)}{rank} of 2\n"
    assert run.stdout == ""
    events = [json.loads(line) for line in run.stderr.splitlines() if line.startswith('{"name"')]
    assert {"torchelastic.worker.status.SUCCEEDED"} <= {event["name"] for event in events}
    assert {event["source"] for event in events} <= {"AGENT", "WORKER"}
    assert all(event["metadata"]["role"] == "default" for event in events)


@under_both
@pytest.mark.parametrize("option", ["--logs-specs=unheard-of", "--event-log-handler=unheard-of", "--tee=9", "--redirects=0-3"])
def test_a_plug_in_or_stream_that_there_is_not_ends_it(scene: Scene, launcher: Launcher, option: str) -> None:
    run = scene.start(launcher, option, PROBE)
    code = run.end()
    if launcher.is_ours:
        assert code == 2 and "Traceback" not in run.stderr
        assert option.partition("=")[2] in run.stderr
    else:
        assert code == 1
    assert scene.n_probes() == 0 or "event" in option  # torchrun's event handlers are looked up after the ranks' end
