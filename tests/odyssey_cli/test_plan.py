"""`odyssey plan`: where it takes its measurements from, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import strategies
from launcher.joblog import registry
from launcher.joblog.events import RankExited, encode
from odyssey.errors import UsageError
from odyssey_cli.__main__ import main
from odyssey_cli.jobs import find as jobs_find
from odyssey_cli.planning import source
from perfmodel.profile.profile import write
from tests import ROOT, job_events


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def write_job(folder: Path, name: str, n_events: int | None = None) -> Path:
    (folder / "odyssey-logs" / name).mkdir(parents=True)
    lines = b"".join(encode(event) for event in job_events.job()[:n_events])
    (folder / "odyssey-logs" / name / "events.jsonl").write_bytes(lines)
    return folder / "odyssey-logs" / name


def test_without_a_source_it_takes_the_profile_here(folder: Path) -> None:
    write(job_events.profile(), folder / "profile.json")
    write_job(folder, "job")

    found = source.find(None)

    assert (found.name, found.n_nodes, found.ranks_per_node, found.plan) == ("profile.json", 4, 1, None)


def test_without_a_profile_it_takes_the_newest_job(folder: Path) -> None:
    job = write_job(folder, "job")

    found = source.find(None)

    assert found.name == str(job.relative_to(folder))
    assert found.profile == job_events.profile()
    assert found.plan is not None and found.plan.strategy == "reroute"
    change = found.expected_change(None, None)
    node_h = (4 * 2.98 + 3 * 1.42) / 3600  # four nodes of one rank until the loss, three after it
    assert change.source == f"1 loss in {node_h:.3g} node-h, prior 0.0065 per node-day"


@pytest.mark.parametrize("text", ["last", "20261121-09", "20261121-0900_cafe"])
def test_a_job_is_named_as_for_the_other_commands(folder: Path, text: str) -> None:
    jobs = folder / "elsewhere"
    registry.enter(write_job(jobs, "20261120-0800_beef"))
    os.utime(registry.directory() / "20261120-0800_beef", (1, 1), follow_symlinks=False)
    registry.enter(write_job(jobs, "20261121-0900_cafe"))

    found = source.find(text)

    assert Path(found.name).name == "20261121-0900_cafe" == jobs_find.find(text).name
    assert found.profile == job_events.profile()


def test_a_beginning_that_two_jobs_have_is_an_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("alpha-1", "alpha-2"):
        registry.enter(write_job(folder, name))

    assert main(["plan", "alpha"]) == 2
    assert "2 jobs begin with alpha: say which" in capfd.readouterr().err


def test_the_last_of_no_jobs_is_an_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "last"]) == 2
    assert "no such job: last" in capfd.readouterr().err


def test_a_log_with_an_unknown_event_is_an_error_with_its_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = write_job(folder, "job")
    with (job / "events.jsonl").open("ab") as log:
        log.write(b"{}\n")

    assert main(["plan", str(job)]) == 2
    assert f"{job}/events.jsonl: line {len(job_events.job()) + 1}: " in capfd.readouterr().err


def test_a_job_that_was_never_measured_is_an_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = write_job(folder, "job", n_events=5)

    assert main(["plan", str(job)]) == 2
    assert "the job ended before its model was measured" in capfd.readouterr().err


def test_it_shows_the_layout_now_and_after_and_all_candidates(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail-ranks", "3", "--layout", "2x2", "--mtbf", "1h"])

    out = capfd.readouterr().out
    assert code == 0
    assert out.startswith("now  layout 2x2, ")
    assert "without rank 3  " in out
    assert "▸" in out
    for strategy in strategies.names():
        assert strategy in out
    assert "next change expected in 1.0 h (--mtbf 3600 s)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_any_loss_is_shown_by_kinds_and_at_its_worst(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail", "2", "--nodes", "8", "--layout", "2x4"])

    out = capfd.readouterr().out
    assert code == 0
    assert "cannot go on" in out
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("ranks lost"))
    comes_of_it = [line[len("ranks lost") :] for line in lines[first + 1 : lines.index("", first)]]
    assert len(set(comes_of_it)) == len(comes_of_it) > 1


def test_a_loss_that_ends_the_job_says_which_layers_are_gone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail-ranks", "1,3", "--layout", "2x2"])

    assert code == 1
    assert "every holder of layers 3 (Block3), 4 (Block4), 5" in capfd.readouterr().out


def test_json_holds_everything(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail", "1", "--json"])

    answer = json.loads(capfd.readouterr().out)
    assert code == 0
    assert answer["n_placements"] == 4
    names = {"strategy", "plan", "estimate", "reason", "at_next_loss", "spread", "worth_spread", "is_near_equal", "is_fault"}
    assert names == set(answer["outcomes"][0]["candidates"][0])


def test_a_job_of_configs_can_be_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-tiny-two-cores", "--fail-ranks", "3"]) == 0
    assert capfd.readouterr().out.startswith("now  layout 2x2, ")


def test_an_unknown_name_is_told_the_known_ones(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt5"]) == 2
    assert "gpt-tiny-two-cores" in capfd.readouterr().err


def test_it_answers_without_torch(folder: Path) -> None:
    """Which takes longer to import than the answer does."""
    write(job_events.profile(), folder / "profile.json")
    statement = (
        "import sys; from odyssey_cli.__main__ import main; code = main(['plan', '--fail', '1']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    root = str(ROOT)
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True, env={"PYTHONPATH": root})


def test_it_says_what_to_start_with_and_what_failures_cost(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt3-6.7b-a100-32", "--nodes", "2", "--fail-nodes", "1", "--mtbf", "2h"]) == 0

    out = capfd.readouterr().out
    starts = out[out.index("layouts to start with") : out.index("losses  every placement")]
    assert "any 1 node" in next(line for line in starts.splitlines() if "▸" in line)
    exposed = next(line for line in starts.splitlines() if line.startswith("   11+5 "))
    assert exposed.rstrip().endswith("any 1 rank")
    assert "a loss takes " in out and " of every hour" in out
    assert "score: useful samples a second until the loss after the next" in out


def test_a_newer_script_without_a_job_is_passed_over(folder: Path) -> None:
    job = write_job(folder, "job")
    plain = write_job(folder, "plain", n_events=2)
    os.utime(job / "events.jsonl", (1, 1))
    assert source.find(None).name == str(job.relative_to(folder))
    (job / "events.jsonl").unlink()
    with pytest.raises(UsageError, match="no job in odyssey-logs has measured its model"):
        source.find(None)
    with pytest.raises(UsageError, match="ended before its model was measured"):
        source.find(str(plain))


def test_a_job_that_has_ended_is_planned_for_as_if_its_ranks_were_there(folder: Path) -> None:
    job = write_job(folder, "job")
    running = source.find(None).expected_change(None, None).seconds
    last = job_events.job()[-1]
    ends = [replace(last, body=RankExited(rank)) for rank in range(4)]
    with (job / "events.jsonl").open("ab") as file:
        file.writelines(map(encode, ends))
    assert source.find(None).expected_change(None, None).seconds == pytest.approx(running)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--survive", "4"],
            "error: --survive 4: no layout of 4 ranks does: some layer has 4 of the 5 holders that it takes\n",
        ),
        (
            ["--survive-nodes", "4"],
            "error: --survive-nodes 4: no layout of 4 ranks does: some layer has its holders on 4 of the 5",
        ),
        (
            ["--layout", "1x4", "--survive", "1", "--protect", "none"],
            "error: --survive 1: layout 1x4 does not: some layer has 1 of the 2 holders",
        ),
        (["--protect", "some"], "error: --protect: unknown value 'some'\nhelp: did you mean none? one of: auto, none, state\n"),
        (["--objective", "best"], "error: --objective: unknown value 'best'\nhelp: one of: ahead, paper"),
        (["--failure-rate", "0"], "error: --failure-rate: expected 1e-9 to 1e6 losses per node-day, got 0\n"),
        (["--failure-rate", "1e-160"], "error: --failure-rate: expected 1e-9 to 1e6 losses per node-day, got 1e-160\n"),
        (["--failure-rate", "nan"], "error: --failure-rate: expected 1e-9 to 1e6 losses per node-day, got nan\n"),
        (["--fail", "1", "--fail-nodes", "1"], "error: --fail and --fail-nodes exclude each other\n"),
        (["--layouts", "--fail", "1"], "error: --layouts and --fail exclude each other\n"),
        (["--spares", "1", "--layout", "2x2"], "error: --spares and --layout exclude each other\n"),
        (["--layouts", "--svg", "picture.svg"], "error: --layouts and --svg exclude each other\n"),
        (["--spares", "4"], "error: --spares 4: there are 4 ranks\n"),
        (["--spare-nodes", "0"], "error: --spare-nodes: expected at least 1, got 0\n"),
        (["--nodes", "99999999"], "error: --nodes 99999999 --nproc-per-node 1: 99999999 ranks are more than any cluster has\n"),
        (["--fail-ranks", "1,2-99999999999"], "error: --fail-ranks 2-99999999999: 100000000000 ranks are more than any"),
        (["--layouts", "--horizon", "soon"], "error: --horizon: expected a duration, got 'soon'\n"),
    ],
)
def test_what_cannot_be_survived_or_meant_is_an_error(
    options: list[str], error: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(job_events.profile(), folder / "profile.json")

    assert main(["plan", *options]) == 2
    assert capfd.readouterr().err.startswith(error)


def test_the_papers_objective_looks_at_no_loss_but_the_next(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    assert main(["plan", "--fail-ranks", "3", "--objective", "paper"]) == 0

    out = capfd.readouterr().out
    assert "until the next loss (eq. 8)" in out
    assert not [line for line in out.splitlines() if line.startswith("   strategy") and "next loss" in line]


def test_layouts_are_compared_by_what_is_useful_at_this_rate_of_losses(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt3-6.7b-a100-32", "--nodes", "2", "--layouts", "--mtbf", "6h"]
    assert main(asked) == 0
    out = capfd.readouterr().out
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)

    useful = [start["lifetime_value"]["samples_per_s"] for start in answer["starts"]]
    assert useful == sorted(useful, reverse=True) and len(useful) >= 6
    assert all(start["lifetime_value"]["samples_per_s"] < start["samples_per_s"] for start in answer["starts"])
    (single,) = (start for start in answer["starts"] if start["layout"] == "1x16")
    assert single["lifetime_value"]["n_ends"] < 0.5
    (marked,) = (line for line in out.splitlines() if line.startswith("▸  "))
    assert marked.split()[1] == answer["chosen"]
    rows = [line.split()[0] for line in out.splitlines()[3:] if line.startswith("   ")]
    assert sorted([*rows, answer["chosen"]]) == sorted(start["layout"] for start in answer["starts"])
    assert main([*asked, "--json", "--protect", "none"]) == 0
    (single,) = (its for its in json.loads(capfd.readouterr().out)["starts"] if its["layout"] == "1x16")
    assert single["lifetime_value"]["n_ends"] > 0.9
    assert "16x1: no split of 34 layers in one stage fits 80.0 GB each" in out
    assert max(map(len, out.splitlines())) <= 80


def test_spares_are_shown_held_back_and_added(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt3-6.7b-a100-32", "--nodes", "2", "--spare-nodes", "1", "--mtbf", "6h", "--horizon", "12h"]
    assert main(asked) == 0
    out = capfd.readouterr().out
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)

    assert [(spare["n_ranks"], spare["n_idle"]) for spare in answer["held_back"]] == [(16, 0), (16, 8)]
    (added,) = answer["added"]
    assert (added["n_ranks"], added["n_idle"], added["start"]["n_idle"]) == (24, 8, 8)
    none, with_spare = (spare["start"]["lifetime_value"] for spare in (answer["held_back"][0], added))
    assert none["n_losses"] < with_spare["n_losses"]  # which has more nodes to lose
    assert none["samples_per_s"] < with_spare["samples_per_s"] < added["training"]["lifetime_value"]["samples_per_s"]
    assert "held back, of 16 ranks" in out and "added to 16 ranks" in out and "most useful work with none held back" in out
    assert "in the mean over 12.0 h" in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_failures_cost_of_an_hour_is_what_they_take_from_useful_work(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "gpt3-6.7b-a100-32", "--nodes", "2", "--mtbf", "1h", "--horizon", "6h"]
    assert main(asked) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("failures cost "))
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)

    lifetime_value, rate = answer["lifetime_value"], answer["now"]["global_batch"] / answer["step_s"]
    lost = 1 - lifetime_value["samples_per_s"] / rate
    assert line.startswith(f"failures cost {lost * 60:.0f} min of every hour over 6.0 h, with ")
    assert lost == pytest.approx(lifetime_value["stopped"] + lifetime_value["slower"])
    assert 3 < lifetime_value["n_losses"] < 6  # some of six strike what is gone


# -- ranks that come ---------------------------------------------------------------------------------------------------


def test_ranks_that_come_are_taken_in_where_it_pays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")
    asked = ["plan", "--join", "2", "--layout", "2x2", "--mtbf", "1h"]
    assert main(asked) == 0
    out = capfd.readouterr().out
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)

    assert answer["outcomes"] == [] and "without" not in out.partition("\nwith ")[0]
    joined = answer["joined"]
    assert joined["ranks"] == [4, 5]
    first, *rest = joined["candidates"]
    (unchanged,) = (row for row in rest if row["strategy"] == "unchanged")
    assert first["strategy"] == "expand" and first["estimate"]["objective"] > unchanged["estimate"]["objective"]
    assert unchanged["estimate"]["transition"]["moves_s"] == 0 == first["estimate"]["transition"]["groups_s"]
    assert "with ranks 4-5  expand, layout " in out and "ranks 4-5 taken in" in out
    assert "to take them in pays: a score of " in out and "the next change is expected in 1.0 h" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_ranks_that_come_where_it_does_not_pay_stand_by(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--join", "1", "--layout", "3+1", "--mtbf", "100ms", "--horizon", "10s", "--objective", "paper"])

    out = capfd.readouterr().out
    assert code == 0
    assert "with rank 4  unchanged, layout 3+1, " in out and "○ 4 idle" in out
    assert "to take it in does not pay: a score of " in out and " if it stands by" in out
    assert "taken in" not in out


def test_who_was_lost_comes_back_before_others_come(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail-ranks", "3", "--join", "2", "--layout", "2x2", "--change", "change.svg"])

    out = capfd.readouterr().out
    assert code == 0
    assert out.index("without rank 3  ") < out.index("then with ranks 3-4  expand, layout ")
    drawn = (folder / "change.svg").read_text()
    assert (
        "rank 3 is lost: " in drawn
        and "ranks 3-4 taken in" in drawn
        and drawn.index("without rank 3") < drawn.index("with ranks 3-4")
    )


def test_whole_nodes_come_back_where_whole_nodes_were_lost(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")
    nodes = ["--nodes", "3", "--nproc-per-node", "2"]

    assert main(["plan", *nodes, "--fail-nodes", "1", "--join-nodes", "2", "--layout", "3x2", "--json"]) == 0
    by_nodes = json.loads(capfd.readouterr().out)
    assert main(["plan", *nodes, "--fail-ranks", "0", "--join-nodes", "1", "--layout", "3x2", "--json"]) == 0
    one_lost = json.loads(capfd.readouterr().out)

    assert by_nodes["joined"]["ranks"] == [*by_nodes["outcomes"][-1]["ranks"], 6, 7]
    assert one_lost["joined"]["ranks"] == [6, 7]  # a node of which a rank is left has not come


def test_nobody_comes_to_a_job_that_has_ended(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(job_events.profile(), folder / "profile.json")

    code = main(["plan", "--fail-ranks", "1,3", "--layout", "2x2", "--join", "2"])

    out = capfd.readouterr().out
    assert code == 1
    assert "training cannot go on" in out and "then with" not in out


@pytest.mark.parametrize("options", [["--fail", "1"], ["--layouts"], ["--spares", "3"]])
def test_losses_may_come_at_any_rate_where_no_horizon_is_given(
    options: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(job_events.profile(), folder / "profile.json")
    assert main(["plan", *options, "--mtbf", "1"]) == 0, capfd.readouterr().err
    assert main(["plan", *options, "--mtbf", "1", "--horizon", "1d"]) == 2
    assert capfd.readouterr().err.startswith("error: --horizon: ")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--join", "0"), "--join: expected at least 1, got 0"),
        (("--join-nodes", "-1"), "--join-nodes: expected at least 1, got -1"),
        (("--join", "999999999"), "--join 999999999: 999999999 ranks are more than any cluster has"),
        (("--join-nodes", "999999999"), "--join-nodes 999999999: 999999999 ranks are more than any cluster has"),
        (("--join", "1", "--join-nodes", "1"), "--join and --join-nodes exclude each other"),
        (("--join", "1", "--layouts"), "--layouts and --join exclude each other"),
        (("--spares", "1", "--join", "1"), "--spares and --join exclude each other"),
        (("--join", "1", "--strategy", "reroute"), "--join and --strategy exclude each other"),
        (("--join", "1", "--fail", "1", "--fail-nodes", "1"), "--fail and --fail-nodes exclude each other"),
    ],
)
def test_what_cannot_come_is_one_error(
    folder: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], error: str
) -> None:
    write(job_events.profile(), folder / "profile.json")

    assert main(["plan", *options]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {error}\n") and said.count("error:") == 1
