"""Ranks and the store come whatever happens to the zygote; it costs the speed of the next start, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.health import life, waits
from launcher.health.waits import Waits
from launcher.host.handle import Handle
from launcher.host.kernel import set_subreaper
from launcher.host.loop import Loop
from launcher.host.orphans import end_descendants
from launcher.host.proc import vitals
from launcher.options import Entry, RunOptions
from launcher.processes import environment, fork_rules, rank_process, spawner
from launcher.processes.rank_process import RankProcess
from launcher.processes.spawner import Spawner
from odyssey.control_group import Allowance
from odyssey.errors import OdysseyError, UsageError
from odyssey.zygote.protocol import ForkAhead, Imported

pytestmark = pytest.mark.timeout(120)
STOPS_FIRST_FORK = """
import os, signal

def stop():
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)

os.register_at_fork(after_in_child=stop)
"""
HERE = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], flush=True)"


class Starts:
    """Forks on a loop of their own, and what has become of what they were asked for."""

    def __init__(self, folder: Path, text: str = HERE, **options: Any) -> None:
        (folder / "script.py").write_text(text)
        self.folder = folder
        self.options = RunOptions(str(folder / "script.py"), n_ranks_per_node=2, **options)
        self.loop = Loop(time.monotonic)
        self.said: list[str] = []
        self.ranks: list[tuple[int, int]] = []
        self.handles: list[Handle] = []
        self.gone: list[tuple[int, int]] = []
        """Rank and pid, as they came."""
        self.stores: list[int] = []
        self.sockets: list[socket.socket] = []
        self._was_subreaper = set_subreaper(True)
        self.forks = Spawner(
            self.options,
            self.loop,
            2,
            say=self.said.append,
            started=self._started,
            not_started=self._not_started,
            gone=self._gone,
        )
        self.waits = Waits(self.loop, self.said.append)
        self.waits.watch(self.forks.awaited)
        self.forks.start()

    def _not_started(self, process: RankProcess, why: OdysseyError) -> None:
        raise why

    def _started(self, process: RankProcess | None, handle: Handle) -> None:
        if process is None:
            self.stores.append(handle.pid)
        else:
            self.ranks.append((process.rank, handle.pid))
            self.handles.append(handle)

    def _gone(self, pid: int, status: int) -> None:
        """It was reaped before it was known."""
        self.gone.append((pid, status))

    @property
    def zygote(self) -> int:
        assert self.forks._present is not None
        return self.forks._present.zygote.pid

    @property
    def watcher(self) -> int | None:
        """What watches timers, if it is there."""
        return self.forks._timers.pid if self.forks._timers is not None else None

    def start(self, rank: int, **variables: str) -> None:
        assignment = RankAssignment(rank, rank, 0, 2, 2, 1, rank, 2)
        given = environment.for_rank(
            self.options, os.environ, assignment, master_addr="", master_port=0, run_id="", job_dir=None, error_file=""
        )
        ours, theirs = socket.socketpair()
        self.sockets.append(ours)
        with theirs, open(os.devnull) as stdin, (self.folder / f"out{rank}").open("ab") as out:
            descriptors = [stdin.fileno(), out.fileno(), out.fileno(), theirs.fileno()]
            self.forks.start_rank(RankProcess(assignment, 1), given | variables, descriptors)

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.loop.turn()

    def ready(self) -> None:
        self.until(lambda: self.forks._present is None or self.forks._present.is_ready)  # or cannot be

    def output(self, n_ranks: int) -> list[str]:
        """The output of all ranks, when they have come and ended."""
        self.until(lambda: len(self.ranks) == n_ranks)
        for ours in self.sockets:
            while ours.recv(1 << 16):
                pass  # its end of file is the rank's end
            ours.close()
        self.sockets.clear()
        for _, pid in self.ranks:
            os.waitpid(pid, 0)
        return [(self.folder / f"out{rank}").read_text() for rank in sorted({rank for rank, _ in self.ranks})]

    def reap(self) -> None:
        """As an agent does of its own accord."""
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            self.forks.reaped(ended.si_pid, ended.si_status)

    def close(self) -> None:
        self.waits.close()
        self.forks.close()
        self.loop.close()
        end_descendants()
        set_subreaper(self._was_subreaper)


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Callable[..., Starts]]:
    made: list[Starts] = []
    before = set(os.listdir("/proc/self/fd"))

    def make(text: str = HERE, **options: Any) -> Starts:
        made.append(Starts(tmp_path, text, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("cold")  # a fork of what has imported everything is ready before it can be killed
def test_a_zygote_that_is_killed_while_it_imports_is_replaced(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.start(0)
    os.kill(it.zygote, signal.SIGKILL)
    assert it.output(1) == ["0 0\n"]
    assert it.said == ["the process that ranks are forked from was lost; another one is started"]


@pytest.mark.usefixtures("cold")
def test_a_zygote_that_never_gets_ready_is_done_without(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.start(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        it.forks.start_store("127.0.0.1", port, listener.fileno())
        for _ in range(2):
            first = it.zygote
            os.kill(first, signal.SIGKILL)
            it.until(lambda first=first: it.forks._present is None or it.zygote != first)
        assert it.output(1) == ["0 0\n"]
        assert it.said[-1] == "ranks are started afresh, not forked: the process to fork from has ended twice"
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_zygote_that_is_killed_between_two_starts_is_replaced(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.ready()
    os.kill(it.zygote, signal.SIGKILL)
    os.waitid(os.P_PID, it.zygote, os.WEXITED | os.WNOWAIT)
    it.start(1)
    assert it.output(1) == ["1 1\n"]


def test_a_zygote_that_is_killed_while_it_forks_leaves_each_rank_once(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.ready()
    for rank in range(6):
        it.start(rank)
    it.until(lambda: it.ranks)
    os.kill(it.zygote, signal.SIGKILL)
    assert it.output(6) == [f"{rank} {rank}\n" for rank in range(6)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits are shortened; test_waits.py has them as they are."""
    monkeypatch.setattr(waits, "LOOK_S", 0.1)
    monkeypatch.setattr(life, "STOPPED_S", 0.3)


@pytest.mark.usefixtures("cold", "soon")
def test_a_zygote_that_is_stopped_while_it_imports_is_replaced(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.start(0)
    os.kill(it.zygote, signal.SIGSTOP)
    it.waits.look()
    assert it.output(1) == ["0 0\n"]
    said = [text for text in it.said if not text.startswith("importing torch")]  # which lasts on a busy machine
    assert said == ["the process that ranks are forked from was stopped by a signal; another one is started"]


@pytest.mark.usefixtures("soon")
def test_a_zygote_that_is_stopped_is_replaced_when_it_is_needed(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.ready()
    first = it.zygote
    os.kill(first, signal.SIGSTOP)
    it.waits.look()
    it.loop.later(1.0, lambda: it.start(1))
    it.loop.later(1.0, it.waits.look)
    it.until(lambda: it.sockets)
    assert it.zygote == first, "nobody needed it"
    assert it.output(1) == ["1 1\n"]
    assert it.zygote != first


@pytest.mark.usefixtures("soon")
def test_what_is_stopped_while_it_forks_is_replaced_and_each_rank_comes_once(
    starts: Callable[..., Starts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zygote's child that forks the ranks: nobody knows its id, and the zygote itself is in order."""
    monkeypatch.setattr(spawner, "FORK_IDLE_S", 3.0)
    (tmp_path / "sitecustomize.py").write_text(STOPS_FIRST_FORK.format(flag=str(tmp_path / "flag")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    it = starts()
    for rank in range(6):
        it.start(rank)
    it.waits.look()
    assert it.output(6) == [f"{rank} {rank}\n" for rank in range(6)]
    assert (tmp_path / "flag").exists()
    said = [text for text in it.said if not text.startswith("importing torch")]  # which lasts on a busy machine
    assert said == ["the process that ranks are forked from has used no processor for 3 s; another one is started"]


def test_forks_wait_for_the_next_start_only_when_all_ranks_have_had_time_for_their_first_step(
    starts: Callable[..., Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = starts()
    it.ready()
    assert it.forks._present is not None
    asked: list[object] = []
    monkeypatch.setattr(it.forks._present.zygote, "request", lambda request, descriptors: asked.append(request))
    for _ in range(2):
        it.forks.prepare(())
    assert not asked
    it.until(lambda: asked)
    assert asked == [ForkAhead(2, os.getpid(), spawner.HEAP_BYTES)]


def test_no_fork_is_made_for_the_next_start_while_this_one_begins(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.forks.prepare(())
    timer = it.forks._ahead_timer
    assert timer is not None and timer.call is not None
    it.start(0)
    assert timer.call is None
    it.forks.prepare(())
    assert it.forks._ahead_timer not in (None, timer)
    assert it.output(1) == ["0 0\n"]


def test_forks_that_are_made_at_once_are_not_made_again_a_moment_later(starts: Callable[..., Starts]) -> None:
    it = starts()
    it.ready()
    it.forks.prepare(())
    timer = it.forks._ahead_timer
    it.forks._fork_ahead()  # as a better zygote has it done
    assert timer is not None and timer.call is None and it.forks._ahead_timer is None


@pytest.mark.parametrize(("free_bytes", "expected"), [(None, 31 << 20), (1 << 30, 31 << 20), (200 << 20, 0)])
def test_who_waits_takes_no_memory_that_others_may_need(
    free_bytes: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner, "allowance", lambda: Allowance(free_bytes=free_bytes))
    assert spawner._heap_bytes(2) == expected


@pytest.mark.usefixtures("soon")
def test_a_next_zygote_that_is_stopped_is_made_again(starts: Callable[..., Starts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.processes.spawner.WORTH_LEARNING", 1)
    it = starts(verbose=True)
    it.ready()
    it.forks.prepare(("wave",))
    learning = it.forks._warm._zygote
    assert learning is not None
    os.kill(learning.pid, signal.SIGSTOP)
    it.waits.look()
    it.until(lambda: it.zygote not in (0, learning.pid) and "the next start has 1 modules ready" in it.said)
    assert "the process that prepares the next start was stopped by a signal" in it.said


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_what_watches_timers_is_replaced(starts: Callable[..., Starts], tmp_path: Path, number: signal.Signals) -> None:
    it = starts()
    it.forks.start_timers(str(tmp_path / "timers"), "job")
    it.until(lambda: it.watcher)
    first = it.watcher
    assert first is not None
    os.kill(first, number)
    while number == signal.SIGSTOP and (seen := vitals(first)) is not None and not seen.is_stopped:
        time.sleep(0.01)  # it is not our child yet, to be waited for
    it.waits.look()

    def is_replaced() -> bool:
        it.reap()
        it.loop.later(0.05, lambda: None)
        return it.watcher not in (None, first)

    it.until(is_replaced)


def test_what_has_been_asked_for_is_not_to_come_after_the_end(starts: Callable[..., Starts]) -> None:
    it = starts()
    os.kill(it.zygote, signal.SIGSTOP)
    os.waitid(os.P_PID, it.zygote, os.WSTOPPED | os.WNOWAIT)
    it.start(0)
    it.forks.end()
    it.until(lambda: not it.forks.pending.has_ranks)
    assert it.ranks == []
    it.sockets.pop().close()


def test_nobody_is_signalled_for_a_rank_that_was_reaped_before_it_was_known(starts: Callable[..., Starts]) -> None:
    """Its number may be another's by then."""
    it = starts("pass")
    it.ready()
    it.start(0)
    rank = os.waitid(os.P_ALL, 0, os.WEXITED)
    assert rank is not None and rank.si_pid != it.zygote
    it.forks.reaped(rank.si_pid, rank.si_status)

    it.until(lambda: it.ranks)

    assert it.handles == [Handle(rank.si_pid, None)]
    assert it.gone == [(rank.si_pid, 0)]
    it.sockets.pop().close()


def test_where_torch_cannot_be_imported_ranks_are_plain_spawns(
    starts: Callable[..., Starts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    it = starts()
    it.ready()
    it.start(0)
    assert it.output(1) == ["0 0\n"]
    assert it.said == ["ranks are started afresh, not forked: importing ahead failed, ImportError: broken on purpose"]


@pytest.mark.soak
def test_fifty_starts_leak_no_descriptor(starts: Callable[..., Starts]) -> None:
    it = starts("pass")
    it.ready()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(50):
        it.start(0)
        it.output(1)
        it.ranks.clear()
    assert set(os.listdir("/proc/self/fd")) == before


def test_an_environment_may_be_larger_than_a_packet(starts: Callable[..., Starts]) -> None:
    it = starts("import os; print(sum(map(len, os.environ.values())) > 3_000_000)")
    it.start(0, **{f"LARGE_{i}": "x" * 100_000 for i in range(30)})
    assert it.output(1) == ["True\n"]


def test_plain_spawns_run_programs_and_other_interpreters(starts: Callable[..., Starts]) -> None:
    it = starts("import sys; print(sys.executable, sys.argv[1:])", interpreter=sys.base_prefix + "/bin/python3")
    it.start(0)
    assert it.output(1)[0].startswith(sys.base_prefix)
    assert it.said == []


@pytest.mark.parametrize(
    ("options", "variables", "name"),
    [
        ({"entry": Entry.PROGRAM}, {}, "no-python"),
        ({"interpreter": "/usr/bin/python3"}, {}, "other-interpreter"),
        ({}, {"ODYSSEY_ZYGOTE": "0"}, "switched-off"),
        ({"script": "train.pyc"}, {}, "compiled"),
        ({}, {"PYTHONPROFILEIMPORTTIME": "1"}, "start-variable"),
        ({}, {"COVERAGE_PROCESS_START": "x"}, "coverage"),
    ],
)
def test_rules_say_why_ranks_are_no_forks(options: dict[str, Any], variables: dict[str, str], name: str) -> None:
    ruling = fork_rules.ruling(RunOptions(**{"script": "script.py", **options}), variables)
    assert ruling is not None and ruling.name == name and ruling.reason
    assert fork_rules.ruling(RunOptions("script.py"), {}) is None


@pytest.mark.parametrize(
    ("imported", "name"),
    [(Imported(1.0, 3), "threads"), (Imported(1.0, 1, has_cuda=True), "cuda"), (Imported(1.0, 1, error="E"), "broken-import")],
)
def test_what_the_zygote_became_may_forbid_forks(imported: Imported, name: str) -> None:
    ruling = fork_rules.ruling_on(imported)
    assert not imported.is_safe and ruling is not None and ruling.name == name
    assert fork_rules.ruling_on(Imported(1.0, 1)) is None


def test_rules_are_said_when_asked_for(starts: Callable[..., Starts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODYSSEY_ZYGOTE", "0")
    it = starts(verbose=True)
    assert it.said == ["ranks are started afresh, not forked: ODYSSEY_ZYGOTE is 0 (rule switched-off)"]


def test_arguments_name_the_local_rank() -> None:
    assignment = RankAssignment(5, 1, 1, 8, 4, 2, 5, 8)
    options = RunOptions("s.py", ("--dir=${local_rank}", "$HOME"), passes_local_rank=True, virtual_local_rank=True)
    assert rank_process.arguments_for(options, assignment) == ("--local-rank=1", "--dir=1", "$HOME")


def test_a_virtual_local_rank_sees_one_device() -> None:
    options = RunOptions("s.py", virtual_local_rank=True)

    def of_rank(local_rank: int, **inherited: str) -> tuple[str, ...]:
        assignment = RankAssignment(local_rank, local_rank, 0, 2, 2, 1, local_rank, 2)
        given = environment.for_rank(
            options, inherited, assignment, master_addr="", master_port=0, run_id="", job_dir=None, error_file=""
        )
        names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        return tuple(given[name] for name in names if name in given)

    assert of_rank(1) == ("0", "1")
    assert of_rank(1, CUDA_VISIBLE_DEVICES="4, 7") == ("0", "7")
    with pytest.raises(UsageError, match="no device for local rank 1 in CUDA_VISIBLE_DEVICES=4"):
        of_rank(1, CUDA_VISIBLE_DEVICES="4")
    assert of_rank(1, CUDA_VISIBLE_DEVICES="4,7", HIP_VISIBLE_DEVICES="2, 3") == ("0", "3", "3")  # which ROCm heeds
    assert of_rank(1, CUDA_VISIBLE_DEVICES="4,7", HIP_VISIBLE_DEVICES="") == ("0", "7", "")
    with pytest.raises(UsageError, match="no device for local rank 1 in HIP_VISIBLE_DEVICES=2"):
        of_rank(1, CUDA_VISIBLE_DEVICES="4,7", HIP_VISIBLE_DEVICES="2")


@pytest.mark.parametrize(
    ("name", "what"), [("none", "no such program"), ("plain.sh", "not executable"), (".", "is a directory")]
)
def test_a_program_that_cannot_run_is_an_error_before_the_start(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "plain.sh").write_text("true")
    with pytest.raises(UsageError, match=what):
        rank_process.check(RunOptions(f"{tmp_path}/{name}", entry=Entry.PROGRAM))


def test_binding_without_a_gpu_is_one_error() -> None:
    if any(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")):
        pytest.skip("this host has a GPU")
    with pytest.raises(UsageError, match="this host has no GPU"):
        rank_process.check(RunOptions("script.py", numa_binding="node"))
