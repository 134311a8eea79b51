"""`odyssey rehearse`: run the plan of a cluster that is not there, lose ranks of it, and compare with what was predicted."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

import strategies
from launcher.joblog.events import Event, RankStarted, SlotsReturned
from launcher.joblog.exit_codes import SIGNALS
from launcher.joblog.wording import ranks_text
from launcher.options import RunOptions
from odyssey.codec import to_json
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Finished, Hello
from odyssey_cli import files, run
from odyssey_cli.command_line import values
from odyssey_cli.command_line.typed_requests import RehearseRequest
from odyssey_cli.display import quantities
from odyssey_cli.display.page import page
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import plan_now
from odyssey_cli.planning.source import Source
from odyssey_cli.rehearsal.comparison import Rehearsal, generations, not_taken, show
from odyssey_cli.rehearsal.disturbance import Disturbance
from odyssey_cli.rehearsal.network import Interfaces
from odyssey_cli.replay import traces
from odyssey_cli.replay.traces import NodeEventKind, Trace
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile, scaled
from strategies.situation import Aim

RANK = Path(__file__).with_name("rank.py")
_ACTIONS = {NodeEventKind.LOST: "lose", NodeEventKind.FAILED: "kill", NodeEventKind.RETURNED: "join"}
"""What a drill may do."""


class Wanted(msgspec.Struct, frozen=True):
    """What is to be rehearsed. `drills`: as of `odyssey run`, empty for a loss of one rank in mid-rehearsal.

    `speed`: seconds of the cluster that pass in one of ours. `jitter`: standard deviation of the logarithm of an op's
    time. `slow`: rank -> a factor of all its ops. `n_spares`: ranks that stand by from the start.
    """

    layout: str
    strategies: tuple[str, ...]
    drills: tuple[str, ...]
    n_steps: int
    speed: float
    mtbf_s: float | None
    jitter: float
    slow: dict[int, float]
    seed: int
    max_restarts: int
    log_dir: Path
    aim: Aim = Aim()
    n_spares: int = 0


SHARDED_HELP = "`odyssey plan --fail 1` and `odyssey replay` say what is planned for it"


def rehearse(found: Source, wanted: Wanted, *, display: bool) -> list[Rehearsal]:
    """One job for each strategy. Raises UsageError before anything is started."""
    n_ranks = found.n_nodes * found.ranks_per_node
    for rank in wanted.slow:
        if rank >= n_ranks:
            raise UsageError(f"--slow {rank}: there are ranks 0 to {n_ranks - 1}")
    if found.profile.is_sharded:
        raise UsageError(
            f"{found.profile.model} is sharded: its ranks compute together, which cannot be rehearsed", SHARDED_HELP
        )
    profile = scaled(_as_it_shows(found), wanted.speed)
    path = wanted.log_dir / f"rehearsal-{os.getpid()}.json"
    try:
        wanted.log_dir.mkdir(parents=True, exist_ok=True)
        profiles.write(profile, path)
    except OSError as error:
        raise UsageError(f"--log-dir {wanted.log_dir}: {(error.strerror or str(error)).lower()}") from None
    rehearsals: list[Rehearsal] = []
    try:
        for i, strategy in enumerate(wanted.strategies):
            if len(wanted.strategies) > 1:
                which = f"rehearsal {i + 1} of {len(wanted.strategies)}"
                print(f"odyssey: {which}: --strategy {strategy}", file=sys.stderr, flush=True)
            rehearsals.append(_job(found, profile, wanted, strategy, path, display))
            if rehearsals[-1].code > SIGNALS:
                break  # somebody has ended it, and the others with it
    finally:
        path.unlink()
    return rehearsals


def _as_it_shows(found: Source) -> Profile:
    """The profile of what is waited for: a device for each rank, as what sharing cores costs cannot be seen where nobody
    computes; and ops that take what the steps of the job have shown, not what they took one by one."""
    replace, profile = msgspec.structs.replace, found.profile
    slowed = scaled(profile, 1 / profile.step_scale)
    cluster = replace(slowed.cluster, ranks_per_node=found.ranks_per_node, cores=None)
    return replace(slowed, step_scale=1.0, recovery=profile.recovery, cluster=cluster)


def _job(found: Source, profile: Profile, wanted: Wanted, strategy: str, path: Path, display: bool) -> Rehearsal:
    events: list[Event] = []
    interfaces, n_hosts = path.with_suffix(".interfaces"), -(-found.n_nodes // profile.cluster.nodes_per_host)
    began = path.with_suffix(".began")
    arguments = [str(path), f"--steps={wanted.n_steps}", f"--jitter={wanted.jitter}", f"--seed={wanted.seed}"]
    arguments.append(f"--began={began}")
    arguments += [f"--slow={rank}={factor}" for rank, factor in sorted(wanted.slow.items())]
    if profile.cluster.interface_bandwidth is not None:
        Interfaces.make(str(interfaces), n_hosts)
        arguments += [f"--interfaces={interfaces}", f"--hosts={n_hosts}"]
    options = RunOptions(
        script=str(RANK),
        arguments=tuple(arguments),
        n_nodes=found.n_nodes,
        n_ranks_per_node=found.ranks_per_node,
        max_restarts=wanted.max_restarts,
        log_dir=wanted.log_dir,
        layout=wanted.layout,
        n_spares=wanted.n_spares,
        strategy=strategy,
        aim=wanted.aim,
        mtbf_s=None if wanted.mtbf_s is None else wanted.mtbf_s / wanted.speed,
        drills=wanted.drills,
        profile=path,
        rehearsed=f"{found.name} at speed {wanted.speed:g}",
        speed=wanted.speed,
    )
    disturbance = Disturbance(wanted.n_steps)

    def watch(event: Event) -> None:
        events.append(event)
        disturbance.watch(event)

    try:
        code = run.run(options, display=display, also=watch)
    finally:
        interfaces.unlink(missing_ok=True)
        began.unlink(missing_ok=True)
    if late := came_too_late(events):
        start = quantities.seconds(found.profile.recovery.spawn_s)
        what = f"the job ended while {ranks_text(late)} {'were' if len(late) > 1 else 'was'} starting, which takes {start}"
        print(f"odyssey: {what}: give more --steps to see what comes of that", file=sys.stderr)
    ran = generations(events, wanted.speed)
    return Rehearsal(strategy, code, profile.global_batch, tuple(ran), not_taken(strategy, events), disturbance.text)


def came_too_late(events: Iterable[Event]) -> set[Rank]:
    """Ranks that have come back, and had not built their Job yet when the job ended."""
    back: set[Rank] = set()
    starting: set[Rank] = set()
    for event in events:
        match event.body:
            case SlotsReturned(ranks=ranks):
                back.update(ranks)
            case RankStarted(rank=rank) if rank in back:
                starting.add(rank)
            case Hello(rank=rank):
                starting.discard(rank)
            case Finished():
                break
    return starting


def losses(mtbf_s: float, step_s: float, n_steps: int, n_ranks: int, seed: int) -> tuple[str, ...]:
    """Drills: ranks lost with their slots, at exponentially distributed distances with this mean, to the last but one."""
    draws = random.Random(seed)
    alive = list(range(n_ranks))
    found: list[str] = []
    now_s = draws.expovariate(1 / mtbf_s)
    while now_s < n_steps * step_s and len(alive) > 1:
        rank = alive.pop(draws.randrange(len(alive)))
        found.append(f"step={int(now_s / step_s)} lose={rank}")
        now_s += draws.expovariate(1 / mtbf_s)
    return tuple(found)


def changes_of(trace: Trace, n_steps: int) -> tuple[str, ...]:
    """Drills: the losses and returns of the trace, its whole length drawn together into these steps. A node changes once in a
    step: what else becomes of it there comes in the steps after it."""
    last: dict[int, int] = {}
    away: set[int] = set()
    found: list[str] = []
    for change in trace.changes:
        node = change.node
        if (node in away) != (change.kind is NodeEventKind.RETURNED):
            continue  # it is lost once until it is back
        step = max(min(int(change.at_s / trace.length_s * n_steps), n_steps - 1), last.get(node, -1) + 1)
        if step == n_steps:
            continue
        last[node] = step
        if change.kind is not NodeEventKind.FAILED:
            away ^= {node}
        found.append(f"step={step} {_ACTIONS[change.kind]}=node{node}")
    return tuple(found)


def command(asked: RehearseRequest) -> int:
    """The command line: rehearse, and print the table; returns the largest exit code of the jobs."""
    values.counts(1, {"--nodes": asked.nodes, "--nproc-per-node": asked.nproc_per_node, "--steps": asked.steps})
    values.counts(0, {"--max-restarts": asked.max_restarts, "--spares": asked.spares})
    found = source.find(asked.source).resized(asked.nodes, asked.nproc_per_node)
    json_file = files.check_if_given(asked.json, "--json")
    rehearsals = rehearse(found, _wanted(asked, found), display=not asked.no_display)
    show(rehearsals, page())
    if json_file is not None:
        files.write(json_file, to_json(rehearsals) + b"\n")
    return max(rehearsal.code for rehearsal in rehearsals)


def _wanted(asked: RehearseRequest, found: Source) -> Wanted:
    mtbf_s = values.duration_s_if_given(asked.mtbf, "--mtbf")
    layout = asked.layout
    if layout is None:
        layout = "auto" if asked.spares else found.layout  # which is one of all ranks
    values.layout_of(layout, found.n_nodes, found.ranks_per_node, asked.spares)
    drills = tuple(asked.drill or ())
    if asked.trace is not None:
        if drills or asked.mtbf is not None:
            raise UsageError("--trace says what is lost", "leave --drill and --mtbf out")
        drills = _traced_changes(found, asked.trace, asked.steps, asked.seed)
    elif not drills:
        drills = _default_losses(found, layout, asked.spares, mtbf_s, asked.steps, asked.seed)
    return Wanted(
        layout=layout,
        strategies=_strategies(asked.strategy),
        drills=drills,
        n_steps=asked.steps,
        speed=_between(asked.speed, "--speed", 0.01, 100.0),
        mtbf_s=mtbf_s,
        jitter=_between(asked.jitter, "--jitter", 0.0, 1.0),
        slow=dict(_slowness(text) for text in asked.slow or ()),
        seed=asked.seed,
        max_restarts=asked.max_restarts,
        log_dir=asked.log_dir,
        n_spares=asked.spares,
        aim=values.aim(found.aim, asked.objective, asked.protect, values.low_rank(asked.allow_approximate)),
    )


def _traced_changes(found: Source, trace: str, steps: int, seed: int) -> tuple[str, ...]:
    """The changes as the trace has them, which people are told of."""
    drills = changes_of(traces.read(trace, seed).cut(found.n_nodes), steps)
    n_back = sum(f" {_ACTIONS[NodeEventKind.RETURNED]}=" in drill for drill in drills)
    lost, back = (quantities.plural(n, "node") for n in (len(drills) - n_back, n_back))
    print(f"odyssey: {trace}: {lost} lost and {back} back in {steps} steps", file=sys.stderr)
    return drills


def _default_losses(found: Source, layout: str, n_spares: int, mtbf_s: float | None, steps: int, seed: int) -> tuple[str, ...]:
    """By `--mtbf`, or one rank in the middle of the rehearsal."""
    n_ranks = found.n_nodes * found.ranks_per_node
    if mtbf_s is None:
        return (f"step={steps // 2} lose={n_ranks // 2}",) if n_ranks > 1 else ()
    estimate = plan_now(found, layout, mtbf_s, n_spares=n_spares).estimate
    assert estimate is not None
    drawn = losses(mtbf_s, estimate.step_s, steps, n_ranks, seed)
    print(f"odyssey: --mtbf {mtbf_s:g} s: {len(drawn)} losses in {steps} steps (--seed {seed})", file=sys.stderr)
    return drawn


def _strategies(text: str) -> tuple[str, ...]:
    if text == "all":
        return ("auto", *strategies.names())
    return tuple(values.strategy(name.strip()) for name in text.split(",") if name.strip()) or ("auto",)


def _between(value: float, option: str, least: float, most: float) -> float:
    if not least <= value <= most:
        raise UsageError(f"{option} {value:g}: expected a number from {least:g} to {most:g}")
    return value


def _slowness(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        found = int(rank), float(factor)
    except ValueError:
        raise UsageError(f"--slow {text}: expected RANK=FACTOR, for example 3=1.5") from None
    if found[0] < 0 or not 0.1 <= found[1] <= 100:
        raise UsageError(f"--slow {text}: expected a rank, and a factor from 0.1 to 100")
    return found
