"""`odyssey ps`, `status`, `stop`, `logs`, `stacks`: jobs of this user on this host, seen and ended from another process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from launcher.cluster.questions import CannotTell
from launcher.host import proc
from launcher.joblog import reader, registry
from launcher.joblog.events import (
    Body,
    Cause,
    CauseKind,
    Event,
    JobEnded,
    JobStarted,
    Note,
    RankLost,
    RankStarted,
    Stalled,
    encode,
)
from launcher.options import RunOptions
from odyssey.errors import UsageError
from odyssey_cli.__main__ import main
from odyssey_cli.jobs import find, logs, stacks
from tests import ROOT, job_events
from tests.agent_runs import Ran

pytestmark = pytest.mark.timeout(120)

WAITING = """
import os, sys, odyssey
def serve():
    with open(sys.argv[1]) as pipe: pipe.read()  # in one line, so that both are at the same place
print("rank", os.environ["RANK"], "begins", flush=True)
odyssey.heartbeat(7)
serve()
print("rank", os.environ["RANK"], "is through", flush=True)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "odyssey" / "jobs" / socket.gethostname()


class Launched:
    """A job in a process of its own, whose ranks wait for the end of a pipe."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir()
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        (folder / "serve.py").write_text(WAITING)
        command = [
            sys.executable,
            "-m",
            "odyssey_cli",
            "run",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(folder / "logs"),
        ]
        self.process = subprocess.Popen(
            [*command, *flags, str(folder / "serve.py"), str(self.fifo)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        self._keeps = "--keep-output" not in flags
        self._writer: int | None = None

    def begin(self) -> Path:
        """Wait until every rank waits, and the agent has kept what it wrote; answers the job's folder."""
        self._writer = os.open(self.fifo, os.O_RDWR)  # so that no reader meets an end of file
        while not (folders := [f for f in registry.folders() if f.parent == self.fifo.parent / "logs"]):
            assert self.process.poll() is None
            time.sleep(0.01)
        while True:
            bodies = [event.body for event in reader.events(folders[0] / reader.NAME)]
            pids = [body.pid for body in bodies if isinstance(body, RankStarted)]
            if len(pids) == 2 and all(_reads(pid, self.fifo) for pid in pids):
                kept = [log.read_text() for log in folders[0].glob("**/stdout.log")]
                if not self._keeps or sum(text.endswith("begins\n") for text in kept) == 2:
                    return folders[0]
            assert self.process.poll() is None
            time.sleep(0.01)

    def let_go(self) -> None:
        assert self._writer is not None
        os.close(self._writer)
        self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self.let_go()
        if self.process.poll() is None:
            everything = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            psutil.wait_procs(everything, timeout=30)
        self.process.wait(30)


def _reads(pid: int, file: Path) -> bool:
    try:
        return any(os.readlink(entry) == str(file) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*flags: str) -> Launched:
        launched.append(Launched(tmp_path / f"job{len(launched)}", *flags))
        return launched[-1]

    yield start
    for job in launched:
        job.close()


class Cli:
    """Runs a command of ours, and has what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        capsys.readouterr()
        self.code = main(argv)
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


# -- real jobs ---------------------------------------------------------------------------------------------------------


def test_a_running_job_is_listed_shown_read_and_stopped(
    launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch("--tee", "3")
    folder = job.begin()

    while (line := Cli(capsys, "ps", "--json").json[0])["step"] is None:  # as long as the agent has not read of it
        assert job.process.poll() is None
    assert line["job"] == folder.name and line["agent"] == job.process.pid and line["command"].endswith(str(job.fifo))
    assert (line["n_alive"], line["n_ranks"], line["step"], line["status"]) == (2, 2, 7, "running")
    assert Cli(capsys, "ps").out.splitlines()[1].split()[:2] == [folder.name, "2/2"]

    for name in (folder.name, folder.name[:-1], str(job.process.pid), str(folder), "last"):
        status = Cli(capsys, "status", name, "--json").json
        assert status["line"]["job"] == folder.name
        assert [rank["is_alive"] for rank in status["ranks"]] == [True, True]
    assert f"agent     pid {job.process.pid}" in Cli(capsys, "status").out

    assert Cli(capsys, "stacks").out == "ranks 0-1: in serve (serve.py:4)\n"
    assert Cli(capsys, "logs").out == "[rank 0]: rank 0 begins\n[rank 1]: rank 1 begins\n"
    assert Cli(capsys, "logs", "--rank", "1").out == "rank 1 begins\n"
    assert "has no rank 2" in Cli(capsys, "logs", "--rank", "2").err
    assert "has no odyssey.Job" in Cli(capsys, "leave", "1").err

    stopped = Cli(capsys, "stop")
    assert stopped.code == 0 and stopped.out.splitlines()[-1] == f"{folder.name} has ended"
    assert job.process.wait() == 128 + signal.SIGTERM
    assert Cli(capsys, "ps").out.startswith("no job is running")
    status = Cli(capsys, "status", "--json").json
    assert (status["line"]["status"], status["exit_code"], status["line"]["n_alive"]) == ("stopped", 143, 0)
    assert "does not run any more (stopped)" in Cli(capsys, "stop", folder.name).err


@pytest.mark.soak
def test_stop_now_does_not_wait_for_ranks_that_ignore_the_signal(
    launch: Callable[..., Launched], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WAITING", "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + WAITING)
    job = launch("--shutdown-timeout", "1000")
    job.begin()
    assert Cli(capsys, "stop", "--now").code == 0
    assert job.process.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("now", [(), ("--now",)])
def test_an_agent_that_was_stopped_by_ctrl_z_ends(
    now: tuple[str, ...], launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch()
    job.begin()
    job.process.send_signal(signal.SIGSTOP)
    assert Cli(capsys, "stop", *now).code == 0
    assert job.process.wait() == 128 + signal.SIGTERM


def test_what_has_become_of_a_jobs_folder_costs_no_exit_code(launch: Callable[..., Launched]) -> None:
    job = launch()
    notices = job.begin() / "notices"
    notices.unlink()
    notices.mkdir()  # it cannot be unlinked, as on a disk that has become read-only
    job.let_go()
    assert job.process.wait() == 0


def test_who_follows_a_job_that_keeps_no_output_is_told_how_it_is_kept(launch: Callable[..., Launched]) -> None:
    job = launch("--keep-output", "0")
    folder = job.begin()
    command = [sys.executable, "-m", "odyssey_cli.__main__", "logs", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as follower:
        assert follower.stdout is not None and follower.stderr is not None
        told = follower.stderr.readline()  # while the job runs
        job.let_go()
        assert (follower.stdout.read(), follower.stderr.read(), follower.wait()) == ("", "", 0)
    assert f"no rank of {folder.name} has written to a file yet; `odyssey run --tee 3` keeps" in told


@pytest.mark.parametrize("flags", [("--tee", "3"), ()], ids=["asked-for", "by-default"])
def test_logs_are_followed_until_the_job_ends(launch: Callable[..., Launched], flags: tuple[str, ...]) -> None:
    job = launch(*flags)
    folder = job.begin()
    command = [sys.executable, "-m", "odyssey_cli.__main__", "logs", folder.name, "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as follower:
        assert follower.stdout is not None
        first = {follower.stdout.readline() for _ in range(2)}
        job.let_go()
        rest = set(follower.stdout.read().splitlines())
        assert follower.wait() == 0
    assert first == {"[rank 0]: rank 0 begins\n", "[rank 1]: rank 1 begins\n"}
    assert rest == {"[rank 0]: rank 0 is through", "[rank 1]: rank 1 is through"}
    assert job.process.wait() == 0


def test_a_job_whose_agent_was_killed_is_told_as_that(
    launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    job = launch()
    folder = job.begin()
    ranks = psutil.Process(job.process.pid).children(recursive=True)
    job.process.kill()
    job.process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    with (folder / "events.jsonl").open("ab") as log:
        log.write(b'{"time": 17')  # as a kill may leave it
    assert Cli(capsys, "ps", "--json").json == []
    assert [line["status"] for line in Cli(capsys, "ps", "--all", "--json").json] == ["agent was killed"]
    shown = Cli(capsys, "status").out
    assert "why       the agent was killed" in shown and "ranks     0 of 2 alive" in shown
    assert "does not run any more (agent was killed)" in Cli(capsys, "stop", folder.name).err
    assert Cli(capsys, "logs").out == "[rank 0]: rank 0 begins\n[rank 1]: rank 1 begins\n"


def test_two_running_jobs_have_to_be_told_apart(launch: Callable[..., Launched], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = launch(), launch()
    names = {first.begin().name, second.begin().name}
    assert {line["job"] for line in Cli(capsys, "ps", "--json").json} == names
    asked = Cli(capsys, "stop")
    assert asked.code == 2 and "2 jobs are running: say which" in asked.err and all(name in asked.err for name in names)
    assert first.process.poll() is None and second.process.poll() is None


# -- the registry ------------------------------------------------------------------------------------------------------


def plain(tmp_path: Path, **rest: object) -> RunOptions:
    (tmp_path / "script.py").write_text("")
    return RunOptions(script=str(tmp_path / "script.py"), capture_output=True, **rest)


def test_a_job_is_entered_when_it_begins(tmp_path: Path, state: Path) -> None:
    ran = Ran(plain(tmp_path, log_dir=tmp_path / "logs"))
    assert {link.name: link.resolve() for link in state.iterdir()} == {ran.folder.name: ran.folder}


def test_a_registry_that_cannot_be_written_stops_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    ran = Ran(plain(tmp_path, log_dir=tmp_path / "logs"))
    assert ran.code == 0
    assert any("`odyssey ps` will not show this job" in note.text for note in ran.all(Note))
    assert registry.folders() == []


def test_a_job_without_a_folder_is_not_entered(tmp_path: Path, state: Path) -> None:
    from launcher.agent.start import run

    assert run(plain(tmp_path, log_dir=Path(os.devnull)), lambda event: None, lambda *output: None) == 0
    assert not state.exists()


def started(pid: int = 1, pid_started: float = -1.0, **rest: Any) -> JobStarted:
    named = {"boot": proc.boot_id(), **rest}
    return JobStarted("train.py", (), 1, 2, 0, "auto", "auto", None, "0.1.0", pid, False, pid_started, **named)


def logged(folder: Path, *bodies: Body, time: float = 2e9) -> Path:
    """A job's folder with these events."""
    folder.mkdir(parents=True)
    lines = [encode(Event(time + i, 0, "agent", body)) for i, body in enumerate(bodies)]
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    return folder


def test_the_registry_forgets_what_is_gone_and_all_but_the_newest_that_ended(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "N_KEPT", 2)
    own = registry.started_at(os.getpid())
    assert own is not None
    registry.enter(logged(tmp_path / "old but running", started(os.getpid(), own)))
    registry.enter(logged(tmp_path / "old", started()))
    gone = logged(tmp_path / "gone", started())
    registry.enter(gone)
    (gone / "events.jsonl").unlink()
    for i, link in enumerate(("old but running", "old", "gone")):
        os.utime(state / link, (i, i), follow_symlinks=False)
    for name in ("new", "newer"):
        registry.enter(logged(tmp_path / name, started()))
    assert {link.name for link in state.iterdir()} == {"old but running", "new", "newer"}


def test_hosts_that_share_a_home_leave_each_others_jobs_alone(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, seen = logged(tmp_path / "hidden", started()), logged(tmp_path / "seen", started())
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "elsewhere")
        for folder in (hidden, seen):
            registry.enter(folder)
    monkeypatch.setattr(registry, "N_KEPT", 1)
    (hidden / "events.jsonl").rename(hidden / "on a disk of that host")
    here = [logged(tmp_path / name, started()) for name in ("here", "newest")]
    for folder in here:
        registry.enter(folder)
    assert {link.name for link in (state.parent / "elsewhere").iterdir()} == {"hidden", "seen"}
    assert set(registry.folders()) == {here[1], seen}


def test_folders_of_the_same_name_are_both_kept(tmp_path: Path) -> None:
    folders = {logged(tmp_path / side / "job", started()) for side in ("a", "b")}
    for folder in folders:
        registry.enter(folder)
    assert set(registry.folders()) == folders


@pytest.mark.parametrize("broken", ["start", "host", "boot"])
def test_another_process_with_the_agents_number_is_never_taken_for_it(
    tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = registry.started_at(os.getpid())
    assert own is not None
    right = logged(tmp_path / "right", started(os.getpid(), own), time=1.0)  # the clock was set since
    assert registry.is_running(right)
    assert registry.is_running(logged(tmp_path / "later", Note("waiting for agent 1"), started(os.getpid(), own)))
    rest = {"host": {"host": "elsewhere"}, "boot": {"boot": "before"}}.get(broken, {})
    folder = logged(tmp_path / "wrong", started(os.getpid(), own + (broken == "start"), **rest))
    assert not registry.is_running(folder)
    assert Cli(capsys, "stop", str(folder)).code == 2  # and this process lives


# -- logs that tell little ---------------------------------------------------------------------------------------------


def test_lines_of_another_version_are_skipped_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = logged(
        tmp_path / "job", started(), RankLost(1, Cause(CauseKind.SIGNAL, "SIGKILL"), False), JobEnded(1, "rank 1", "look")
    )
    log = folder / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b"\n", b'\n{"time":1,"body":{"type":"of_the_future"}}\n', 1))
    shown = Cli(capsys, "status", str(folder)).out
    assert "1 line of the log could not be read: skipped" in shown
    assert "rank 1: SIGKILL" in shown and "status     failed" in shown and "help       look" in shown


def test_a_log_without_any_event_is_an_error_not_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = logged(tmp_path / "job")
    registry.enter(folder)
    assert Cli(capsys, "ps", "--all").code == 0
    for command in ("status", "stop", "logs", "stacks"):
        shown = Cli(capsys, command, "job")
        assert shown.code in (1, 2) and shown.err.startswith("error: ") and "Traceback" not in shown.err


def test_a_stall_shows_until_there_is_progress(tmp_path: Path) -> None:
    own = registry.started_at(os.getpid())
    assert own is not None
    folder = logged(tmp_path / "job", started(os.getpid(), own), Stalled((0,), (0,), "rank 0 makes no progress\n  more"))
    assert find.read(folder).status == "stalled"


def test_arguments_that_a_terminal_would_obey_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = msgspec.structs.replace(started(), arguments=("a\nb\tc", "\x1b[2J"))
    folder = logged(tmp_path / "job", odd)
    registry.enter(folder)

    shown, listed = Cli(capsys, "status", "job").out, Cli(capsys, "ps", "--all").out

    assert "\nscript    train.py a\\nb\\tc \\x1b[2J\n" in shown
    assert len(listed.splitlines()) == 2 and "train.py a\\nb\\tc \\x1b[2J" in listed
    assert Cli(capsys, "status", "job", "--json").json["line"]["command"] == odd.what


def test_an_agent_that_fails_of_what_it_is_asked_is_told_of_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation: Any = SimpleNamespace(
        ask=lambda questions, limit_s: dict.fromkeys(questions, CannotTell("input/output error")), close=lambda: None
    )
    asked = logs.AskedAgent(conversation, 1)
    assert not asked.files() and asked.problem == "input/output error"
    monkeypatch.setattr(stacks, "Conversation", lambda job: conversation)
    rank = SimpleNamespace(rank=2, agent=1, is_alive=True, is_here=False)
    job: Any = SimpleNamespace(ranks=[rank], agents=SimpleNamespace(name=lambda number: f"agent {number} (h1)"))
    assert not stacks._elsewhere(job)
    assert capsys.readouterr().err == "odyssey: agent 1 (h1) cannot tell where its ranks are: input/output error\n"


def test_losses_and_events_are_told_with_their_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lost = RankLost(1, Cause(CauseKind.SIGNAL, "SIGKILL"), True)
    registry.enter(logged(tmp_path / "job", started(), lost, Stalled((0,), (0,), "rank 0 makes no progress\nmore")))

    shown = Cli(capsys, "status", "job").out

    assert "\nlosses\n  2033-05-18 03:33:21  rank 1: " in shown
    assert shown.endswith("  2033-05-18 03:33:22  rank 0 makes no progress\n                       more\n")


def test_a_number_that_is_no_number_of_a_process_names_no_job(tmp_path: Path) -> None:
    own = registry.started_at(os.getpid())
    assert own is not None
    registry.enter(logged(tmp_path / "job", started(os.getpid(), own)))
    assert find.find(str(os.getpid())).name == "job"
    with pytest.raises(UsageError, match="no such job: ²"):
        find.find("²")


def test_a_long_log_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    folder = logged(tmp_path / "job", started())
    steps = b"".join(encode(job_events.committed(step, float(step))) for step in range(5000))
    with (folder / "events.jsonl").open("ab") as log:
        log.write(steps)
    tracemalloc.start()
    try:
        job = find.read(folder)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert job.board.steps == 5000 and most < len(steps) / 4


# -- which job ---------------------------------------------------------------------------------------------------------


def test_a_job_is_found_by_what_is_unique_of_it(tmp_path: Path) -> None:
    for i, name in enumerate(("alpha-1", "alpha-2", "beta")):
        registry.enter(logged(tmp_path / name, started()))
        os.utime(registry.directory() / name, (i, i), follow_symlinks=False)
    assert find.find("alpha-1").name == "alpha-1"
    assert find.find("b").name == "beta"
    assert find.find(None).name == find.find("last").name == "beta"
    with pytest.raises(UsageError, match="2 jobs begin with alpha: say which") as caught:
        find.find("alpha")
    assert caught.value.help == "one of alpha-2, alpha-1"
    with pytest.raises(UsageError, match="no such job: gamma"):
        find.find("gamma")
    with pytest.raises(UsageError, match=r"is no job's folder: it has no events.jsonl"):
        find.find(str(tmp_path))
    with pytest.raises(UsageError, match="no job is running"):
        find.find(None, only_running=True)


def test_without_any_job_there_is_a_way_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no job is running" in Cli(capsys, "ps").out
    assert "no job of yours is known on this host" in Cli(capsys, "ps", "--all").out
    for command in ("status", "logs", "stacks", "stop"):
        assert Cli(capsys, command).code == 2


AS_ANOTHER_USER = """
import contextlib, os, subprocess, sys
from odyssey_cli.__main__ import main
folder, commands = sys.argv[1], sys.argv[2:]
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
    for command in ("status", "logs", "stacks", "timeline", "plan", "replay"):
        main([command, folder])  # what is imported then need not be readable for the other
    main(["stop", folder + "/none"])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.chdir("/")
os.environ["XDG_STATE_HOME"] = "/nonexistent"
for command in commands:
    print("--", command, main([*command.split(), folder]), flush=True)
"""


def as_another_user(folder: Path, *commands: str) -> str:
    """What they say, and after each its exit code."""
    given = [sys.executable, "-c", AS_ANOTHER_USER, str(folder), *commands]
    return subprocess.run(given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_job_of_another_user_is_seen_as_far_as_its_folder_is_and_not_touched() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # the tests' own folder is closed to others
        os.chmod(place, 0o755)
        job = Launched(Path(place) / "job", "--tee", "3")
        try:
            folder = job.begin()
            commands = ("status", "logs", "stacks", "timeline", "plan", "replay", "stop", "stop --now")
            denied = f"error: {folder / reader.NAME}: permission denied\nhelp: it belongs to root: ask them\n"
            assert as_another_user(folder, *commands) == "".join(f"{denied}-- {command} 1\n" for command in commands)
            folder.chmod(0o711)  # its log can be read by who knows its name
            denied = f"error: {folder}: permission denied\nhelp: it belongs to root: ask them\n-- logs 1\n"
            assert as_another_user(folder, "logs") == denied
            folder.chmod(0o755)
            said = as_another_user(folder, "status", "logs", "stacks", "stop", "stop --now")
            theirs = f"error: {folder.name} is another user's\nhelp: ask them\n"
            shown, _, rest = said.partition("-- status 0\n")
            assert "2 of 2 alive" in shown
            lines = "".join(f"[rank {rank}]: rank {rank} begins\n" for rank in range(2))
            assert rest == f"{lines}-- logs 0\n{theirs}-- stacks 1\n{theirs}-- stop 1\n{theirs}-- stop --now 1\n"
            assert job.process.poll() is None
        finally:
            job.close()
