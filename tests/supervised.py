"""Whatever a run of tests or benchmarks has started ends with it, however it ends: by itself, by a signal, by its limit.

    the process that was started ─► the supervisor, a subreaper ─► the run, and all that it starts

`supervise` returns in the run alone. The first process stands for the run: it passes signals on and exits as the run did, when
nothing is left. The supervisor is the ancestor of all that the run starts, sessions of their own and orphans too, so nothing
gets away from it when the run ends, or when either of the two is killed. The run does not outlive it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import setproctitle

from launcher.host.kernel import die_with_parent, set_subreaper
from launcher.host.orphans import end_descendants

NETWORKS = "ODYSSEY_TESTS_NETWORKS"
"""In the environment of a run: how the names of its network namespaces and their links begin."""
PASSED_ON = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
SHARED = Path("/dev/shm")
"""Files in memory lie there: a folder of the same name as that of the run is gone after it, too."""
LAST_WORDS_S = 30.0
"""From SIGINT at its limit until a run is killed: pytest says what has failed until then."""
TOO_LONG = 124
"""The exit code of a run that came to its limit, as of `timeout`."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def supervise(name: str, *, limit_s: float | None = None, ends_with_parent: bool = False) -> Path:
    """Go on below a supervisor. Answers a folder, which is the run's and gone after it.

    `limit_s`: after it the run is told to end, and killed if it does not. `ends_with_parent`: `make` is killed by a process
    number, and what it runs is to end with it.
    """
    # Short, as paths of sockets may have 107 characters; whose it is can be told by its name.
    folder = Path(tempfile.mkdtemp(prefix=f"odyssey-{name}-{base36(os.getpid())}-", dir="/tmp"))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who inherits that it is ignored is not told of any end
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    ours, theirs = os.pipe()
    supervisor = os.fork()
    if supervisor != 0:
        os.close(ours)
        if ends_with_parent:
            die_with_parent(parent)
        _stand_for(supervisor)
    os.close(theirs)
    own = os.getpid()
    run = os.fork()
    if run != 0:
        try:
            code = _Supervisor(name, run, ours, folder).wait(limit_s)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        os._exit(code)
    os.close(ours)
    die_with_parent(own)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ[NETWORKS] = _prefix(own)
    return folder


def base36(number: int) -> str:
    """Five digits or more, of which an interface's name has room for two such numbers."""
    text = ""
    while number or len(text) < 5:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


def _prefix(supervisor: int) -> str:
    return f"od{base36(supervisor)}"


def _stand_for(supervisor: int) -> None:
    """Does not return. A terminal sends its signals to the run as well: what it sends is not passed on."""
    while True:
        got = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(supervisor, os.WNOHANG)
            if pid:
                os._exit(_exit_code(status))
        elif got.si_pid != 0:
            os.kill(supervisor, got.si_signo)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class _Supervisor:
    """`front`: a pipe that ends with the first process."""

    def __init__(self, name: str, run: int, front: int, folder: Path) -> None:
        os.setsid()
        set_subreaper(True)
        setproctitle.setproctitle(f"supervisor of {name}")  # who kills all of this name does not mean this one
        self._name = name
        self._run = run
        self._front = front
        self._folder = folder
        self._status: int | None = None
        wake, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wake, False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON | {signal.SIGCHLD})
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(front, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)

    def wait(self, limit_s: float | None) -> int:
        """Until the run has ended, and nothing of it is left. Answers the exit code."""
        is_late = not self._ends_within(limit_s) and self._status is None and limit_s is not None and self._has_front
        if is_late:
            assert limit_s is not None
            os.write(2, f"\n{self._name}: not done after {limit_s:.0f} s, and ended\n".encode())
            self._send(signal.SIGINT)
            self._ends_within(LAST_WORDS_S)
        if self._status is None:
            self._send(signal.SIGKILL)
        end_descendants()
        _remove_networks(_prefix(os.getpid()))
        for folder in (self._folder, SHARED / self._folder.name):
            shutil.rmtree(folder, ignore_errors=True)
        if is_late:
            return TOO_LONG
        return _exit_code(self._status) if self._status is not None else 128 + signal.SIGKILL

    @property
    def _has_front(self) -> bool:
        return self._front in self._selector.get_map()

    def _ends_within(self, limit_s: float | None) -> bool:
        """Whether the run has ended before the limit, and before the process that stands for it."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while self._status is None and self._has_front:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            for key, _ in self._selector.select(left_s):
                if key.fd == self._front:
                    self._selector.unregister(self._front)  # it never says a word: this is its end
                else:
                    for number in os.read(self._wake, 4096):
                        if number != signal.SIGCHLD:
                            self._send(signal.Signals(number))
                    self._reap()
        return self._status is not None

    def _send(self, number: int) -> None:
        """To the run, which is not waited for yet."""
        if self._status is None:
            os.kill(self._run, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._run:
                    self._status = ended[1]


def _remove_networks(prefix: str) -> None:
    """What tests/hosts/network.py has made and could not take away."""
    for folder, command in (("/run/netns", ("netns", "del")), ("/sys/class/net", ("link", "del"))):
        with contextlib.suppress(FileNotFoundError):
            for name in [name for name in os.listdir(folder) if name.startswith(prefix)]:
                subprocess.run(["ip", *command, name], check=False, capture_output=True, timeout=60)
