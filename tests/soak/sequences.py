"""Sequences of changes from a seed, one after the other in one job: losses, notices, slow ranks, agents that come and go, and
what is lost comes back (`--max-restarts`).

Each change waits for an event: for some units more, for a rank that comes back, for all that drain for it, for a Go. So the
next one meets whatever layout the last one has left, or finds it in the middle of that.
"""

from __future__ import annotations

import random
import signal

from tests.soak.case import Agents, Case, Fault, Recipe

N_RANKS, N_LEAST = 8, 8
"""The steps of each job, and changes that must have struck in it."""
LAYOUTS = ("1x4", "4x2", "2x4", "8x1", "3+2+3", "auto")
RECIPES = tuple(
    Recipe(variant, global_batch=global_batch, micro_batch=2, steps=80, eval_every=0)
    for variant, global_batch in (("gpt", 16), ("tied", 15), ("shared", 19), ("mlp", 32))
)
"""Few, so that one process trains them once for many jobs."""
KINDS = {"kill": 8, "stop": 2, "leave": 2, "slow": 3, "freeze": 1, "cut": 1}
MOST = {"stop": 1, "leave": 3}
"""In a sequence: one that stands still is lost after three seconds, one that has left does not come back."""
AFTER_A_LOSS = ("started", "joined", "joined", "draining", "go")
N_UNITS, N_UNITS_SLOW = 12, 25
"""A change waits for so many units at most; behind that of a slow rank, which takes a while to be noticed."""


def case(seed: int) -> Case:
    """The sequence of this seed: pure, and the same on every machine."""
    rng = random.Random(f"sequence {seed}")
    recipe = rng.choice(RECIPES)
    if rng.random() < 0.2:
        agents = Agents((2, 2, 2, 2, 2, 2), n_late=2, n_least=2, last_call_s=0.0)
        chain = _among_agents(rng, agents.n_late)
        return Case(seed, "auto", N_RANKS, "auto", 40, True, recipe, (chain,), agents=agents, is_sequence=True)
    strategy, layout = rng.choice(("auto", "auto", "auto", "repartition", "reroute", "respawn")), rng.choice(LAYOUTS)
    chain, in_halves = _on_one_host(rng), rng.random() < 0.2
    return Case(seed, layout, N_RANKS, strategy, 40, True, recipe, (chain,), in_halves=in_halves, is_sequence=True)


def _on_one_host(rng: random.Random) -> tuple[Fault, ...]:
    changes: list[Fault] = []
    for _ in range(rng.randint(N_LEAST + 1, N_LEAST + 4)):
        left = {kind: weight for kind, weight in KINDS.items() if _count(changes, kind) < MOST.get(kind, len(changes) + 1)}
        kind = rng.choices([*left], [*left.values()])[0]
        changes.append(_change(rng, kind, "rank", changes))
    return tuple(changes)


def _among_agents(rng: random.Random, n_late: int) -> tuple[Fault, ...]:
    """Between losses of ranks agents are killed, told to leave, and come."""
    changes: list[Fault] = []
    of_agents = ["kill", "leave", "join", "join"][: 2 + n_late]
    rng.shuffle(of_agents)
    for i in range(N_LEAST + 3):
        if i % 2 and of_agents:
            kind = of_agents.pop()
            target = "late agent" if kind == "join" else rng.choice(("agent", "member", "member"))
            changes.append(_change(rng, kind, target, changes))
        else:
            changes.append(_change(rng, rng.choice(("kill", "kill", "slow")), "rank", changes))
    return tuple(changes)


def _change(rng: random.Random, kind: str, target: str, before: list[Fault]) -> Fault:
    on, number, n_units = "unit", rng.randint(2, 6), N_UNITS
    if before and before[-1].may_lose_a_rank and rng.random() < 0.7:
        on, number = rng.choice(AFTER_A_LOSS), 1
    elif before and before[-1].kind == "slow":
        number, n_units = rng.randint(2, N_UNITS_SLOW), N_UNITS_SLOW
    sent = {"kill": signal.SIGKILL, "leave": signal.SIGTERM}.get(kind, 0)
    delay_s = rng.choice((0.0, rng.uniform(0, 0.03)))
    return Fault(
        *(kind, target, on, number, delay_s, rng.randrange(N_RANKS)),
        signal=int(sent),
        seconds=rng.uniform(0.05, 0.4) if kind == "freeze" else 0.0,
        n_cut=rng.randint(1, 3) if kind == "cut" else 0,
        n_units=n_units,
    )


def _count(changes: list[Fault], kind: str) -> int:
    return sum(change.kind == kind for change in changes)
