"""What a Job's ops are carried out by: this process's device, or something that stands in for it."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey.model.model import Model
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from odyssey.protocol.model_spec import Boundary, ModelSpec
from odyssey.runtime.boundary import Expectations
from odyssey.runtime.computation import Computation
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher


class Backend:
    """Computes. `odyssey_cli/rehearsal` has another one, which only takes the time."""

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model as the agent and the other ranks are to see it."""
        return spec

    def boundaries(self, measured: Iterable[Boundary]) -> Iterable[Boundary]:
        """What passes between layers."""
        return measured

    def computation(
        self, plan: Plan, worker: Worker, model: Model, job_spec: JobSpec, data: Prefetcher, expectations: Expectations
    ) -> Computation:
        """For a new generation."""
        return Computation(plan, worker, model, job_spec, data, expectations)

    def built(self, plan: Plan, since_s: float, kept_members: int = 0) -> None:
        """The groups of `plan` stand; building began at `since_s` of time.monotonic. `kept_members`: of those that this rank
        has not built anew, together."""

    def moved(self, plan: Plan, worker: Worker, since_s: float) -> None:
        """This worker's part in the moves of `plan` is done; they began at `since_s` of time.monotonic."""
