"""`subprocess.Popen` for tests: what has a template becomes a fork of that (templates.py), all else starts as always."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from launcher.host import orphans
from launcher.host.kernel import set_subreaper
from launcher.processes.environment import for_zygote
from odyssey.zygote.protocol import SERVER
from tests import ROOT
from tests.descendants import END_S
from tests.warm.start import IMPORTS, here, send

AGENTS = ("odyssey_cli run", "odyssey_cli.torchrun", "odyssey_cli.launch", "tests.failing_agent run", "tests.soak.drive")
COMMAND = (
    "import sys; at_start = frozenset(sys.modules); sys.path[0] = sys.argv[1]; from tests.warm import templates; "
    "del sys.path[0]; templates.run([*map(int, sys.argv[2:])], at_start)"
)
"""The templates' (templates.py). `at_start` as the zygote takes it: before anything is imported for its own use."""
PLANNER = "launcher.planning.precompute"
MATTERS = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "PYTORCH_",
    "MALLOC_",
    "GLIBC_",
    "LANG",
    "LC_",
    "TZ",
)
"""How the variables begin that Python, torch or the libraries read when they begin."""
LATER = ("TORCH_CPP_LOG_LEVEL", "TORCH_NCCL_", "TZ")
"""Those of these that are read later, or that a fork takes over (start.py)."""
HOSTS: dict[str, int] = {}
"""Processes that live on hosts with a network of their own, by the first two words of what has a command run there."""
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_plain = subprocess.Popen
_signature = inspect.signature(_plain._execute_child)  # type: ignore[attr-defined]


class Templates:
    """The templates of this process, or in an agent the one that it has been given."""

    def __init__(self) -> None:
        self.sockets: dict[int, socket.socket] = {}
        """By what the template has imported (`IMPORTS`)."""
        self.variables: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Have them ready."""
        self._owner = os.getpid()
        pairs = [socket.socketpair() for _ in IMPORTS]
        numbers = [theirs.fileno() for _, theirs in pairs]
        self.variables = zygote_variables(os.environ)
        command = [sys.executable, "-u", "-c", COMMAND, str(ROOT), *map(str, numbers)]
        self.process = _plain(command, env=self.variables, pass_fds=numbers, stdin=subprocess.DEVNULL, start_new_session=True)
        for i, (ours, theirs) in enumerate(pairs):
            theirs.close()
            ours.recv(1)
            self.sockets[i] = ours
        hide(self.process.pid)

    @property
    def are_ours(self) -> bool:
        """Not in a fork of the process that has them: whose child it would be is looked at."""
        return bool(self.sockets) and self._owner == os.getpid()

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
        if self.process is not None:
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_S)


templates = Templates()


def start() -> None:
    """From now on, in this process. Its end is `templates.close`."""
    templates.start()
    subprocess.Popen = Popen  # type: ignore[misc]


def hide(pid: int) -> None:
    """An agent in this process ends all that is below it when its job is over: not what is needed after that."""
    everybody = orphans.family

    def family() -> orphans.Family:
        found = everybody()
        return found._replace(children={parent: [*filter(pid.__ne__, of)] for parent, of in found.children.items()})

    orphans.family = family


def zygote_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a zygote of an agent with this environment begins with."""
    return {"OPENBLAS_NUM_THREADS": "1", **for_zygote(environment, n_ranks=2)}


def begins_alike(environment: Mapping[str, str]) -> bool:
    """Whether Python and torch begin with this environment as they have in the templates; a host's only rank would have all
    processors, and has one here."""

    def that_matters(variables: Mapping[str, str]) -> dict[str, str]:
        names = [name for name in variables if name.startswith(MATTERS) and not name.startswith(LATER)]
        return {"OMP_NUM_THREADS": "1"} | {name: variables[name] for name in names}

    return that_matters(environment) == that_matters(templates.variables)


@contextmanager
def cold() -> Iterator[None]:
    """What is started meanwhile starts as it always does."""
    before = subprocess.Popen
    subprocess.Popen = _plain  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


class Popen(_plain):  # type: ignore[type-arg, valid-type, misc]
    """The pid of what is started warm is a child's, as any other's."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _signature.bind(self, *arguments).arguments
        found = None if not templates.are_ours or given["preexec_fn"] or given["shell"] else self._template(given)
        if found is None:
            super()._execute_child(*arguments)
            return
        index, argv, environment, is_agent, host = found
        streams = [
            given["p2cread"] if given["p2cread"] != -1 else 0,
            given["c2pwrite"] if given["c2pwrite"] != -1 else 1,
            given["errwrite"] if given["errwrite"] != -1 else 2,
        ]
        passed = sorted(given["pass_fds"])
        start = here(
            argv,
            environment,
            os.path.abspath(os.fspath(given["cwd"]) if given["cwd"] is not None else os.getcwd()),
            new_session=given["start_new_session"],
            has_template=is_agent,
            targets=(0, 1, 2, *passed),
            host=host,
        )
        before = set_subreaper(True)
        self.pid = send(templates.sockets[index], start, [*streams, *passed])
        set_subreaper(before)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))

    @staticmethod
    def _template(given: Mapping[str, Any]) -> _Found | None:
        """None for a process that starts as always."""
        argv = given["args"]
        environment = dict(os.environ if given["env"] is None else given["env"])
        if not isinstance(argv, list | tuple) or given["executable"] not in (None, argv[0]) or sys.executable not in argv:
            return None
        if not all(isinstance(text, str) for text in (*argv, *environment, *environment.values())):
            return None
        if len(argv) == 4 and argv[0] == sys.executable and argv[2] == SERVER and begins_alike(environment):
            index = _index({*environment.get("ODYSSEY_ZYGOTE_IMPORTS", "").split(), "odyssey.zygote.entry"})
            most = max((i for i in templates.sockets if index is not None and i <= index), default=None)  # it imports the rest
            return None if most is None else _Found(most, argv, environment)
        if not begins_alike(zygote_variables(environment)):
            return None
        if len(argv) == 3 and argv[:2] == [sys.executable, "-c"] and PLANNER in argv[2]:
            return _Found(min(templates.sockets), argv, environment)
        k = argv.index(sys.executable)
        host = HOSTS.get(" ".join(argv[:2])) if k else os.getpid()
        if templates.process is None or host is None or argv[k + 1 : k + 2] != ["-m"]:
            return None
        if not " ".join(argv[k + 2 : k + 4]).startswith(AGENTS):
            return None
        return _Found(_guess(argv[k + 3 :], given["cwd"]), argv[k:], environment, is_agent=True, host=host)


class _Found(NamedTuple):
    """The template that something becomes a fork of, its command line and environment, and whose namespaces it takes."""

    index: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    is_agent: bool = False
    host: int = 0


def _index(modules: set[str]) -> int | None:
    imported: set[str] = set()
    for i, more in enumerate(IMPORTS):
        imported |= set(more)
        if modules == imported:
            return i
    return None


def _guess(arguments: Sequence[str], cwd: str | None) -> int:
    """What the zygote of this agent will be asked to import, by the first script on its command line."""
    for argument in arguments:
        path = os.path.join(cwd or "", argument)
        if os.path.isfile(path):
            data = Path(path).read_bytes()
            return 2 if b"odyssey" in data else 1 if b"optim" in data else 0
    return 0
