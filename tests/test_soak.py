"""The promise under random faults: some named jobs in `make test`, a thousand faults in `make soak`. See tests/soak."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from benchmarks import report
from launcher.joblog.events import Event
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position, Result
from tests import ROOT
from tests.soak import draw, parts, sequences, verdict, worlds
from tests.soak.case import Agents, Case, Fault, PointFault, Recipe, Slow, logs_of
from tests.soak.classes import SURROUNDINGS, surroundings
from tests.soak.points import OF_ONE_RANK, POINTS
from tests.soak.run import GOOD, Outcome, run
from tests.soak.soak import Total, soak_jobs, soak_protected, soak_sequences
from tests.soak.start import Broken, Start

SHORT = Recipe(steps=10)
NAMED = {
    3001: {"nested", "kill at trial", "kill at rename", "stop at data", "kill rank on step"},
    3002: {"nadam", "raise in loss", "kill rank on ready", "stop rank on receiving", "overwrite store on joined"},
    3004: {"prefix", "cut rank on step", "kill store on go", "_exit in script", "kill rank on receiving"},
    3013: {"kill job on joined", "kill job on step", "kill rank on step"},
    3015: {"mlp", "kill rank on receiving", "slow ops: seconds"},
    3023: {"odd", "kill job on step"},
    3027: {"stop agent on pausing", "kill agent on step", "kill member on plan"},
    3028: {"kill member on go", "kill rank on step", "several agents"},
}
"""Seeds of the quick jobs, and what is drawn for each: change them with the drawing."""
MET = (
    "rolled forward",
    "redone",
    "lost during recovery",
    "lost while receiving",
    "lost just after joining",
    "paused after layers were received",
    "paused in the script's own code",
    "paused in halves",
    "paused in halves of other pipelines",
    "paused with cut micro-batches",
    "grew back",
    "lost while draining",
    "newcomer lost",
)
"""Odd branches that a soak must have met: otherwise its faults do not test them."""
STRUCK = (
    *(f"{kind} rank" for kind in ("kill", "stop", "freeze", "signal", "cut")),
    *(f"{kind} {helper}" for kind in ("kill", "freeze", "stop") for helper in ("store", "zygote", "planner", "guard")),
    *(f"{how} in {where}" for how in ("raise", "exit", "_exit") for where in ("script", "loss")),
    *(f"{how} at {where}" for how in ("kill", "stop") for where in POINTS),
    *(f"{kind} {target}" for kind in ("kill", "stop", "freeze") for target in ("agent", "member")),
    "signal agent",
    "join late agent",
    "kill job",
    "junk ports",
    "silence ports",
    "overwrite store",
)
"""And the faults that it must consist of."""


SEQUENCES_MEET = {
    *(f"{kind} rank" for kind in ("kill", "stop", "leave", "slow", "freeze", "cut")),
    *(f"{kind} {target}" for kind in ("kill", "leave") for target in ("agent", "member")),
    "join late agent",
    "grew back",
    "lost while draining",
    "newcomer lost",
    "expand",
    "rebalance",
}
"""What 300 sequences must have consisted of, and met."""


def ran(case: Case, folder) -> Outcome:
    outcome = run(case, folder / "job")
    assert outcome.is_good, str(outcome)
    return outcome


def kill(on: str, number: int, rank: int, delay_s: float = 0.01) -> Fault:
    return Fault("kill", "rank", on, number, delay_s, rank, signal.SIGKILL)


LAYOUTS = ("4x2", "2x2", "2x4", "3+2+3")
QUICK = ("2x2-auto", "2x2-respawn")


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        pytest.param(layout, strategy, marks=() if f"{layout}-{strategy}" in QUICK else pytest.mark.soak)
        for layout in LAYOUTS
        for strategy in draw.STRATEGIES
        if strategy != "redundant"  # every layer has two holders here
    ],
)
def test_a_killed_rank_changes_nothing(layout, strategy, tmp_path):
    n_ranks = draw.N_RANKS[layout]
    restarts = 3 if strategy == "respawn" else 0
    tied = Recipe(variant="tied", steps=40)  # the agent may be steps behind
    case = Case(0, layout, n_ranks, strategy, restarts, False, tied, chains=((kill("step", 4, n_ranks - 1),),))
    outcome = ran(case, tmp_path)
    assert outcome.verdict == "exact" and outcome.struck == ["kill rank"]
    assert strategy in ("auto", outcome.strategies[1]), "the first plan is that of the start"


def ended(case: Case, outcome: Outcome, code: int) -> Start:
    """A start of one agent that has been before."""
    start = Start(case, outcome.folder, 0)
    start.codes = {0: code}
    start.struck = [{"struck": "kill rank", "rank": 3, "agent": None, "innocent": False}]
    return start


@pytest.mark.soak
def test_the_verdict_sees_what_is_wrong(tmp_path):
    """A job's results, each changed a little: none of them passes for exact."""
    chain = (kill("step", 3, 3),)
    outcome = ran(
        Case(0, "2x2", 4, recipe=Recipe(steps=6, eval_every=2, save_every=2, once_every=3), chains=(chain,)), tmp_path
    )
    (log,) = logs_of(outcome.folder, 0, 0).glob("*/events.jsonl")

    def judged(case: Case = outcome.case) -> str:
        with pytest.raises(Broken) as broken:
            verdict.judge(case, outcome.folder, [ended(case, outcome, 0)])
        return str(broken.value)

    unstruck = ended(outcome.case, outcome, 0)
    unstruck.struck = []
    with pytest.raises(Broken, match=r"wrongly lost: nothing had struck \{.rank 3.\}"):
        verdict.judge(outcome.case, outcome.folder, [unstruck])

    for altered in ({"optimizer": "momentum"}, {"dropout": 0.2}, {"clip": None}, {"steps": 7}, {"global_batch": 14}):
        assert judged(replace(outcome.case, recipe=replace(outcome.case.recipe, **altered))).startswith("wrong: ")
    written = (outcome.folder / "result.pt").read_bytes()
    result = torch.load(outcome.folder / "result.pt")
    result["state"]["model"]["layers.2.up.weight"][1, 1] += 1e-9
    torch.save(result, outcome.folder / "result.pt")
    assert "the parameters at the end differ by" in judged()
    (outcome.folder / "once-3").unlink()
    assert "what was to be done once was not after the steps [3]" in judged()
    (outcome.folder / "once-3").touch()
    (outcome.folder / "result.pt").unlink()
    assert "without a result" in judged()
    (outcome.folder / "result.pt").write_bytes(written)
    parts = list((outcome.folder / "checkpoint" / "step-000006").iterdir())
    max(parts, key=lambda path: path.stat().st_size).write_bytes(b"")
    assert "the checkpoint after 6 steps" in judged()
    log.write_bytes(log.read_bytes().replace(b'"code":0', b'"code":1'))
    with pytest.raises(Broken, match="does not replay"):
        verdict.judge(outcome.case, outcome.folder, [ended(outcome.case, outcome, 1)])


@pytest.mark.parametrize(("limit", "why"), [("SILENT_S", "nothing but notes in its logs"), ("LIMIT_S", "it has not ended")])
def test_a_job_whose_logs_tell_nothing_or_that_never_ends_is_told_as_hung(limit, why, tmp_path, monkeypatch):
    monkeypatch.setattr(f"tests.soak.start.{limit}", 0.2)  # in which nothing can have been imported yet
    outcome = run(Case(0, "2x2", 4, recipe=SHORT), tmp_path / "job")
    assert outcome.verdict == "hang" and why in outcome.why and (outcome.folder / "stacks.txt").exists()


@pytest.mark.parametrize(("is_killed", "unseen"), [(True, {2, 3}), (False, set())])
def test_a_step_that_was_saved_before_the_agent_heard_of_it_is_behind_the_next_start(is_killed, unseen, tmp_path):
    def log(*results: Result) -> list[Event]:
        return [Event(0.0, 1, "rank 0", Committed(0, 1, result, 8, 0.1)) for result in results]

    before = log(Result(Position(0, 1), "step", (0.5,)), Result(Position(1, 1), "step", (0.4,)))
    after = log(Result(Position(0, 0), "resume", (4.0,)), Result(Position(4, 1), "step", (0.3,)))
    starts = [Start(Case(0, "2x2", 4), tmp_path, number) for number in range(2)]
    starts[0].is_killed = is_killed
    assert verdict._saved_unseen(starts, [before, after]) == unseen


def test_a_seed_is_a_case_and_many_seeds_are_every_kind_of_fault():
    cases = [draw.case(seed) for seed in range(300)]
    assert cases == [draw.case(seed) for seed in range(300)]
    assert msgspec.json.decode(msgspec.json.encode(cases), type=list[Case]) == cases
    drawn = {fault.label for case in cases for fault in (*case.faults, *case.script_faults, *case.point_faults)}
    assert drawn == set(STRUCK)
    assert set().union(*(surroundings(case) for case in cases)) == set(SURROUNDINGS)
    assert {worlds.of(seed) for seed in range(300)} == set(worlds.WORLDS)
    kinds = {(case.in_halves, case.recipe.bucket_bytes, case.recipe.independent_samples) for case in cases}
    assert len(kinds) == 2 * 3 * 2
    for case in cases:
        if case.agents is not None:
            assert case.n_ranks == sum(case.agents.n_ranks) and case.agents.n_first >= case.agents.n_least
        assert math.ceil(case.recipe.global_batch / case.recipe.micro_batch) >= draw.N_PIPELINES.get(case.layout, 1)


def test_the_table_counts_a_job_in_each_class_that_it_belongs_to():
    agents = Agents((2, 2, 2), "::1")
    slow = (Slow("fsync", "sleep", 1.0), Slow("forward", "deaf", 4.0))
    cases = {"exact": Case(1, "auto", 6, agents=agents), "stopped": Case(2, "2x2", 4, slow=slow), "hang": Case(3, "2x2", 4)}
    total = Total(1)
    for verdict_of_it, case in cases.items():
        total.add(Outcome(case, Path("nowhere"), verdict_of_it, struck=["kill rank", "kill rank", "kill at once"]))
    rows = {row.pop("class"): row for row in total.table()}
    assert set(rows) == {
        *("all", "kill rank", "kill at once", "one agent", "several agents", "an endpoint of IPv6"),
        *("slow disk", "a rank that computes without Python"),
    }
    none = dict.fromkeys(("exact", "stopped rightly", "wrong", "hung", "stopped wrongly", "healthy taken for lost"), 0)
    none["broken otherwise"] = 0
    assert rows["all"] == none | {"faults": 9, "jobs": 3, "exact": 1, "stopped rightly": 1, "hung": 1}
    assert rows["kill rank"] == rows["all"] | {"faults": 6}
    assert rows["slow disk"] == none | {"faults": 3, "jobs": 1, "stopped rightly": 1}
    assert rows["an endpoint of IPv6"] == none | {"faults": 3, "jobs": 1, "exact": 1}


IN_BUCKETS = Recipe(bucket_bytes=1, steps=12)
CUT = replace(IN_BUCKETS, global_batch=22, micro_batch=4, dropout=0.0, independent_samples=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "strategy", "recipe", "met"),
    [
        ("2x4", "repartition", replace(IN_BUCKETS, variant="nested"), {"paused in halves"}),
        (
            "4x2",
            "reroute",
            replace(IN_BUCKETS, variant="tied"),
            {"paused in halves", "paused in halves of other pipelines"},
        ),
        ("2x2", "respawn", replace(IN_BUCKETS, variant="frozen"), {"paused in halves"}),
        ("3x2", "repartition", replace(CUT, global_batch=18), {"paused with cut micro-batches"}),
        ("4x2", "auto", CUT, {"paused with cut micro-batches"}),
    ],
)
def test_ranks_killed_in_halves_in_buckets_and_with_cut_micro_batches_change_nothing(
    layout: str, strategy: str, recipe: Recipe, met: set[str], tmp_path: Path
) -> None:
    """One in a step of the first plan, and where a layer's holders are enough one of the second, wherever they are in it."""
    n_ranks = draw.N_RANKS[layout]
    chains = ((kill("step", 3, n_ranks - 1, 0.02),), (kill("step", 7, 0, 0.03),))
    restarts = 4 if strategy == "respawn" else 0
    case = Case(0, layout, n_ranks, strategy, restarts, True, recipe, chains, in_halves=True)
    seen: set[str] = set()
    for attempt in range(3):  # where a kill finds the ranks, and what the next plan is, depends on what else this machine does
        outcome = ran(case, tmp_path / str(attempt))
        assert outcome.verdict == "exact" and outcome.struck[0] == "kill rank"
        seen |= outcome.marks
        if seen >= met:
            return
    assert seen >= met


@pytest.mark.soak
@pytest.mark.parametrize("phase", ["pausing", "plan", "go"])
def test_a_second_loss_during_the_recovery_changes_nothing(phase, tmp_path):
    """Whoever reads in the log that a recovery is at this phase may be too late: then another job is run."""
    chain = (kill("step", 3, 7), kill(phase, 1, 2, delay_s=0.0))
    for attempt in range(5):
        outcome = ran(Case(0, "4x2", 8, recipe=SHORT, chains=(chain,)), tmp_path / str(attempt))
        assert outcome.struck == ["kill rank", "kill rank"]
        if phase == "go" or "lost during recovery" in outcome.marks:
            return
    pytest.fail("in none of five jobs the second loss fell into the recovery from the first")


@pytest.mark.soak
@pytest.mark.parametrize(("where", "how"), [*((where, "kill") for where in POINTS), ("backward", "stop")])
def test_a_rank_lost_at_an_exact_point_changes_nothing(where: str, how: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=8, save_every=2, once_every=2, bucket_bytes=1)
    point = PointFault(how, where, POINTS[where] // 4 + 1, None if where in OF_ONE_RANK else 1)
    outcome = ran(Case(0, "2x2", 4, "respawn", 3, recipe=recipe, point_faults=(point,)), tmp_path)
    assert outcome.verdict == "exact" and outcome.struck == [f"{how} at {where}"]


JOB_ON_AGENTS = Case(0, "auto", 6, recipe=Recipe(steps=8, own_s=0.1))


@pytest.mark.soak
@pytest.mark.parametrize("host", ["localhost", "::1"])
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("on", [*worlds.OF_THE_START, "step"])
def test_a_leading_agent_lost_in_its_first_second_or_later_changes_nothing(
    on: str, kind: str, host: str, tmp_path: Path
) -> None:
    if (on, kind) == ("said", "stop"):  # before the job begins it is looked for until it is back (docs/hosts.md)
        kind = "freeze"
    number = 4 if on in ("started", "joined") else 2  # of six ranks: the agent may then be spared, whosever they are
    lost = Fault(kind, "agent", on, number, 0.0, signal=signal.SIGKILL if kind == "kill" else 0, seconds=6.0)
    agents = Agents((2, 2, 2), host, last_call_s=5.0)
    # Ranks are still at work when it is noticed that nobody leads them.
    case = replace(JOB_ON_AGENTS, recipe=replace(JOB_ON_AGENTS.recipe, own_s=1.0)) if on == "step" else JOB_ON_AGENTS
    outcome = ran(replace(case, agents=agents, chains=((lost,),)), tmp_path)
    assert outcome.verdict == "exact"
    assert outcome.struck == ([f"{kind} agent"] if on not in ("begun", "plan", "go") else [])


@pytest.mark.soak
@pytest.mark.parametrize("on", ["begun", "joined", "plan"])
def test_an_agent_that_comes_in_any_window_of_the_start_changes_nothing(on: str, tmp_path: Path) -> None:
    chains = ((Fault("join", "late agent", on, 1, 0.0),), (kill("step", 3, 1),))
    outcome = ran(replace(JOB_ON_AGENTS, agents=Agents((2, 2, 2), n_late=1), chains=chains), tmp_path)
    assert outcome.verdict == "exact" and outcome.struck[0] == "join late agent"


@pytest.mark.soak
def test_a_job_killed_as_a_whole_again_and_again_goes_on_exactly(tmp_path: Path) -> None:
    def end(on: str, number: int) -> tuple[Fault, ...]:
        return (Fault("kill", "job", on, number, 0.0),)

    recipe = Recipe(steps=9, save_every=1, once_every=3, resumes=True)
    again = ((end("go", 1),), (end("step", 5), (kill("step", 4, 2),)), ())
    outcome = ran(Case(0, "2x2", 4, recipe=recipe, chains=(end("step", 3),), again=again), tmp_path)
    assert outcome.verdict == "exact" and outcome.struck.count("kill job") == 3


SLOW = {
    "a receive of more than a minute": Slow("forward", "sleep", 65.0, 40, 0, 1),
    "a first step that compiles": Slow("forward", "deaf", 5.0, 1, 0, 2),
    "a step that does not let Python in": Slow("forward", "deaf", 8.0, 60, 0, 2),
    "a disk of ten seconds": Slow("fsync", "sleep", 10.0, 2, 0),
    "a sample of ten seconds": Slow("data", "sleep", 10.0, 30, 0),
}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", SLOW)
def test_who_is_slow_is_not_taken_for_lost(what: str, tmp_path: Path) -> None:
    """And another rank, which is lost meanwhile or soon, is replaced."""
    recipe = Recipe(steps=6, save_every=2)
    case = Case(0, "2x2", 4, recipe=recipe, chains=((kill("step", 3, 3),),), slow=(SLOW[what],))
    outcome = ran(case, tmp_path)
    assert outcome.verdict == "exact" and outcome.struck == ["kill rank"]


@pytest.mark.soak
def test_a_rank_that_stands_still_is_lost_and_changes_nothing(tmp_path):
    chain = (Fault("stop", "rank", "step", 3, 0.005, 1),)
    outcome = ran(Case(0, "2x2", 4, recipe=SHORT, chains=(chain,)), tmp_path)
    assert outcome.struck == ["stop rank"] and len(outcome.strategies) == 2


@pytest.mark.soak
def test_stages_that_need_no_gradient_train_on_and_survive(tmp_path):
    """Whole stages of frozen layers: no gradient comes back to say that what they have sent has arrived."""
    frozen = Recipe(variant="prefix", global_batch=32, steps=8)
    outcome = ran(Case(0, "2x3", 6, "repartition", recipe=frozen, chains=((kill("step", 3, 1),),)), tmp_path)
    assert outcome.struck == ["kill rank"] and len(outcome.strategies) == 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", NAMED)
def test_random_faults_change_nothing(seed, tmp_path):
    case = draw.case(seed)
    faults = {f"{fault.label} on {fault.on}" for fault in case.faults}
    faults |= {fault.label for fault in (*case.script_faults, *case.point_faults)}
    assert {case.recipe.variant, case.recipe.optimizer, *faults, *surroundings(case)} >= NAMED[seed]
    outcome = ran(case, tmp_path)
    assert outcome.verdict == "exact" and outcome.struck


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("part", range(15))
def test_a_thousand_random_faults_change_nothing(tmp_path: Path, part: int) -> None:
    """Those of ten jobs. A failing one again: `python -m tests.soak SEED`."""
    machine = report.this_machine()
    total = soak_jobs(1000 + 10 * part, 10, tmp_path, at_once=2)
    print(total)
    whole = parts.together("soak", part, 15, total)
    if whole is not None:
        report.write(_report(whole, machine), report.RESULTS)
    assert not total.bad, str(total)
    if whole is not None:
        assert whole.n_faults >= 1000
        assert not (missed := [mark for mark in MET if not whole.marks[mark]]), f"no fault met {missed}: they are not tested"
        wanted = [label for label in STRUCK if not label.startswith("stop at")]  # which are rare, and like the kills there
        assert not (missed := [label for label in wanted if not whole.struck[label]]), f"there was no {missed}"


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("first_seed", [40_000, 40_050, 40_100])
def test_fifty_protected_jobs_change_nothing(tmp_path: Path, first_seed: int) -> None:
    """A failing one again: `python -m tests.soak SEED --protected 1`."""
    total = soak_protected(first_seed, 50, tmp_path, at_once=2)
    print(total)
    assert not total.bad, str(total)
    assert total.strategies["redundant"] >= 17, "too few losses were taken over"


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("part", range(12))
def test_three_hundred_random_sequences_of_changes_change_nothing(tmp_path: Path, part: int) -> None:
    """25 of them. ODYSSEY_SOAK_SEED: of the first of all, else it is drawn. A failing one, by the seed that its line names,
    again: `python -m tests.soak SEED --sequences 1`."""
    seed = int(os.environ.get("ODYSSEY_SOAK_SEED") or secrets.randbelow(1_000_000)) + 50 * part
    machine = report.this_machine()
    total = soak_sequences(seed, 25, tmp_path, at_once=2)
    print(total)
    whole = parts.together("sequences", part, 12, total)
    if whole is not None:
        report.write(_report_of_sequences(whole, machine), report.RESULTS)
    assert not total.bad, str(total)
    if whole is not None:
        assert not (missed := SEQUENCES_MEET - {*whole.struck, *whole.marks, *whole.strategies}), f"no sequence had {missed}"


def test_what_parts_of_a_soak_have_come_to_is_told_when_each_has_come(tmp_path: Path) -> None:
    """One that was run twice counts twice, whatever it came to; parts of another state of the code do not count."""

    def came(seed: int) -> Total:
        return Total(seed, Counter(exact=2, wrong=1), Counter({"kill rank": seed}), recovery_s=[float(seed)], bad=[f"{seed}"])

    assert parts.together("x", 1, 2, came(9), tmp_path) is None
    assert parts.together("x", 1, 2, came(5), tmp_path) is None
    whole = parts.together("x", 0, 2, came(7), tmp_path)
    assert whole is not None and whole.first_seed == 5 and whole.verdicts == {"exact": 6, "wrong": 3}
    assert (whole.n_faults, whole.recovery_s, whole.bad) == (21, [5.0, 7.0, 9.0], ["9", "5", "7"])
    (tmp_path / "x.json").write_text((tmp_path / "x.json").read_text().replace('"code":"', '"code":"0'))
    assert parts.together("x", 1, 2, came(3), tmp_path) is None


def test_a_seed_is_a_sequence_and_many_seeds_are_every_kind_of_change() -> None:
    cases = [sequences.case(seed) for seed in range(100)]
    assert cases == [sequences.case(seed) for seed in range(100)]
    assert {fault.label for case in cases for fault in case.faults} == {name for name in SEQUENCES_MEET if " " in name} - {
        "grew back",
        "lost while draining",
        "newcomer lost",
    }
    assert all(len(case.faults) >= sequences.N_LEAST and case.n_ranks == sequences.N_RANKS for case in cases)


def test_a_sequence_of_changes_changes_nothing(tmp_path: Path) -> None:
    """With the recipe that one process trains in a moment."""
    outcome = ran(replace(sequences.case(33), recipe=Recipe("mlp", steps=50, eval_every=0)), tmp_path)
    assert outcome.verdict == "exact" and outcome.struck


def _report_of_sequences(total: Total, machine: report.Machine) -> report.Report:
    about = (
        f"Random sequences of changes, one after the other in one job of {sequences.N_RANKS} ranks: losses by kill and stop, "
        "what was lost comes back, notices, slow ranks, agents that are killed, leave and come. Each is held against one "
        "process within 1e-10: every loss, the parameters at the end, and what each rank has in its own modules; each step "
        "became final once. Rows as for the soak."
    )
    bad = sum(count for verdict, count in total.verdicts.items() if verdict not in GOOD)
    summary = {
        "sequences": total.n_long,
        "sequence_changes": total.n_faults,
        "sequences_bad": bad,
        "sequences_minutes": total.minutes,
    }
    return report.Report("sequences", about, machine, summary, [dict(each) for each in total.table()])


def _report(total: Total, machine: report.Machine) -> report.Report:
    about = (
        "Random faults at random moments of random jobs, over layouts, strategies, models and optimizers. A row for each kind "
        "of fault, and for what jobs ran in beside it: how many struck, in how many jobs, and what became of these; a job "
        "counts in each row that it belongs to. Exact: losses, evaluations, checkpoints and parameters are those of the run "
        "in one process within 1e-10. Stopped rightly: the last holder of just the layers that the job named was struck, or "
        "so many agents that those left may not decide anything. `went through`: jobs in which this was met; `planned`: plans."
    )
    bad = sum(count for verdict, count in total.verdicts.items() if verdict not in GOOD)
    summary = {
        "faults": total.n_faults,
        "jobs": total.verdicts.total(),
        "jobs_bad": bad,
        "jobs_stopped_because_state_was_lost": total.verdicts["stopped"],
        "recoveries": len(total.recovery_s),
        "recovery_median_s": total.recovery_s[len(total.recovery_s) // 2],
        "recovery_p99_s": total.recovery_s[int(len(total.recovery_s) * 0.99)],
        "minutes": total.minutes,
    }
    rows: list[dict[str, report.Cell]] = [dict(each) for each in total.table()]
    for what, counts in (("went through", total.marks), ("planned", total.strategies)):
        rows += [dict.fromkeys(rows[0]) | {"class": f"{what}: {name}", "jobs": n} for name, n in sorted(counts.items())]
    return report.Report("soak", about, machine, summary, rows)


@pytest.mark.soak
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("kind", ["ddp", "resilient"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_fifty_jobs_of_scripts_with_their_own_loops_are_exact(tmp_path, part, kind):
    """ODYSSEY_SOAK_SEED: of the first, else it is drawn. A failing one, by the seed that its line names, again:
    `python -m tests.soak SEED --ddp 1`, or `--resilient 1`."""
    seed = int(os.environ.get("ODYSSEY_SOAK_SEED") or secrets.randbelow(1_000_000)) + 50 * part
    command = [sys.executable, "-m", "tests.soak", str(seed), f"--{kind}", "50", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": exact (") == 50
