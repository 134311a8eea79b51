"""Ranks that make no progress: who has stalled, whom the others wait for, and what becomes of them in real jobs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.health import stacks, stalls, traffic
from launcher.health.stacks import Frame, Group, Reading, Stack
from launcher.health.stalls import Sample, Stalls, Verdict, to_blame
from launcher.joblog.events import AtStep, Event, Progressed, RankLost, RankStarted, Restarting, Resumed, Stalled
from launcher.options import RunOptions
from odyssey.protocol.reports import Failed
from odyssey.runtime.heartbeat import INTERVAL_S
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

IDLE, LIBRARY = Sample(5.0, 100), "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


# -- the detector ------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_nothing_for_the_time_has_stalled_since_its_last_sign() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE})
    watch.look(4.0, {0: Sample(5.0, 101)})
    assert watch.look(13.9, {0: Sample(5.0, 101)}).stalled == {}
    assert watch.look(14.0, {0: Sample(5.0, 101)}).stalled == {0: 4.0}


def test_output_or_processor_time_is_life_again() -> None:
    for alive in (Sample(5.2, 100), Sample(5.0, 101), Sample(5.0, 100, exchanged=1)):
        watch = Stalls(10.0)
        watch.look(0.0, {0: IDLE})
        assert watch.look(10.0, {0: IDLE}).stalled == {0: 0.0}
        assert watch.look(11.0, {0: alive}).stalled == {}


def test_a_trickle_of_processor_time_is_no_life() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: Sample(5.0, 0)})
    for second in range(1, 10):
        watch.look(float(second), {0: Sample(5.0 + 0.005 * second, 0)})
    assert watch.look(10.0, {0: Sample(5.05, 0)}).stalled == {0: 0.0}


def test_a_little_processor_time_again_and_again_is_life_however_often_one_looks() -> None:
    watch = Stalls(1.0)
    for look in range(17):  # a tick of ten milliseconds each
        assert watch.look(look / 8, {0: Sample(5.0 + look / 100, 0)}).stalled == {}


def test_what_a_process_that_has_ended_had_used_is_not_owed() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: Sample(50.0, 0)})
    watch.look(9.0, {0: Sample(5.0, 0)})
    assert watch.look(12.0, {0: Sample(5.2, 0)}).stalled == {}


def test_what_reading_its_stack_cost_a_rank_is_no_life() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE})
    watch.pass_over({0: Sample(5.5, 100)})
    assert watch.look(10.0, {0: Sample(5.5, 100)}).stalled == {0: 0.0}


def test_nobody_has_stalled_in_a_time_that_was_not_seen() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE, 1: IDLE})
    watch.beat(1, 1.0)
    for rank in (0, 1):
        watch.excuse(rank, 30.0)
    assert watch.look(30.0, {0: IDLE, 1: IDLE}).stalled == {}
    assert watch.look(40.0 + INTERVAL_S, {0: IDLE, 1: IDLE}).stalled == {0: 30.0, 1: 30.0}


def test_with_heartbeats_only_heartbeats_count() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE})
    watch.beat(0, 5.0)
    busy = Sample(15.0, 900)
    assert watch.look(14.9 + INTERVAL_S, {0: busy}).stalled == {}
    assert watch.look(15.0 + INTERVAL_S, {0: Sample(25.0, 999)}).stalled == {0: 5.0}
    watch.beat(0, 17.0)
    assert watch.look(18.0, {0: Sample(25.0, 999)}).stalled == {}


def test_a_new_process_of_a_rank_owes_no_heartbeat_yet() -> None:
    watch = Stalls(10.0)
    watch.beat(0, 0.0)
    watch.look(1.0, {0: IDLE})
    watch.forget(0)
    watch.look(100.0, {0: IDLE})
    assert watch.look(105.0, {0: Sample(9.0, 0)}).stalled == {}


def test_a_rank_that_is_sampled_no_more_is_forgotten() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE, 1: IDLE})
    watch.look(9.0, {0: IDLE})
    assert watch.look(10.0, {0: IDLE, 1: IDLE}).stalled == {0: 0.0}


def test_a_verdict_stays_open_while_others_may_be_about_to_stall_too() -> None:
    watch = Stalls(10.0)
    watch.look(0.0, {0: IDLE, 1: IDLE})
    watch.look(3.0, {0: IDLE, 1: Sample(6.0, 0)})
    assert watch.look(10.0, {0: IDLE, 1: Sample(6.0, 0)}).is_open
    verdict = watch.look(13.0, {0: IDLE, 1: Sample(6.0, 0)})
    assert verdict.stalled == {0: 0.0, 1: 3.0} and not verdict.is_open


# -- whom the others wait for ------------------------------------------------------------------------------------------


def stack(*frames: tuple[str, int, str]) -> Stack:
    return Stack(tuple(Frame(*frame) for frame in frames))


REDUCING = stack((LIBRARY, 2900, "all_reduce"), ("/lib/python3.11/c10d_logger.py", 81, "wrapper"), ("/my/train.py", 88, "step"))
READING = stack(("/my/data.py", 17, "read"), ("/my/train.py", 80, "step"))


def test_stacks_are_grouped_by_the_users_frames_and_what_they_called() -> None:
    elsewhere_inside = stack((LIBRARY, 2911, "all_reduce"), ("/my/train.py", 88, "step"))
    groups = stacks.group({**dict.fromkeys((0, 1, 2, 4, 5, 6), REDUCING), 7: elsewhere_inside, 3: READING})
    assert stacks.lines(groups) == [
        "ranks 0-2,4-7: 7 ranks wait in all_reduce (train.py:88 step)",
        "rank 3: in read (data.py:17)",
    ]
    assert stacks.outliers(groups) == {3}


def test_a_users_folder_called_torch_is_not_torch() -> None:
    reading = stack(("/home/me/torch/data.py", 17, "read"), ("/home/me/torch/train.py", 80, "step"))
    groups = stacks.group({0: REDUCING, 1: reading})
    assert stacks.lines(groups)[1] == "rank 1: in read (data.py:17)"
    assert stacks.outliers(groups) == {1}


def test_torch_is_known_wherever_it_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "__init__.py"
    file.parent.mkdir()
    file.touch()
    ask = (
        "import sys; from launcher.health.stacks import Frame, Stack, place, waits\n"
        "stack = Stack((Frame(sys.argv[1], 1, 'all_reduce'), Frame('/home/me/torch/train.py', 80, 'step')))\n"
        "print(waits(stack), place(stack))"
    )
    root = str(Path(stacks.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), root))}
    said = subprocess.run(
        [sys.executable, "-c", ask, str(file)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert said.stdout == "True all_reduce (train.py:80 step)\n"


def test_stacks_that_cannot_be_read_are_named_and_blame_nobody() -> None:
    groups = stacks.group({0: REDUCING, 1: Stack(problem="py-spy is not installed")})
    assert stacks.lines(groups) == [
        "rank 0: waits in all_reduce (train.py:88 step)",
        "rank 1: its stack could not be read: py-spy is not installed",
    ]
    assert stacks.outliers(groups) == frozenset()


def test_a_rank_in_another_collective_than_most_is_the_outlier() -> None:
    other = stack((LIBRARY, 4000, "barrier"), ("/my/train.py", 90, "step"))
    assert stacks.outliers(stacks.group({0: other, 1: REDUCING, 2: REDUCING})) == {0}
    assert stacks.outliers(stacks.group({0: other, 1: REDUCING})) == frozenset()


def group(*ranks: int, waits: bool) -> Group:
    return Group(ranks, "somewhere", waits)


def test_who_does_not_wait_with_the_others_is_to_blame() -> None:
    verdict = Verdict({0: 1.0, 1: 1.0, 2: 1.0}, frozenset())
    assert to_blame(verdict, [group(0, 2, waits=True), group(1, waits=False)]) == ({1}, frozenset())


def test_nobody_is_to_blame_while_the_others_wait_for_a_busy_rank() -> None:
    verdict = Verdict({0: 1.0, 1: 1.0}, frozenset({2}))
    assert to_blame(verdict, [group(0, 1, waits=True), group(2, waits=False)]) == (frozenset(), {2})
    pair = Verdict({0: 1.0}, frozenset({1}))
    assert to_blame(pair, [group(0, waits=True), group(1, waits=True)]) == (frozenset(), {1})


def test_all_that_stalled_are_to_blame_where_nobody_stands_out() -> None:
    verdict = Verdict({0: 1.0, 1: 1.0}, frozenset())
    assert to_blame(verdict, [group(0, 1, waits=True)]) == ({0, 1}, frozenset())
    assert to_blame(verdict, []) == ({0, 1}, frozenset())


def test_a_stopped_rank_is_to_blame_wherever_it_was() -> None:
    verdict = Verdict({0: 1.0, 1: 1.0}, frozenset(), frozenset({0}))
    assert to_blame(verdict, [group(0, 1, waits=True)]) == ({0}, frozenset())


# -- reading stacks ----------------------------------------------------------------------------------------------------

SLEEPER = """
import sys, threading, time
def wait():
    print("ready", flush=True); time.sleep(1000)  # in one line, so that both are at the same place
threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
wait()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with subprocess.Popen([sys.executable, str(tmp_path / "sleeper.py")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


needs_spy = pytest.mark.skipif(stacks.find_spy() is None, reason="py-spy is not installed")


@needs_spy
def test_the_main_threads_stack_is_read_from_outside(sleeper: subprocess.Popen[str]) -> None:
    found = Reading().read({0: sleeper.pid})
    assert stacks.lines(stacks.group(found)) == ["rank 0: in wait (sleeper.py:4)"]


@needs_spy
def test_the_stack_of_a_stopped_process_is_read(sleeper: subprocess.Popen[str]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert stacks.place(Reading().read({0: sleeper.pid})[0]) == "wait (sleeper.py:4)"


def test_without_py_spy_a_process_that_is_not_prepared_is_left_alone(
    sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_spy", lambda: None)
    assert Reading().read({0: sleeper.pid})[0].problem.startswith("py-spy is not installed")
    assert sleeper.poll() is None


def test_a_rank_that_ends_before_it_is_asked_is_no_harm_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_spy", lambda: None)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        gone = Path(f"/proc/{process.pid}/fd/3")
    monkeypatch.setattr(stacks, "_own_file", {process.pid: gone, os.getpid(): None}.get)
    found = Reading().read({0: process.pid, 1: os.getpid()})
    assert found[0].problem == "it has ended" and found[1].problem.startswith("py-spy is not installed")


def test_a_process_that_is_no_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        found = Reading().read({0: process.pid})
        process.kill()
    assert not found[0].frames and found[0].problem


def test_faulthandlers_text_is_read_from_its_last_thread() -> None:
    text = (
        'Thread 0x0000000000000001 (most recent call first):\n  File "/a.py", line 1 in loop\n\n'
        'Current thread 0x0000000000000002 (most recent call first):\n  File "/b.py", line 2 in f\n'
        '  File "<frozen runpy>", line 3 in <module>\n'
    )
    assert stacks.parse_faulthandler(text) == stack(("/b.py", 2, "f"), ("<frozen runpy>", 3, "<module>"))


# -- real jobs ---------------------------------------------------------------------------------------------------------

COLLECTIVE = """
import os, sys
import torch, torch.distributed as dist
def read():
    with open(sys.argv[1]) as pipe:
        return pipe.read()
dist.init_process_group("gloo")
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    read()
dist.all_reduce(torch.ones(1))
print("through", flush=True)
dist.destroy_process_group()
"""


def options(tmp_path: Path, text: str, *arguments: str, **rest: object) -> RunOptions:
    script = tmp_path / "script.py"
    script.write_text(text)
    return RunOptions(script=str(script), arguments=arguments, log_dir=tmp_path / "logs", capture_output=True, **rest)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize("has_spy", [pytest.param(True, marks=needs_spy), pytest.param(False, marks=pytest.mark.soak)])
def test_a_rank_that_hangs_in_a_read_is_named_and_ended(
    tmp_path: Path, fifo: Path, has_spy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_spy:
        monkeypatch.setattr(stacks, "find_spy", lambda: None)
    watched = {"stall_timeout_s": 2.0, "ends_stalled": True, "max_restarts": 1}
    ran = Ran(options(tmp_path, COLLECTIVE, str(fifo), n_ranks_per_node=3, **watched))
    assert ran.code == 0 and ran.text().count("through") == 3
    stalled = ran.all(Stalled)[-1]
    assert stalled.apart == (1,)
    assert "ranks 0,2: 2 ranks wait in all_reduce (script.py:10 <module>)" in stalled.text
    assert "rank 1: in read (script.py:5)" in stalled.text
    assert "rank 1 makes no progress since " in stalled.text
    first = ran.all(RankLost)[0]
    assert (first.rank, first.cause.kind) == (1, "hang")
    assert len(ran.all(Restarting)) == 1
    ran.assert_replays()


@pytest.mark.soak
def test_a_warning_ends_nothing_and_progress_is_told(tmp_path: Path, fifo: Path) -> None:
    def let_go(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Stalled) and not ran.all(Stalled)[1:]:
            threading.Thread(target=lambda: fifo.write_text("go")).start()

    ran = Ran(
        options(tmp_path, COLLECTIVE + "sum(range(10 ** 8))\n", str(fifo), n_ranks_per_node=2, stall_timeout_s=1.0), let_go
    )
    assert ran.code == 0
    assert ran.all(Resumed) and not ran.all(RankLost)


@pytest.mark.soak
def test_ranks_that_wait_for_a_busy_one_are_not_ended(tmp_path: Path) -> None:
    text = """
import os, time
import torch, torch.distributed as dist
def evaluate():
    until = time.monotonic() + 12
    while time.monotonic() < until:
        pass
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    evaluate()
dist.barrier()
dist.destroy_process_group()
"""
    ran = Ran(options(tmp_path, text, n_ranks_per_node=2, stall_timeout_s=4.0, ends_stalled=True))
    assert ran.code == 0 and not ran.all(RankLost), [event.body for event in ran.events]
    assert all("the others wait for rank 0, which is busy" in stalled.text for stalled in ran.all(Stalled))


COLLECTS = """
import socket, sys, time
agent = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    time.sleep(0.2)
    agent.sendall(b"1")
"""


def test_traffic_is_what_goes_between_processes_of_ranks() -> None:
    program = (
        "import socket, sys\nc = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nc.sendall(b'12345')\nc.recv(1)"
    )
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with listener, socket.create_connection(listener.getsockname()) as own, listener.accept()[0] as end:
        own.sendall(b"to oneself")
        assert end.recv(100) == b"to oneself"
        with subprocess.Popen([sys.executable, "-c", program, str(port)]) as other, listener.accept()[0] as connected:
            assert connected.recv(100) == b"12345"
            ours, both = {0: os.getpid()}, {0: os.getpid(), 1: other.pid}
            assert traffic.between_ranks(ours, 1, ()) == {0: 0}, "what is no rank"
            found = traffic.between_ranks(both, 1, ())
            assert found[0] >= 5 and found[1] >= 5
            assert traffic.between_ranks(both, port, ()) == {0: 0, 1: 0}, "the store"
            assert traffic.between_ranks(ours, 1, ("127.0.0.1",)) == {0: found[0]}, "a rank of another agent"
            connected.sendall(b"x")
        assert traffic.between_ranks({0: other.pid}, 1, ()) == {0: 0}, "a process that has ended"


SPEAKS = f"""
import os, sys, threading, time
import socket, subprocess
import torch, torch.distributed as dist
dist.init_process_group("gloo")
collects = socket.create_server(("127.0.0.1", 0))
program = {COLLECTS!r}
collector = subprocess.Popen([sys.executable, "-c", program, str(collects.getsockname()[1])])
connected, _ = collects.accept()
store = dist.distributed_c10d._get_default_store()
def beside():
    while True:
        connected.sendall(connected.recv(9))
        store.add("asked", 1)
threading.Thread(target=beside, daemon=True).start()
"""
"""To the store and to a process of its own, now and then, whatever becomes of the script."""


def test_ranks_that_speak_to_each_other_live_and_use_next_to_nothing(tmp_path: Path) -> None:
    text = (
        SPEAKS
        + """
for _ in range(100):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
collector.kill()
os._exit(0)
"""
    )
    ran = Ran(options(tmp_path, text, n_ranks_per_node=2, stall_timeout_s=4.0, ends_stalled=True))
    assert ran.code == 0 and not ran.all(RankLost) and not ran.all(Stalled), [event.body for event in ran.events]


def test_what_is_said_to_the_store_or_to_ones_own_processes_is_no_life(tmp_path: Path) -> None:
    text = (
        SPEAKS
        + """
dist.barrier()  # both stand still from here on; on a busy machine one of them may be found before the other
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        time.sleep(1000)  # each time that it woke it would use its processor, and more so where many wait for one
    dist.all_reduce(torch.ones(1))
collector.kill()
os._exit(0)
"""
    )
    ran = Ran(options(tmp_path, text, n_ranks_per_node=2, stall_timeout_s=4.0, ends_stalled=True, max_restarts=1))
    assert ran.code == 0, [event.body for event in ran.events]
    assert ran.all(Stalled) and ran.all(RankLost)[0].cause.kind == "hang"


def test_a_stopped_rank_is_told_as_stopped_and_ended(tmp_path: Path) -> None:
    def stop(event: Event, ran: Ran) -> None:
        if event.body == Progressed(1) and not ran.all(RankLost):
            pid = next(started.pid for started in ran.all(RankStarted) if started.rank == 1)
            psutil.Process(pid).suspend()

    text = """
import os, odyssey, time
odyssey.heartbeat()
until = time.monotonic() + (0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 1000)
while time.monotonic() < until:
    odyssey.heartbeat()
    time.sleep(0.01)
"""
    watched = {"stall_timeout_s": 1.0, "ends_stalled": True, "max_restarts": 1}
    ran = Ran(options(tmp_path, text, n_ranks_per_node=2, **watched), stop)
    assert ran.code == 0
    (stalled,) = ran.all(Stalled)
    assert stalled.ranks == (1,) and "rank 1 was stopped by a signal" in stalled.text
    assert "no odyssey.heartbeat()" in stalled.text
    assert ran.all(RankLost)[0].cause.kind == "hang"


def test_a_rank_that_computes_but_stops_beating_has_stalled(tmp_path: Path) -> None:
    text = """
import os, odyssey
odyssey.heartbeat(41)
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pass
"""
    ran = Ran(options(tmp_path, text, stall_timeout_s=1.0, ends_stalled=True, max_restarts=1))
    assert ran.code == 0
    assert ", at step 41): no odyssey.heartbeat()" in ran.all(Stalled)[0].text


def test_the_last_step_is_in_the_log_before_the_failure(tmp_path: Path) -> None:
    text = """
import odyssey
for step in range(100):
    odyssey.heartbeat(step)
raise ValueError
"""
    ran = Ran(options(tmp_path, text))
    ends = [event.body for event in ran.events if isinstance(event.body, AtStep | Failed)]
    assert ends[-2] == AtStep(0, 99) and isinstance(ends[-1], Failed)


@pytest.mark.soak
def test_heartbeats_of_other_processes_than_the_rank_are_none(tmp_path: Path) -> None:
    text = """
import multiprocessing, os, subprocess, sys
import odyssey
def work():
    odyssey.heartbeat(1)
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", "import odyssey; odyssey.heartbeat(1)"], check=True)
    if "beat" in sys.argv:
        odyssey.heartbeat(2)
"""
    assert not Ran(options(tmp_path, text)).all(Progressed)
    (tmp_path / "other").mkdir()
    ran = Ran(options(tmp_path / "other", text, "beat"))
    assert ran.code == 0
    assert ran.all(Progressed) == [Progressed(0)]


def test_a_heartbeat_outside_of_a_job_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import odyssey; odyssey.heartbeat(); odyssey.heartbeat(3)"
    environment = {name: value for name, value in os.environ.items() if name != "ODYSSEY_AGENT_FD"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    # at this number something else may be open, in processes that a rank has started
    assert (
        subprocess.run([sys.executable, "-c", code], env={**environment, "ODYSSEY_AGENT_FD": "1:0"}, check=False).returncode
        == 0
    )


def test_what_the_transport_turns_for_nothing_is_no_sign_of_life() -> None:
    """Its thread reads and writes, and that is seen in the bytes, where the kernel counts them."""
    turns = """
import ctypes, threading, time
def turn():
    ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop", 0, 0, 0)
    while time.thread_time() < 0.5:
        pass
    print(flush=True)
    threading.Event().wait()
threading.Thread(target=turn, daemon=True).start()
input()
"""
    with subprocess.Popen([sys.executable, "-S", "-c", turns], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        found = [stalls.sample({0: process.pid}, lambda rank: 0, seen)[0].processor_s for seen in ({}, {0: 7})]
        process.stdin.close()
    assert found[0] >= 0.5 > found[0] - 0.45 >= found[1]


def test_what_a_rank_has_started_counts_as_its_own() -> None:
    spin = "print('ready', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, start_new_session=True) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        before = stalls.sample({0: os.getpid()}, lambda rank: 0, {})[0].processor_s
        own = os.times()
        process = psutil.Process(busy.pid)
        enough_s = process.cpu_times().user + 0.1
        while process.cpu_times().user < enough_s:
            pass
        after = stalls.sample({0: os.getpid()}, lambda rank: 0, {})[0].processor_s
        spent = os.times()
        busy.kill()
    ours = spent.user + spent.system - own.user - own.system
    assert after - before > ours
