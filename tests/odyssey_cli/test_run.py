"""`odyssey run` and `odyssey profile` with a stand-in for the agent: what it is asked for, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.joblog.events import Event, JobEnded, JobStarted
from launcher.options import RunOptions
from odyssey_cli import run as run_command
from odyssey_cli.__main__ import main
from odyssey_cli.jobs.find import newest_job
from odyssey_cli.planning import profile as profile_command
from odyssey_cli.torchrun import main as torchrun
from perfmodel.profile.profile import write
from tests.job_events import job, profile

Watch = Callable[[Event], None]
Output = Callable[[int, str, bytes], None]
AGENT = "launcher.agent.start.run"
"""What starts ranks; here something else takes its place."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunOptions]:
    """What the agent was asked for; it does nothing and ends well."""
    asked: list[RunOptions] = []

    def agent(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None]) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr(AGENT, agent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return asked


def test_options_reach_the_agent(asked: list[RunOptions]) -> None:
    argv = ["--nodes", "4", "--nproc_per_node", "2", "--max-restarts", "3", "--layout", "2x4", "--strategy", "reroute"]
    argv += ["--mtbf", "6h", "--log-dir", "logs", "--drill", "step=5 kill=2", "--drill", "step=9 lose=1"]
    argv += ["--master-addr", "10.0.0.1", "--master-port", "29500", "--no-display"]

    code = main(["run", *argv, "train.py", "--steps", "5", "--nodes", "7"])

    assert code == 0
    assert asked == [
        RunOptions(
            script="train.py",
            arguments=("--steps", "5", "--nodes", "7"),
            n_nodes=4,
            n_ranks_per_node=2,
            max_restarts=3,
            layout="2x4",
            strategy="reroute",
            mtbf_s=21600.0,
            log_dir=Path("logs"),
            drills=("step=5 kill=2", "step=9 lose=1"),
            master_addr="10.0.0.1",
            master_port=29500,
            ends_process=True,
        )
    ]


def test_nodes_behind_the_script_is_ours_if_no_option_stands_before_it(
    asked: list[RunOptions], capfd: pytest.CaptureFixture[str]
) -> None:
    main(["run", "train.py", "--steps", "5", "--nodes", "4", "--", "-x"])

    assert (asked[0].n_nodes, asked[0].arguments) == (4, ("--steps", "5", "--", "-x"))
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("odyssey: took --nodes 4 as the launcher's")


def test_spares_of_a_script_that_may_build_no_job_are_told_of(
    asked: list[RunOptions], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ours.py").write_text("import odyssey")
    argv = ["run", "--nodes", "2", "--spares", "1", "--no-display"]
    told = "odyssey: --spares: train.py does not import odyssey; ranks stand by in an odyssey.Job, else all of them run\n"

    assert [main([*argv, script]) for script in ("train.py", "ours.py")] == [0, 0]

    assert [options.n_spares for options in asked] == [1, 1]
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize(
    ("before", "behind", "note"),
    [
        ((), ("--layout", "x", "--help"), "--layout x behind train.py was passed to it"),
        (("--max-restarts", "1"), ("--nodes", "3"), "--nodes 3 behind train.py was passed to it"),
        (("--nodes", "1"), ("--nodes=3", "--no_display"), "--nodes=3, --no_display behind train.py were passed to it"),
        (("--no-display",), ("--layout",), "--layout behind train.py was passed to it"),
        ((), ("--tee", "3", "--lay", "2x4"), None),
        ((), ("--epochs", "2", "--", "--nodes", "3"), None),
    ],
)
def test_options_of_ours_behind_the_script_are_passed_to_it_with_a_note(
    asked: list[RunOptions],
    capfd: pytest.CaptureFixture[str],
    before: tuple[str, ...],
    behind: tuple[str, ...],
    note: str | None,
) -> None:
    main(["run", *before, "train.py", *behind])

    assert (asked[0].n_nodes, asked[0].arguments) == (1, behind)
    said = [line for line in capfd.readouterr().err.splitlines() if "note:" in line]
    assert said == ([] if note is None else [f"odyssey: note: {note}"])


def test_torchruns_own_command_line_has_no_such_note(asked: list[RunOptions], capfd: pytest.CaptureFixture[str]) -> None:
    torchrun(["train.py", "--nodes", "3"])

    assert (asked[0].n_nodes, asked[0].arguments) == (1, ("--nodes", "3"))
    assert "note:" not in capfd.readouterr().err


def replay(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None]) -> int:
    for event in job():
        watch(event)
    return 0


def test_without_a_terminal_events_are_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AGENT, replay)
    code = run_command.run(RunOptions("train.py", log_dir=tmp_path), display=True)

    out, err = capfd.readouterr()
    assert (code, out) == (0, "")
    said = [line.split(" ", 2)[2] if line.startswith("odyssey ") else line for line in err.splitlines()]
    assert said == [
        "start train.py --steps 40 on 4 ranks",
        "profile measured in 200 ms",
        "generation 1: plan start, layout 2x2 (2 pipelines of 2 stages): the start",
        "generation 1: go",
        "rank 3 lost: SIGKILL, its slot is gone",
        "generation 2: 3 candidates, next change expected in 1.0 h (--mtbf); planned ahead: 0 of 1",
        "generation 2: plan reroute, layout 2x2 -1 (2 pipelines of 2 stages; 1 stage without a rank, whose micro-batches "
        "others run): best of 2 candidates",
        "generation 2: go, recovered in 88 ms (detect 2.0 ms, pause 11 ms, plan 4.0 ms, groups 61 ms, move 10 ms)",
        "odyssey: 40 steps in 0:04",
        "odyssey: recovered from the loss of 1 rank in 88 ms; planned ahead: 0 of 1",
        "odyssey: 130 ms lost in all, the work that was redone included",
    ]


def test_the_end_names_the_jobs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def agent(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None]) -> int:
        started = JobStarted("train.py", (), 1, 2, 0, "auto", "auto", None, "0.1.0", 100, folder=f"{tmp_path}/7_3f9c")
        watch(Event(1.0, 1, "agent", started))
        return 0

    monkeypatch.setattr(AGENT, agent)
    run_command.run(RunOptions("train.py", log_dir=tmp_path), display=False)

    first, *_, last = capfd.readouterr().err.splitlines()
    assert first.endswith(f"start train.py on 2 ranks; logs: {tmp_path}/7_3f9c")
    assert last == f"odyssey: log: {tmp_path}/7_3f9c"


def test_a_failed_job_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def agent(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None]) -> int:
        watch(Event(1.0, 1, "agent", JobEnded(1, "rank 0 failed: ValueError: bad", "see its traceback above")))
        return 1

    monkeypatch.setattr(AGENT, agent)
    code = run_command.run(RunOptions("train.py", log_dir=tmp_path), display=False)

    assert code == 1
    assert capfd.readouterr().err.splitlines()[:2] == [
        "error: rank 0 failed: ValueError: bad",
        "help: see its traceback above",
    ]


def test_the_newest_job_is_the_one_written_last(tmp_path: Path) -> None:
    import os

    for name, written in (("b", 100), ("a", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("")
        os.utime(tmp_path / name / "events.jsonl", (written, written))

    assert newest_job(tmp_path) == tmp_path / "a"
    assert newest_job(tmp_path / "a") is None


def test_a_profile_is_written_and_shown_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def agent(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None]) -> int:
        assert options.write_profile is not None
        write(profile(), options.write_profile)
        return 0

    monkeypatch.setattr(AGENT, agent)
    code = profile_command.profile(RunOptions("train.py"), tmp_path / "p.json")

    out = capfd.readouterr().out
    assert code == 0
    assert (
        "Block7" in out
        and max(map(len, out.splitlines())) <= 80
        and "weight-grad" in out
        and "2.0 ms" in out
        and "groups" in out
    )


def test_a_script_that_cannot_be_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odyssey.errors import OdysseyError

    monkeypatch.setattr(AGENT, lambda *_: 0)
    with pytest.raises(OdysseyError, match="ended without a profile"):
        profile_command.profile(RunOptions("train.py"), tmp_path / "p.json")
