"""For all tests: what they start finds the same surroundings everywhere, whoever started the tests, and from where.

Whatever a process inherits is set here, once, in the process of the tests: variables, signals, standard input, the mask of
file modes, and a home, a temporary folder and a registry of jobs of its own.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.examples import SHARE
from tests.going_on import Code, GoingOn
from tests.supervised import NETWORKS, supervise
from tests.warm import popen

KEPT = (NETWORKS, "PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_", "PYTEST_", "ODYSSEY_SOAK_", "ODYSSEY_REWRITE")
"""How the variables begin that tests, and what they start, have from outside: where programs are, and what tests are told."""

WORTH_WARMTH = 20
TEARDOWN_S = 300.0
_stderr = pytest.StashKey[int]()
_any = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
"""No test depends on how busy the machine is."""
hypothesis.settings.register_profile("same", _any, derandomize=True, database=None, max_examples=100 // SHARE)
hypothesis.settings.register_profile("random", _any)
hypothesis.settings.load_profile("same")  # `make soak` looks at other examples every time: --hypothesis-profile


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and collected
    _set_variables(_own_folder(config))
    if (file := config.getoption("--go-on")) is not None:
        config.pluginmanager.register(GoingOn(file, Code().key_of, getattr(config, "workerinput", None)))
    config.stash[_stderr] = os.dup(2)  # as it is outside of tests
    _set_signals()
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not os.isatty(0):  # a terminal is here only with `-s`, for a debugger
        nothing = os.open(os.devnull, os.O_RDONLY)
        if nothing != 0:
            os.dup2(nothing, 0)
            os.close(nothing)


def _own_folder(config: pytest.Config) -> Path:
    """Gone when all tests have ended, as are all processes that they started (supervised.py)."""
    workerinput: dict[str, str] | None = getattr(config, "workerinput", None)
    if workerinput is not None:
        folder = Path(os.environ["TMPDIR"]).parent / workerinput["workerid"]  # short: sockets lie in it
        folder.mkdir()
        return folder
    return supervise("tests", limit_s=config.getoption("--limit"), ends_with_parent=config.getoption("--ends-with-parent"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start every process as users do (tests/warm)")
    parser.addoption("--limit", type=float, metavar="SECONDS", help="for all tests together")
    parser.addoption("--teardown-limit", type=float, metavar="SECONDS", default=TEARDOWN_S, help="for that of one test")
    parser.addoption("--go-on", type=Path, metavar="FILE", help="leave out what has passed on this code, as FILE says")
    parser.addoption("--ends-with-parent", action="store_true", help="with the process that has started pytest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--timeout` no test has less, whatever it says itself: the long tests share their machine."""
    if (least_s := config.getoption("--timeout")) is not None:
        for item in items:
            own = item.get_closest_marker("timeout")
            if own is not None and own.args[0] < least_s:
                item.add_marker(pytest.mark.timeout(least_s), append=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Not for a few tests, which would wait for the templates longer than they win by them."""
    gc.collect()
    gc.freeze()  # all that was imported and collected stays: no collection looks at it again
    gc.enable()
    if len(session.items) > WORTH_WARMTH and not session.config.getoption("--cold"):
        popen.start()
        session.config.add_cleanup(popen.templates.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test's limit strikes once. Where a teardown waits for ever after it, this process says where, and ends."""
    limit_s = item.config.getoption("--teardown-limit")
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def cold() -> Iterator[None]:
    """For what a test does to the processes of a job while they begin."""
    with popen.cold():
        yield


def _set_variables(folder: Path) -> None:
    for name in [name for name in os.environ if not name.startswith(KEPT)]:
        del os.environ[name]
    folders = {"HOME": "home", "TMPDIR": "tmp", "XDG_STATE_HOME": "state", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    for variable, name in folders.items():
        (folder / name).mkdir()
        os.environ[variable] = str(folder / name)
    os.environ |= {"LANG": "C.UTF-8", "TZ": "UTC", "USER": "tests", "OMP_NUM_THREADS": "1"}


def _set_signals() -> None:
    """What this process was told to ignore (by nohup, or a shell in the background) it goes on ignoring, but by a handler:
    what it starts does not inherit that."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
