"""What a rank of `odyssey.Job` holds: layers of the model, with their optimizers, and the data that they are trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from odyssey.errors import OdysseyError
from odyssey.model import draws
from odyssey.model.model import Model
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.rest import Rest, Summed, kept_layers
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.model_spec import Boundary, ModelSpec
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Measured, OpTimes, Ready, Report
from odyssey.protocol.units import STEPS, Position
from odyssey.runtime import comparison, proof
from odyssey.runtime.backend import Backend
from odyssey.runtime.computation import Drawn
from odyssey.runtime.cut import Cut
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.tally import Tally
from odyssey.runtime.transfer import Moved, move_layers

OP_TIMES_EVERY_S = 0.5
Measuring = Callable[[Measure, Worker, Model, JobSpec, Backend, Groups], Measured]


class Layers:
    """The State of a Job (runner.py); an Engine is its Runner."""

    def __init__(self, model: Model, job_spec: JobSpec, backend: Backend, measure: Measuring) -> None:
        self.model = model
        self.changes_between_units = model.changes_between_units
        self._job_spec = job_spec
        self._backend = backend
        self._measure = measure
        self._tally = Tally(len(model.layers), model.ties)
        self._data: Prefetcher | None = None
        self._times_sent_s = time.monotonic()
        self._n_compared_steps = comparison.N_STEPS
        """Since state has come."""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def spec(self) -> ModelSpec:
        """What the script gave, as it is to be seen."""
        return self._job_spec.spec

    @property
    def held(self) -> Collection[int]:
        """Layers with full state."""
        return self.model.held

    def summed(self) -> tuple[Summed, ...]:
        """By layer. Without the statistics of the same micro-batches gradients are of no use."""
        return () if self.model.statistics or self.model.n_shards > 1 else self._tally.summed()

    def joining(self) -> None:
        """State that comes is ahead of the script."""
        self.model.replay.joining()

    def replaying(self) -> None:
        """What a script did meanwhile to a model of its own is undone."""
        self.model.replay.replaying()

    def replayed(self) -> None:
        """What a script did meanwhile to a model of its own is undone."""
        self.model.replay.replayed()

    @property
    def has_adopted(self) -> bool:
        """Whether it came lately."""
        return self._n_compared_steps < comparison.N_STEPS

    def difference(self, runner: Engine, kind: str) -> str:
        """See comparison.py."""
        what = comparison.difference(runner, self.model)
        self._n_compared_steps += kind in STEPS
        return what

    def forget_unit(self) -> None:
        """Nothing is summed."""
        self._tally.clear()

    def measure(self, order: Measure, worker: Worker, groups: Groups) -> Measured:
        """See odyssey/profiling."""
        self.model.peers.among(groups, [stage.worker for stage in order.chain])
        with self.model.unchanged(), draws.apart(self.device):  # not all ranks measure, nor as many layers
            return self._measure(order, worker, self.model, self._job_spec, self._backend, groups)

    def built(self, plan: Plan, since_s: float, kept_members: int = 0) -> None:
        """The backend's time for it passes."""
        self._backend.built(plan, since_s, kept_members)

    def why_not(self, lost: Collection[Rank]) -> str:
        """Whatever is lost, the coordinator knows who holds it."""
        return ""

    def let_go(self, runner: Engine, plan: Plan, rest: Rest | None) -> None:
        """Old gradients make room for what comes, and for new ones; but for those that are kept."""
        kept = frozenset() if rest is None else rest.layers & kept_layers(self.summed(), plan, runner.worker)
        runner.release(kept)

    def take_on(self, plan: Plan, worker: Worker, groups: Groups) -> Moved:
        """Build layers, or have them moved here."""
        began_s = time.monotonic()
        is_mover = worker in groups.needs.movers
        if self.changes_between_units and worker in plan.moved_to:
            self._n_compared_steps = 0  # first: a cut may come when state has
        with draws.apart(self.device):  # functions that build layers draw, and not on all ranks the same
            if plan.state_from is StateFrom.SCRIPT:
                self.model.hold_built(plan.holds.get(worker, frozenset()))
            elif self.model.is_as_built:
                self.model.hold_built(())  # its state comes from others, if it has work at all
            moved = move_layers(plan.moves, worker, self.model, groups) if is_mover else Moved()
        self._backend.moved(plan, worker, began_s)
        return moved

    def runner(self, plan: Plan, worker: Worker, groups: Groups, boundaries: Iterable[Boundary], rest: Rest | None) -> Engine:
        """An engine over these layers."""
        if self._data is None:
            self._data = self._job_spec.prefetcher()
        self.model.peers.among(groups, plan.pipelines[plan.place[worker][0]].workers if worker in plan.place else ())
        return Engine(
            plan, worker, self.model, self._job_spec, self._backend, self._data, groups, boundaries, self._tally, rest
        )

    def ready(self, runner: Engine, position: Position, *, groups_s: float, moves_s: float, moved: Moved) -> Ready:
        """See proof.py."""
        assert self._data is not None
        return proof.ready(
            runner,
            self.model,
            self._job_spec,
            self._data,
            position,
            groups_s=groups_s,
            moves_s=moves_s,
            moved=moved,
        )

    hands_on = False

    def hand_on(self, groups: Groups) -> None:
        """Every unit has a commit point."""
        raise OdysseyError("a unit of a Job was to be handed on", "please report this bug")

    def run_only(self, runner: Engine) -> None:
        """Layers that another plan had here go, and not before (I8)."""
        self.model.keep_only(runner.plan.holds.get(runner.worker, ()))
        if what := proof.problem(runner, self.model):
            raise OdysseyError(f"what the ranks have compared is not what is left to train: {what}", "please report this bug")

    def interrupted(self, runner: Engine, cut: Cut) -> Report | None:
        """Tells why micro-batches stay whole, if the cut is of that."""
        runner.computation.interrupted()
        return OpTimes(runner.plan.generation, (), str(cut)) if isinstance(cut, Drawn) else None

    def close(self) -> None:
        """Nothing is read any more."""
        if self._data is not None:
            self._data.close()

    def reports(self, runner: Engine) -> Iterator[Report]:
        """Steps that were recorded, and what ops took."""
        if (recorded := runner.recorder.take()) is not None:
            yield recorded
        now_s = time.monotonic()
        if now_s - self._times_sent_s >= OP_TIMES_EVERY_S:
            self._times_sent_s = now_s
            if times := runner.computation.clock.take(runner.plan.micro_batch):
                yield OpTimes(runner.plan.generation, times)
