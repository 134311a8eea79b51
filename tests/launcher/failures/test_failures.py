"""What failed first and what only followed from it: as a judgement over ends, and in real jobs with real deaths."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from launcher.failures.diagnostics import exception_at_the_end, last_exception, read_error_file
from launcher.failures.exit_status import Ends, oom_counter
from launcher.failures.hints import advice
from launcher.failures.history import Failure, FailureHistory, after, failure_of
from launcher.failures.root_cause import Ends as EndsOfRanks
from launcher.failures.root_cause import FailureKind, alike, others, root, victims, with_end
from launcher.joblog.events import Cause, CauseKind, Diagnostics, JobEnded, Note, RankExited, RankLost, RankStarted, Restarting
from launcher.options import RunOptions
from odyssey.protocol.calls import ranks_alike
from odyssey.protocol.reports import Failed
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]

CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27307"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"
FULL_MESH = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error"
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"


# -- the judgement -----------------------------------------------------------------------------------------------------


def failed(rank: int, error: str) -> Failed:
    return Failed(rank, error, "", f"Traceback\n{error}")


def exited(rank: int, code: int = 1) -> RankLost:
    return RankLost(rank, Cause(CauseKind.EXIT, f"exit code {code}", code), False)


def killed(rank: int, number: signal.Signals = signal.SIGKILL) -> RankLost:
    return RankLost(rank, Cause(CauseKind.SIGNAL, number.name, -number), False)


def ended(rank: int, status: int = -15) -> RankLost:
    return RankLost(rank, Cause(CauseKind.ENDED, f"ended with the others, {status}", status), False)


def judge(*events: Failed | RankLost | RankExited | float) -> EndsOfRanks:
    """A tenth of a second lies between two events; a number lets so many seconds pass."""
    ends: EndsOfRanks = {}
    now = 0.0
    for event in events:
        now += event if isinstance(event, float) else 0.1
        if not isinstance(event, float):
            ends = with_end(ends, now, event)
    return ends


def root_rank(ends: EndsOfRanks) -> int | None:
    cause = root(ends)
    return cause.rank if cause is not None else None


@pytest.mark.parametrize("consequence", [CLOSED, NCCL, FULL_MESH, STORE])
def test_a_broken_connection_is_not_the_cause_though_it_was_noticed_first(consequence: str) -> None:
    ends = judge(failed(0, consequence), exited(0), failed(3, "ValueError: no"), exited(3), ended(1), ended(2))
    cause = root(ends)
    assert cause is not None and (cause.rank, cause.kind, cause.text) == (3, FailureKind.EXCEPTION, "ValueError: no")
    assert victims(ends, cause) == (1, 2)
    assert [end.rank for end in others(ends, cause)] == [0]


def test_only_broken_connections_are_a_cause_of_their_own() -> None:
    ends = judge(failed(1, CLOSED), exited(1), failed(0, NCCL), exited(0))
    cause = root(ends)
    assert cause is not None and (cause.rank, cause.kind) == (1, FailureKind.COMMUNICATION)


def test_a_port_in_use_is_no_consequence_of_anything() -> None:
    text = "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 29500, code: -98, EADDRINUSE"
    ends = judge(failed(0, CLOSED), exited(0), failed(1, text), exited(1))
    cause = root(ends)
    assert cause is not None and cause.kind is FailureKind.EXCEPTION and "ss -ltnp" in advice(cause)


def test_a_kill_explains_an_exception_that_was_noticed_a_moment_before() -> None:
    wrapped = failed(0, "RuntimeError: training failed")
    assert root_rank(judge(wrapped, killed(1), exited(0))) == 1
    assert root_rank(judge(wrapped, exited(0), 5.0, killed(1))) == 0
    assert root_rank(judge(wrapped, killed(1, signal.SIGABRT), exited(0))) == 0


def test_the_answer_of_a_victim_to_our_signal_is_no_failure() -> None:
    answer = "SignalException: Process 17 got signal: 15"
    ends = judge(failed(0, CLOSED), exited(0), failed(1, answer), ended(1, 1), RankExited(2, was_ended=True))
    cause = root(ends)
    assert cause is not None and cause.rank == 0 and victims(ends, cause) == (1, 2)


def test_a_cause_that_goes_on_behind_a_colon_is_told_whole() -> None:
    first, second = "RuntimeError: Error(s) in loading state_dict for Linear:", "\tsize mismatch for weight: [4, 4] from [4, 2]"
    tail = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    load()\n{first}\n{second}\nbye\n'
    found = last_exception(tail)
    assert found is not None and found[0] == f"{first}\n{second}" and found[1].endswith(second)
    cause = root(judge(failed(0, found[0]), exited(0)))
    assert cause is not None and cause.text == f"{first} {second.strip()}"


def test_a_rank_that_had_failed_before_it_was_ended_counts() -> None:
    assert root_rank(judge(failed(1, "ValueError: no"), failed(0, CLOSED), exited(0), ended(1))) == 1


def test_ranks_that_ended_well_are_no_part_of_it() -> None:
    assert root(judge(RankExited(0))) is None
    assert root(judge(ended(0))) is None
    ends = judge(RankExited(0), failed(1, "ValueError: no"), exited(1), failed(2, CLOSED), exited(2))
    cause = root(ends)
    assert cause is not None and cause.rank == 1
    assert [end.rank for end in others(ends, cause)] == [2] and victims(ends, cause) == ()


def test_who_left_with_exit_code_0_is_the_cause_of_connections_that_break_then() -> None:
    ends = judge(RankExited(2), failed(0, CLOSED), failed(1, CLOSED), exited(0), exited(1))
    cause = root(ends)
    assert cause is not None and cause.reason == "rank 2 ended with exit code 0, and others still needed it"
    assert "come to the end of the script together" in advice(cause)
    assert [end.rank for end in others(ends, cause)] == [0, 1]
    assert root_rank(judge(failed(0, CLOSED), exited(0), 5.0, RankExited(2))) == 0, "what broke before is not its doing"


def test_an_exception_on_many_ranks_is_one_although_numbers_differ() -> None:
    ends = judge(
        *(failed(rank, f"IndexError: {rank} at 0x7f{rank}a is out of range") for rank in (2, 0, 1)), failed(3, "KeyError: 3")
    )
    cause = root(ends)
    assert cause is not None and alike(ends, cause) == (0, 1, 2)
    assert [end.rank for end in others(ends, cause)] == [3]


def test_ranks_are_written_as_runs() -> None:
    assert ranks_alike([3]) == "rank 3"
    assert ranks_alike([7, 0, 1, 2, 4]) == "ranks 0-2, 4, 7"


# -- what ranks leave behind -------------------------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    fail()
  File "train.py", line 2, in fail
    raise ValueError("no")
ValueError: no"""


def test_the_last_traceback_of_stderr_is_read_with_torchs_prefix_or_without() -> None:
    prefixed = "\n".join(f"[rank2]: {line}" for line in TRACEBACK.splitlines())
    for text in (TRACEBACK, prefixed, f"{TRACEBACK.replace('no', 'old')}\nwent on\n{TRACEBACK}\n[W] a warning at the end\n"):
        assert last_exception(text) == ("ValueError: no", TRACEBACK)


def test_a_traceback_whose_beginning_is_cut_off_is_still_one() -> None:
    cut = TRACEBACK.partition("line 3")[2]
    found = last_exception(cut)
    assert found is not None and found[0] == "ValueError: no" and found[1].startswith('  File "train.py", line 2')


def test_other_output_is_no_traceback() -> None:
    assert last_exception("usage: train.py [-h]\ntrain.py: error: no such option\n") is None
    assert last_exception('  File "a.py", line 1\n    unfinished') is None


def test_of_a_rank_that_was_ended_only_a_traceback_at_the_very_end_counts() -> None:
    assert exception_at_the_end(f"{TRACEBACK}\n") == ("ValueError: no", TRACEBACK)
    assert exception_at_the_end(f"{TRACEBACK}\nretrying\n") is None


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"message": {"other": 1}}', '{"message": null}'])
def test_an_error_file_of_another_kind_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert read_error_file(str(tmp_path / "error.json")) is None
    assert read_error_file(str(tmp_path / "none")) is None


def test_kills_for_want_of_memory_are_told_by_the_nearest_counter(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("pgfault 7\noom_kill 4\n")
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/jobs/a\n1:name=systemd:/\n0::/jobs/b\n")
    assert oom_counter(proc, groups) == proc / "vmstat"
    v1 = groups / "memory" / "jobs" / "a" / "memory.oom_control"
    v1.parent.mkdir(parents=True)
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_counter(proc, groups) == v1
    (proc / "self" / "cgroup").write_text("0::/jobs/b\n")
    v2 = groups / "jobs" / "b" / "memory.events"
    v2.parent.mkdir(parents=True)
    v2.write_text("low 0\noom 1\noom_kill 1\n")
    assert oom_counter(proc, groups) == v2


def test_as_many_ranks_were_killed_for_want_of_memory_as_the_kernel_counts(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 1\n")
    ends = Ends(counter)
    assert ends.cause(-9, None).kind == "signal"
    counter.write_text("oom_kill 3\n")
    assert [ends.cause(-9, None).kind for _ in range(3)] == ["out-of-memory", "out-of-memory", "signal"]
    counter.write_text("oom_kill 4\n")
    ends.rank_starts()  # that was no rank
    assert ends.cause(-9, None).kind == "signal"
    assert Ends(tmp_path / "none").cause(-9, None).kind == "signal"


# -- real jobs ---------------------------------------------------------------------------------------------------------

real = pytest.mark.usefixtures("nothing_left")

BLOCKED = """
import ctypes, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 2:
    match sys.argv[1]:
        case "raise": raise ValueError("no such thing")
        case "exit": sys.exit(3)
        case "SIGSEGV": ctypes.string_at(0)
        case name: os.kill(os.getpid(), getattr(__import__("signal"), name))
dist.all_reduce(torch.ones(1))
"""


def options(tmp_path: Path, text: str, *arguments: str, **rest: object) -> RunOptions:
    script = tmp_path / "script.py"
    script.write_text(text)
    return RunOptions(script=str(script), arguments=arguments, log_dir=tmp_path / "logs", capture_output=True, **rest)  # type: ignore[arg-type]


def chronicle_of(ran: Ran) -> FailureHistory:
    history = FailureHistory()
    for event in ran.events:
        history = after(history, event)
    return history


def failure_in(ran: Ran) -> Failure:
    ran.assert_replays()
    failure = failure_of(chronicle_of(ran))
    assert failure is not None
    return failure


@real
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "kind", "status", "reason"),
    [
        ("raise", FailureKind.EXCEPTION, 1, "rank 2 failed: ValueError: no such thing"),
        ("exit", FailureKind.EXIT, 3, "rank 2 ended with exit code 3"),
        ("SIGKILL", FailureKind.SIGNAL, -9, "rank 2 was lost (SIGKILL)"),
        ("SIGTERM", FailureKind.SIGNAL, -15, "rank 2 was lost (SIGTERM)"),
        ("SIGSEGV", FailureKind.CRASH, -11, "rank 2 ended with SIGSEGV"),
    ],
)
def test_who_fails_while_others_wait_in_a_collective_is_the_cause(
    tmp_path: Path, how: str, kind: FailureKind, status: int, reason: str
) -> None:
    ran = Ran(options(tmp_path, BLOCKED, how, n_ranks_per_node=4))
    failure = failure_in(ran)
    cause = failure.cause
    assert cause is not None and (cause.rank, cause.kind, cause.status) == (2, kind, status)
    assert ran.events[-1].body == JobEnded(1, reason, "") and failure.reason == reason
    assert (failure.local_rank, failure.host, failure.n_ranks) == (2, os.uname().nodename, 4)
    rest = {end.rank: end.kind for end in failure.others} | dict.fromkeys(failure.victims, FailureKind.ENDED)
    assert set(rest) == {0, 1, 3} and set(rest.values()) <= {FailureKind.COMMUNICATION, FailureKind.ENDED}
    if how == "raise":
        assert 'raise ValueError("no such thing")' in cause.traceback
    if how == "SIGSEGV":
        assert f'File "{tmp_path}/script.py", line 11 in <module>' in cause.diagnostics.last_lines


@real
@pytest.mark.timeout(120)
def test_the_same_exception_on_all_ranks_is_one_failure(tmp_path: Path) -> None:
    text = """
import os, time
from pathlib import Path
Path(os.environ["RANK"]).touch()
while len(list(Path().iterdir())) < 4: time.sleep(0.01)
raise KeyError(f"rank {os.environ['RANK']}")
"""
    (tmp_path / "cwd").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path / "cwd")
    try:
        failure = failure_in(Ran(options(tmp_path, text, n_ranks_per_node=4)))
    finally:
        os.chdir(before)
    assert failure.cause is not None and failure.cause.rank in failure.alike
    assert set(failure.alike) | set(failure.victims) == {0, 1, 2, 3} and failure.others == ()


@real
@pytest.mark.timeout(120)
def test_a_kill_for_want_of_memory_is_told_by_the_kernels_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 0\n")
    monkeypatch.setattr("launcher.failures.exit_status.oom_counter", lambda: counter)
    text = "import os, sys; open(sys.argv[1], 'w').write('oom_kill 1\\n'); os.kill(os.getpid(), 9)"
    failure = failure_in(Ran(options(tmp_path, text, str(counter))))
    assert failure.cause is not None and failure.cause.kind is FailureKind.OUT_OF_MEMORY
    assert failure.reason == "rank 0 was lost (killed for want of memory)" and "use less memory" in failure.help


@real
@pytest.mark.timeout(120)
def test_an_exit_code_that_is_never_retried_ends_the_job(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "import sys; sys.exit(70)", max_restarts=3, never_retry=(70,)))
    assert len(ran.all(RankStarted)) == 1
    assert failure_in(ran).reason == "rank 0 ended with exit code 70; exit code 70 is never retried"


@real
@pytest.mark.timeout(120)
def test_the_same_failure_twice_before_the_first_step_ends_the_job(tmp_path: Path) -> None:
    text = "import os; raise ValueError(f'no batch {os.getpid()}')"
    failure = failure_in(Ran(options(tmp_path, text, max_restarts=5)))
    assert failure.attempt == 1 and [attempt.number for attempt in failure.attempts] == [0]
    assert "the same failure came twice with no step in between" in failure.reason and "--retry-same-failure" in failure.help


@real
@pytest.mark.timeout(120)
def test_the_same_failure_is_retried_where_that_is_asked_for_with_pauses(tmp_path: Path) -> None:
    ran = Ran(options(tmp_path, "1 / 0", max_restarts=2, retries_same_failure=True, restart_backoff_s=0.02))
    assert [decision.wait_s for decision in ran.all(Restarting)] == [0.0, 0.02]
    assert failure_in(ran).reason == "rank 0 failed: ZeroDivisionError: division by zero; 2 of 2 restarts used"


@real
@pytest.mark.timeout(120)
def test_ranks_are_told_of_the_failure_and_people_of_the_way_back(tmp_path: Path) -> None:
    text = """
import os
import odyssey
odyssey.heartbeat()
names = ("RESTART_COUNT", "MAX_RESTARTS", "ATTEMPT", "LAST_FAILURE")
print(*(os.environ[f"ODYSSEY_{name}"] for name in names), sep="|")
if os.environ["ODYSSEY_ATTEMPT"] == "0":
    os.kill(os.getpid(), 9)
"""
    ran = Ran(options(tmp_path, text, max_restarts=3))
    assert ran.code == 0
    assert ran.text().splitlines() == ["0|3|0|", "1|3|1|rank 0 was lost (SIGKILL)"]
    (restarting,) = ran.all(Restarting)
    assert restarting.reason == "rank 0 was lost (SIGKILL); all ranks start again (restart 1 of 3)"
    assert any(note.text.startswith("training again after ") for note in ran.all(Note))
    ran.assert_replays()


RECORDED = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("recorded")
    time.sleep(1000)
main()
"""


@real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("forked", [True, False])
def test_the_error_file_of_a_recorded_script_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    asked = options(tmp_path, RECORDED, n_ranks_per_node=2)
    if not forked:  # a directory is run by a plain spawn
        (tmp_path / "folder").mkdir()
        (tmp_path / "script.py").rename(tmp_path / "folder" / "__main__.py")
        asked = RunOptions(str(tmp_path / "folder"), n_ranks_per_node=2, log_dir=tmp_path / "logs")
    failure = failure_in(Ran(asked))
    assert failure.reason == "rank 1 failed: ValueError: recorded" and failure.victims == (0,)
    assert failure.cause is not None and 'raise ValueError("recorded")' in failure.cause.traceback
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: recorded", 1)
    assert 'raise ValueError("recorded")' in message["extraInfo"]["py_callstack"]


@real
@pytest.mark.timeout(120)
def test_the_traceback_of_a_spawned_rank_is_read_from_its_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import no_such_module")
    failure = failure_in(Ran(RunOptions(str(tmp_path / "folder"), log_dir=tmp_path / "logs", capture_output=True)))
    assert failure.reason == "rank 0 failed: ModuleNotFoundError: No module named 'no_such_module'"
    assert failure.cause is not None and "import no_such_module" in failure.cause.traceback
    assert "PYTHON_EXEC" in failure.help and Path(failure.cause.diagnostics.log).read_text()
    assert "no_such_module" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_testimony_of_lost_ranks_is_kept(tmp_path: Path) -> None:
    """The last lines that a crashed rank wrote, and where the rest of it is."""
    lost = RankLost(
        0, Cause(CauseKind.SIGNAL, "SIGABRT", -6), False, Diagnostics(last_lines="terminate called", log="a/stderr.log")
    )
    cause = root(judge(lost))
    assert cause is not None and cause.kind is FailureKind.CRASH and cause.diagnostics == lost.diagnostics
    watchdog = Diagnostics(last_lines="[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)")
    cause = root(judge(RankLost(0, Cause(CauseKind.SIGNAL, "SIGABRT", -6), False, watchdog)))
    assert cause is not None and cause.kind is FailureKind.COMMUNICATION


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_leaves_with_exit_code_0_is_named_by_those_that_still_need_it(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.zeros(1))\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(0)\n"
        "dist.all_reduce(torch.zeros(1))\n"
    )
    ran = Ran(RunOptions(str(script), n_nodes=2, log_dir=tmp_path / "logs", capture_output=True))
    assert ran.code == 1
    assert ran.events[-1].body.reason == "rank 1 ended with exit code 0, and others still needed it"
