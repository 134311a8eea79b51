"""A session without a launcher: one process that trains alone, so that `python train.py` works as it is."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, nullcontext

from odyssey.model.model import Model
from odyssey.plan.needs import Needs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.worker import Rank, worker_of
from odyssey.protocol.units import FIRST, Position, Result, position_after
from odyssey.runtime.backend import Backend
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.passed_units import PassedUnits
from odyssey.runtime.tally import Tally
from odyssey.runtime.transaction import Transaction


class LocalSession:
    """What `Session` is, for a job of one process."""

    def __init__(self, model: Model, job_spec: JobSpec, backend: Backend) -> None:
        spec, alone = job_spec.spec, worker_of(Rank(0))
        n_layers, n_micro_batches = len(spec.layers), -(-spec.global_batch // spec.micro_batch)
        layers, ties = tuple(range(n_layers)), tuple(range(len(spec.ties)))
        self.plan = prove(
            Plan(
                generation=1,
                strategy="alone",
                step=0,
                global_batch=spec.global_batch,
                micro_batch=spec.micro_batch,
                n_layers=n_layers,
                blocks=blocks_of((Pipeline((Stage(alone, 0, n_layers),), 0, n_micro_batches),)),
                reductions=(Reduction(layers, ties),),
                ties=spec.ties,
                state_from=StateFrom.SCRIPT,
            )
        )
        self.rank = self.leader = Rank(0)
        self.model = model
        self.position = FIRST
        self.replay = PassedUnits()
        self.is_idle = self.has_acted = False
        model.hold_built(layers)
        tally = Tally(len(spec.layers), spec.ties)
        groups = Groups(to_nobody, 1, Needs((alone,)), alone, model.device)
        model.peers.among(groups, (alone,))
        data = job_spec.prefetcher()
        atexit.register(data.close)
        self._engine = Engine(self.plan, alone, model, job_spec, backend, data, groups, (), tally)

    @property
    def place(self) -> Position:
        """Where the script stands."""
        return self.position

    def outside(self) -> AbstractContextManager[None]:
        """Around the script's own code inside a unit."""
        return nullcontext()

    def run(self, transaction: Transaction[Engine]) -> Result:
        """Run one unit."""
        sums = list(map(float, transaction.body(self._engine)))
        self._engine.computation.clock.take(self.plan.micro_batch)  # nobody asks, and on a GPU every op has left events
        values, metrics = transaction.conclude(sums), dict(transaction.metrics(sums))
        result = Result(self.position, transaction.kind, values, metrics)
        transaction.take(self._engine, result.values)
        self.position, self.has_acted = position_after(result), False
        return result
