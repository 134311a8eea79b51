"""What is drawn around a job of draw.py, or in its place: several agents, kills of all, exact points, slow things, growth."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping

from msgspec.structs import replace

from tests.soak.case import HELPERS, Agents, Case, Chain, Fault, PointFault, Recipe, Slow
from tests.soak.points import OF_ONE_RANK, POINTS

_TEN = "host", "points", "host", "killed", "host", "slow", "host", "agents", "start"
WORLDS = (*_TEN, "growth", *_TEN, "growth")
"""The worlds of twenty jobs in a row. The first two kinds cost the least time for a fault."""
ON_AGENT = {"kill": 6, "stop": 2, "freeze": 3}
ON_HELPERS = tuple((kind, helper) for helper in HELPERS for kind in ("kill", "freeze", "stop"))
SILENCES_S = (0.1, 0.8), (5.0, 8.0)
"""That an agent bears (tests/soak/strikes.py), and that it is lost by."""
OF_THE_START = ("said", "begun", "started", "joined", "plan", "ready", "go")
OF_A_RECOVERY = ("pausing", "paused", "plan", "receiving", "ready", "go", "leads")


def of(seed: int) -> str:
    return WORLDS[seed % len(WORLDS)]


def case(seed: int, on_one_host: Case) -> Case:
    """The job of this seed. `on_one_host`: what draw.py has for it, which lends recipe and settings."""
    rng = random.Random(f"case {seed}")
    base = replace(on_one_host, recipe=replace(on_one_host.recipe, eval_every=rng.choice((0, 3)), state_every=0))
    match of(seed):
        case "killed":
            return _killed(rng, base)
        case "points":
            return _points(rng, base)
        case "agents":
            return _among(rng, base, _losses(rng))
        case "start":
            return _among(rng, base, _early(rng), is_start=True)
        case "slow":
            return _slow(rng, base)
        case "growth":
            return _growth(rng, base)
        case _:
            strangers = _strangers(rng) if rng.random() < 0.3 else ()
            return replace(on_one_host, chains=(*on_one_host.chains, *strangers, _on_helper(rng, seed)))


# -- one agent ---------------------------------------------------------------------------------------------------------


def _on_helper(rng: random.Random, seed: int) -> Chain:
    """One of each kind in turn, or most would not be among a thousand faults."""
    round, place = divmod(seed, len(WORLDS))
    number = round * WORLDS.count("host") + WORLDS[:place].count("host")
    kind, helper = ON_HELPERS[number % len(ON_HELPERS)]
    seconds = rng.uniform(0.05, 3.0) if kind == "freeze" else 0.0
    killed = signal.SIGKILL if kind == "kill" else 0
    return (Fault(kind, helper, "step", rng.randint(1, 6), _soon(rng), None, signal=int(killed), seconds=seconds),)


def _strangers(rng: random.Random) -> tuple[Chain, ...]:
    kinds = rng.choices(("junk", "silence", "overwrite"), (2, 1, 3), k=rng.randint(1, 3))
    moments = [rng.choice((("step", rng.randint(1, 8)), ("joined", 1), ("plan", 1), ("pausing", 1))) for _ in kinds]
    return tuple(
        (Fault(kind, "store" if kind == "overwrite" else "ports", on, number, _soon(rng)),)
        for kind, (on, number) in zip(kinds, moments, strict=True)
    )


def _killed(rng: random.Random, base: Case) -> Case:
    """Killed as a whole one to three times, at steps and in starts, and other losses before; by one agent or several."""
    n_kills = rng.randint(1, 3)
    starts: list[tuple[Chain, ...]] = []
    step = 0
    for k in range(n_kills + 1):
        chains: list[Chain] = [(_kill(rng, base.n_ranks, step + rng.randint(1, 2)),) for _ in range(rng.randint(1, 2))]
        step += rng.randint(2, 4)
        if k < n_kills:
            on, number = ("step", step) if rng.random() < 0.7 else (rng.choice(("joined", "plan", "ready", "go")), 1)
            chains.append((Fault("kill", "job", on, number, rng.uniform(0, 0.08)),))
        starts.append(tuple(chains))
    recipe = replace(
        base.recipe, steps=step + 3, save_every=rng.choice((1, 2)), once_every=rng.choice((0, 3)), own_s=0.01, resumes=True
    )
    case = replace(base, recipe=recipe, chains=starts[0], again=tuple(starts[1:]), script_faults=())
    return _with_agents(rng, case) if rng.random() < 0.35 else case


def _points(rng: random.Random, base: Case) -> Case:
    """Ranks killed and stopped at exact points, with few faults from outside."""
    recipe = replace(base.recipe, save_every=rng.choice((1, 2)), once_every=rng.choice((2, 3)), bucket_bytes=1)
    recipe = replace(recipe, own_s=0.0, n_samples=96)
    strategy = rng.choice(("respawn", "respawn", "auto"))
    faults = tuple(_point(rng, base.n_ranks) for _ in range(rng.randint(9, 14)))
    chains: tuple[Chain, ...] = ((_kill(rng, base.n_ranks, rng.randint(2, 6)),),)
    return replace(
        base, recipe=recipe, strategy=strategy, max_restarts=40, chains=chains, script_faults=(), point_faults=faults
    )


def _point(rng: random.Random, n_ranks: int) -> PointFault:
    where = rng.choice(list(POINTS))
    layer = rng.randrange(6) if where in ("forward", "backward") and rng.random() < 0.5 else None
    number = rng.randint(1, POINTS[where] // (1 if layer is None else 4))
    how = "stop" if rng.random() < 0.15 else "kill"
    rank = None if where in OF_ONE_RANK else rng.randrange(n_ranks)
    return PointFault(how, where, number, rank, layer, another=rng.random() < 0.25)


def _growth(rng: random.Random, base: Case) -> Case:
    """Ranks that are lost come back beside the training, and then more is lost: who comes, or who drains for them."""
    chains: list[Chain] = []
    step = 0
    for _ in range(rng.randint(3, 5)):
        step += rng.randint(2, 6)
        first = _kill(rng, base.n_ranks, step)
        chains.append((first, _while_it_grows(rng, base.n_ranks)) if rng.random() < 0.8 else (first,))
    recipe = replace(
        base.recipe,
        steps=step + rng.randint(2, 12),
        save_every=rng.choice((0, 1, 3)),
        once_every=rng.choice((0, 2)),
        own_s=rng.choice((0.05, 0.1)),
        n_samples=96,
    )
    strategy = rng.choice(("auto", "repartition", "reroute"))
    case = replace(base, recipe=recipe, strategy=strategy, max_restarts=40, chains=tuple(chains), script_faults=())
    return _with_agents(rng, case) if rng.random() < 0.2 else case


def _while_it_grows(rng: random.Random, n_ranks: int) -> Fault:
    """After a loss: at the start of the rank that comes back, when it has joined, while all drain, and at the Go with it."""
    on, number = rng.choice((("started", 1), ("joined", 1), ("draining", 1), ("draining", 1), ("go", 2)))
    kind = _weighted(rng, {"kill": 6, "stop": 2, "freeze": 2, "cut": 2})
    rank = rng.randrange(n_ranks) if on in ("draining", "go") else None
    return Fault(
        *(kind, "rank", on, number, _soon(rng), rank),
        signal=int(signal.SIGKILL) if kind == "kill" else 0,
        seconds=rng.uniform(0.1, 3.0) if kind == "freeze" else 0.0,
        n_cut=rng.randint(1, 3) if kind == "cut" else 0,
    )


# -- time --------------------------------------------------------------------------------------------------------------


def _slow(rng: random.Random, base: Case) -> Case:
    """Something takes long, and meanwhile ranks are lost: nobody is taken for lost because of that."""
    which = ("milliseconds", "seconds", "disk", "data", "deaf")[base.seed // 10 % 5]
    where, layer = rng.choice(("forward", "backward", "optimizer")), rng.choice((None, 1, 3))
    layer = None if where == "optimizer" else layer
    how = rng.choice(("sleep", "spin"))
    match which:
        case "milliseconds":
            slow = Slow(where, how, rng.uniform(0.001, 0.02), 1, 1, layer)
        case "seconds":
            slow = Slow(where, how if how == "sleep" else "sleep", rng.uniform(6, 12), rng.randint(1, 60), 0, layer)
        case "disk":
            slow = Slow(rng.choice(("fsync", "rename")), "sleep", rng.uniform(0.3, 4), rng.randint(1, 4), rng.choice((0, 4)))
        case "data":
            slow = Slow("data", "sleep", *rng.choice(((0.05, 1, 7), (rng.uniform(3, 7), rng.randint(1, 60), 0))))
        case _:
            slow = Slow("forward", "deaf", rng.uniform(2, 6), rng.choice((1, 20, 60)), 0, layer)
    chains: list[Chain] = []
    step = 0
    for _ in range(rng.randint(2, 4)):
        step += rng.randint(1, 3)
        first = _kill(rng, base.n_ranks, step)
        moment = rng.choice(("pausing", "plan", "receiving", "go"))
        more = (Fault("kill", "rank", moment, 1, _soon(rng), rng.randrange(base.n_ranks), signal.SIGKILL),)
        chains.append((first, *more) if rng.random() < 0.4 else (first,))
    recipe = replace(base.recipe, steps=step + 4, save_every=2 if which == "disk" else 0, own_s=0.0, n_samples=96)
    case = replace(base, recipe=recipe, chains=tuple(chains), script_faults=(), slow=(slow,))
    return _with_agents(rng, case) if rng.random() < 0.3 else case


# -- several agents ----------------------------------------------------------------------------------------------------


def _with_agents(rng: random.Random, case: Case) -> Case:
    """The same on three agents. Of ranks that no agent has none is struck."""
    agents = Agents((2, 2, 2), rng.choice(("localhost", "localhost", "::1")), n_least=2, last_call_s=10.0)
    return replace(case, agents=agents, layout="auto", n_ranks=6, recipe=_fit(case.recipe))


def _among(rng: random.Random, base: Case, chains: list[Chain], *, is_start: bool = False) -> Case:
    sizes = rng.choice(((2, 2, 2), (1, 2, 2), (2, 2, 1, 1), (1, 1, 1)))
    n_late = 1 if any(fault.kind == "join" for chain in chains for fault in chain) else 0
    host = rng.choice(("localhost", "localhost", "::1"))
    agents = Agents(sizes, host, n_late, n_least=2, last_call_s=rng.choice((0.0, 1.0)) if is_start else 10.0)
    recipe = replace(_fit(base.recipe), steps=8 if is_start else 12, own_s=0.1, save_every=rng.choice((0, 2)), once_every=4)
    strategy = "respawn" if base.max_restarts and rng.random() < 0.3 else "auto"
    return Case(
        base.seed, "auto", sum(sizes), strategy, base.max_restarts, rng.random() < 0.9, recipe, tuple(chains), agents=agents
    )


def _fit(recipe: Recipe) -> Recipe:
    """Enough micro-batches for six ranks in any layout."""
    return replace(recipe, global_batch=max(recipe.global_batch, 12), micro_batch=min(recipe.micro_batch, 2))


def _losses(rng: random.Random) -> list[Chain]:
    """Draw losses of agents while the job runs, some in the recovery from another loss."""
    chains: list[Chain] = []
    step = 0
    for _ in range(rng.randint(2, 3)):
        step += rng.randint(1, 3)
        target = rng.choice(("agent", "member", "member"))
        if rng.random() < 0.5:
            chains.append((_kill(rng, 6, step), _on_agent(rng, target, rng.choice(OF_A_RECOVERY[:-1]), 1)))
        else:
            more = (Fault("kill", "rank", rng.choice(OF_A_RECOVERY), 1, _soon(rng), rng.randrange(6), signal.SIGKILL),)
            chains.append((_on_agent(rng, target, "step", step), *(more if rng.random() < 0.6 else ())))
    if rng.random() < 0.4:
        chains.append((Fault("cut", "rank", "step", rng.randint(1, 6), _soon(rng), rng.randrange(6), n_cut=2),))
    return chains + list(_strangers(rng)) if rng.random() < 0.3 else chains


def _early(rng: random.Random) -> list[Chain]:
    """Agents that are lost in the first second, and one that comes while the job begins."""
    chains: list[Chain] = []
    for _ in range(rng.randint(1, 2)):
        target = rng.choice(("agent", "agent", "member"))
        chains.append((_on_agent(rng, target, rng.choice(OF_THE_START), rng.choice((1, 1, 2, 3))),))
    if rng.random() < 0.6:
        moment, number = rng.choice((*((moment, rng.choice((1, 1, 2))) for moment in OF_THE_START), ("step", 1)))
        chains.append((Fault("join", "late agent", moment, number, rng.choice((0.0, rng.uniform(0, 0.5)))),))
    chains.append((_kill(rng, 6, rng.randint(1, 5)),))
    return chains


def _on_agent(rng: random.Random, target: str, on: str, number: int) -> Fault:
    kind = _weighted(rng, ON_AGENT)
    seconds = rng.uniform(*rng.choice(SILENCES_S)) if kind == "freeze" else 0.0
    number_sent = signal.SIGKILL if kind == "kill" else 0
    delay_s = rng.choice((0.0, 0.0, _soon(rng), rng.uniform(0, 0.9)))
    return Fault(kind, target, on, number, delay_s, rng.randrange(4), int(number_sent), seconds)


def _kill(rng: random.Random, n_ranks: int, step: int) -> Fault:
    return Fault("kill", "rank", "step", step, rng.uniform(0, 0.08), rng.randrange(n_ranks), signal.SIGKILL)


def _soon(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0, 0.03)))


def _weighted(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
