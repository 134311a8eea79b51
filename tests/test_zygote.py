"""A fork of the zygote behaves as `python -u script.py` does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from launcher import spawn
from launcher.ends import end_descendants
from odyssey import services, zygote
from odyssey.messages import Deframer, Failed, Report

pytestmark = pytest.mark.timeout(120)


class Forks:
    """One zygote for all tests of this file; each script runs in a fork of it and as a process of its own."""

    def __init__(self) -> None:
        self._was_subreaper = spawn.set_subreaper(True)
        self._number = 0
        self.zygote = spawn.Zygote(["torch", "torch.distributed", "odyssey.link"], dict(os.environ), 2)
        imported = self.zygote.answer()
        assert isinstance(imported, zygote.Imported) and imported.threads == 1

    def run(self, script: Path, *arguments: str, cwd: Path, **variables: str) -> tuple[int, bytes, bytes, list[object]]:
        """Exit code (minus the signal), stdout, stderr, and what the rank reported."""
        self._number += 1
        ours, theirs = socket.socketpair()
        out, err = (cwd / f"{self._number}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr, open(os.devnull) as stdin:
            request = zygote.ForkRank(
                self._number, str(script), arguments, str(cwd), {**os.environ, **variables}, "ODYSSEY_AGENT_FD", os.getpid()
            )
            self.zygote.request(request, [stdin.fileno(), stdout.fileno(), stderr.fileno(), theirs.fileno()])
        theirs.close()
        answer = self.zygote.answer()
        assert isinstance(answer, zygote.Forked)
        reports = Deframer(Report)
        said = []
        while data := ours.recv(1 << 16):
            said += list(reports.feed(data))
        ours.close()
        code = os.waitstatus_to_exitcode(os.waitpid(answer.pid, 0)[1])
        return code, out.read_bytes(), err.read_bytes(), said

    def close(self) -> None:
        self.zygote.socket.close()
        os.waitpid(self.zygote.pid, 0)
        end_descendants()  # what the scripts left behind came to this process
        spawn.set_subreaper(self._was_subreaper)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def as_python(script: Path, *arguments: str, cwd: Path) -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-u", str(script), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


SAME = {
    "names": """
import sys, os
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__).__name__)
print(sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.orig_argv, sys.path, sys.flags, os.getcwd(), sys.executable)
print([name for name in sorted(globals())])
""",
    "exception": """
def f():
    raise ValueError("two\\nlines") from KeyError("why")
f()
""",
    "syntax": "def f(:\n",
    "exit_text": "import sys; sys.exit('no more')",
    "exit_code": "import sys; sys.exit(300)",
    "exit_none": "import sys; sys.exit()",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\n1 / 0",
    "atexit": """
import atexit, threading, time
atexit.register(lambda: print("bye"))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
open("left.txt", "w").write("unflushed")
raise SystemExit(3)
""",
    "signals": """
import signal
for number in sorted(signal.valid_signals()):
    print(number, signal.getsignal(number))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
""",
    "streams": """
import sys
for s in (sys.stdin, sys.stdout, sys.stderr):
    print(s.name, s.encoding, s.errors, s.line_buffering, getattr(s, "write_through", None), s.isatty(), type(s.buffer))
print(repr(sys.stdin.read()))
""",
    "pickle": """
import pickle, multiprocessing as mp
class Mine: pass
def work(x): return x + 1
if __name__ == "__main__":
    print(type(pickle.loads(pickle.dumps(Mine()))))
    with mp.get_context("spawn").Pool(1) as pool: print(pool.map(work, [1, 2]))
""",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("name", SAME)
def test_a_fork_behaves_as_python_does(name: str, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAME[name])
    code, out, err, _ = forks.run(script, "-a", "b c", cwd=tmp_path)
    assert (code, out, err) == as_python(script, "-a", "b c", cwd=tmp_path)
    if name == "atexit":
        assert (tmp_path / "left.txt").read_text() == "unflushed"


def test_a_relative_script_and_modules_beside_it(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "launcher.py").write_text("value = 'the user\\'s own'")
    (tmp_path / "below" / "script.py").write_text("import launcher; print(launcher.value, __file__)")
    code, out, _, _ = forks.run(Path("below/script.py"), cwd=tmp_path)
    assert (code, out.decode()) == (0, f"the user's own {tmp_path}/below/script.py\n")


def test_forks_draw_different_random_numbers(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import random, torch, numpy; print(random.random(), torch.rand(1).item(), numpy.random.rand())")
    first, second = (forks.run(script, cwd=tmp_path)[1].split() for _ in range(2))
    assert all(mine != its for mine, its in zip(first, second, strict=True))


def test_the_failure_is_reported_with_its_traceback(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    raise ValueError('mine')\nf()\n")
    (failed,) = forks.run(script, cwd=tmp_path)[3]
    assert isinstance(failed, Failed)
    assert failed.error == "ValueError: mine"
    assert failed.traceback.count('File "') == 2 and "zygote" not in failed.traceback


def test_a_fork_has_its_own_session_threads_and_no_descriptor_of_ours(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "fds = sorted(int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}'))\n"
        "print(os.getsid(0) == os.getpid(), os.getppid(), fds == [0, 1, 2, int(os.environ['ODYSSEY_AGENT_FD'])])\n"
        "print(torch.get_num_threads(), 'OPENBLAS_NUM_THREADS' in os.environ, 'odyssey.zygote' in sys.modules)\n"
    )
    code, out, _, _ = forks.run(script, cwd=tmp_path, OMP_NUM_THREADS="3")
    assert code == 0
    assert out.decode() == f"True {os.getpid()} True\n3 False False\n"


def test_a_store_is_served_on_the_socket_it_was_given(forks: Forks) -> None:
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for value in ("first", "second"):  # each process serves a fresh store at the same address
            forks.zygote.request(services.ForkStore(1, "127.0.0.1", port, os.getpid()), [listener.fileno()])
            answer = forks.zygote.answer()
            assert isinstance(answer, zygote.Forked)
            client = TCPStore("127.0.0.1", port, is_master=False)
            assert not client.check(["key"])
            client.set("key", value)
            assert client.get("key") == value.encode()
            os.kill(answer.pid, signal.SIGKILL)
            os.waitpid(answer.pid, 0)


def test_the_end_of_the_agents_socket_ends_the_zygote() -> None:
    agent = spawn.Zygote(["json"], dict(os.environ), 1)
    process = psutil.Process(agent.pid)
    agent.socket.close()
    assert process.wait(30) == 0


def test_requests_have_a_text_form() -> None:
    request = zygote.ForkRank(1, "a.py", ("-x",), "/", {"A": "b"}, "FD", 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=zygote.Request) == request
