"""What a seed stands for: a job, what it trains, and the faults that are to strike it."""

from __future__ import annotations

import signal

import msgspec

HELPERS = ("store", "zygote", "planner", "guard")
"""Processes of the agent that are no ranks."""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""What the agent passes on to all ranks."""


class Fault(msgspec.Struct, frozen=True):
    """`kind`: `kill` and `signal` send `signal`; `stop` is SIGSTOP for good; `freeze` the same for `seconds`; `cut` shuts
    `n_cut` of the process's TCP connections down. `target`: `rank`, `agent`, or one of HELPERS.

    `on`: the moment. `step`: when `number` steps are committed. Any other: the `number`th event of this kind (MOMENTS in
    strikes.py) since the fault before it in its chain, or since the start. `delay_s` later it strikes. `rank`: which one, or
    another where that is gone; None for the one that the event is about.
    """

    kind: str
    target: str
    on: str
    number: int
    delay_s: float
    rank: int | None = None
    signal: int = 0
    seconds: float = 0.0
    n_cut: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.target}"

    @property
    def may_lose_a_rank(self) -> bool:
        return self.target == "rank" and (self.kind in ("kill", "stop") or (self.kind == "freeze" and self.seconds > 0.5))


class ScriptFault(msgspec.Struct, frozen=True):
    """The script itself fails once, on one rank: `raise`, `exit`, `_exit` when `step` is next, in its own code or in `loss`."""

    how: str
    where: str
    step: int
    rank: int
    code: int

    @property
    def label(self) -> str:
        return f"{self.how} in {self.where}"


class Recipe(msgspec.Struct, frozen=True):
    """What is trained, and which calls the script makes: every so many steps, 0 for never. `own_s`: of its own after a step.

    `bucket_bytes`: of gradients, when a bucket of a reduction is full; 0 for the engine's own, one for all of these.
    `independent_samples`: micro-batches may be cut, if nothing is drawn at random.
    """

    variant: str = "gpt"
    optimizer: str = "adamw"
    scheduler: str = "warmup"
    dtype: str = "float64"
    dropout: float = 0.1
    clip: float | None = 0.5
    n_samples: int = 96
    global_batch: int = 15
    micro_batch: int = 2
    steps: int = 14
    eval_every: int = 5
    save_every: int = 0
    state_every: int = 0
    own_s: float = 0.0
    bucket_bytes: int = 0
    independent_samples: bool = False


class Case(msgspec.Struct, frozen=True):
    """A job and its faults. `spares`: no fault hits the last holder of a layer, as far as can be told from outside.

    `in_halves`: the search is told of hardware on which backwards are best run in halves.
    """

    seed: int
    layout: str
    n_ranks: int
    strategy: str = "auto"
    max_restarts: int = 0
    spares: bool = True
    recipe: Recipe = Recipe()
    chains: tuple[tuple[Fault, ...], ...] = ()
    script_faults: tuple[ScriptFault, ...] = ()
    in_halves: bool = False
