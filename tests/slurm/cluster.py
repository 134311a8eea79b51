"""A SLURM of four nodes on this machine, and jobs of it, as a user sees them: batch scripts, states, exit codes, output."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.hosts.network import Hosts, Impossible

HERE = Path(__file__).parent
N_NODES = 4
PATIENCE_S = 90.0
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@dataclass
class Job:
    """One job. `folder`: where it was submitted, and its output lies."""

    cluster: Cluster
    id: str
    folder: Path

    def shows(self, field: str) -> str:
        """Give a field of `scontrol show job`."""
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", self.id)
        found = re.search(rf"\b{field}=(\S*)", text)
        return found[1] if found is not None else ""

    @property
    def output(self) -> str:
        path = self.folder / f"{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, beginning: str) -> list[str]:
        return sorted(line for line in self.output.splitlines() if line.startswith(beginning))

    def wait_for(self, what: str, n: int = 1, patience_s: float = PATIENCE_S) -> None:
        """Until its output has a text so many times."""
        self.cluster.wait_for(lambda: self.output.count(what) >= n, self.story, patience_s)

    def ends(self, state: str, code: str = "0:0", patience_s: float = PATIENCE_S) -> None:
        self.cluster.wait_for(lambda: self.shows("JobState") in OVER, self.story, patience_s)
        assert (self.shows("JobState"), self.shows("ExitCode")) == (state, code), self.story()

    def cancel(self, *options: str) -> None:
        self.cluster.run("scancel", *options, self.id)

    def processes(self, word: str) -> list[psutil.Process]:
        """Those of the job that have this word on their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if word in process.cmdline() and process.environ().get("SLURM_JOB_ID") == self.id:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def leads(self, agent: psutil.Process) -> bool:
        """It listens at the endpoint, which it has told."""
        port = int(self.output.partition("leading at ")[2].partition(": ")[0].rpartition(":")[2])
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in agent.net_connections())

    def agents(self) -> list[psutil.Process]:
        """The tasks themselves."""
        return [found for found in self.processes("run") if found.environ().get("SLURM_TASK_PID") == str(found.pid)]

    def story(self) -> str:
        shown = self.cluster.run("scontrol", "show", "job", self.id)
        return f"job {self.id}\n{self.output[-8000:]}\n---\n{shown}"


class Cluster:
    """Up from the first test that needs it to the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.jobs: list[Job] = []

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def node(self, verb: str, number: int) -> None:
        """`kill-node` or `start-node`: its slurmd."""
        subprocess.run([HERE / "slurm.sh", verb, str(number)], env=self.environment, check=True, timeout=60)

    def submit(self, folder: Path, script: str, *options: str) -> Job:
        path = folder / "batch.sh"
        path.write_text(script)
        out = self.run("sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/%j.out", *options, str(path))
        self.jobs.append(Job(self, out.strip().partition(";")[0], folder))
        return self.jobs[-1]

    def wait_for(self, what: Callable[[], bool], story: Callable[[], str], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not what():
            assert time.monotonic() < deadline, story()
            time.sleep(0.1)

    def clear(self) -> None:
        """No job is left, all nodes are there."""
        self.run("scancel", "--user=root")
        self.wait_for(lambda: not self.run("squeue", "--noheader"), lambda: self.run("squeue"))
        self.jobs.clear()
        self.wait_for(
            lambda: not _of_steps(self.environment["SLURM_CONF"]), lambda: str(_of_steps(self.environment["SLURM_CONF"]))
        )


def by_recipe(cluster: Cluster, folder: Path, script: str, *options: str) -> Job:
    """The script that `odyssey slurm` prints, submitted; the ranks run `script`."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "odyssey_cli", "slurm", *options]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment).stdout
    return cluster.submit(folder, printed)


def _of_steps(conf: str) -> list[psutil.Process]:
    """Processes that steps of the cluster have left."""
    return [process for process in psutil.process_iter() if _is_of_step(process, conf)]


def _is_of_step(process: psutil.Process, conf: str) -> bool:
    try:
        variables = process.environ()
    except psutil.Error:
        return False  # it is gone
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_CONF") == conf


def why_not() -> str:
    """Why there can be no SLURM here; empty if there can."""
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged", "sbatch")
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)} missing): `make slurm-test` installs it as root where apt-get can"
    return "" if os.getuid() == 0 else "SLURM's daemons of these tests need root"


@contextmanager
def up(n_nodes: int, **variables: str) -> Iterator[Cluster]:
    """A cluster; `variables`: for slurm.sh."""
    if why := why_not():
        pytest.skip(why)
    with open("/run/odyssey-slurm.lock", "w") as lock, mock.patch.dict(os.environ, variables):
        fcntl.flock(lock, fcntl.LOCK_EX)  # the cluster's ports are the machine's
        folder = Path(os.environ["TMPDIR"]) / "slurm"
        for path in (folder.parent, folder.parent.parent):
            path.chmod(0o755)  # munged is another user's
        command = [HERE / "slurm.sh", "up", str(n_nodes), folder]
        begun = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if begun.returncode == 77:
            pytest.skip(f"SLURM cannot be started here: {begun.stderr.strip()[-300:]}")
        assert begun.returncode == 0, begun.stdout + begun.stderr
        try:
            yield Cluster(folder)
        finally:
            subprocess.run([HERE / "slurm.sh", "down"], check=True, timeout=120)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Four nodes that are one host."""
    with up(N_NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three, with names and addresses of their own."""
    try:
        made = Hosts(3, tmp_path_factory.mktemp("hosts"), 91)
    except Impossible as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def slurm_of_hosts(hosts: Hosts) -> Iterator[Cluster]:
    """Three nodes that are these hosts."""
    network = hosts.join().rpartition(".")[0]
    on = {f"ON_{i}": shlex.join(hosts.command(i, [])) for i in hosts.numbers}
    with up(3, NETWORK=network, **on) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    yield slurm
    slurm.clear()


def end(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
