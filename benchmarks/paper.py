"""The published evaluations, by replay and by rehearsal: `python -m benchmarks.paper` (a few minutes each on two cores).

32 workers that fail as in ReCycle's and Oobleck's evaluations; the adaptive choice against policies like theirs, next to what
they published. docs/internals/published-systems.md says what the policies assume, and where differences come from. Then a day
of 16,384 workers, of which one is lost every ten minutes: what is left of it for training with the adaptive choice, and how
long all stand still for a loss. `--only replay` or `--only rehearsal` (paper_rehearsal.py) runs that part alone; each has its
own result.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import paper_rehearsal, report
from benchmarks.kept import Kept
from benchmarks.published_systems import policies
from benchmarks.report import Cell
from benchmarks.run import run
from odyssey_cli.planning import source
from odyssey_cli.replay.ask import Answer, ask
from odyssey_cli.replay.generators import Failures, exponential
from odyssey_cli.replay.policies import named
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace

N_WORKERS = 32
HOUR_S = 3600.0
INTERVALS_H = (6.0, 2.0, 0.5)
MODELS = ("gpt3-medium-a100-32", "gpt3-3.35b-a100-32", "gpt3-6.7b-a100-32")
POLICIES = ("auto", "oobleck", "recycle", "varuna", "redundant", "torchrun")
PUBLISHED = {
    "gpt3-medium-a100-32": (27.58, (27.26, 25.37, 19.47), (27.27, 25.42, 22.27)),
    "gpt3-3.35b-a100-32": (14.87, (14.55, 13.44, 9.78), (14.59, 14.17, 12.63)),
    "gpt3-6.7b-a100-32": (5.33, (4.98, 4.65, 2.78), (5.17, 4.85, 3.53)),
}
"""ReCycle, SOSP 2024: samples/s without failures, of Oobleck and of ReCycle at a failure every 6 h, 2 h, 30 min."""
LARGE = "llama-65b-h100-64"
LARGE_NODES, LARGE_RANKS_PER_NODE = 2048, 8
LARGE_INTERVAL_H, LARGE_REPAIR_H, LARGE_TRANSIENT = 1 / 6, 4.0, 0.73
"""Unicron (arXiv 2401.00134) has so many losses that leave the node healthy; rate and repair are assumed."""
LARGE_LENGTH_H = 24.0
ABOUT = (
    "Useful throughput as a share of that without failures, by replay (docs/operators/replay.md), for jobs of configs/ on 32 "
    "workers, one a node. `falling`: a worker is lost every so often, until half are left, and none returns (as in Oobleck's "
    "evaluation). `returning`: losses and returns at random, two workers away in the mean (as in MeCeFO's mildest), 48 "
    "losses. `oobleck`, `recycle` and the others are policies like theirs with our prices; `published` is what ReCycle's "
    "paper has for Oobleck and for itself at the same interval, over its failure-free DeepSpeed. Chameleon (arXiv "
    "2508.21613) publishes up to 1.229 times Oobleck and 1.355 times ReCycle, and after a recovery a throughput within "
    "11.00 % of the failure-free one. `2048x8`: a day of 2,048 nodes of eight with a loss every ten minutes in the mean; 73 % "
    "of them leave the node healthy, the others take it away for four hours in the mean. `transition s`: by `auto`, of each "
    "loss, what takes in those who come back included."
)


def main() -> None:
    options = _parse_arguments()
    if options.only != "rehearsal":
        _replay(options.models, options.seed, options.results)
    if options.only != "replay":
        paper_rehearsal.publish(N_WORKERS, options.results)


def _replay(models: Sequence[str], seed: int, results: Path) -> None:
    kept = Kept("paper")
    rows: list[dict[str, Cell]] = []
    answers: list[tuple[str, Answer]] = []
    for model in models:
        for interval, interval_h in enumerate(INTERVALS_H):
            for name, trace in (
                ("falling", falling(interval_h * HOUR_S, seed)),
                ("returning", returning(interval_h * HOUR_S, seed)),
            ):
                key = f"{model} {name} {interval_h}"
                answers.append((name, kept.once(key, Answer, partial(_answer, model, trace))))
                rows.append(row(model, name, interval, answers[-1][1]))
                print(f"{model}, {name}, every {interval_h:g} h", flush=True)
    large = kept.once("large", Answer, partial(large_day, seed))
    rows.append(dict.fromkeys(rows[0]) | _large_row(large))
    print(f"{LARGE}, {rows[-1]['nodes']}", flush=True)
    kept.publish(ABOUT, summarise(answers) | summarise_large(large), rows, results)


def falling(interval_s: float, seed: int) -> Trace:
    """One worker after the other, until half are left, and one more interval."""
    lost = random.Random(seed).sample(range(N_WORKERS), N_WORKERS // 2)
    changes = tuple(Change((i + 1) * interval_s, node, NodeEventKind.LOST) for i, node in enumerate(lost))
    return Trace("falling", "", N_WORKERS, (len(lost) + 1) * interval_s, changes)


def returning(interval_s: float, seed: int) -> Trace:
    """Two are away in the mean."""
    return exponential(Failures(N_WORKERS, 48 * interval_s, interval_s, 2 * interval_s, 0.0, seed))


def _answer(model: str, trace: Trace) -> Answer:
    found = source.find(model).resized(N_WORKERS, 1)
    setup = Setup(found.profile, 1)
    return ask(model, trace, setup, RestartCosts(), policies(*POLICIES), lambda policy, at_s: None)


def large_day(seed: int) -> Answer:
    """One of 16,384 workers, as `odyssey replay exponential` draws and replays it."""
    found = source.find(LARGE).resized(LARGE_NODES, LARGE_RANKS_PER_NODE)
    length_s, interval_s, repair_s = (hours * HOUR_S for hours in (LARGE_LENGTH_H, LARGE_INTERVAL_H, LARGE_REPAIR_H))
    trace = exponential(Failures(LARGE_NODES, length_s, interval_s, repair_s, LARGE_TRANSIENT, seed))
    setup = Setup(found.profile, LARGE_RANKS_PER_NODE, mtbf_s=interval_s)
    return ask(LARGE, trace, setup, RestartCosts(), named(("auto",)), lambda policy, at_s: None)


def row(model: str, name: str, interval: int, answer: Answer) -> dict[str, Cell]:
    """Shares of the failure-free throughput."""
    failure_free, oobleck, recycle = PUBLISHED[model]
    shares: dict[str, Cell] = {outcome.policy: outcome.useful for outcome in answer.outcomes}
    return {
        "job": model,
        "nodes": name,
        "loss every h": INTERVALS_H[interval],
        **shares,
        "transition s": transition_s(answer),
        "oobleck published": oobleck[interval] / failure_free,
        "recycle published": recycle[interval] / failure_free,
    }


def _large_row(answer: Answer) -> dict[str, Cell]:
    nodes = f"{LARGE_NODES}x{LARGE_RANKS_PER_NODE}"
    return {
        "job": LARGE,
        "nodes": nodes,
        "loss every h": LARGE_INTERVAL_H,
        "auto": answer.outcomes[0].useful,
        "transition s": transition_s(answer),
    }


def transition_s(answer: Answer) -> float:
    """By `auto`: seconds of transitions in memory for each loss, those included that take ranks in again."""
    adaptive = next(outcome for outcome in answer.outcomes if outcome.policy == "auto")
    return adaptive.totals.transition_s / answer.trace.n_losses


def summarise_large(answer: Answer) -> dict[str, float]:
    """What is left of the day, and how long all stand still for a loss."""
    return {"useful_16384_10min": answer.outcomes[0].useful, "transition_s_16384_10min": transition_s(answer)}


def summarise(answers: Sequence[tuple[str, Answer]]) -> dict[str, float]:
    """The best and the worst ratio of the adaptive choice to each single policy."""
    ratios: dict[str, list[float]] = {"oobleck": [], "recycle": []}
    after_one = []
    for name, answer in answers:
        useful = {outcome.policy: outcome.useful for outcome in answer.outcomes}
        adaptive = next(outcome for outcome in answer.outcomes if outcome.policy == "auto")
        for other, found in ratios.items():
            found.append(useful["auto"] / useful[other])
        step_s = adaptive.result.decisions[1].step_s
        if name == "falling" and step_s is not None:
            after_one.append(answer.step_s / step_s)
    summary = {}
    for other, found in ratios.items():
        summary[f"replayed_over_{other}_best"], summary[f"replayed_over_{other}_worst"] = max(found), min(found)
    summary["replayed_after_one_loss_worst"] = min(after_one)
    return summary


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--only", choices=("replay", "rehearsal"), help="this part alone")
    parser.add_argument("--seed", type=int, default=0, help="of the replayed traces")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
