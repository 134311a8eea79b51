"""The block at the end of a failed job, as a user reads it, and the same for tools."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.failures.history import Failure, FailureHistory, after, failure_of, retold
from launcher.joblog.events import (
    AtStep,
    Body,
    Cause,
    CauseKind,
    Diagnostics,
    Event,
    JobEnded,
    JobStarted,
    RankExited,
    RankLost,
    RankStarted,
    Restarting,
    StopRequested,
)
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey.protocol.reports import Failed
from odyssey_cli import run as run_command
from odyssey_cli.display.failure_block import N_TRACEBACK_LINES, render
from odyssey_cli.jobs import json_report
from tests import ROOT

START = 1_700_000_000.0
TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
  File "train.py", line 9, in main
    raise ValueError("no such batch")
ValueError: no such batch"""
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:27307"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def story(n_ranks: int, *told: tuple[float, Body]) -> FailureHistory:
    """A job that starts at 0 s; `told`: what happens in it, and when."""
    job = JobStarted("train.py", ("--lr", "1"), 1, n_ranks, 3, "auto", "auto", None, "0.1", 7, folder="logs/a", run_id="a")
    events: list[tuple[float, Body]] = [(0.0, job)]
    events += [(0.1, RankStarted(rank, 100 + rank, 0, rank, "gpu-7")) for rank in range(n_ranks)]
    history = FailureHistory()
    for at, body in (*events, *told):
        history = after(history, Event(START + at, 0, "agent", body))
    return history


def exit_of(rank: int, code: int = 1, kind: str = "exit", **diagnostics: str) -> RankLost:
    return RankLost(rank, Cause(CauseKind(kind), f"exit code {code}", code), False, Diagnostics(**diagnostics))


def signal_of(rank: int, name: str, number: int, kind: str = "signal", last_lines: str = "") -> RankLost:
    text = "killed for want of memory" if kind == "out-of-memory" else name
    return RankLost(rank, Cause(CauseKind(kind), text, -number), False, Diagnostics(last_lines=last_lines))


def ended_of(rank: int) -> RankLost:
    return RankLost(rank, Cause(CauseKind.ENDED, "ended with the others, SIGTERM", -15), False)


def failure(history: FailureHistory) -> Failure:
    found = failure_of(history)
    assert found is not None
    return found


EXCEPTION = story(
    4,
    (10.0, AtStep(2, 41)),
    (12.3, Failed(0, CLOSED, "", CLOSED)),
    (12.3, exit_of(0)),
    (12.4, Failed(2, "ValueError: no such batch", "", TRACEBACK)),
    (12.5, exit_of(2, log="logs/a/attempt_0/2/stderr.log")),
    (12.5, ended_of(1)),
    (12.6, RankExited(3, was_ended=True)),
    (12.6, JobEnded(1, "rank 2 failed: ValueError: no such batch", "")),
)


def test_the_cause_its_consequences_and_its_victims() -> None:
    assert (
        render(failure(EXCEPTION), "logs/a", 72)
        == """\
========================================================================
train.py FAILED
Root Cause (the first failure that explains the others):
  time      : 2023-11-14_22:13:32, 12 s after the start
  host      : gpu-7
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 102)
  cause     : ValueError: no such batch
  step      : 41
  log       : logs/a/attempt_0/2/stderr.log
  traceback :
    Traceback (most recent call last):
      File "train.py", line 12, in <module>
        main()
      File "train.py", line 9, in main
        raise ValueError("no such batch")
    ValueError: no such batch
lost their connection to it: 0
ended by us after rank 2 failed: 1, 3
========================================================================
error: rank 2 failed: ValueError: no such batch"""
    )


TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
IN_TORCH = f"""Traceback (most recent call last):
  File "{TORCH}/utils/data/_utils/worker.py", line 351, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 7, in __getitem__
    return decode(self.files[i])
  File "/opt/venv/lib/python3.12/site-packages/PIL/Image.py", line 3498, in open
    raise UnidentifiedImageError(msg)
PIL.UnidentifiedImageError: cannot identify image file '7.png'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    loss = model(batch)
           ^^^^^^^^^^^^
  File "{TORCH}/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "{TORCH}/nn/modules/module.py", line 1786, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/me/model.py", line 4, in forward
    return self.head(x)
  File "{TORCH}/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "{TORCH}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
  File "/usr/lib/python3.12/contextlib.py", line 85, in inner
    return func(*args, **kwds)
RuntimeError: mat1 and mat2 shapes cannot be multiplied"""


def traceback_in_block(text: str) -> list[str]:
    history = story(
        1,
        (12.4, Failed(0, text.splitlines()[-1], "", text)),
        (12.5, exit_of(0)),
        (12.6, JobEnded(1, "rank 0 failed", "")),
    )
    lines = render(failure(history), "logs/a", 72).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  traceback :"))
    return [lines[at], *(line.removeprefix("    ") for line in lines[at + 1 :] if line.startswith("    ") or not line)]


def test_frames_of_libraries_behind_the_users_last_one_are_counted() -> None:
    assert traceback_in_block(IN_TORCH) == [
        "  traceback : (the last 15 lines of 22)",
        *"""
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1786, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/me/model.py", line 4, in forward
    return self.head(x)
  ... 3 frames in torch, contextlib
RuntimeError: mat1 and mat2 shapes cannot be multiplied""".splitlines(),
    ]


def test_the_frames_that_python_itself_prints_of_libraries_are_counted() -> None:
    try:
        json.loads("{")
    except ValueError:
        text = traceback.format_exc().rstrip()

    _, *lines = traceback_in_block(text)

    *_, frames, error = lines
    assert frames == "  ... 3 frames in json" and error == text.splitlines()[-1]
    assert 'json.loads("{")' in lines[2]


def test_of_libraries_alone_all_frames_are_told() -> None:
    text = f'''Traceback (most recent call last):
  File "{TORCH}/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
ValueError: no'''

    assert traceback_in_block(text)[1:] == text.splitlines()


def test_earlier_attempts_and_why_there_is_no_other() -> None:
    reason = "rank 1 was lost (SIGKILL); all ranks start again (restart 1 of 3)"
    history = story(
        2,
        (5.0, signal_of(1, "SIGKILL", 9)),
        (5.1, ended_of(0)),
        (5.1, Restarting(1, "rank 1 was lost (SIGKILL)", reason, 0.0)),
        *((5.2, RankStarted(rank, 200 + rank, 0, rank, "gpu-7")) for rank in range(2)),
        (9.0, signal_of(0, "", 9, "out-of-memory")),
        (9.1, ended_of(1)),
        (9.1, JobEnded(1, "rank 0 was lost (killed for want of memory); 1 of 1 restarts used", "")),
    )
    assert (
        render(failure(history), "logs/a", 72)
        == """\
========================================================================
train.py FAILED
Root Cause (the first failure that explains the others):
  time      : 2023-11-14_22:13:29, 9.00 s after the start
  host      : gpu-7
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 200)
  cause     : the kernel killed it: killed for want of memory
  attempt   : 1
  log       : logs/a
ended by us after rank 0 failed: 1
Earlier attempts:
  attempt 0: rank 1 was lost (SIGKILL), after 5.00 s
========================================================================
error: rank 0 was lost (killed for want of memory); 1 of 1 restarts used
help: use less memory (smaller batches, fewer data loader workers), or
    raise the limit of the job or the container"""
    )


def test_a_crash_says_what_its_signal_means_and_what_the_rank_wrote_last() -> None:
    history = story(
        1,
        (1.0, signal_of(0, "SIGABRT", 6, last_lines="terminate called after throwing\n  what():  bad size")),
        (1.0, JobEnded(1, "rank 0 ended with SIGABRT", "")),
    )
    lines = render(failure(history), "", 72).splitlines()
    assert "  cause     : SIGABRT: aborted by its own native code" in lines
    assert lines[lines.index("  last lines :") + 1 :][:2] == ["    terminate called after throwing", "      what():  bad size"]


def test_one_traceback_on_many_ranks_is_told_once_and_fits_a_screen() -> None:
    long = "\n".join(["Traceback (most recent call last):", *(f'  File "a.py", line {i}' for i in range(90)), "KeyError: 1"])
    told = [(1.0 + rank / 100, Failed(rank, f"KeyError: {rank}", "", long)) for rank in range(64)]
    history = story(64, *told, *((2.0, exit_of(rank)) for rank in range(64)), (3.0, JobEnded(1, "rank 0 failed", "")))
    text = render(failure(history), "", 100)
    assert "  same on   : ranks 0-63" in text and text.count("KeyError: 1") == 1
    assert f"(the last {N_TRACEBACK_LINES} lines of 92)" in text
    assert len(text.splitlines()) <= 30


def test_other_failures_are_told_by_a_line_each_and_only_the_first_few() -> None:
    told = [(1.0 + rank / 100, Failed(rank, f"{chr(65 + rank)}Error: no\nmore", "", "…")) for rank in range(9)]
    lines = render(failure(story(9, *told, (3.0, JobEnded(1, "rank 0 failed", "")))), "", 80).splitlines()
    at = lines.index("Other failures:")
    assert lines[at + 1 : at + 6] == [*(f"  rank {r}: {chr(65 + r)}Error: no" for r in (1, 2, 3, 4)), "  and ranks 5-8"]


@pytest.mark.parametrize("width", [20, 60, 72, 200])
def test_no_line_is_longer_than_the_screen_but_those_of_a_traceback(width: int) -> None:
    text = render(failure(EXCEPTION), "logs/a", width)
    head, _, rest = text.partition("  traceback :")
    shown = max(60, min(width, 100))
    assert all(len(line) <= shown for line in (head + rest.partition("lost their")[2]).splitlines())


def test_what_an_agent_is_told_at_the_end_leads_to_the_same_block() -> None:
    again = "rank 1 was lost (SIGKILL)"
    history = EXCEPTION
    later = story(2, (5.0, signal_of(1, "SIGKILL", 9)), (5.0, Restarting(1, again, again, 0.0)), (6.0, exit_of(0, 3)))
    for whole in (history, after(later, Event(START + 7, 0, "agent", JobEnded(1, "rank 0 ended with exit code 3", "")))):
        short = FailureHistory()
        for event in retold(whole):
            short = after(short, event)
        assert render(failure(short), "logs/a", 72) == render(failure(whole), "logs/a", 72)
    assert retold(story(1, (1.0, JobEnded(0, "all ranks have ended their scripts", "")))) == ()


def test_paths_below_the_working_directory_are_short() -> None:
    assert "  log       : a/attempt_0/2/stderr.log" in render(failure(EXCEPTION), "", 72, cwd="logs")


def test_colour_changes_nothing_else() -> None:
    coloured = render(failure(EXCEPTION), "logs/a", 72, in_colour=True)
    for code in ("\033[1;31m", "\033[1m", "\033[2m", "\033[36m", "\033[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == render(failure(EXCEPTION), "logs/a", 72)


def test_a_job_that_ended_well_or_was_told_to_end_has_no_failure() -> None:
    assert failure_of(story(1, (1.0, RankExited(0)), (1.0, JobEnded(0, "all ranks have ended their scripts", "")))) is None
    assert failure_of(story(1, (1.0, StopRequested("interrupted by Ctrl-C")), (1.0, JobEnded(130, "interrupted", "")))) is None


# -- for tools ---------------------------------------------------------------------------------------------------------


def test_the_report_for_tools_has_it_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("of an earlier job")
    json_report.write(path, EXCEPTION, 1)
    report = json.loads(path.read_text())
    assert os.listdir(tmp_path) == ["report.json"]
    assert (report["status"], report["exitcode"], report["attempt"]) == ("failed", 1, 0)
    assert report["cause"] == {
        "rank": 2,
        "local_rank": 2,
        "host": "gpu-7",
        "pid": 102,
        "kind": "exception",
        "text": "ValueError: no such batch",
        "exitcode": 1,
        "signal": None,
        "exception": "ValueError: no such batch",
        "traceback": TRACEBACK,
        "last_lines": "",
        "step": 41,
        "log": "logs/a/attempt_0/2/stderr.log",
        "time": START + 12.4,
    }
    assert (report["same_on"], report["victims"], report["attempts"]) == ([2], [1, 3], [])
    (other,) = report["others"]
    assert (other["rank"], other["kind"]) == (0, "communication")
    assert report["job"]["n_ranks"] == 4 and report["job"]["arguments"] == ["--lr", "1"]


def test_a_report_counts_the_ranks_of_the_last_attempt() -> None:
    reason = "rank 3 was lost (SIGKILL)"
    history = story(
        4,
        (5.0, signal_of(3, "SIGKILL", 9)),
        (5.1, Restarting(1, reason, reason, 0.0)),
        *((5.2, RankStarted(rank, 200 + rank, 0, rank, "gpu-7")) for rank in range(2)),
        (9.0, JobEnded(0, "all ranks have ended their scripts", "")),
    )
    assert json_report.report(history, 0)["job"]["n_ranks"] == 2


def test_a_step_is_told_of_the_process_that_made_it() -> None:
    """Rank 1 alone was started again, and told of no step."""
    history = story(
        2,
        (4.0, AtStep(1, 41)),
        (5.0, signal_of(1, "SIGKILL", 9)),
        (5.2, RankStarted(1, 201, 0, 1, "gpu-7")),
        (9.0, exit_of(1)),
        (9.0, JobEnded(1, "rank 1 ended with exit code 1", "")),
    )
    assert failure(history).step is None and failure(history).pid == 201


def test_a_job_that_succeeded_has_a_report_too(tmp_path: Path) -> None:
    history = story(1, (1.0, RankExited(0)), (1.0, JobEnded(0, "all ranks have ended their scripts", "")))
    json_report.write(tmp_path / "report.json", history, 0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["exitcode"], report["cause"], report["reason"]) == ("succeeded", 0, None, "")


# -- docs/failures.md --------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "failures.md"
HEAD_FAILED = f"""Traceback (most recent call last):
  File "/home/me/train.py", line 61, in <module>
    loss = step(model, batch)
  File "/home/me/train.py", line 40, in step
    return model(batch).square().mean()
           ^^^^^^^^^^^^
  File "{TORCH}/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "{TORCH}/nn/modules/module.py", line 1786, in _call_impl
    return forward_call(*args, **kwargs)
  File "{TORCH}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x17 and 16x4)"""
ON_THE_PAGE = story(
    4,
    (60.0, signal_of(3, "SIGKILL", 9)),
    (60.1, Restarting(1, "rank 3 was lost (SIGKILL)", "rank 3 was lost (SIGKILL)", 0.0)),
    *((60.2, RankStarted(rank, 200 + rank, 0, rank, "gpu-7")) for rank in range(4)),
    (912.0, AtStep(2, 1041)),
    (912.3, Failed(2, HEAD_FAILED.splitlines()[-1], "", HEAD_FAILED)),
    (912.3, Failed(0, CLOSED, "", CLOSED)),
    (912.4, exit_of(0)),
    (912.4, exit_of(2, log="odyssey-logs/none_x4k/attempt_1/2/stderr.log")),
    (912.4, ended_of(1)),
    (912.4, ended_of(3)),
    (912.5, JobEnded(1, f"rank 2 failed: {HEAD_FAILED.splitlines()[-1]}; 1 of 1 restarts used", "")),
)


def test_the_block_on_the_page_is_what_is_printed() -> None:
    block = render(failure(ON_THE_PAGE), "odyssey-logs/none_x4k", 90)

    assert f"```text\n{block}\n```" in PAGE.read_text()


def test_every_line_of_the_block_and_every_key_of_the_report_is_explained_on_the_page() -> None:
    named = {name for cell in re.findall(r"^\| (`.+?`) \|", PAGE.read_text(), re.MULTILINE) for name in cell.split("`")}
    report = json_report.report(EXCEPTION, 1)
    keys = {*report, *(f"job.{key}" for key in report["job"]), *(f"cause.{key}" for key in report["cause"])}
    fields = re.findall(r"^  (\w[\w ]*?) +:", render(failure(ON_THE_PAGE), "", 90), re.MULTILINE)

    assert keys - {"job"} <= named
    assert len(fields) == 9 and {*fields} <= named


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_is_on_the_page(code: ExitCode) -> None:
    assert re.search(rf"^\| {code.value} \| ", PAGE.read_text(), re.MULTILINE)


# -- `odyssey run` -----------------------------------------------------------------------------------------------------


def failing(options: RunOptions, watch: Callable[[Event], None], *others: object) -> int:
    """Stands in for the agent: a job of one rank that fails."""
    told: tuple[Body, ...] = (
        JobStarted(options.script, (), 1, 1, 0, "auto", "auto", None, "0.1", 7),
        RankStarted(0, 100, 0, 0, "gpu-7"),
        Failed(0, "ValueError: no", "", TRACEBACK),
        exit_of(0),
        JobEnded(1, "rank 0 failed: ValueError: no", ""),
    )
    for body in told:
        watch(Event(START, 0, "agent", body))
    return 1


def test_a_failed_job_ends_with_the_block_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.agent.start.run", failing)
    options = RunOptions("train.py", log_dir=tmp_path, json_report=tmp_path / "report.json")
    assert run_command.run(options, display=False) == 1
    said = capfd.readouterr().err.splitlines()
    assert "train.py FAILED" in said and "error: rank 0 failed: ValueError: no" in said
    assert sum("ValueError: no" in line and "odyssey" in line for line in said) == 0, "it is told once, in the block"
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "failed"


def test_a_report_that_cannot_be_written_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.agent.start.run", failing)
    path = tmp_path / "none" / "report.json"
    assert run_command.run(RunOptions("train.py", json_report=path), display=False) == 1
    assert f"error: --json-report: cannot write {path}: no such file or directory" in capfd.readouterr().err.splitlines()
