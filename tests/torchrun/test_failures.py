"""Ranks that fail, ranks that will not end, restarts and signals: as under torchrun, or better."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.launchers import CLIENTS, PATIENCE_S, Launcher, Scene, better_than_torchrun, free_port, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

READY = """
import os, signal, sys, time
def ready(*words):
    with open(os.environ["READY"], "w") as file:
        file.write(" ".join([os.environ["RANK"], *map(str, words)]) + "\\n")
"""
WAIT = READY + "ready(os.getpid())\nsignal.pause()\n"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- what failed -------------------------------------------------------------------------------------------------------


@under_both
def test_any_exit_code_of_a_rank_makes_1_of_the_launcher_and_ends_the_others(scene: Scene, launcher: Launcher) -> None:
    text = (
        READY
        + """
def ended(number, frame):
    ready("got", signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
if os.environ["RANK"] == "1":
    with open("waits") as file:
        file.read()
    sys.exit(7)
open("waits", "w").close()
signal.pause()
"""
    )
    os.mkfifo(scene.cwd / "waits")
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", text)).fail()
    assert scene.hear(1) == ["0 got SIGTERM"]
    report = run.stderr[run.stderr.index("FAILED") :]
    assert re.search(r"^.*train\.py.*FAILED", run.stderr, re.MULTILINE)
    after = report[report.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", after)
    assert re.search(r"exitcode\s*: 7 \(pid: \d+\)", after)
    assert re.search(r"host\s*: \S+", after) and re.search(r"time\s*: \d{4}-\d\d-\d\d", after)


@under_both
def test_a_kill_is_named_by_its_signal(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, scene.write("train.py", WAIT))
    os.kill(int(scene.hear(1)[0].split()[1]), signal.SIGKILL)
    run.fail()
    after = run.stderr[run.stderr.index("Root Cause") :]
    assert re.search(r"exitcode\s*: -9 \(pid: \d+\)", after)
    assert "SIGKILL" in after


@better_than_torchrun
@under_both
def test_an_exception_is_shown_in_the_report_without_the_scripts_help(scene: Scene, launcher: Launcher) -> None:
    text = "import os\nif os.environ['RANK'] == '1':\n    raise KeyError('the missing one')\nimport signal; signal.pause()"
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", text)).fail()
    report = run.stderr[run.stderr.index("Root Cause") :]
    assert ("the missing one" in report) == launcher.is_ours
    assert ("<N/A>" in report) != launcher.is_ours
    if launcher.is_ours:
        assert "torch/distributed" not in run.stderr and "odyssey_cli" not in run.stderr  # no traceback of the launcher's own


@under_both
def test_one_rank_that_ends_with_0_does_not_end_the_others(scene: Scene, launcher: Launcher) -> None:
    text = (
        READY
        + """
if os.environ["RANK"] == "0":
    ready("ends")
    sys.exit(0)
with open("waits") as file:
    file.read()
ready("ends last")
"""
    )
    os.mkfifo(scene.cwd / "waits")
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", text))
    assert scene.hear(1) == ["0 ends"]
    with (scene.cwd / "waits").open("w"):
        pass
    assert scene.hear(1) == ["1 ends last"]
    run.succeed()


@under_both
@pytest.mark.parametrize("name", ["missing.py", "broken.py"])
def test_a_script_that_cannot_start_fails(scene: Scene, launcher: Launcher, name: str) -> None:
    scene.write("broken.py", "def (:\n")
    run = scene.start(launcher, "--nproc-per-node=1", name)
    code = run.end()
    assert name in run.stderr
    assert code == (2 if launcher.is_ours else 1)  # it is known before anything is started


# -- restarts ----------------------------------------------------------------------------------------------------------

RESTARTED = (
    READY
    + f"""
sys.path.insert(0, {str(CLIENTS)!r})
import probe
probe.main()
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt " + attempt + " of " + os.environ["TORCHELASTIC_MAX_RESTARTS"] + "\\n", end="")
fails = attempt == rank
if attempt != "2":
    open("met" + attempt, "r" if fails else "w").close()  # a pipe: each waits for the other
os.chdir("/")
sys.argv.append("spoiled")
os.environ["SPOILED"] = "1"
if fails and attempt == "0":
    sys.exit(3)
if fails:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt != "2":
    signal.pause()
"""
)


@under_both
@pytest.mark.parametrize("is_static", [False, True], ids=["alone", "static"])
def test_all_ranks_start_anew_with_the_same_arguments(scene: Scene, launcher: Launcher, is_static: bool) -> None:
    where = [f"--master-port={free_port()}"] if is_static else []
    for attempt in (0, 1):
        os.mkfifo(scene.cwd / f"met{attempt}")
    script = scene.write("train.py", RESTARTED)
    run = scene.start(
        launcher, "--nproc-per-node=2", "--max-restarts=3", "--log-dir=logs", "--redirects=1", *where, script, "--lr", "1"
    ).succeed()
    assert scene.n_probes() == 6
    for attempt in range(3):
        for rank in (0, 1):
            probe = scene.probe(rank, attempt)
            assert probe.env["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
            assert probe.env["TORCHELASTIC_MAX_RESTARTS"] == "3"
            assert probe.facts["argv"] == ["train.py", "--lr", "1"]
            assert probe.facts["cwd"] == str(scene.cwd)
            assert "SPOILED" not in probe.env
            assert probe.assignment == (rank, rank, 2, 2, 0, 1, rank, 2)
            assert probe.facts["store_answers"]
            log = scene.cwd / Path(probe.env["TORCHELASTIC_ERROR_FILE"]).parent / "stdout.log"
            assert log.parts[-3:-1] == (f"attempt_{attempt}", str(rank))
            assert log.read_text() == f"attempt {attempt} of 3\n"
    assert run.stdout == ""


@under_both
def test_the_last_restart_is_the_last(scene: Scene, launcher: Launcher) -> None:
    text = (
        READY + "ready(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(4 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    )
    run = scene.start(launcher, "--max-restarts=1", scene.write("train.py", text)).fail()
    assert scene.hear(2) == ["0 0", "0 1"]
    assert re.search(r"exitcode\s*: 5 ", run.stderr[run.stderr.index("Root Cause") :])


# -- signals to the launcher -------------------------------------------------------------------------------------------

TELLS = (
    READY
    + """
def told(number, frame):
    os.write(1, f"{os.environ['RANK']} got {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(getattr(signal, name), told)
ready()
while True:
    signal.pause()
"""
)


@under_both
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        *(pytest.param(number, marks=pytest.mark.soak) for number in (signal.SIGHUP, signal.SIGQUIT)),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_is_passed_on_and_ends_the_job(scene: Scene, launcher: Launcher, number: signal.Signals) -> None:
    run = scene.start(launcher, "--nproc-per-node=2", "--max-restarts=3", scene.write("train.py", TELLS))
    scene.hear(2)
    run.signal(number)
    assert run.end() == (128 + number if launcher.is_ours else 1)
    assert sorted(run.stdout.splitlines()) == [f"{rank} got {number.name}" for rank in (0, 1)]
    assert ("Traceback" in run.stderr) != launcher.is_ours


@under_both
def test_other_signals_can_be_named(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, "--signals-to-handle=SIGUSR1, SIGTERM", scene.write("train.py", TELLS))
    scene.hear(1)
    run.signal(signal.SIGUSR1)
    assert run.end() != 0
    assert run.stdout == "0 got SIGUSR1\n"


STUBBORN = (
    READY
    + """
signal.signal(signal.SIGTERM, lambda *_: ready("got SIGTERM"))
if len(sys.argv) > 1 and os.environ["RANK"] == "1":
    sys.exit(9)
ready(os.getpid())
while True:
    signal.pause()
"""
)


@under_both
@pytest.mark.parametrize("by_variable", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["option", "variable"])
def test_a_rank_that_ignores_sigterm_is_killed_after_the_time_out(scene: Scene, launcher: Launcher, by_variable: bool) -> None:
    option, env = ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}) if by_variable else (["--shutdown-timeout=1"], {})
    run = scene.start(launcher, *option, scene.write("train.py", STUBBORN), env=env)
    pid = int(scene.hear(1)[0].split()[1])
    run.signal(signal.SIGTERM)
    assert scene.hear(1) == ["0 got SIGTERM"]
    assert run.end(patience_s=25) != 0
    assert not is_running(pid)


@better_than_torchrun
@pytest.mark.soak
@under_both
def test_the_time_out_holds_after_a_failure_too(scene: Scene, launcher: Launcher) -> None:
    """torchrun then waits for 30 s, whatever was asked for."""
    run = scene.start(launcher, "--nproc-per-node=2", "--shutdown-timeout=1", scene.write("train.py", STUBBORN), "fail")
    assert [line for line in scene.hear(2) if "SIGTERM" in line] == ["0 got SIGTERM"]
    if launcher.is_ours:
        assert run.end(patience_s=20) == 1
    else:
        with pytest.raises(AssertionError, match="still runs after"):
            run.end(patience_s=15)


@better_than_torchrun
@under_both
def test_a_killed_launcher_leaves_no_rank(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", WAIT))
    ranks = [psutil.Process(int(line.split()[1])) for line in scene.hear(2)]
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    if launcher.is_ours:
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
        assert alive == []
    else:
        _, alive = psutil.wait_procs(ranks, timeout=2)
        assert set(alive) == set(ranks)


@better_than_torchrun
@under_both
def test_a_port_in_use_is_refused_with_the_name_of_its_holder(scene: Scene, launcher: Launcher) -> None:
    """torchrun takes the other's port for its own store's and waits; so it is ended here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = scene.start(launcher, f"--master-port={port}", scene.write("train.py", WAIT))
        if launcher.is_ours:
            assert run.end() == 2
            assert f"{port}" in run.stderr and f"process {os.getpid()}" in run.stderr
        else:
            code = run.end(patience_s=60)
            assert code == 1 and str(os.getpid()) not in run.stderr and "Traceback" in run.stderr
