"""What a seed stands for: a job, what it trains, and the faults that are to strike it."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

HELPERS = ("store", "zygote", "planner", "guard")
"""Processes of the agent that are no ranks."""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""What the agent passes on to all ranks."""


class Fault(msgspec.Struct, frozen=True):
    """`kind`: `kill` and `signal` send `signal`; `stop` is SIGSTOP for good; `freeze` the same for `seconds`; `cut` shuts
    `n_cut` of the process's TCP connections down; `leave` gives notice of it; `slow` makes a rank slow, and whoever was it
    quick again; `join` starts one more agent; `junk`, `silence` and `overwrite` are what a stranger does (strangers.py).
    `target`: `rank`, `agent` (the one that leads), `member` (another one), `job` (all agents at
    once), `store`, `ports` (all that agents and ranks listen at), or one of HELPERS.

    `on`: the moment. `step`: when `number` steps are committed. Any other: the `number`th event of this kind (MOMENTS in
    strikes.py) since the fault before it in its chain, or since the start. `delay_s` later it strikes. `rank`: which one, or
    another where that is gone; None for the one that the event is about. `n_units`: it strikes after so many units at the
    latest, though its moment has not come; and one that nobody can be struck by waits for as many more. 0 for neither.
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
    n_units: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.target}"

    @property
    def may_lose_a_rank(self) -> bool:
        loses = self.kind in ("kill", "stop", "leave") or (self.kind == "freeze" and self.seconds > 0.5)
        return self.target == "rank" and loses


Chain = tuple[Fault, ...]
"""Faults, each of which waits for the one before."""


class PointFault(msgspec.Struct, frozen=True):
    """The script kills or stops (`how`) a rank at an exact point of `rank`: when that has got to `where` (POINTS in points.py)
    for the `number`th time, in `layer` if that is not None. `rank`: None for whoever gets there first; `another`: not this
    rank is struck, but the next one.
    """

    how: str
    where: str
    number: int
    rank: int | None
    layer: int | None = None
    another: bool = False

    @property
    def label(self) -> str:
        return f"{self.how} at {self.where}"


class Slow(msgspec.Struct, frozen=True):
    """A point that takes `seconds` longer: the `first` time that a rank gets there, and every `every`th time after it (0:
    never again). `how`: `sleep`, `spin` in Python, or `deaf`: in C, without letting Python in."""

    where: str
    how: str
    seconds: float
    first: int = 1
    every: int = 1
    layer: int | None = None


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
    `independent_samples`: micro-batches may be cut, if nothing is drawn at random. `resumes`: from its checkpoints.
    `stream`: how its data, which can only be iterated over, are read (tests/streams.py); empty for a map-style data set.
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
    once_every: int = 0
    own_s: float = 0.0
    bucket_bytes: int = 0
    independent_samples: bool = False
    resumes: bool = False
    stream: str = ""


class Agents(msgspec.Struct, frozen=True):
    """Several agents on one host that meet at `host`. `n_ranks`: of each. `n_late`: so many of them, the last, are started by
    faults. `n_least`: of them, with which the job may begin. `detect_s`, `last_call_s`: as in RunOptions."""

    n_ranks: tuple[int, ...]
    host: str = "localhost"
    n_late: int = 0
    n_least: int = 2
    detect_s: float = 3.0
    last_call_s: float = 0.0

    @property
    def n_first(self) -> int:
        return len(self.n_ranks) - self.n_late


class Case(msgspec.Struct, frozen=True):
    """A job and its faults. `spares`: no fault hits the last holder of a layer, as far as can be told from outside.

    `in_halves`: the search is told of hardware on which backwards are best run in halves. `agents`: None for one, whose nodes
    are the ranks. `again`: the chains of each further start of the job, which comes when the one before was killed as a whole.
    `is_sequence`: of sequences.py.
    """

    seed: int
    layout: str
    n_ranks: int
    strategy: str = "auto"
    max_restarts: int = 0
    spares: bool = True
    recipe: Recipe = Recipe()
    chains: tuple[Chain, ...] = ()
    script_faults: tuple[ScriptFault, ...] = ()
    in_halves: bool = False
    agents: Agents | None = None
    again: tuple[tuple[Chain, ...], ...] = ()
    point_faults: tuple[PointFault, ...] = ()
    slow: tuple[Slow, ...] = ()
    is_sequence: bool = False
    protect: str = "auto"

    @property
    def n_agents(self) -> int:
        return len(self.agents.n_ranks) if self.agents is not None else 1

    def chains_of(self, start: int) -> tuple[Chain, ...]:
        """`start`: 0 for the first of the job."""
        return (self.chains, *self.again)[start]

    @property
    def faults(self) -> list[Fault]:
        """All that may strike from outside."""
        return [fault for chains in (self.chains, *self.again) for chain in chains for fault in chain]


SLOW_RANK = "slow-rank"
"""A file in the folder of a job, with the number of the rank that is slow."""


def logs_of(folder: Path, start: int, agent: int) -> Path:
    """Where an agent of a job writes its log when the job is started for the `start`th time, from 0 on."""
    return folder / f"log-{start}" / f"agent-{agent}"
