"""`odyssey run` as a whole in a terminal of its own, with real ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import odyssey
import os, sys
rank = os.environ["RANK"]
sys.stdout.write("half of rank " + rank)
sys.stdout.flush()
print(" and the rest", sys.argv[1:])
sys.stderr.write("10%\\r100%\\n")
sys.stdout.write("no newline at the end")
sys.exit(3 if rank == "1" and "fail" in sys.argv else 0)
"""


def started_in_terminal(folder: Path, *argv: str, script: str) -> tuple[subprocess.Popen[bytes], int]:
    """`odyssey run --nodes 2 ...` in a session without a terminal of its own, and the other end of that which it writes to."""
    (folder / "script.py").write_text(script)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "odyssey_cli", "run", "--nodes", "2", *argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(slave)
    return process, master


def run_in_terminal(folder: Path, *argv: str, script: str = SCRIPT) -> tuple[int, str]:
    """Exit code and everything that the terminal got, of `odyssey run --nodes 2 script.py ...`."""
    process, master = started_in_terminal(folder, "script.py", *argv, script=script)
    said = b""
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # the last process has closed its end
            break
        if not data:
            break
        said += data
    os.close(master)
    return process.wait(), said.decode()


def test_lines_of_the_ranks_are_whole_and_the_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    code, said = run_in_terminal(tmp_path, "-x", "--nodes", "7")

    assert code == 0
    for rank in (0, 1):
        assert f"half of rank {rank} and the rest ['-x', '--nodes', '7']" in said
    assert said.count("no newline at the end") == 2
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")
    assert len(list((tmp_path / "odyssey-logs").iterdir())) == 1


def test_a_rank_that_fails_ends_the_job_with_an_error(tmp_path: Path) -> None:
    code, said = run_in_terminal(tmp_path, "fail")

    assert code == 1
    assert "rank 1 ended with exit code 3" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


def test_a_script_that_knows_nothing_of_us_has_the_terminal_to_itself(tmp_path: Path) -> None:
    code, said = run_in_terminal(tmp_path, script="import os; os.write(1, b'tty %d%d\\n' % (os.isatty(1), os.isatty(2)))")

    assert code == 0
    assert said.count("tty 11") == 2 and "\x1b[?25l" not in said


FAILS_EVERYWHERE = """
import odyssey
import os, pathlib, traceback
try:
    raise ValueError("bad number\\\\nin two lines")
except ValueError:
    os.write(2, traceback.format_exc().encode())  # at once: what is shown in two pieces is not known again
pathlib.Path(os.environ["RANK"]).touch()
while not (pathlib.Path("0").exists() and pathlib.Path("1").exists()):
    pass
os._exit(1)
"""


def test_a_traceback_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    """Those that the failure block tells again are not counted."""
    code, said = run_in_terminal(tmp_path, script=FAILS_EVERYWHERE)

    assert code == 1
    lines = [line for line in said.replace("\r", "").split("\n") if "[rank " in line]
    assert len([line for line in lines if line.endswith("Traceback (most recent call last):")]) == 1
    assert len([line for line in lines if "the same traceback as rank" in line]) == 1


GOES_ON = """
import odyssey
import pathlib, time
print("waiting", flush=True)
while not pathlib.Path("gone").exists():
    time.sleep(0.01)
for _ in range({n_lines}):
    print("x" * 1023)
"""


@pytest.mark.parametrize("n_lines", [1, 6 << 10], ids=["a line", "more than is kept for a terminal"])
def test_a_job_whose_terminal_is_gone_goes_on_to_its_good_end(tmp_path: Path, n_lines: int) -> None:
    script = GOES_ON.format(n_lines=n_lines)
    process, master = started_in_terminal(tmp_path, "--json-report=report.json", "script.py", script=script)
    said = b""
    while said.count(b"waiting") < 2:
        said += os.read(master, 1 << 16)

    os.close(master)
    (tmp_path / "gone").touch()

    try:
        assert process.wait(timeout=120) == 0, "what a terminal does not take holds nobody up"
    finally:
        process.terminate()
        process.wait()
    assert json.loads((tmp_path / "report.json").read_text())["exitcode"] == 0


@pytest.mark.parametrize("ends", [True, False], ids=["that has ended well", "that goes on"])
def test_a_job_whose_terminal_is_stopped_ends_when_it_is_told_to(tmp_path: Path, ends: bool) -> None:
    script = GOES_ON.format(n_lines=0) + ("" if ends else "while True:\n    time.sleep(1)\n")
    process, master = started_in_terminal(tmp_path, "script.py", script=script)
    said = b""
    while said.count(b"waiting") < 2:
        said += os.read(master, 1 << 16)
    os.write(master, b"\x13")  # Ctrl-S
    wait_for(lambda: writes_to_stderr(process.pid))
    (tmp_path / "gone").touch()
    if ends:
        (log,) = tmp_path.glob("odyssey-logs/*/events.jsonl")
        wait_for(lambda: "job_ended" in log.read_text())

    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:  # between the job's end and the last lines nobody hears it
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)

    process.kill()
    assert process.wait() == (0 if ends else 143)
    os.close(master)


def writes_to_stderr(pid: int) -> bool:
    """A thread waits in the kernel to write there."""
    return any(path.read_text().startswith("1 0x2 ") for path in Path(f"/proc/{pid}/task").glob("*/syscall"))


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_line_with_a_colour_that_is_none_is_shown_without_it(tmp_path: Path) -> None:
    script = "import odyssey\nprint('\\x1b[' + '5' * 5000 + 'mthis\\nand that')"

    code, said = run_in_terminal(tmp_path, script=script)

    assert code == 0
    assert said.count("mthis") == 2 and said.count("and that") == 2
