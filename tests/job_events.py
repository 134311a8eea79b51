"""Builds the events of a small job for tests of the display: 2 pipelines x 2 stages, rank 3 is lost, rerouted."""

from __future__ import annotations

from launcher.joblog.events import (
    Body,
    Cause,
    CauseKind,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    Pausing,
    PlanChosen,
    Profiled,
    Proposed,
    RankLost,
    RankStarted,
)
from odyssey.plan.estimate import Estimate, Transition
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, Route
from odyssey.plan.proof import prove
from odyssey.protocol.model_spec import LayerSpec, ModelSpec
from odyssey.protocol.reports import Committed, Hello, Paused, Ready
from odyssey.protocol.units import Position, Result
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from perfmodel.profile.spread import Spread
from strategies.situation import Candidate

START = 1_700_000_000.0
N_LAYERS = 8
START_ESTIMATE = Estimate(0.05, Transition(groups_s=0.01), 300 << 20, 640.0)


def layer_profile(i: int) -> LayerProfile:
    return LayerProfile(f"Block{i}", f"d{i}", 0.002, 0.002, 0.0018, 0.0001, 4 << 20, 4 << 20, 8 << 20, 0, 1 << 20, 1 << 16)


def profile() -> Profile:
    link = Link(50e-6, 2e9)
    return Profile(
        model="m",
        micro_batch=4,
        global_batch=32,
        layers=tuple(layer_profile(i) for i in range(N_LAYERS)),
        ties=(),
        tie_bytes=(),
        loss_s=0.0002,
        op_overhead_s=0.0001,
        commit_s=0.0004,
        runtime_bytes=200 << 20,
        cluster=Cluster(1, 4, 2, 8 << 30, link, link),
        recovery=Recovery(),
    )


def plan(generation: int = 1, lost: int | None = None, estimate: Estimate | None = None) -> Plan:
    """Two pipelines of two stages; the lost rank's micro-batches go to the same stage of the other pipeline."""
    workers = [[0, 1], [2, 3]]
    pipelines = tuple(
        Pipeline(tuple(Stage(None if w == lost else w, 4 * s, 4 * s + 4) for s, w in enumerate(row)), 4 * p, 4 * p + 4)
        for p, row in enumerate(workers)
    )
    routes = []
    if lost is not None:
        p, s = divmod(lost, 2)
        routes = [Route(k, s, workers[1 - p][s]) for k in range(4 * p, 4 * p + 4)]
    reductions = tuple(Reduction(tuple(range(4 * s, 4 * s + 4)), ()) for s in (0, 1))
    strategy = "start" if lost is None else "reroute"
    return prove(
        Plan(
            generation, strategy, 0, 32, 4, N_LAYERS, blocks_of(pipelines), reductions, routes=tuple(routes), estimate=estimate
        )
    )


def candidates() -> tuple[Candidate, ...]:
    best = Estimate(0.062, Transition(0.002, 0.011, 0.0, 0.0, 0.06, 0.01), 312 << 20, 410.0)
    spread = Spread(0.06, 0.18)
    other = Estimate(0.071, Transition(0.002, 0.011, 0.0, 0.0, 0.06, 0.09), 420 << 20, 380.0)
    return (
        Candidate("reroute", plan(2, 3, best), best, "best objective", None, spread, 0.08),
        Candidate("shrink", plan(2, None, other), other, "7 % less useful work an hour than reroute", None, spread, 0.08, True),
        Candidate("respawn", None, None, "no restarts are left (--max-restarts 0)"),
    )


def committed(step: int, time: float, generation: int = 1, loss: float = 3.0) -> Event:
    body = Committed(0, generation, Result(Position(step, 0), "step", (loss, 1.0)), 32, 0.05, 40)
    return Event(time, generation, "rank 0", body)


def job() -> list[Event]:
    """A whole job: 20 steps, the loss of rank 3, 20 more steps, a good end."""
    spec = ModelSpec(tuple(LayerSpec(f"Block{i}", f"d{i}", 1, 1, 0) for i in range(N_LAYERS)), (), (), 32, 4, 1000, 0, "cpu")

    def agent(time: float, generation: int, body: Body) -> Event:
        return Event(START + time, generation, "agent", body)

    events = [agent(0, 0, JobStarted("train.py", ("--steps", "40"), 4, 1, 0, "2x2", "auto", None, "0.1.0", 100))]
    events += [agent(0.1 * r, 0, RankStarted(r, 200 + r, r)) for r in range(4)]
    events += [agent(1.0 + 0.1 * r, 0, Hello(r, spec)) for r in range(4)]
    events.append(agent(1.6, 0, Profiled(profile(), 0.2)))
    events.append(agent(1.7, 1, PlanChosen(plan(1, None, START_ESTIMATE), "the start", ())))
    events += [agent(1.8, 1, Ready(r, 1, Position(0, 0), (), (), 32, 0.01, 0.0, 0)) for r in range(4)]
    events.append(agent(1.9, 1, GenerationStarted(None, None, None, 0.01, 0.0, None)))
    events += [committed(k, START + 2 + 0.05 * k, loss=4 - 0.05 * k) for k in range(20)]
    events.append(agent(2.98, 1, RankLost(3, Cause(CauseKind.SIGNAL, "SIGKILL"), True)))
    events.append(agent(2.98, 2, Pausing((3,), "rank 3 lost: SIGKILL")))
    events += [agent(2.99, 2, Paused(r, 2, Position(20, 0), "compute", ())) for r in range(3)]
    events.append(agent(2.995, 2, Proposed(candidates(), 3600.0, "--mtbf", 0.004, False)))
    events.append(agent(3.0, 2, PlanChosen(plan(2, 3), "best of 2 candidates", ())))
    events += [agent(3.06, 2, Ready(r, 2, Position(20, 0), (), (), 32, 0.06, 0.0, 0)) for r in range(3)]
    events.append(agent(3.07, 2, GenerationStarted(0.002, 0.011, 0.004, 0.061, 0.010, 0.088)))
    events += [committed(k, START + 3.13 + 0.06 * (k - 20), 2, 4 - 0.05 * k) for k in range(20, 40)]
    events.append(agent(4.4, 2, JobEnded(0, "all ranks finished", "")))
    return events
