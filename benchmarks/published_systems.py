"""What published systems do at a change: their rules in short, with our prices for their layouts.

So systems differ in what they do and not in how they were measured. What their papers leave open is guessed, and
docs/internals/published-systems.md says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from benchmarks.published_life import PublishedLife, Response, System
from odyssey.errors import StateLost
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, Worker, numbers_from
from odyssey_cli.replay.first_plans import FirstPlans, step_s
from odyssey_cli.replay.outcome import Result
from odyssey_cli.replay.policies import Policy, all_policies
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import DAY_S, Trace, at_once
from perfmodel.profile.profile import Profile
from strategies.building.shapes import shapes_of
from strategies.search import best, search
from strategies.situation import Aim, Objective, Situation


class _Restarting:
    """What the systems share: a job, how it starts, and what a restart takes."""

    def __init__(self, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts) -> None:
        self._setup, self._first_plans, self._restart_costs = setup, first_plans.plain(), restart_costs
        self._used: frozenset[int] = frozenset()

    def start(self, there: frozenset[int]) -> Response:
        """All ranks, anew."""
        plan = self._layout(there)
        self._used = there if plan is not None else frozenset()
        if plan is None:
            return Response("waits for nodes", None, 0.0, 0, self._used)
        n_ranks = len(there) * self._setup.ranks_per_node
        return Response(layout_of(plan), step_s(plan), self._restart_costs.restart_of(n_ranks), len(plan.workers), there)

    def _layout(self, there: frozenset[int]) -> Plan | None:
        return self._first_plans.on(len(there))

    def _back_to_checkpoint(self, there: frozenset[int]) -> Response:
        return _with(self.start(there), rolls_back=True)


class Varuna(_Restarting):
    """Varuna (EuroSys 2022): after a loss back to the newest checkpoint, for nodes that come a checkpoint on demand; then the
    best layout of equal pipelines; what is left over stays idle."""

    def lost(self, nodes: frozenset[int], there: frozenset[int]) -> Response | None:
        return self._back_to_checkpoint(there) if nodes & self._used else None

    def returned(self, there: frozenset[int]) -> Response | None:
        had = bool(self._used)
        return _with(self.start(there), saves=had, rolls_back=not had)

    def _layout(self, there: frozenset[int]) -> Plan | None:
        """By the closed form, as Varuna's choice is by its own simulation."""
        n_ranks = len(there) * self._setup.ranks_per_node
        depths = range(1, len(self._setup.profile.layers) + 1)
        best = _best_equal(self._setup.profile, n_ranks, depths)
        return None if best is None else self._first_plans.of_ranks(n_ranks, f"{best[0]}x{best[1]}")


class Oobleck(_Restarting):
    """Oobleck (SOSP 2023): pipelines of any length from the least that has the memory; a pipeline that loses a node becomes
    shorter, borrows from the longest, or merges with the shortest; missing layers are copied from other pipelines."""

    def __init__(self, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts) -> None:
        super().__init__(setup, first_plans, restart_costs)
        self._plan: Plan | None = None
        self._ranks: dict[Worker, Rank] = {}
        """Worker of the plan -> rank of the trace's cluster: node times ranks of a node, and its place there."""
        self._shortest = _least_depth(setup.profile)

    def start(self, there: frozenset[int]) -> Response:
        response = super().start(there)
        ranks = [rank for node in sorted(there) for rank in _ranks_of(node, self._setup)]
        self._ranks = dict(zip(numbers_from(Worker(0), len(ranks)), ranks, strict=True))
        return response

    def lost(self, nodes: frozenset[int], there: frozenset[int]) -> Response | None:
        plan = self._plan
        if not nodes & self._used or plan is None:
            return None
        self._used -= nodes
        gone = {rank for node in nodes for rank in _ranks_of(node, self._setup)}
        left = {worker for worker, rank in self._ranks.items() if rank not in gone}
        if any(left.isdisjoint(plan.holders[layer]) for layer in range(plan.n_layers)):
            return self._back_to_checkpoint(there)
        pipelines = [[s.worker for s in pipeline.stages if s.worker in left] for pipeline in plan.pipelines]
        pipelines.append([worker for worker in plan.idle if worker in left])
        ranks = [[self._ranks[worker] for worker in row if worker is not None] for row in pipelines]
        *rows, spare = ranks
        return self._instantiate(regrouped(rows, spare, self._shortest), spare, there)

    def returned(self, there: frozenset[int]) -> Response | None:
        if not self._used:
            return self._back_to_checkpoint(there)
        return _with(self.start(there), pause_s=self._reconfigure_s())

    def _instantiate(self, rows: Sequence[Sequence[Rank]], spare: Sequence[Rank], there: frozenset[int]) -> Response:
        n_layers, n_micro_batches = len(self._setup.profile.layers), _n_micro_batches(self._setup.profile)
        rows = sorted((list(row) for row in rows), key=lambda row: (-len(row), row))[:n_micro_batches]
        lengths = [min(len(row), n_layers) for row in rows]
        used = [rank for row, length in zip(rows, lengths, strict=True) for rank in row[:length]]
        others = [rank for node in sorted(self._used) for rank in _ranks_of(node, self._setup) if rank not in set(used)]
        plan = self._first_plans.of_ranks(len(used) + len(others), "+".join(map(str, lengths))) if lengths else None
        if plan is None:
            return self._back_to_checkpoint(there)
        ranks = [*used, *others]
        self._plan, self._ranks = plan, dict(zip(numbers_from(Worker(0), len(ranks)), ranks, strict=True))
        return Response(layout_of(plan), step_s(plan), self._reconfigure_s(), len(used), self._used)

    def _reconfigure_s(self) -> float:
        """A line through the 2 to 10 s of its artifact, from BERT to 6.7 B parameters (of two bytes)."""
        return 2.0 + 1.2 * _billions(self._setup.profile)

    def _layout(self, there: frozenset[int]) -> Plan | None:
        self._plan = super()._layout(there)
        return self._plan


class Recycle(_Restarting):
    """ReCycle (SOSP 2024): a lost worker's micro-batches go to the same stage of other pipelines, its layers stay where they
    are; a node that returns takes its place again. Without a worker left of some stage: back to the checkpoint."""

    def __init__(self, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts) -> None:
        super().__init__(setup, first_plans, restart_costs)
        self._plan: Plan | None = None
        self._places: tuple[int, ...] = ()
        """The nodes for which the plan was made."""

    def start(self, there: frozenset[int]) -> Response:
        self._places = tuple(sorted(there))
        return super().start(there)

    def lost(self, nodes: frozenset[int], there: frozenset[int]) -> Response | None:
        return self._rerouted(there) if nodes & self._used else None

    def returned(self, there: frozenset[int]) -> Response | None:
        if not self._used:
            return self._back_to_checkpoint(there)
        if there - set(self._places):
            return _with(self.start(there), saves=True)
        return self._rerouted(there)

    def _rerouted(self, there: frozenset[int]) -> Response:
        plan, setup = self._plan, self._setup
        assert plan is not None and plan.estimate is not None
        places = {worker: self._places[worker // setup.ranks_per_node] for worker in (*plan.workers, *plan.idle)}
        alive = tuple(sorted(worker for worker, node in places.items() if node in there))
        lost = tuple(sorted(set(places) - set(alive)))
        self._used = frozenset(places.values()) & there
        situation = Situation(
            generation=plan.generation + 1,
            step=1,
            plan=plan,
            alive=alive,
            lost=lost,
            respawnable=(),
            held={worker: plan.holds.get(worker, frozenset()) for worker in alive},
            node_of={worker: worker // setup.ranks_per_node for worker in places},
            profile=setup.profile,
            seconds_to_change=DAY_S,
            aim=Aim(Objective.PAPER),
        )
        try:
            chosen = best(search(situation, "reroute"))
        except StateLost:
            chosen = None
        if chosen is None or chosen.plan is None or chosen.estimate is None:
            return self._back_to_checkpoint(there)
        pause_s = chosen.estimate.transition.total_s
        return Response(layout_of(chosen.plan), chosen.estimate.step_s, pause_s, len(chosen.plan.workers), self._used)

    def _layout(self, there: frozenset[int]) -> Plan | None:
        self._plan = super()._layout(there)
        return self._plan


def regrouped(rows: Sequence[Sequence[Rank]], spare: Sequence[Rank], shortest: int) -> list[list[Rank]]:
    """Oobleck's rules: pipelines that became too short take spare ranks, borrow from the longest that can lend, or merge."""
    free = list(spare)
    kept = sorted((list(row) for row in rows if row), key=len)
    done: list[list[Rank]] = []
    while kept:
        row = kept.pop(0)
        while len(row) < shortest and free:
            row.append(free.pop())
        while len(row) < shortest:
            lender = max([*kept, *done], key=len, default=[])
            if len(lender) <= shortest:
                break
            row.append(lender.pop())
        if len(row) >= shortest:
            done.append(row)
        elif kept:
            kept[0] = sorted([*kept[0], *row])
        elif done:
            done[0] = sorted([*done[0], *row])
    return done


def _with(response: Response, **changes: object) -> Response:
    """Where it cannot train, falling back is all that can be added."""
    if response.step_s is None:
        changes = {name: value for name, value in changes.items() if name == "rolls_back"}
    return replace(response, **changes)


def _n_micro_batches(profile: Profile) -> int:
    return -(-profile.global_batch // profile.micro_batch)


def _least_depth(profile: Profile) -> int:
    """The shortest pipeline that has the memory for the model."""
    shapes, n_layers = shapes_of(profile, _n_micro_batches(profile)), len(profile.layers)
    return next((n for n in range(1, n_layers + 1) if shapes.of(n) is not None), n_layers)


def _best_equal(profile: Profile, n_ranks: int, depths: Iterable[int]) -> tuple[int, int] | None:
    """(pipelines, depth) of equal pipelines, the best of these depths by the closed form; None if none can be."""
    shapes = shapes_of(profile, _n_micro_batches(profile))
    found: list[tuple[float, int, int]] = []
    for depth in depths:
        shape, n_pipelines = shapes.of(depth), min(n_ranks // depth, shapes.n_micro_batches)
        if shape is not None and n_pipelines:
            found.append((shapes.closed_s({shape: n_pipelines}), n_pipelines, depth))
    return min(found)[1:] if found else None


def _ranks_of(node: int, setup: Setup) -> Iterable[Rank]:
    return numbers_from(Rank(node * setup.ranks_per_node), setup.ranks_per_node)


def _billions(profile: Profile) -> float:
    return sum(layer.parameter_bytes for layer in profile.layers) / 2 / 1e9


def _like(
    system: Callable[[Setup, FirstPlans, RestartCosts], System],
    trace: Trace,
    setup: Setup,
    first_plans: FirstPlans,
    restart_costs: RestartCosts,
    progress: Callable[[float], None],
) -> Result:
    """Varuna, which always returns to a checkpoint, is given the best interval for this trace, as if it were known."""
    known_s = trace.length_s / max(1, sum(1 for _ in at_once(trace.changes))) if system is Varuna else None
    return PublishedLife(trace, restart_costs, system(setup, first_plans, restart_costs), known_s).run(progress)


_PUBLISHED = (
    Policy("varuna", "like Varuna: as torchrun, in the best layout of equal pipelines", partial(_like, Varuna)),
    Policy("oobleck", "like Oobleck: pipelines become shorter, and longer again", partial(_like, Oobleck)),
    Policy("recycle", "like ReCycle: micro-batches go to the same stage of other pipelines", partial(_like, Recycle)),
)


def policies(*names: str) -> tuple[Policy, ...]:
    """These: ours, and those like published systems."""
    known = {policy.name: policy for policy in (*all_policies(), *_PUBLISHED)}
    return tuple(known[name] for name in dict.fromkeys(names))
