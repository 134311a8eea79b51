"""A fork of the zygote behaves as `python -u script.py` does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from launcher.host.kernel import set_subreaper
from launcher.host.orphans import end_descendants
from launcher.processes import rank_process
from odyssey.protocol.frames import Deframer
from odyssey.protocol.reports import Failed, Report
from odyssey.zygote import protocol, services
from tests.warm import popen

pytestmark = pytest.mark.timeout(120)
FOR_ALL = {"PYTHONFAULTHANDLER": "1"}
"""What the launcher sets for every rank, and a fork finds in effect."""


class Forks:
    """One zygote for all tests of this file; each script runs in a fork of it and as a process of its own."""

    def __init__(self, *also: str, **variables: str) -> None:
        """`also`: modules that it imports besides."""
        self._was_subreaper = set_subreaper(True)
        self._number = self.pid = 0
        """`pid`: of the last one."""
        self.others: set[int] = set()
        """Children of this process that are not its."""
        modules = ["torch", "torch.distributed", "odyssey.protocol.link", *also]
        self.zygote = rank_process.Zygote(modules, {**os.environ, **variables}, 2)
        imported = self.zygote.answer()
        assert isinstance(imported, protocol.Imported) and imported.threads == 1

    def run(
        self, script: Path | str, *arguments: str, cwd: Path, entry: protocol.Entry = "script", **variables: str
    ) -> tuple[int, bytes, bytes, list[object]]:
        """Exit code (minus the signal), stdout, stderr, and what the rank reported."""
        self._number += 1
        ours, theirs = socket.socketpair()
        out, err = (cwd / f"{self._number}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr, open(os.devnull) as stdin:
            variables = {**os.environ, **FOR_ALL, "RANK": "0", **variables}
            environment = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
            line = tuple(map(os.fsencode, arguments))
            request = protocol.ForkRank(
                self._number, os.fsencode(script), line, bytes(cwd), environment, "ODYSSEY_AGENT_FD", os.getpid(), entry
            )
            self.zygote.request(request, [stdin.fileno(), stdout.fileno(), stderr.fileno(), theirs.fileno()])
        theirs.close()
        answer = self.zygote.answer()
        assert isinstance(answer, protocol.Forked)
        self.pid = answer.pid
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
        set_subreaper(self._was_subreaper)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with popen.cold():
        made = Forks()
    yield made
    made.close()
    end_descendants()  # what the scripts left behind came to this process


def as_python(script: Path | str, *arguments: str, cwd: Path, entry: protocol.Entry = "script") -> tuple[int, bytes, bytes]:
    command = [sys.executable, *protocol.command(entry, str(script), arguments)]
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **FOR_ALL, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


KINDS = ("file", "directory", "zip", "module", "package", "path")


def place(kind: str, text: str, folder: Path) -> tuple[protocol.Entry, str]:
    """Put a script there, for an entry of this kind: how it is run, and what is named."""
    if kind == "directory":
        (folder / "app").mkdir()
        (folder / "app" / "__main__.py").write_text(text)
        return "script", "app"
    if kind == "zip":
        with zipfile.ZipFile(folder / "app.zip", "w") as file:
            file.writestr("__main__.py", text)
        return "script", "app.zip"
    if kind == "package":
        (folder / "app").mkdir()
        (folder / "app" / "__init__.py").write_text("")
        (folder / "app" / "__main__.py").write_text(text)
        return "module", "app"
    (folder / "app.py").write_text(text)
    return ("module", "app") if kind == "module" else ("path" if kind == "path" else "script", "app.py")


PROBE = r"""
import torch, atexit, faulthandler, gc, logging, os, pickle, resource, signal, sys, threading, types, warnings
class Mine: pass
def inner(): pass
main = sys.modules["__main__"]
print(__name__, globals().get("__file__"), __package__, __doc__, type(__loader__).__name__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent), globals().get("__cached__"))
print(main.__dict__ is globals(), sorted(globals()))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.prefix, sys.warnoptions, sys._xoptions)
others = {"OMP_NUM_THREADS", "ODYSSEY_AGENT_FD", "RANK", "_", "LC_CTYPE"}
print(os.getcwd(), os.environ.get("PWD"), sorted(set(os.environ) - others))
for number in sorted(signal.valid_signals() - {signal.SIGRTMAX - 7}):
    print(number, signal.getsignal(number), signal.siginterrupt)
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
print({name: status[name] for name in ("Name", "Umask", "SigBlk", "SigIgn", "Threads", "Cpus_allowed", "Seccomp")})
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), resource.getrlimit(resource.RLIMIT_NOFILE))
print(os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())
print(open("/proc/self/cmdline").read().rstrip("\0 ").replace("\0", " "), os.readlink("/proc/self/exe"))
for s in (sys.stdin, sys.stdout, sys.stderr):
    print(s.name, s.encoding, s.errors, s.line_buffering, s is sys.stdin or s.write_through, type(s.buffer))
    print(s is getattr(sys, f"__{s.name[1:-1]}__"), s.fileno())
print(repr(sys.stdin.read()), threading.current_thread().name, threading.active_count())
print(threading.main_thread().native_id == os.getpid())
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
print(faulthandler.is_enabled(), sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), gc.isenabled())
print([f[:1] + f[2:3] for f in warnings.filters if f[2] is not None and f[2].__module__ == "builtins"], logging.root.handlers)
print(logging.LogRecord("n", 10, "p", 1, "m", (), None).relativeCreated < 60_000, sys.dont_write_bytecode, sys.pycache_prefix)
print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, Mine.__module__, inner.__module__)
print(hasattr(sys, "last_value"), hasattr(sys, "ps1"), os.path.exists(sys.path[0] or "."), type(sys.meta_path[0]).__name__)
atexit.register(lambda: print("bye"))
"""
NAMES = r"""
import pickle, sys
class Mine: pass
print(__name__, globals().get("__file__"), __package__, __doc__, type(__loader__).__name__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent), globals().get("__cached__"))
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.prefix, sys.warnoptions, sys._xoptions)
print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, Mine.__module__)
"""
"""What depends on how a script is run, of all that is looked at by `PROBE`."""
SAME = {
    "probe": PROBE,
    "names": NAMES,
    "exception": """
import sys, atexit
atexit.register(lambda: print(type(sys.last_value)))
def f():
    raise ValueError("two\\nlines") from KeyError("why")
f()
""",
    "syntax": "def f(:\n",
    "exit_text": "import sys; sys.exit('no more')",
    "exit_code": "import sys; sys.exit(300)",
    "exit_none": "import sys; sys.exit()",
    "exit_object": "raise SystemExit([1, 2])",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "excepthook": "import sys\nsys.excepthook = lambda kind, e, trace: print('mine', kind, trace.tb_lineno)\n1 / 0",
    "excepthook_exits": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1 / 0",
    "atexit": """
import atexit, threading, time
atexit.register(lambda: print("bye"))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
open("left.txt", "w").write("unflushed")
raise SystemExit(3)
""",
    "processes": """
import multiprocessing as mp, sys
class Mine: pass
def work(x): print(type(x), __name__, flush=True)
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        process = mp.get_context(method).Process(target=work, args=(Mine(),))
        process.start()
        process.join()
        print(process.exitcode)
""",
    "loader": """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        print([batch.tolist() for batch in DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=method)])
""",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "file") for name in SAME]
    + [(name, kind) for name in ("exception", "syntax", "exit_text") for kind in KINDS[1:]]
    + [("names", kind) for kind in KINDS[1:]]
    + [pytest.param("probe", kind, marks=pytest.mark.soak) for kind in KINDS[1:]]
    + [("processes", "module"), ("processes", "package")],
)
def test_a_fork_behaves_as_python_does(name: str, kind: str, forks: Forks, tmp_path: Path) -> None:
    entry, script = place(kind, SAME[name], tmp_path)
    code, out, err, _ = forks.run(script, "-a", "b c", cwd=tmp_path, entry=entry, OMP_NUM_THREADS="1")
    theirs = as_python(script, "-a", "b c", cwd=tmp_path, entry=entry)
    if name == "interrupted":  # as all ranks are by Ctrl-C: none prints a traceback
        assert theirs[2].endswith(b"KeyboardInterrupt\n")
        theirs = (theirs[0], theirs[1], b"")
    assert (code, out.decode(), err.decode()) == (theirs[0], theirs[1].decode(), theirs[2].decode())
    if name == "atexit":
        assert (tmp_path / "left.txt").read_text() == "unflushed"


@pytest.mark.parametrize(("entry", "script"), [("module", "no.such"), ("module", "json.nothing"), ("module", "email")])
def test_what_cannot_be_run_says_what_python_says(entry: protocol.Entry, script: str, forks: Forks, tmp_path: Path) -> None:
    code, out, err, _ = forks.run(script, cwd=tmp_path, entry=entry)
    assert (code, out, err) == as_python(script, cwd=tmp_path, entry=entry)
    assert code == 1 and err


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
        "fds = {int(fd): os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')}\n"
        "ours = [fd for fd, file in fds.items() if os.path.exists(f'/proc/self/fd/{fd}') and 'odyssey-stacks' not in file]\n"
        "number = int(os.environ['ODYSSEY_AGENT_FD'].partition(':')[0])\n"
        "print(os.getsid(0) == os.getpid(), os.getppid(), ours == [0, 1, 2, number])\n"
        "print(torch.get_num_threads(), 'OPENBLAS_NUM_THREADS' in os.environ, 'odyssey.zygote' in sys.modules)\n"
    )
    code, out, _, _ = forks.run(script, cwd=tmp_path, OMP_NUM_THREADS="3")
    assert code == 0
    assert out.decode() == f"True {os.getpid()} True\n3 False False\n"


NUMPYS_THREADS = """
import ctypes, torch
(library,) = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
print(ctypes.CDLL(library).scipy_openblas_get_num_threads64_())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="numpy has one thread for each processor")
@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1000"}])
def test_numpy_computes_with_as_many_threads(
    variables: dict[str, str], forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "script.py").write_text(NUMPYS_THREADS)
    python = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, check=True, env={**os.environ, **variables}
    )
    assert forks.run("script.py", cwd=tmp_path, **variables)[:2] == (0, python.stdout)


def test_a_store_is_served_on_the_socket_it_was_given(forks: Forks) -> None:
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for value in ("first", "second"):  # each process serves a fresh store at the same address
            forks.zygote.request(services.ForkStore(1, "127.0.0.1", port, os.getpid()), [listener.fileno()])
            answer = forks.zygote.answer()
            assert isinstance(answer, protocol.Forked)
            client = TCPStore("127.0.0.1", port, is_master=False)
            assert not client.check(["key"])
            client.set("key", value)
            assert client.get("key") == value.encode()
            os.kill(answer.pid, signal.SIGKILL)
            os.waitpid(answer.pid, 0)


def test_a_rank_that_is_interrupted_before_its_script_begins_ends_without_a_word(tmp_path: Path) -> None:
    """No frame of ours is shown, and the end of torch is not waited for."""
    (tmp_path / "interrupting.py").write_text(
        "import os, signal\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    )
    script = tmp_path / "begins.py"
    script.write_text("print('begun')")
    forks = Forks("interrupting", PYTHONPATH=str(tmp_path))
    try:
        assert forks.run(script, cwd=tmp_path) == (-signal.SIGINT, b"", b"", [])
    finally:
        forks.close()


def test_the_end_of_the_agents_socket_ends_the_zygote() -> None:
    agent = rank_process.Zygote(["json"], dict(os.environ), 1)
    process = psutil.Process(agent.pid)
    agent.socket.close()
    assert process.wait(30) == 0


def test_requests_have_a_text_form() -> None:
    request = protocol.ForkRank(1, b"a.py", (b"-x",), b"/", {b"A": b"b"}, "FD", 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=protocol.Request) == request
