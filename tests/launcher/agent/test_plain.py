"""Scripts that know nothing of Odyssey: they run as under torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from launcher.agent.start import run
from launcher.joblog.events import Event, JobEnded, RankLost, RankStarted
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey.errors import UsageError
from odyssey.protocol.reports import Failed
from tests import ROOT
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def options(tmp_path: Path, text: str, *arguments: str, **rest: object) -> RunOptions:
    script = tmp_path / "script.py"
    script.write_text(text)
    return RunOptions(script=str(script), arguments=arguments, log_dir=tmp_path / "logs", capture_output=True, **rest)


COLLECTIVE = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("sum", total.item(), "attempt", attempt, "node", os.environ["ODYSSEY_NODE"], "local", os.environ["LOCAL_RANK"])
if attempt == "0" and "--die" in sys.argv and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_meet_at_the_store_of_their_environment(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, COLLECTIVE, n_nodes=2, n_ranks_per_node=2))
    assert ran.code == 0
    for rank in range(4):
        assert ran.output[rank, "stdout"].decode() == f"sum 4.0 attempt 0 node {rank // 2} local {rank}\n"
    ran.assert_replays()


def test_all_ranks_start_again_on_a_fresh_store_after_one_was_killed(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, COLLECTIVE, "--die", n_nodes=2, max_restarts=1))
    assert ran.code == 0
    assert ran.output[0, "stdout"].decode().splitlines()[-1] == "sum 2.0 attempt 1 node 0 local 0"
    assert len(ran.all(RankStarted)) == 4
    assert ran.all(RankLost)[0].cause.text == "SIGKILL"
    ran.assert_replays()


def test_the_first_failure_ends_the_job_and_is_named(tmp_path: Path) -> None:
    text = """
import os, time, sys
def fail():
    raise ValueError("no such thing")
if os.environ["RANK"] == "1":
    fail()
time.sleep(1000)
"""
    ran = Ran(options(tmp_path, text, n_nodes=3))
    assert ran.code == ExitCode.FAILED
    (failed,) = ran.all(Failed)
    assert failed.error == "ValueError: no such thing" and "in fail" in failed.traceback
    assert ran.events[-1].body == JobEnded(1, "rank 1 failed: ValueError: no such thing", "")
    frames = [line.split(",")[0].strip() for line in ran.text("stderr").splitlines() if "File" in line]
    assert frames == [f'File "{tmp_path}/script.py"'] * 2
    ran.assert_replays()


def test_a_death_ends_those_that_failed_of_it_before_they_have_done_all_they_do_at_their_end(tmp_path: Path) -> None:
    text = """
import atexit, os, time
def finish():
    time.sleep(4)  # less than a rank that fails by itself would be given
    open("finished", "w")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        atexit.register(finish)
        raise RuntimeError("Connection closed by peer")
    time.sleep(1000)
"""

    def on_event(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Failed):  # rank 0 is dead by the time this is acted upon
            pid = next(body.pid for body in ran.all(RankStarted) if body.rank == 0)
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    folder = tmp_path / "here"
    folder.mkdir()
    with contextlib.chdir(folder):
        ran = Ran(options(tmp_path, text, n_nodes=2, max_restarts=1), on_event)
    assert ran.code == 0
    assert [lost.cause.text for lost in ran.all(RankLost) if lost.rank == 0] == ["SIGKILL"]
    assert not (folder / "finished").exists()


def test_an_exit_code_of_its_own_fails_the_job(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "import sys; sys.exit(7)"))
    assert ran.code == ExitCode.FAILED
    assert ran.events[-1].body == JobEnded(1, "rank 0 ended with exit code 7", "")


def test_captured_output_is_complete_and_kept(tmp_path: Path) -> None:
    text = """
import sys, os
for i in range(40000):
    sys.stdout.write(f"{i} {'x' * 40}\\n")
sys.stderr.write("done\\n")
"""
    ran = Ran(options(tmp_path, text, n_nodes=2))
    expected = "".join(f"{i} {'x' * 40}\n" for i in range(40000))
    for rank in range(2):
        assert ran.output[rank, "stdout"].decode() == expected
        assert ran.output[rank, "stderr"] == b"done\n"
        assert (ran.folder / "attempt_0" / str(rank) / "stdout.log").read_text() == expected
        assert (ran.folder / "attempt_0" / str(rank) / "stderr.log").read_text() == "done\n"


def test_a_directory_is_run_by_its_main(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys; print(sys.argv[1:], sys.path[0])")
    ran = Ran(RunOptions(script=str(folder), arguments=("--a",), log_dir=tmp_path / "logs", capture_output=True))
    assert ran.code == 0
    assert ran.text() == f"['--a'] {folder}\n"


def test_a_rank_whose_timer_expires_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    text = """
import os, threading
import torch.distributed.elastic.timer as timer
path = os.environ["TORCHELASTIC_TIMER_FILE"]
client = timer.FileTimerClient(path)
timer.configure(client)
while not os.path.exists(path):
    os.sched_yield()
with timer.expires(after=0.2):
    threading.Event().wait()
"""
    ran = Ran(options(tmp_path, text))
    assert ran.code == ExitCode.FAILED
    assert ran.all(RankLost)[0].cause.text == "SIGKILL"
    assert not list(ran.folder.glob("timers-*"))


def test_the_pipe_of_timers_is_in_a_folder_of_its_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the job has no folder: who can write to it can have processes ended."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    text = """
import os
folder, name = os.path.split(os.environ["TORCHELASTIC_TIMER_FILE"])
print(oct(os.stat(folder).st_mode & 0o777), os.stat(folder).st_uid == os.getuid(), os.path.dirname(folder))
"""
    written: list[bytes] = []
    nowhere = replace(options(tmp_path, text), log_dir=Path(os.devnull))
    assert run(nowhere, lambda event: None, lambda rank, stream, data: written.append(data)) == 0
    assert b"".join(written).decode() == f"0o700 True {tmp_path / 'shared'}\n"
    assert not list((tmp_path / "shared").iterdir())


def test_what_ranks_leave_behind_is_ended(tmp_path: Path) -> None:
    text = """
import subprocess, sys
print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
    ran = Ran(options(tmp_path, text))
    assert ran.code == 0
    assert not psutil.pid_exists(int(ran.text()))


def test_a_busy_port_is_one_error_that_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            run(options(tmp_path, "", master_port=port), lambda event: None, lambda *output: None)
    assert caught.value.what.startswith(f"--master-port {port} is in use by process {os.getpid()} (")


def test_a_missing_script_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such script"):
        run(RunOptions(script=str(tmp_path / "none.py"), log_dir=tmp_path), lambda event: None, lambda *output: None)


LAUNCH = """
import sys
from pathlib import Path
from launcher.agent.start import run
from launcher.options import RunOptions
sys.exit(run(RunOptions(sys.argv[1], n_nodes=2, log_dir=Path(sys.argv[2])), lambda event: None, lambda *output: None))
"""
WAITING = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())  # whole: print writes the end of the line apart
signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGTERM, ExitCode.TERMINATED),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    command = [sys.executable, "-c", LAUNCH, str(script), str(tmp_path / "logs")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        everything = psutil.Process(launcher.pid).children(recursive=True)
        assert set(ranks) <= set(everything)
        launcher.send_signal(number)
        assert launcher.wait() == code
        _, alive = psutil.wait_procs(everything, timeout=30)
    assert alive == []


def test_a_forwarded_signal_reaches_every_rank_and_ends_nothing(tmp_path: Path) -> None:
    text = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, b"ready\\n")
os.write(1, b"got %d\\n" % signal.sigwait([signal.SIGUSR1]))
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    options = ["--forward-signals", "SIGUSR1", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    process = subprocess.Popen(
        [sys.executable, "-m", "odyssey_cli", "run", *options, str(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.read() == f"got {signal.SIGUSR1:d}\n" * 2
    assert process.wait() == 0
    process.stdout.close()
