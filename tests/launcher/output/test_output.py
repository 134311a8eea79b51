"""What ranks write and read, with real ranks under the real command lines: ours, and torchrun's as the judge of formats."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.agent.start import run
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.loop import Loop
from launcher.joblog.events import Event
from launcher.options import RunOptions, Std
from launcher.output.log_files import JobFolder
from launcher.output.streams import Streams
from tests import ROOT
from tests.agent_runs import nothing_left
from tests.torchrun import record

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

OURS = [sys.executable, "-m", "odyssey_cli.torchrun"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
either = pytest.mark.parametrize(
    "launcher", [OURS, pytest.param(TORCHRUN, marks=record.only_without_record)], ids=["ours", "torchrun"]
)
RANK = "import os, sys; rank = os.environ['RANK']\n"


class Launched:
    """A launcher that has ended: its exit code, both streams, and the files below its log directory."""

    def __init__(
        self, tmp_path: Path, launcher: list[str], text: str, *flags: str, n_ranks: int = 2, pipe_to: str = ""
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text(RANK + text)
        self.logs = tmp_path / "logs"
        command = [*launcher, f"--nproc-per-node={n_ranks}", f"--log-dir={self.logs}", *flags, str(script)]
        shell = ["bash", "-c", f'set -o pipefail; "$@" | {pipe_to}', "bash", *command] if pipe_to else command
        done = subprocess.run(shell, capture_output=True, text=True, timeout=100)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def file(self, name: str) -> str:
        (folder,) = self.logs.iterdir()
        return (folder / name).read_text()

    def files(self) -> list[str]:
        (folder,) = self.logs.iterdir()
        return sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "events.jsonl" and path.is_file()
        )

    def lines(self, stream: str) -> list[str]:
        """Those of ranks."""
        return sorted(line for line in stream.splitlines() if line.startswith("["))


@either
def test_teed_streams_have_torchruns_prefix_files_and_filters(tmp_path: Path, launcher: list[str]) -> None:
    text = "print('apple', rank)\nprint('plum')\nprint('pear', rank, file=sys.stderr)\nsys.stdout.write('1%\\r2%\\r\\n')"
    flags = ("--tee=0:3,1:1", "--redirects=1:2", "--duplicate-stdout-filters=apple", "--duplicate-stderr-filters=pear")
    job = Launched(tmp_path, launcher, text, *flags)
    assert job.code == 0, job.err
    said = [f"[default{rank}]:{line}" for rank in range(2) for line in ("1%", "2%", f"apple {rank}", "plum")]
    assert job.lines(job.out) == said
    assert job.lines(job.err) == ["[default0]:pear 0"]
    in_folders = [f"attempt_0/{rank}/{name}.log" for rank in range(2) for name in ("stderr", "stdout")]
    assert job.files() == [*in_folders, "attempt_0/filtered_stderr.log", "attempt_0/filtered_stdout.log"]
    assert job.file("attempt_0/1/stderr.log") == "pear 1\n"
    assert sorted(job.file("attempt_0/filtered_stdout.log").splitlines()) == ["[default0]:apple 0", "[default1]:apple 1"]
    assert job.file("attempt_0/filtered_stderr.log") == "[default0]:pear 0\n"


@either
def test_ranks_that_are_filtered_out_are_not_shown(tmp_path: Path, launcher: list[str]) -> None:
    job = Launched(tmp_path, launcher, "print('[', rank)", "--local-ranks-filter=1", "--redirects=1:2")
    assert job.code == 0, job.err
    assert job.lines(job.out) == ["[ 1"]
    assert job.files() == ["attempt_0/1/stderr.log"]


def test_what_a_rank_wrote_before_it_died_is_in_the_file_and_shown_before_the_last_line(tmp_path: Path) -> None:
    text = "for n in range(40000): sys.stderr.write(f'line {n} of {rank}\\n')\nos.kill(os.getpid(), 9)"
    job = Launched(tmp_path, OURS, text, "--tee=3")
    assert job.code != 0
    for rank in range(2):
        written = job.file(f"attempt_0/{rank}/stderr.log").splitlines()
        assert written == [f"line {n} of {rank}" for n in range(len(written))]
        shown = [line for line in job.err.splitlines() if line.startswith(f"[default{rank}]:")]
        assert shown == [f"[default{rank}]:{line}" for line in written]
    assert max(len(job.file(f"attempt_0/{rank}/stderr.log").splitlines()) for rank in range(2)) == 40000
    assert not job.err.splitlines()[-1].startswith("[")


def test_stderr_that_is_no_terminal_is_passed_on_unchanged_and_in_order(tmp_path: Path) -> None:
    text = "for n in range(2000):\n  os.write(1 + n % 2, b'%d\\r%d ' % (n, n))\nos.write(1, b'\\n')"
    script = tmp_path / "script.py"
    script.write_text("import os\n" + text)
    log = tmp_path / "all.txt"
    with log.open("wb") as file:
        command = [*OURS, f"--log-dir={tmp_path / 'logs'}", str(script)]
        assert subprocess.run(command, stdout=file, stderr=file, timeout=100).returncode == 0
    assert b"".join(b"%d\r%d " % (n, n) for n in range(2000)) + b"\n" in log.read_bytes()


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    text = "for n in range(20000): print('line', n)"
    job = Launched(tmp_path, OURS, text, "--tee=1", n_ranks=1, pipe_to="head -n 1")
    assert job.out == "[default0]:line 0\n"
    assert job.code == 0, job.err
    assert len(job.file("attempt_0/0/stdout.log").splitlines()) == 20000
    assert "standard output cannot be written to any more: broken pipe; ranks go on without it" in job.err


def test_a_log_file_that_cannot_be_made_ends_the_job_with_one_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    notes: list[Event] = []

    def watch(event: Event) -> None:
        notes.append(event)
        for folder in (tmp_path / "logs").iterdir():
            (folder / "attempt_1").touch()  # in the way

    options = RunOptions(
        str(script),
        log_dir=tmp_path / "logs",
        redirects=Std.ALL,
        max_restarts=1,
        retries_same_failure=True,
        restart_backoff_s=0.0,
    )
    assert run(options, watch, lambda *output: None) == 1
    assert "cannot make the log directory" in notes[-1].body.reason  # type: ignore[union-attr]


# -- the end of stderr -------------------------------------------------------------------------------------------------

SEAT = RankAssignment(rank=0, local_rank=0, node=0, n_ranks=1, n_local_ranks=1, n_nodes=1, role_rank=0, n_role_ranks=1)


@pytest.mark.parametrize(
    "how",
    [
        {"redirects": Std.ERR},
        {"tee": Std.ERR, "shown_ranks": frozenset({1})},
        {"shown_ranks": frozenset({1})},
        {"capture_output": True},
        {"capture_output": True, "log_dir": Path(os.devnull)},
    ],
    ids=str,
)
def test_the_end_of_stderr_is_known_wherever_it_goes(tmp_path: Path, how: dict[str, object]) -> None:
    def never(text: str) -> None:
        raise AssertionError(text)

    options = RunOptions("train.py", **({"log_dir": tmp_path / "logs"} | how))  # type: ignore[arg-type]
    loop, folder = Loop(lambda: 0.0), JobFolder(options, 0.0, never)
    streams = Streams(options, loop, folder.logs_of, lambda *output: None, never)
    tails = []
    for words in (b"of one that was replaced\n", b"x" * 9000 + b"\nValueError: bad\n"):
        of_rank = streams.open(SEAT, {})
        os.write(of_rank.descriptors[2], words)
        tails.append(streams.stderr_tail(0))
        of_rank.close()
        assert streams.stderr_tail(0) == tails[-1]
    streams.close()
    folder.close()
    loop.close()
    assert tails[0] == "of one that was replaced"
    assert tails[1] == "x" * (4096 - 17) + "\nValueError: bad"


def test_no_file_of_a_rank_that_has_ended_stays_open(tmp_path: Path) -> None:
    def never(text: str) -> None:
        raise AssertionError(text)

    options = RunOptions("train.py", log_dir=tmp_path / "logs", tee=Std.ALL, stdout_filters=("a",), stderr_filters=("b",))
    loop, folder = Loop(lambda: 0.0), JobFolder(options, 0.0, never)
    streams = Streams(options, loop, folder.logs_of, lambda *output: None, never)
    n_open = set()
    for attempt in range(3):
        streams.open(replace(SEAT, attempt=attempt), {}).close()
        n_open.add(len(os.listdir("/proc/self/fd")))
    assert len(n_open) == 1
    streams.close()
    folder.close()
    loop.close()


# -- a terminal --------------------------------------------------------------------------------------------------------


class Terminal:
    """A launcher whose standard streams are a terminal that it controls, as in a shell."""

    def __init__(self, tmp_path: Path, text: str, *flags: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(RANK + text)
        logs = f"--log-dir={tmp_path / 'logs'}"
        command = [sys.executable, "-m", "odyssey_cli", "run", "--no-display", "--nproc-per-node=2", logs, *flags, str(script)]
        self._ours, self._theirs = pty.openpty()
        self.launcher = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.seen = b""

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def until(self, words: bytes, times: int = 1) -> None:
        """Read until the terminal shows this, so often."""
        while self.seen.count(words) < times:
            self.seen += os.read(self._ours, 4096)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def end(self) -> int:
        """The exit code. All that is shown is read first."""
        reader = threading.Thread(target=self._read_to_the_end)
        reader.start()
        code = self.launcher.wait()
        os.close(self._theirs)
        reader.join()
        os.close(self._ours)
        return code

    def _read_to_the_end(self) -> None:
        try:
            while data := os.read(self._ours, 4096):
                self.seen += data
        except OSError:
            pass  # how a terminal's end of file shows


def test_ranks_keep_the_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "os.write(1, f'rank {rank}: {[os.isatty(n) for n in range(3)]}\\n'.encode())")
    assert terminal.end() == 0
    for rank in range(2):
        assert f"rank {rank}: [True, True, True]" in terminal.seen.decode()


DEBUGGED = """
if rank == '1':
    value = 41
    breakpoint()
    print('value is', value)
else:
    print('rank 0 read', repr(sys.stdin.read()))
"""


@pytest.mark.parametrize("flags", [(), ("--tee=3",)], ids=["direct", "teed"])
def test_a_debugger_works_in_the_rank_that_has_standard_input(tmp_path: Path, flags: tuple[str, ...]) -> None:
    terminal = Terminal(tmp_path, DEBUGGED, "--stdin-rank=1", *flags)
    terminal.until(b"(Pdb) ")
    terminal.type(b"value += 1\n")
    terminal.until(b"(Pdb) ", times=2)  # who types while readline sets the terminal may type an empty line
    terminal.type(b"c\n")
    assert terminal.end() == 0, terminal.seen.decode()
    assert b"value is 42" in terminal.seen
    assert b"rank 0 read ''" in terminal.seen


def test_ctrl_c_at_a_prompt_ends_the_job_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    text = """
import signal, termios
if rank == '1':
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    attributes = termios.tcgetattr(0)
    attributes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, attributes)
    input('name? ')
else:
    signal.pause()
"""
    terminal = Terminal(tmp_path, text, "--stdin-rank=1")
    before = terminal.settings()
    terminal.until(b"name? ")
    assert terminal.settings() != before
    terminal.type(b"\x03")
    assert terminal.launcher.wait() == 128 + signal.SIGINT
    assert terminal.settings() == before
    terminal.end()
