"""A case from a seed: pure, and the same on every machine. Here the jobs of one agent; worlds.py has what is around them."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping

from msgspec.structs import replace

import strategies
from tests import models
from tests.soak import worlds
from tests.soak.case import FORWARDED, HELPERS, Case, Fault, Recipe, ScriptFault
from tests.soak.recipe import OPTIMIZERS, SCHEDULERS

N_RANKS = {"2x2": 4, "2+3": 5, "2x3": 6, "3x2": 6, "2x4": 8, "4x2": 8, "3+2+3": 8, "auto": 6}
N_PIPELINES = {"2x2": 2, "2+3": 2, "2x3": 2, "3x2": 3, "2x4": 2, "4x2": 4, "3+2+3": 3, "auto": 1}
"""Each needs a micro-batch; the more there are, the more losses a job survives."""
_OTHERS = [name for name in strategies.names() if name not in ("respawn", "neighbour")]
STRATEGIES = {"respawn": 9, "auto": 4} | dict.fromkeys(_OTHERS, 3 / len(_OTHERS))
"""Shares of 16, however many there are: one more changes nothing of a seed's case but, here and there, its strategy."""
DEADLY = (signal.SIGKILL,) * 5 + (signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
HARMLESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGURG, signal.SIGCONT, signal.SIGCHLD)
"""Handled or ignored by train.py, once it has begun."""

FIRST = {"kill": 36, "cut": 14, "freeze": 11, "stop": 8, "signal": 8, "helper": 20, "agent": 8}
NEXT = {"kill": 54, "cut": 10, "freeze": 10, "stop": 5, "signal": 5, "helper": 14, "agent": 2}
ON_HELPER = {"kill": 5, "freeze": 3, "stop": 2}
LOSING = {"kill": 40, "cut": 12, "stop": 6}
"""Weights of the first in a chain that goes on: it begins a recovery."""
DURING = {"pausing": 2, "paused": 2, "plan": 3, "receiving": 6, "ready": 4, "go": 2}
RESPAWNING = {"started": 3, "joined": 4}


def case(seed: int) -> Case:
    """The job of this seed."""
    return worlds.case(seed, on_one_host(seed))


def on_one_host(seed: int) -> Case:
    """With one agent: 4 to 12 faults in chains, the later of a chain at moments of the recovery from the earlier."""
    rng = random.Random(seed)
    layout = _weighted(rng, N_PIPELINES)
    n_ranks, n_pipelines = N_RANKS[layout], N_PIPELINES[layout]
    strategy = _weighted(rng, STRATEGIES)
    max_restarts = 40 if strategy == "respawn" or rng.random() < 0.7 else 0
    n_faults = rng.randint(4, 12) if max_restarts else rng.randint(3, 7)
    chains: list[tuple[Fault, ...]] = []
    if rng.random() < 0.15:
        chains.append((_fault(rng, n_ranks, FIRST, rng.choice(("started", "joined")), rng.randint(1, n_ranks)),))
    step = 0
    while sum(map(len, chains)) < n_faults:
        step += rng.randint(1, 4)
        n_more = rng.choice((0, 0, 0, 1, 1, 2, 3))
        chain = [_fault(rng, n_ranks, LOSING if n_more else FIRST, "step", step)]
        moments = DURING | RESPAWNING if strategy == "respawn" else DURING
        for _ in range(n_more):
            chain.append(_fault(rng, n_ranks, NEXT, _weighted(rng, moments), rng.choice((1, 1, 1, 2))))
        chains.append(tuple(chain))
    script_faults = []
    for at in rng.sample(range(1, step + 1), rng.choice((0, 0, 1, 1, 2)) if max_restarts and step > 1 else 0):
        how, where = rng.choice(("raise", "raise", "exit", "_exit")), rng.choice(("script", "loss"))
        script_faults.append(ScriptFault(how, where, at, rng.randrange(n_ranks), rng.randint(1, 200)))
    if rng.random() < 0.15:
        chains.append((_fault(rng, n_ranks, FIRST, "finished", rng.randint(1, n_ranks)),))
    recipe = _recipe(rng, step + rng.randint(4, 7), n_pipelines)
    spares = rng.random() < 0.8
    in_halves = rng.random() < 0.4
    recipe = replace(recipe, bucket_bytes=rng.choice((0, 1, 1, 20_000)), independent_samples=rng.random() < 0.6)
    recipe = replace(recipe, stream=_stream(random.Random(f"stream {seed}"), recipe))
    case = Case(seed, layout, n_ranks, strategy, max_restarts, spares, recipe, tuple(chains), tuple(script_faults), in_halves)
    return _protected(random.Random(f"protect {seed}"), case)


def protected_case(seed: int) -> Case:
    """The same, in a single pipeline whose ranks keep each other's layers; of several agents in any layout."""
    rng = random.Random(f"protected {seed}")
    layout, strategy = rng.choice(("1x3", "1x4")), rng.choice(("redundant", "redundant", "auto"))
    return worlds.case(seed, replace(on_one_host(seed), layout=layout, protect="state", strategy=strategy))


def _protected(rng: random.Random, case: Case) -> Case:
    """One in four in a single pipeline, whose ranks have to keep each other's layers."""
    if rng.random() < 0.25:
        return replace(case, layout=rng.choice(("1x3", "1x4")), protect="state")
    return replace(case, protect=rng.choice(("auto", "auto", "none", "state")))


def _fault(rng: random.Random, n_ranks: int, kinds: dict[str, int], on: str, number: int) -> Fault:
    kind = _weighted(rng, kinds)
    delay_s = rng.uniform(0, 0.08) if on == "step" else rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.06)))
    rank = rng.randrange(n_ranks) if on in ("step", "pausing", "plan", "go") or rng.random() < 0.3 else None
    target = "rank"
    if kind == "agent":
        kind, target = rng.choice(("freeze", "signal")), "agent"
    elif kind == "helper":
        kind, target = _weighted(rng, ON_HELPER), rng.choice(HELPERS)
    number_sent = {
        "kill": rng.choice(DEADLY) if target == "rank" else signal.SIGKILL,
        "signal": rng.choice(HARMLESS) if target == "rank" else rng.choice(FORWARDED),
    }
    return Fault(
        kind,
        target,
        on,
        number,
        delay_s,
        rank,
        signal=int(number_sent.get(kind, 0)),
        seconds=rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.05, 3.0))) if kind == "freeze" else 0.0,
        n_cut=rng.randint(1, 4) if kind == "cut" else 0,
    )


def _recipe(rng: random.Random, steps: int, n_pipelines: int) -> Recipe:
    variant = rng.choice([its for its in models.VARIANTS if its != "parts"])
    optimizer = rng.choice([name for name in OPTIMIZERS if name != "rprop" or variant == "mlp"])
    is_single = optimizer == "momentum" and rng.random() < 0.3  # no optimizer that divides by a small gradient's size
    global_batch = rng.randint(4, 19)
    return Recipe(
        variant=variant,
        optimizer=optimizer,
        scheduler=rng.choice(SCHEDULERS),
        dtype="float32" if is_single else "float64",
        dropout=0.0 if variant == "mlp" and rng.random() < 0.5 else rng.choice((0.0, 0.1, 0.3)),
        clip=rng.choice((None, 0.5, 0.05)),
        n_samples=rng.choice((1, 7, 23, 96, 96)),
        global_batch=global_batch,
        micro_batch=rng.randint(1, min(4, global_batch // n_pipelines)),
        steps=steps,
        eval_every=rng.choice((0, 3, 5)),
        save_every=rng.choice((0, 1, 2, 3)),
        state_every=rng.choice((0, 0, 4)),
        own_s=rng.choice((0.0, 0.0, 0.01)),
    )


def _stream(rng: random.Random, recipe: Recipe) -> str:
    """Sometimes; one that divides itself has a sample for each micro-batch of a step at least."""
    if rng.random() < 0.7:
        return ""
    is_divisible = recipe.n_samples == 96 and recipe.global_batch <= 12 * recipe.micro_batch
    whole = ("whole", "whole drawn", "whole stated")
    return rng.choice((*whole, "drawn", "drawn", "drawn stated") if is_divisible else whole)


def _weighted(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
