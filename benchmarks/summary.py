"""docs/benchmarks.md from benchmarks/results/*.json: `python -m benchmarks.summary`.

The page is generated whole; nothing in it is written by hand, so no number in it can be older than its result.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MEANINGS = {
    "pause_cpu_s_1024": "1,024 simulated ranks pause: processor time of the coordinator, seconds",
    "pause_cpu_s_4096": "4,096 simulated ranks: the same",
    "pause_cpu_s_16384": "16,384 simulated ranks: the same",
    "pause_growth": "the time per message with 16,384 ranks over that with 1,024",
    "kill_to_step_s_4": "4 ranks: SIGKILL to the next step on all, less one step, seconds",
    "kill_to_step_s_8": "8 ranks: the same",
    "kill_to_step_raw_s_4": "4 ranks: SIGKILL to the next step on all, that step included, seconds",
    "kill_to_step_raw_s_8": "8 ranks: the same",
    "proof_s_4": "4 ranks: what ranks prove at the gate before they go on (within the above), seconds",
    "proof_s_8": "8 ranks: the same",
    "speedup_vs_torchrun_4": "4 ranks: how many times faster than torchrun's restart",
    "speedup_vs_torchrun_8": "8 ranks: the same",
    "real_step_median_error": "real ranks: predicted step time of plans after a loss against measured, median relative error",
    "real_step_bias": "the same with its sign: median of predicted over measured, less 1",
    "real_first_plan_step_median_error": "real ranks: the same for the first plan of a job, priced before any step has run",
    "real_transition_median_error": "real ranks: predicted transition against measured, median relative error",
    "real_memory_median_error": "real ranks: predicted peak memory of the rank that has most against measured, likewise",
    "real_cases": "models, layouts, strategies and schedules that ran on real ranks",
    "rehearsed_cases": "transitions rehearsed: model, layout, loss and strategy",
    "rehearsed_step_median_error": "rehearsed step time against the prediction, median relative error",
    "rehearsed_transition_median_error": "rehearsed transition against the prediction, of its known parts, likewise",
    "choice_right": "share of losses where the chosen strategy is the best of those rehearsed, or within 3 % of it",
    "rehearsed_over_real_2": "2 ranks with a core each: rehearsed step time over that of the real job",
    "rehearsal_agent_share_32": "32 rehearsed ranks: processor time of the launcher over the length of the job",
    "faults": "faults that struck in the soak",
    "jobs": "jobs of the soak",
    "jobs_bad": "of them wrong, hung, stopped without need, or with something left behind",
    "jobs_stopped_because_state_was_lost": "of them stopped, rightly: the last holder of a layer was lost, or too many agents",
    "recoveries": "recoveries of the soak",
    "recovery_median_s": "from the notice of a loss to go, median, seconds",
    "recovery_p99_s": "the same, 99th percentile",
    "minutes": "length of the soak",
    "job_wall_ratio": "8 ranks, one lost every minute, its place healthy: wall time over that of plain ranks without losses",
    "job_wall_ratio_torchrun": "torchrun: the same",
    "job_wall_ratio_torchft": "torchft: the same",
    "lost_progress": "steps of that job that were done again",
    "lost_progress_torchrun": "torchrun: the same",
    "lost_progress_torchft": "torchft: the same",
    "overhead_ratio": "step time without failures against the same pipelines written plainly, 1F1B",
    "overhead_buckets_ratio": "the same, gradients summed in several buckets within the last backward",
    "overhead_split_ratio": "the same, the backward in halves",
    "launch_ratio_1": "1 rank: command to the first line after `import torch`, over torchrun's time",
    "launch_ratio_4": "4 ranks: command to the first line after `import torch` on all, over torchrun's time",
    "launch_ratio_8": "8 ranks: the same",
    "launch_ratio_16": "16 ranks: the same",
    "launch_bare_ratio_4": "4 ranks: the same for a script without imports",
    "launch_bare_ratio_16": "16 ranks: the same for a script without imports",
    "launch_memory_ratio_1": "1 idle rank with torch: memory of the whole job, over torchrun's",
    "launch_memory_ratio_4": "4 idle ranks: the same",
    "launch_memory_ratio_8": "8 idle ranks: the same",
    "launch_memory_ratio_16": "16 idle ranks: the same",
    "help_s": "`odyssey --help`, seconds",
    "help_ratio": "the same, over `python -c pass`",
    "restart_ratio_4": "4 ranks, plain DDP script: SIGKILL of one to the first line on all, over torchrun's time",
    "restart_ratio_8": "8 ranks: the same",
    "resume_ratio_4": "4 ranks, plain DDP script: SIGKILL of one to the first step on all, over torchrun's time",
    "resume_ratio_8": "8 ranks: the same",
    "restart_ratio_4_early": "first line, 4 ranks, killed right after the job's first step",
    "restart_ratio_8_early": "first line, 8 ranks, killed right after the job's first step",
    "resume_ratio_4_early": "first step, 4 ranks, killed right after the job's first step",
    "resume_ratio_8_early": "first step, 8 ranks, killed right after the job's first step",
    "restart_heavy_ratio_4": "first line, 4 ranks, a script that imports transformers and lightning",
    "resume_heavy_ratio_4": "first step, 4 ranks, a script that imports transformers and lightning",
    "replayed_over_oobleck_best": "replayed, 32 workers: the adaptive choice over a policy like Oobleck's, the best case",
    "replayed_over_oobleck_worst": "the worst case",
    "replayed_over_recycle_best": "replayed, 32 workers: the adaptive choice over a policy like ReCycle's, the best case",
    "replayed_over_recycle_worst": "the worst case",
    "replayed_after_one_loss_worst": "throughput after the loss of one of 32 workers over that without failures, the worst",
    "rehearsed_over_oobleck_best": "rehearsed, 32 workers: the adaptive choice over `repartition`, the best case",
    "rehearsed_over_oobleck_worst": "the worst case",
    "rehearsed_over_recycle_best": "rehearsed, 32 workers: the adaptive choice over `reroute`, the best case",
    "rehearsed_over_recycle_worst": "the worst case",
    "replayed_over_rehearsed_most_off": "useful throughput replayed against rehearsed, same losses, largest relative error",
    "search_cpu_s_64": "64 workers, one lost, nothing prepared: processor time of the search, seconds, the worse of two models",
    "search_cpu_s_16384": "16,384 workers: the same",
    "search_growth": "exponent x of its growth n^x from 1,024 to 16,384 workers",
    "plan_kb_16384": "16,384 workers: the largest plan that was chosen, as JSON, kB",
    "one_host_within_2pct": "small random jobs on one host: the share whose plan is within 2 % of the best of all plans",
    "one_host_worst": "the worst of them: worth of its plan over that of the best",
    "hosts_within_2pct": "the same on several hosts with slow links between them",
    "hosts_worst": "the worst of them",
    "large_within_2pct": "random jobs of 12 to 32 workers on several hosts: the share within 2 % of a long local search",
    "large_worst": "the worst of them",
    "moves_over_bound_median": "moves of state in random transitions: priced time over that of the busiest worker, median",
    "moves_over_bound_worst": "the worst",
    "moves_over_any_sources_median": "the same over the busiest worker's time with the best sources there are, median",
    "moves_over_any_sources_worst": "the worst",
    "schedule_median_ratio": "our schedules over the best that a constraint solver proves, small random cases, median",
    "schedule_worst_ratio": "the worst",
    "schedule_proved": "cases that it proved within its time",
    "schedule_split_median_ratio": "of them without a loss, the backward in halves, under a cap of memory: median",
    "schedule_split_worst_ratio": "the worst",
    "schedule_split_proved": "cases of that kind",
    "schedule_coupled_median_ratio": "of them 1F1B: median",
    "schedule_coupled_worst_ratio": "the worst",
    "schedule_coupled_proved": "cases of that kind",
    "schedule_routed_median_ratio": "of them after the loss of a worker: median",
    "schedule_routed_worst_ratio": "the worst",
    "schedule_routed_proved": "cases of that kind",
    "schedule_not_proved": "cases without a proof in its time, which count nowhere above",
    "schedule_not_proved_worst_ratio": "of these the worst, over the best that it found",
    "split_gain_32": "rehearsed, 32 workers: 1F1B's step over that with the backward in halves, less 1, median of the cases",
    "split_gain_32_predicted": "the same as it was predicted",
    "split_gain_32_worst": "the worst case",
    "jobs_ended_paper": "jobs ended in seeded sequences of losses, by the paper's objective",
    "jobs_ended_lookahead": "the same, looking ahead to the next loss",
    "jobs_ended_by_a_rank_and_avoidable_paper": "of them by the loss of one rank, where another plan would have kept the job",
    "jobs_ended_by_a_rank_and_avoidable_lookahead": "the same, looking ahead",
    "jobs_ended_by_a_node_and_avoidable_paper": "of them by the loss of one node, where another plan would have kept the job",
    "jobs_ended_by_a_node_and_avoidable_lookahead": "the same, looking ahead",
    "useful_work_gain": "useful work looking ahead, over that by the paper's objective: geometric mean",
    "useful_work_gain_worst": "the worst job and interval",
    "worst_detect_over_configured": "a member's host crashes, freezes, is cut off: until that is known, over --detect, worst",
    "killed_agent_noticed_s": "the process of a member killed: the same, seconds",
    "leader_replaced_over_configured": "the leading agent's host, likewise: until another one leads, over --detect",
    "killed_leader_replaced_s": "the process of the leading agent killed: the same, seconds",
    "transition_s": "from then until the ranks that are left train again, a member lost, seconds",
    "transition_after_leader_s": "the same, the leading one lost",
    **{
        f"agent_cpu_ms_a_step_{n}": f"{n} agents with 8 simulated ranks each: processor time of the leading one for a step, ms"
        for n in (4, 8, 16, 32, 64)
    },
    "agent_cpu_growth": "exponent x of its growth n^x from 4 to 64 agents",
    "member_cpu_ms_a_step_64": "64 agents: processor time of another one for a step, ms",
    "messages_a_step_64": "64 agents with 512 ranks: messages between them for a step",
    "start_s_64x8": "64 agents with 512 simulated ranks: from the first process until all ranks have joined, seconds",
    "start_over_bare_64x8": "the same, over as many bare connections with an echo each",
    "resumed_loss_error": "last loss after two restarts against the undisturbed run's, relative",
}
LEAST = {"one_host_within_2pct": 0.97, "hosts_within_2pct": 0.97, "one_host_worst": 0.95, "hosts_worst": 0.95}
AIMS = {
    "jobs_bad": 0,
    "job_wall_ratio": 1.1,
    "lost_progress": 0,
    "pause_cpu_s_16384": 0.2,
    "launch_ratio_1": 1.0,
    "launch_ratio_4": 0.40,
    "launch_ratio_16": 0.12,
    "help_s": 0.2,
    "moves_over_bound_median": 1.05,
    "moves_over_bound_worst": 1.3,
    "overhead_ratio": 1.03,
    "overhead_buckets_ratio": 1.03,
    "overhead_split_ratio": 1.03,
    "schedule_median_ratio": 1.01,
    "schedule_worst_ratio": 1.05,
    "search_cpu_s_64": 0.05,
    "worst_detect_over_configured": 1.2,
    "search_cpu_s_16384": 1.0,
    "restart_ratio_4": 0.15,
    "restart_ratio_8": 0.15,
    "resume_ratio_4": 0.15,
    "resume_ratio_8": 0.15,
}
"""Figures that are to be at most this."""


def main() -> None:
    paths = sorted(report.RESULTS.glob("*.json"))
    refused = {path.name: why for path in paths if (why := problem(report.read(path).machine.commit))}
    if refused:
        raise SystemExit("\n".join(f"{name}: {why}; measure it again" for name, why in refused.items()))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page([report.read(path) for path in paths]))
    print(f"{PAGE}: {len(paths)} results")


def problem(commit: str, repository: Path = PAGE.parents[1]) -> str | None:
    """Why nobody can measure the same again as what was measured at `commit`; None where they can."""
    if commit.endswith("+"):
        return f"it was measured with files that differed from commit {commit[:-1]}"
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=repository, capture_output=True, check=False
    )
    return None if known.returncode == 0 else f"it was measured at commit {commit}, which is not in the history"


def page(reports: Sequence[report.Report]) -> str:
    """The whole page as Markdown."""
    lines = ["# Benchmarks", "", "Generated by `python -m benchmarks.summary`; do not edit.", ""]
    if not reports:
        lines += [
            "No results yet. Measure with `python -m benchmarks`.",
            "",
        ]
    else:
        lines += ["| metric | value | aim | meaning |", "|---|---:|---:|---|"]
        for each in reports:
            for metric, value in each.summary.items():
                aim = f"≤ {report.number(AIMS[metric])}" if metric in AIMS else ""
                aim = f"≥ {report.number(LEAST[metric])}" if metric in LEAST else aim
                lines.append(f"| `{metric}` | {report.number(value)} | {aim} | {MEANINGS.get(metric, each.name)} |")
        lines.append("")
    for each in reports:
        lines += [f"## {each.name}", "", each.about, "", *_markdown_table(each.rows), "", _machine(each.machine), ""]
    return "\n".join(lines)


def _markdown_table(rows: Sequence[dict[str, report.Cell]]) -> list[str]:
    if not rows:
        return ["No rows."]
    columns = list(rows[0])
    numeric = [any(isinstance(row[column], int | float) for row in rows) for column in columns]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---:' if is_number else '---' for is_number in numeric)}|"]
    return lines + [f"| {' | '.join(report.number(row[column]) for column in columns)} |" for row in rows]


def _machine(machine: report.Machine) -> str:
    return (
        f"Measured {machine.date} at commit {machine.commit} on {machine.n_cores} cores of {machine.cpu}, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.system}, Python {machine.python}, torch {machine.torch}, "
        f"load before {machine.load_before}. "
        f"Again: `python -m benchmarks.NAME` with the section's name."
    )


if __name__ == "__main__":
    main()
