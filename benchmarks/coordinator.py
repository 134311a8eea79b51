"""What decisions cost at scale: `python -m benchmarks.coordinator`.

The coordinator of a Job of simulated ranks, in one process: they join, start, lose one and pause, each by the messages that
real ones send. What is counted is the processor time of `machine.step` alone, per phase, and per message in it.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import report
from benchmarks.report import Cell
from benchmarks.run import run
from launcher.coordinator.machine import step
from launcher.coordinator.state import JobState, PlainState, State, Status
from launcher.joblog.events import Body, Cause, CauseKind, Event, JobStarted, Profiled, Proposed, RankLost
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.protocol.model_spec import LayerSpec, ModelSpec
from odyssey.protocol.reports import Hello, Paused, Ready
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from strategies.situation import Candidate

N_STAGES = 8
SIZES = (1024, 4096, 16384)
ABOUT = (
    "Processor time of the coordinator's own decisions, for Jobs of simulated ranks in pipelines of 8 stages: all ranks join; "
    "all are ready and go; one is lost and all others report that they have paused. Growth: the time per message at the "
    "largest size over that at the smallest, 1 where a message costs the same however many ranks there are."
)


def main() -> None:
    options = _parse_arguments()
    machine = report.this_machine()
    rows: list[dict[str, Cell]] = []
    per_message: dict[tuple[str, int], float] = {}
    summary: dict[str, float] = {}
    for n_ranks in options.sizes:
        for phase, n_messages, cpu_s in measure(n_ranks):
            per_message[phase, n_ranks] = cpu_s / n_messages
            rows.append(
                {
                    "ranks": n_ranks,
                    "phase": phase,
                    "messages": n_messages,
                    "cpu s": cpu_s,
                    "µs a message": 1e6 * cpu_s / n_messages,
                }
            )
            if phase == "pause":
                summary[f"pause_cpu_s_{n_ranks}"] = cpu_s
    least, most = min(options.sizes), max(options.sizes)
    summary["pause_growth"] = per_message["pause", most] / per_message["pause", least]
    report.publish(report.Report("coordinator", ABOUT, machine, summary, rows), options.results)


def measure(n_ranks: int) -> list[tuple[str, int, float]]:
    """(phase, messages, processor seconds) of a Job of so many ranks."""
    plan, ranks = _plan(n_ranks), range(n_ranks)
    state: State = PlainState()
    state, _ = _feed(state, [JobStarted("train.py", (), n_ranks, 1, 0, "auto", "auto", None, "", 1)])
    found: list[tuple[str, int, float]] = []
    state, cpu_s = _feed(state, [Hello(rank, model(n_ranks)) for rank in ranks])
    found.append(("join", n_ranks, cpu_s))
    state, _ = _feed(state, [Profiled(profile(n_ranks), 0.0)])
    state, _ = _feed(state, [Proposed((Candidate("", plan, None, ""),), 60.0, "", 0.0, False)])
    state, cpu_s = _feed(state, [_ready(plan, rank) for rank in ranks])
    found.append(("ready", n_ranks, cpu_s))
    assert isinstance(state, JobState) and state.status is Status.RUNNING
    held = {rank: tuple(sorted(plan.holds[rank])) for rank in ranks}
    lost: list[Body] = [RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL", -9), False)]
    state, cpu_s = _feed(
        state, [*lost, *(Paused(rank, state.world.generation, (0, 0), "compute", held[rank]) for rank in ranks[1:])], stamp=1
    )
    assert state.status is Status.PLANNING
    found.append(("pause", n_ranks, cpu_s))
    return found


def _feed(state: State, bodies: Iterable[Body], stamp: int = 0) -> tuple[State, float]:
    events = [Event(float(i), state.world.generation + stamp, "", body) for i, body in enumerate(bodies)]
    gc.collect()
    gc.disable()  # as the agent does from a loss on
    before = time.process_time()
    for event in events:
        state, _ = step(state, event)
    cpu_s = time.process_time() - before
    gc.enable()
    return state, cpu_s


def _plan(n_ranks: int) -> Plan:
    pipelines = tuple(
        Pipeline(tuple(Stage(p * N_STAGES + s, s, s + 1) for s in range(N_STAGES)), p, p + 1)
        for p in range(n_ranks // N_STAGES)
    )
    reductions = tuple(Reduction((s,), ()) for s in range(N_STAGES))
    return Plan(1, "initial", 0, len(pipelines), 1, N_STAGES, blocks_of(pipelines), reductions, state_from=StateFrom.SCRIPT)


def _ready(plan: Plan, rank: int) -> Ready:
    p, s = plan.place[rank]
    samples = ((p, 1),) if s == N_STAGES - 1 else ()
    stream = "same" if s in (0, N_STAGES - 1) else None
    return Ready(
        *(rank, plan.generation, (0, 0), ((s, "digest"),), samples, plan.global_batch, 0.01, 0.0, 0),
        contracts=((s, "same"),),
        stream=stream,
    )


def model(n_ranks: int) -> ModelSpec:
    layers = tuple(LayerSpec(f"layer{i}", "digest", 8, 8, 0) for i in range(N_STAGES))
    return ModelSpec(layers, (), (), n_ranks // N_STAGES, 1, 100, 0, "cpu")


def profile(n_ranks: int) -> Profile:
    layers = tuple(LayerProfile(f"layer{i}", "digest", 1e-3, 1e-3, 1e-3, 1e-4, 8, 8, 16, 0, 8, 8) for i in range(N_STAGES))
    cluster = Cluster(1, N_STAGES, None, 1 << 30, Link(1e-5, 1e10), Link(1e-5, 1e10))
    return Profile("model", 1, n_ranks // N_STAGES, layers, (), (), 0.0, 0.0, 0.0, 0, cluster, Recovery())


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks, multiples of 8")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
