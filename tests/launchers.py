"""torchrun and our launcher as subprocesses: the same command line, in the same surroundings, under the same eyes.

A `Scene` is a folder to launch in, with a working directory, a temporary folder and a state folder of its own. Ranks say
that they are ready by a line to a pipe, and `tests/clients/probe.py` writes down what a rank finds around it. The process
of the tests becomes the parent of whatever is orphaned below it, so that neither a process in another session, nor one
without environment, nor a zombie can get away.
"""

from __future__ import annotations

import functools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.descendants import Descendants, describe
from tests.torchrun import record

CLIENTS = Path(__file__).resolve().parent / "clients"
PROBE = str(CLIENTS / "probe.py")
KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TORCHINDUCTOR_CACHE_DIR", "USER")
"""Variables of the process of the tests that launchers have, too."""
PATIENCE_S = 60.0
"""For anything that a launcher has to do. No test waits so long unless it fails."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, by what stands behind `python -m`; `legacy` stands in for torch.distributed.launch."""

    name: str
    command: tuple[str, ...]
    legacy: str = ""

    @property
    def is_ours(self) -> bool:
        return self is not TORCHRUN

    def __str__(self) -> str:
        return self.name


TORCHRUN = Launcher("torchrun", ("torch.distributed.run",), "torch.distributed.launch")
OURS = Launcher("odyssey", ("odyssey_cli.torchrun",), "odyssey_cli.launch")
ODYSSEY_RUN = Launcher("odyssey-run", ("odyssey_cli", "run"))
"""What people type; its command line is torchrun's and more, so a few tests of it suffice."""

torchrun_too = pytest.param(TORCHRUN, marks=record.only_without_record)
_either = pytest.mark.parametrize("launcher", [torchrun_too, OURS], ids=str)


def under_both(test: Callable[..., None]) -> Callable[..., None]:
    """The same assertions hold under both launchers, and what was seen is the same, but for what is better under ours."""

    @functools.wraps(test)
    def run(scene: Scene, launcher: Launcher, **arguments: Any) -> None:
        test(scene, launcher, **arguments)
        if not any(mark.name == better_than_torchrun.name for mark in run.pytestmark):  # type: ignore[attr-defined]
            record.hold(_case(launcher), scene, launcher)

    return _either(run)


def _case(launcher: Launcher) -> str:
    """The name of the test that runs, whichever launcher it is run with."""
    file, _, name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)").partition("::")
    test, _, parameters = name.removesuffix("]").partition("[")
    others = "-".join(part for part in parameters.split("-") if part != launcher.name)
    return f"{file.removeprefix('tests/')}::{test}" + (f"[{others}]" if others else "")


better_than_torchrun = pytest.mark.better_than_torchrun
"""Under torchrun the test shows what is bad there, under ours that it is not so."""


@dataclass(frozen=True)
class Probe:
    """What one rank of one attempt found: see tests/clients/probe.py."""

    facts: dict[str, Any]

    @property
    def env(self) -> dict[str, str]:
        env: dict[str, str] = self.facts["env"]
        return env

    @property
    def assignment(self) -> tuple[int, ...]:
        """(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE)."""
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
        return tuple(int(self.env[name]) for name in names.split())


class Run:
    """One launcher at work. Its output goes to files, so nothing waits for this process to read it."""

    def __init__(self, scene: Scene, name: str, command: list[str], env: dict[str, str], stdin: Path | None) -> None:
        self.scene = scene
        self.env = env
        self.command = command
        self._stdout = scene.folder / f"{name}.stdout"
        self._stderr = scene.folder / f"{name}.stderr"
        with (
            self._stdout.open("wb") as stdout,
            self._stderr.open("wb") as stderr,
            (stdin or Path(os.devnull)).open("rb") as stdin_file,
        ):
            self.process = subprocess.Popen(
                command,
                cwd=scene.cwd,
                env=env,
                stdin=stdin_file,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def is_ours(self) -> bool:
        return any(part.split(".")[0] == "odyssey_cli" or Path(part).name == "odyssey-torchrun" for part in self.command)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    @property
    def stdout_path(self) -> str:
        return str(self._stdout)

    @property
    def stderr_path(self) -> str:
        return str(self._stderr)

    def end(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit code, when it has ended by itself; fails with what it said if it does not."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {patience_s:.0f} s: {self.story()}") from None

    def succeed(self, patience_s: float = PATIENCE_S) -> Self:
        code = self.end(patience_s)
        assert code == 0, f"exit code {code}: {self.story()}"
        return self

    def fail(self, patience_s: float = PATIENCE_S) -> Self:
        code = self.end(patience_s)
        assert code == 1, f"exit code {code} instead of 1: {self.story()}"
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def story(self) -> str:
        return f"{' '.join(self.command)}\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-6000:]}"


class Scene:
    """Everything that the launchers of one test have in common."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cwd, self.state, self.probes_dir = (folder / name for name in ("work", "state", "probes"))
        for path in (self.cwd, self.state, self.probes_dir):
            path.mkdir(parents=True)
        self.tmp = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))  # short, as sockets lie in it
        self.runs: list[Run] = []
        self._ready_path = folder / "ready"
        os.mkfifo(self._ready_path)
        self._ready = os.open(self._ready_path, os.O_RDWR)  # for writing, too: else it ends with its first writer
        self._heard = b""
        self.heard: list[str] = []
        """All that was."""
        self._shm = _shared_memory()
        self._below = Descendants()

    # -- before ----------------------------------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> str:
        """A file in the working directory; answers its name, relative to it."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a launcher starts with: nothing of the process of the tests but where its programs are."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT}
        return kept | {
            "TMPDIR": str(self.tmp),
            "XDG_STATE_HOME": str(self.state),
            "PROBES": str(self.probes_dir),
            "READY": str(self._ready_path),
            **(more or {}),
        }

    def start(
        self,
        launcher: Launcher,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        legacy: bool = False,
        through: Sequence[str] = (),
    ) -> Run:
        """`through`: a program that becomes what is behind it on its command line."""
        command = (launcher.legacy,) if legacy else launcher.command
        return self.start_command([*through, sys.executable, "-m", *command, *arguments], env=env, stdin=stdin)

    def start_command(self, command: list[str], *, env: Mapping[str, str] | None = None, stdin: Path | None = None) -> Run:
        run = Run(self, f"run{len(self.runs)}", command, self.environment(env), stdin)
        self.runs.append(run)
        return run

    # -- during ----------------------------------------------------------------------------------------------------------

    def hear(self, n_lines: int, patience_s: float = PATIENCE_S) -> list[str]:
        """The next lines that ranks wrote to $READY; fails if they do not come or every launcher ends without them."""
        deadline = time.monotonic() + patience_s
        while self._heard.count(b"\n") < n_lines:
            all_ended = all(run.process.poll() is not None for run in self.runs)
            if select.select([self._ready], [], [], 0 if all_ended else 0.2)[0]:
                self._heard += os.read(self._ready, 65536)
            elif all_ended or time.monotonic() > deadline:
                stories = "\n".join(run.story() for run in self.runs)
                raise AssertionError(f"heard {self._heard.decode().splitlines()} of {n_lines} lines: {stories}")
        *lines, self._heard = self._heard.split(b"\n", n_lines)
        self.heard += [line.decode() for line in lines]
        return self.heard[-n_lines:]

    def hears_nothing(self, seconds: float) -> bool:
        """Whether no further line comes in this time. For what never comes under torchrun."""
        return not self._heard and not select.select([self._ready], [], [], seconds)[0]

    def processes(self) -> list[psutil.Process]:
        """Every living process of this scene's launchers, their ranks, and whatever these started, orphans too."""
        return self._below.living()

    # -- after -----------------------------------------------------------------------------------------------------------

    def probe(self, rank: int = 0, attempt: int = 0) -> Probe:
        path = self.probes_dir / f"{rank}.{attempt}.json"
        if not path.exists():
            left = sorted(path.name for path in self.probes_dir.iterdir())
            raise AssertionError(f"no probe {path.name}, only {left}: {[run.story() for run in self.runs]}")
        return self.probe_at(path)

    @staticmethod
    def probe_at(path: Path) -> Probe:
        return Probe(json.loads(path.read_text()))

    def n_probes(self) -> int:
        return len(list(self.probes_dir.glob("*.json")))

    def assert_nothing_left(self) -> None:
        """All launchers have ended: no process of theirs is left, no zombie, no file where none was asked for.

        A launcher that was killed could not wait for its ranks; then they get a moment to die in.
        """
        running = [run.story() for run in self.runs if run.process.poll() is None]
        assert not running, f"still running: {running}"
        if any(run.process.returncode == -signal.SIGKILL for run in self.runs):
            self._below.wait(60)
        left = [describe(process) for process in self._below.all()]
        assert not left, f"{left} left by {[run.story() for run in self.runs]}"
        files = sorted(self.tmp.rglob("*"))
        assert not files, f"{files} left in the temporary folder"
        deadline = time.monotonic() + 5
        while (names := _shared_memory() - self._shm) and (names := names - _mapped()) and time.monotonic() < deadline:
            time.sleep(0.05)  # shared memory belongs to the whole host: what other programs have is not ours
        assert not names, f"{sorted(names)} left in /dev/shm"

    def clear(self) -> None:
        """End what is left, whoever left it."""
        os.close(self._ready)
        self._below.end()
        self._below.close()
        for run in self.runs:
            run.process.wait(PATIENCE_S)


@contextmanager
def scene_in(folder: Path) -> Iterator[Scene]:
    """A scene in a new folder. Afterwards no process of it is left, and nothing at all where only ours were launched."""
    scene = Scene(folder)
    try:
        yield scene
        if scene.runs and all(run.is_ours for run in scene.runs):
            scene.assert_nothing_left()
    finally:
        scene.clear()


def free_port() -> int:
    """Below those that the kernel hands out, as are those beside it at which agents listen for each other
    (launcher/cluster/links/addresses.py): so no test beside this one is given one of them by chance."""
    while True:
        port = random.randrange(24000, 32768)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with scene_in(tmp_path) as scene:
        yield scene


def _shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if entry.is_file(follow_symlinks=False)}


def _mapped() -> set[str]:
    """The files of /dev/shm that a living process has."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # it is gone, or another user's
        names |= {line.rpartition("/dev/shm/")[2].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
    return names
