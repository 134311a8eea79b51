"""What the benchmarks make of a job's log, and what they write; the demo's verdict."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks import (
    accuracy,
    coordinator,
    grow,
    joblog,
    launch,
    recovery,
    report,
    restart,
    simulated_agents,
    slow_rank,
    summary,
    trial,
)
from examples import demo
from launcher.joblog.events import Body, Cause, CauseKind, Event, GenerationStarted, PlanChosen, RankLost, RankStarted
from odyssey.plan.estimate import Estimate, Transition
from odyssey.protocol.reports import Committed, Paused
from odyssey.protocol.units import Position, Result
from tests import ROOT, job_events
from tests.launchers import free_port

MACHINE = report.Machine("cpu", 2, 2**33, "Linux", "3.12", "2.13", "2026-01-01", "abc", 0.1)


def at(time: float, body: Body, generation: int = 1) -> Event:
    return Event(time, generation, "agent", body)


def committed(step: int, rank: int = 0, unit_s: float = 0.1) -> Committed:
    return Committed(rank, 1, Result(Position(step, 0), "step", (2.0, 1.0)), 32, unit_s)


def estimate(step_s: float, moves_s: float = 0.0) -> Estimate:
    return Estimate(step_s, Transition(0.01, 0.01, 0.0, 0.0, 0.02, moves_s), 1 << 20, 100.0)


def a_job_that_loses_rank_3() -> list[Event]:
    """Steps of 0.1 s; rank 3 is lost at 11.05; the new generation goes at 11.2 and makes steps of 0.2 s from step 10."""
    first = job_events.plan(1, None, estimate(0.11))
    second = msgspec.structs.replace(job_events.plan(2, 3, estimate(0.18, moves_s=0.06)), step=10)
    return [
        *[at(9.0, RankStarted(rank, 100 + rank, rank)) for rank in range(4)],
        at(9.9, PlanChosen(first, "the start", ())),
        at(10.0, GenerationStarted(None, None, None, 0.01, 0.0, None)),
        *[at(10.1 + step * 0.1, committed(step)) for step in range(9)],
        at(11.05, RankLost(3, Cause(CauseKind.SIGNAL, "SIGKILL"), True), 1),
        at(11.06, committed(9)),
        *[at(11.07 + rank / 100, Paused(rank, 2, Position(10, 0), "compute", (0,)), 2) for rank in range(3)],
        at(11.1, PlanChosen(second, "best objective", ()), 2),
        at(11.2, GenerationStarted(0.01, 0.04, 0.01, 0.05, 0.03, 0.16), 2),
        *[at(11.4 + i * 0.2, committed(10 + i), 2) for i in range(6)],
    ]


def test_generations_have_their_own_steps_and_the_moments_of_their_transition():
    first, second = joblog.generations(a_job_that_loses_rank_3())

    assert [commit.step for commit in first.commits] == list(range(9))
    assert [commit.step for commit in second.commits] == list(range(10, 16))
    assert (first.lost_at, second.lost_at) == (None, 11.05)
    assert second.paused_at == pytest.approx(11.09)
    assert first.step_s() == pytest.approx(0.1)
    assert second.step_s() == pytest.approx(0.2)


def test_parts_of_a_recovery_add_up_to_the_whole():
    parts = recovery.parts_of(joblog.generations(a_job_that_loses_rank_3())[1], killed_at=11.03, finished_at=11.42)
    in_turn = (parts.detect_s, parts.pause_s, parts.plan_s, parts.ready_s, parts.first_step_s)
    assert in_turn == pytest.approx((0.02, 0.04, 0.01, 0.1, 0.22))
    assert sum(in_turn) == pytest.approx(11.42 - 11.03)


def a_generation(went: GenerationStarted) -> joblog.Generation:
    """It goes at 20.0 and makes steps of 0.2 s."""
    commits = tuple(joblog.Commit(step, 20.25 + step * 0.2, 0.1) for step in range(6))
    return joblog.Generation(job_events.plan(2, None, estimate(0.2)), False, None, None, 19.9, 20.0, went, commits)


def test_a_pause_for_growth_begins_when_a_rank_stands_still_and_one_for_a_respawn_at_the_kill():
    taken_in = a_generation(GenerationStarted(None, None, None, 0.02, 0.03, None, stood_s=0.07))
    waited_for = a_generation(GenerationStarted(0.01, 0.04, 0.01, 0.02, 0.03, 0.5, spawn_s=0.3))
    assert grow.change_of("return", taken_in, killed_at=15.0).pause_s == pytest.approx(20.25 - 19.93 - 0.2)
    assert grow.change_of("respawn", waited_for, killed_at=19.5).pause_s == pytest.approx(20.25 - 19.5 - 0.2 - 0.3)
    with pytest.raises(trial.TrialError):
        grow.change_of("return", waited_for, killed_at=19.5)


def test_a_slow_rank_that_nothing_is_made_of_is_left_alone():
    def ran(generation: int, strategy: str, step_s: float) -> joblog.Generation:
        plan = msgspec.structs.replace(job_events.plan(generation, None, estimate(0.2)), strategy=strategy)
        commits = tuple(joblog.Commit(step, 20.0 + step * step_s, 0.1) for step in range(20))
        return joblog.Generation(
            plan, False, None, None, 19.9, 20.0, GenerationStarted(None, None, None, 0.0, 0.0, None), commits
        )

    alone, reacted, dropped = ran(1, "initial", 0.6), ran(2, "rebalance", 0.2), ran(3, "reroute", 0.3)
    found = [slow_rank.slow_rank_of(alone, reacted, dropped, slow_at=20.1)]
    assert (found[0].strategy, found[0].reacted_after_s) == ("rebalance", pytest.approx(-0.1))
    figures = {"slow_rank_throughput_ratio": 3.0, "slow_rank_over_dropped": 1.5}
    assert slow_rank.summarise(found) == pytest.approx(figures)
    found = [slow_rank.slow_rank_of(alone, alone, dropped, slow_at=20.1)]
    assert slow_rank.summarise(found) == pytest.approx({"slow_rank_throughput_ratio": 1.0, "slow_rank_over_dropped": 0.5})


def test_growth_is_summed_up_by_medians_and_by_all_that_was_redone():
    def one(case: str, pause_s: float) -> grow.Change:
        return grow.Change(case, pause_s, 0.1, 0.01, 0.02, 0.01, 0.0, 1)

    changes = [one("return", 0.1), one("return", 0.2), one("return", 0.6), one("respawn", 0.3)]
    left, slow = [grow.Left(3, 0.0), grow.Left(3, 0.5)], [slow_rank.SlowRank(0.6, 0.2, 0.3, "rebalance", 30.0)]
    figures = {"grow_pause_s_8": 0.2, "respawn_pause_s_8": 0.3, "notice_redone_steps": 0.5}
    assert grow.summarise(changes, left, []) == figures
    assert grow.summarise(changes, left, slow).keys() - figures.keys() == {
        "slow_rank_throughput_ratio",
        "slow_rank_over_dropped",
    }
    found = grow.rows(changes, left, slow)
    expected = [("return", 3, 0.6), ("respawn", 1, 0.3), ("leave", 6, None), ("slow: rebalance", 1, None)]
    assert [(row["case"], row["ranks"], row["worst"]) for row in found] == expected
    assert len({tuple(row) for row in found}) == 1


def test_accuracy_compares_each_generation_with_its_own_estimate():
    log = joblog.generations(a_job_that_loses_rank_3())
    first, second = accuracy.samples_of("small", 4, log, [1 << 20, 2 << 20])
    assert (first.is_first, second.is_first) == (True, False)
    assert (first.plan, second.strategy, second.plan) == ("2x2", "reroute", "2x2 -1")
    assert accuracy.step_error(first) == pytest.approx(0.1)
    assert accuracy.step_error(second) == pytest.approx(0.1)
    assert accuracy.transition_error(first) is None
    assert accuracy.transition_error(second) == pytest.approx(1 - 0.09 / 0.16), "less the detection, which is not measured"
    assert (accuracy.memory_error(first), accuracy.memory_error(second)) == pytest.approx((0.0, 0.5))


def test_accuracy_counts_every_plan_in_one_summary_and_has_quartiles_over_cases():
    def one(model: str, predicted_s: float, transition_s: float | None) -> accuracy.Sample:
        return accuracy.Sample(model, 4, "x", "2x2", predicted_s, 1.0, transition_s, None if transition_s is None else 1.0)

    samples = [*(one(f"m{i}", 1 + i / 10, None) for i in range(5)), *(one("lost", 1.5, x) for x in (1.1, 1.1, 1.4))]
    found = accuracy.summarise(samples)
    assert found == pytest.approx(
        {
            "real_first_plan_step_median_error": 0.2,
            "real_step_median_error": 0.5,
            "real_step_bias": 0.5,
            "real_transition_median_error": 0.1,
            "real_cases": 6,
        }
    )
    low, middle, high, *cases = accuracy.rows(samples)
    assert (low["step error"], middle["step error"], high["step error"]) == pytest.approx((0.1, 0.2, 0.3))
    assert [row["plans"] for row in cases] == [3, 1, 1, 1, 1, 1] and low["plans"] == 5


def test_the_peak_of_a_process_is_what_it_had_since_it_is_watched():
    """The peak of a small process: what another one shares with it, and lets go of meanwhile, is a little."""
    command = [
        sys.executable,
        "-S",
        "-c",
        "print(flush=True); input(); block = b'x' * (64 << 20); del block; print(flush=True); input()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        trial.watch_peak(process.pid)
        before = trial.peak_bytes(process.pid)
        process.stdin.write(b"\n")
        process.stdout.readline()
        assert 60 << 20 < trial.peak_bytes(process.pid) - before < 70 << 20
        trial.watch_peak(process.pid)
        assert trial.peak_bytes(process.pid) - before < 10 << 20
        process.stdin.write(b"\n")


def test_recovery_summary_quotes_the_automatic_choice_and_the_ratio_to_torchrun():
    def one(case: str, n_ranks: int, raw_s: float) -> recovery.MeasuredRecovery:
        return recovery.MeasuredRecovery(case, n_ranks, "reroute", raw_s, 0.1, 0.1, None)

    measured = [
        *[one("odyssey-auto", 4, raw_s) for raw_s in (0.2, 0.3, 0.4)],
        one("odyssey-shrink", 4, 0.15),
        one("torchrun", 4, 6.1),
        one("odyssey-auto", 8, 0.5),
    ]
    found = recovery.summarise(measured)
    assert found == pytest.approx(
        {
            "kill_to_step_s_4": 0.2,
            "kill_to_step_raw_s_4": 0.3,
            "speedup_vs_torchrun_4": 30.0,
            "kill_to_step_s_8": 0.4,
            "kill_to_step_raw_s_8": 0.5,
        }
    )
    assert [(row["ranks"], row["case"]) for row in recovery.rows(measured)] == [
        (4, "odyssey-auto"),
        (4, "odyssey-shrink"),
        (4, "torchrun"),
        (8, "odyssey-auto"),
    ]


def test_step_time_of_marks_is_that_of_the_process_with_most_of_them():
    marks = [trial.Mark(7, 0, step, 5.0 + step * 0.5) for step in range(6)] + [trial.Mark(8, 1, 0, 1.0)]
    assert trial.step_s(marks) == pytest.approx(0.5)


def test_launch_summary_sets_each_number_of_ranks_against_torchruns():
    def one(launcher: str, n_ranks: int, seconds: float, script: str = "imports torch") -> launch.Start:
        return launch.Start(launcher, script, n_ranks, seconds, int(seconds * 100))

    starts = [
        *[one("odyssey", 4, seconds) for seconds in (1.0, 2.0, 9.0)],
        *[one("torchrun", 4, seconds) for seconds in (4.0, 3.0, 5.0)],
        one("odyssey", 4, 0.5, "imports nothing"),
        one("torchrun", 4, 1.0, "imports nothing"),
        one("odyssey", 16, 3.0),
    ]
    helps = [launch.Help(0.3, 0.1), launch.Help(0.1, 0.1), launch.Help(0.2, 0.1)]
    assert launch.summarise(starts, helps) == pytest.approx(
        {
            "launch_ratio_4": 0.5,
            "launch_memory_ratio_4": 0.5,
            "launch_bare_ratio_4": 0.5,
            "help_s": 0.2,
            "help_ratio": 2.0,
        }
    )
    first = launch.rows(starts)[0]
    assert (first["launcher"], first["runs"], first["least"], first["most"]) == ("odyssey", 3, 1.0, 9.0)


def test_restart_summary_keeps_early_kills_and_heavy_imports_apart():
    def one(launcher: str, when: str, line_s: float, step_s: float, script: str = "DDP", n_ranks: int = 4) -> restart.Restart:
        return restart.Restart(launcher, script, n_ranks, when, 3.0, line_s, step_s)

    measured = [
        one("odyssey", "late", 0.2, 0.5),
        one("odyssey", "late", 0.4, 0.7),
        one("torchrun", "late", 3.0, 6.0),
        one("odyssey", "early", 0.6, 1.5),
        one("torchrun", "early", 2.0, 5.0),
        one("odyssey", "late", 1.0, 2.0, "DDP, heavy imports"),
        one("torchrun", "late", 10.0, 10.0, "DDP, heavy imports"),
        one("odyssey", "late", 0.2, 0.5, n_ranks=8),
    ]
    assert restart.summarise(measured) == pytest.approx(
        {
            "restart_ratio_4": 0.1,
            "resume_ratio_4": 0.1,
            "restart_ratio_4_early": 0.3,
            "resume_ratio_4_early": 0.3,
            "restart_heavy_ratio_4": 0.1,
            "resume_heavy_ratio_4": 0.2,
        }
    )
    assert [(row["script"], row["ranks"], row["when"], row["launcher"]) for row in restart.rows(measured)] == [
        ("DDP", 4, "early", "odyssey"),
        ("DDP", 4, "early", "torchrun"),
        ("DDP", 4, "late", "odyssey"),
        ("DDP", 4, "late", "torchrun"),
        ("DDP", 8, "late", "odyssey"),
        ("DDP, heavy imports", 4, "late", "odyssey"),
        ("DDP, heavy imports", 4, "late", "torchrun"),
    ]


@pytest.mark.parametrize("launcher", ["odyssey", "torchrun"])
def test_trial_sees_every_ranks_first_line_kills_the_living_and_leaves_nothing(tmp_path, launcher):
    (tmp_path / launcher).mkdir()
    flags = ["--max-restarts", "2"]
    with trial.PLAIN_LAUNCHERS[launcher](tmp_path / launcher, 2, "idle.py", flags, []) as job:
        job.wait_until(lambda: len(job.first_lines()) == 2, "first lines")
        firsts = job.first_lines()
        assert sorted(first.rank for first in firsts) == [0, 1]
        assert all(first.time > job.started_at for first in firsts)
        assert job.memory_bytes() > 1e6
    assert not any(psutil.pid_exists(first.pid) for first in firsts)


def test_simulated_ranks_join_go_and_pause():
    phases = [(phase, n_messages) for phase, n_messages, _ in coordinator.measure(64)]
    assert phases == [("join", 64), ("ready", 64), ("pause", 64)]


def test_a_step_costs_a_message_an_agent_and_is_nothing_to_agree_upon(tmp_path, monkeypatch):
    monkeypatch.setattr(simulated_agents, "STEP_S", 0.1)
    n, n_ranks_each = 3, 8
    with simulated_agents.simulated(n, n_ranks_each, tmp_path, free_port()) as its:

        def sent():
            return sum((Counter(its.sent(i)) for i in range(n)), Counter())

        its.until(lambda: its.have_joined and its.step >= 5)
        before, step = sent(), its.step
        its.until(lambda: its.step >= step + 10 and "Committed" in sent() - before)
        found, n_steps = sent() - before, its.step - step
    ours = {kind: found[kind] / n_steps for kind in ("Committed", "AppendEntries", "Appended", "FromRank", "other")}
    assert ours["Committed"] <= 2 * (n - 1)  # on a busy machine some of the steps before
    assert ours["AppendEntries"] < n - 1 and ours["Appended"] < n - 1, "less than a round of messages a step"
    assert ours["FromRank"] + ours["other"] <= n


def test_next_attempt_is_that_of_other_processes(tmp_path):
    with trial.Trial(["true"], {}, tmp_path) as job:
        for pid, rank, moments in ((11, 0, (1.0, 2.0)), (12, 1, (1.5,)), (21, 0, (7.0, 8.0)), (22, 1, (9.0,))):
            lines = [f"{rank} {step} {moment}\n" for step, moment in enumerate(moments)]
            (job.marks_folder / f"{pid}.marks").write_text("".join(lines))
            (job.marks_folder / f"{pid}.first").write_text(f"{rank} {moments[0] - 0.5}\n")
        assert restart.steps_of_all(job, frozenset(), 2) == 1.5
        assert restart.steps_of_all(job, frozenset({11, 12}), 2) == 9.0
        assert restart.lines_of_all(job, frozenset({11, 12})) == 8.5


def test_report_is_read_as_written_and_names_the_machine(tmp_path):
    written = report.Report(
        "recovery", "About.", report.this_machine(), {"kill_to_step_s_4": 0.05}, [{"ranks": 4, "raw s": None}]
    )
    assert report.read(report.write(written, tmp_path)) == written
    assert written.machine.n_cores >= 1
    assert written.machine.torch


def test_page_has_every_metric_and_every_row():
    rows: list[dict[str, report.Cell]] = [{"case": "torchrun", "kills": 4, "raw s": 5.912345, "groups s": None}]
    text = summary.details(report.Report("recovery", "About kills.", MACHINE, {"kill_to_step_s_4": 0.0512}, rows))
    assert "| `kill_to_step_s_4` | 0.0512 |  | 4 ranks: SIGKILL to the next step on all, less one step, seconds |" in text
    assert "| case | kills | raw s | groups s |\n|---|---:|---:|---|\n| torchrun | 4 | 5.91 | - |" in text
    assert "2 cores of cpu" in text


def test_page_sets_figures_against_their_aims_and_peers():
    figures = {"kill_to_step_s_8": 0.1768, "speedup_vs_torchrun_8": 66.81}
    text = summary.page([report.Report("recovery", "About.", MACHINE, figures, [])])
    assert "| `kill_to_step_s_8` | 0.177 | ≤ 0.12 | torchrun's restart from memory takes 66.8 times as long |" in text
    assert "[recovery](benchmarks/recovery.md)" in text
    assert "| `launch_ratio_16` | - | ≤ 0.11 | torchrun: 1 |" in text


def test_what_nobody_can_measure_again_as_it_was_is_marked():
    reports = [report.Report(name, "About.", MACHINE, {f"{metric}": 0.1}, []) for name, metric in
               (("recovery", "kill_to_step_s_8"), ("launch", "launch_ratio_16"))]  # fmt: skip
    text = summary.page(reports, {"launch"})
    assert "| `launch_ratio_16` | 0.1 † |" in text and summary.LEGEND in text
    assert "| `kill_to_step_s_8` | 0.1 | ≤ 0.12 |" in text
    assert summary.LEGEND not in summary.page(reports)
    why = "it was measured at commit 1234567, which is not in the history"
    assert f"To be measured again: {why}." in summary.details(reports[1], why)


def test_every_figure_that_is_told_is_explained():
    told = {metric: beside for figures in summary.HEADLINES.values() for metric, beside in figures.items()}
    beside = {metric for text in told.values() for metric in re.findall(r"{(\w+)}", text)}
    assert {*told, *beside, *summary.LEAST, *summary.MOST} <= {*summary.MEANINGS}
    assert not summary.LEAST.keys() & summary.MOST.keys()


def test_page_without_results_says_how_to_get_some():
    assert "python -m benchmarks" in summary.page([])


@pytest.mark.parametrize(
    ("disturbed", "equal", "words"),
    [
        ({0: 5.0, 1: 4.0, 2: 3.0}, True, "no step was lost"),
        ({0: 5.0, 1: 4.00001, 2: 3.0}, True, "no step was lost"),
        ({0: 5.0, 1: 4.1, 2: 3.0}, False, "not the same training"),
        ({0: 5.0, 1: 4.0}, False, "missing"),
    ],
)
def test_demo_tells_the_same_curve_from_another(disturbed, equal, words):
    text, is_equal = demo.verdict(disturbed, {0: 5.0, 1: 4.0, 2: 3.0}, n_steps=3)
    assert is_equal == equal
    assert words in text


def test_what_nobody_can_measure_again_is_refused(tmp_path: Path):
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    commit = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x")
    git(*commit)
    first = git("rev-parse", "--short", "HEAD")
    git("checkout", "-q", "-b", "beside")
    git(*commit[:-1], "beside")
    beside = git("rev-parse", "--short", "HEAD")
    git("checkout", "-q", "main")
    git(*commit[:-1], "second")

    assert summary.problem(first, tmp_path) is None
    assert "differed from commit" in (summary.problem(f"{first}+", tmp_path) or "")
    assert "not in the history" in (summary.problem(beside, tmp_path) or "")
    assert "not in the history" in (summary.problem("unknown", tmp_path) or "")


def test_the_readme_says_of_job_wall_what_was_measured() -> None:
    measured = msgspec.json.decode((report.RESULTS / "job_wall.json").read_bytes())["summary"]
    said = re.findall(r"(\d\.\d\d)\s+times", (ROOT / "README.md").read_text())
    keys = ("job_wall_ratio", "job_wall_ratio_torchrun", "job_wall_ratio_torchft")
    assert said == [f"{measured[key]:.2f}" for key in keys] and measured["lost_progress"] == 0


def test_the_readme_says_how_soon_the_next_step_was_measured_to_come() -> None:
    def beside_torchrun(name: str, *cases: str) -> list[tuple[str, str, str]]:
        measured = report.read(report.RESULTS / f"{name}.json")
        found = {row["case"]: row["beyond the step"] for row in measured.rows if row["ranks"] == 8}
        theirs = found["torchrun"]
        return [(f"{found[case]:.2f}", f"{theirs:.2f}", f"{theirs / found[case]:.0f}") for case in cases]

    tiers = [*beside_torchrun("resilient", "restart", "continue", "resilient"), *beside_torchrun("recovery", "odyssey-auto")]
    said = re.findall(r"(\d+\.\d\d) s, not (\d+\.\d\d) s: (\d+) times sooner \|", (ROOT / "README.md").read_text())
    assert said == tiers
