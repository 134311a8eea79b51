"""Zero bubbles: the best plain plans once more with their backward in halves, where that is worth its memory.

The halves that can wait fill the bubbles of the pipelines (odyssey/split.py orders them, under a cap of memory), so there is
nothing to gain where there are hardly any, or where ranks share cores that are busy anyway. Each cap that is tried is priced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

from odyssey.plan import Plan, Schedule, Work
from perfmodel.costs import Costs, has_halves
from perfmodel.objective import objective
from perfmodel.work import work_of
from strategies.situation import Candidate, Proposal, Situation

LADDER = (None, 2.0, 1.5, 1.25, 1.0)
"""Caps in multiples of the activations that 1F1B keeps; None: all memory that is left."""
WORTH = 0.99
"""More memory is taken only for less than this part of the step time."""
N_TRIED = 2
"""So many plans of each strategy are tried."""
MANY_WORKERS = 256
"""Beyond so many only the best one is, as the prices of more would take seconds."""
MANY_TASKS = 1500
"""After a loss pipelines of more micro-batches at stages are tried at `FEW` rungs; those of many workers always are."""
FEW = (None, 2.0)


def split(
    situation: Situation, costs: Costs, candidates: Iterable[Candidate], priced: Callable[[Proposal], Candidate]
) -> list[Candidate]:
    """The best plain plans of each strategy under `split`, at the least cap that is about as fast as the fastest; of those
    that gain by it. A plan is not tried if no order of it can beat the best candidate."""
    if not has_halves(situation.profile):
        return []
    work = work_of(situation.profile)
    found: list[Candidate] = []
    taken = [(c, c.plan, c.estimate) for c in candidates if c.plan is not None and c.estimate is not None]
    best = max((estimate.objective for *_, estimate in taken), default=0.0)
    hopes = []
    for candidate, plan, estimate in taken:
        if _is_plain(plan) and (least_s := _least_s(plan, costs)) < estimate.step_s * WORTH:
            hoped = objective(plan.global_batch, least_s, estimate.transition.total_s, situation.seconds_to_change)
            hopes.append((hoped, candidate, plan, estimate.step_s * WORTH))
    hopes.sort(key=lambda row: -row[0])
    n_tried: Counter[str] = Counter()
    are_many = len(situation.alive) > MANY_WORKERS
    for hoped, candidate, plan, enough_s in hopes:
        if hoped <= best or n_tried[candidate.strategy] == (1 if are_many else N_TRIED):
            continue
        n_tried[candidate.strategy] += 1
        rung = partial(_rung, priced, candidate.strategy, plan, work)
        is_long = are_many or (situation.plan is not None and _n_tasks(plan) > MANY_TASKS)
        chosen = _least_that_is_fast(rung, FEW if is_long else LADDER, enough_s)
        if chosen is not None and chosen.estimate is not None:
            best = max(best, chosen.estimate.objective)
            found.append(chosen)
    return found


def _n_tasks(plan: Plan) -> int:
    """Micro-batches at stages of the pipeline that has most."""
    return max(len(block.columns) * block.n_micro_batches for block in plan.blocks)


def _rung(priced: Callable[[Proposal], Candidate], strategy: str, plan: Plan, work: Work, cap: float | None) -> Candidate:
    return priced(Proposal(strategy, plan.under(Schedule("split", cap, work)), ""))


def _least_that_is_fast(
    under: Callable[[float | None], Candidate], ladder: Sequence[float | None], enough_s: float
) -> Candidate | None:
    """Under the least cap that is about as fast as all memory is, if that takes less than `enough_s`.

    More memory is not slower, so each rung that is looked at decides half of those that are left.
    """

    def is_fast(rung: Candidate) -> bool:
        return rung.plan is not None and rung.estimate is not None and rung.estimate.step_s < enough_s

    chosen = under(ladder[0])
    if not is_fast(chosen):
        return None
    assert chosen.estimate is not None
    enough_s = min(enough_s, chosen.estimate.step_s / WORTH)
    most, least = 0, len(ladder)
    while most + 1 < least:
        middle = (most + least) // 2
        rung = under(ladder[middle])
        if is_fast(rung):
            most, chosen = middle, rung
        else:
            least = middle
    return chosen


def _is_plain(plan: Plan) -> bool:
    """1F1B in pipelines, and no exceptions."""
    is_1f1b = plan.schedule.rule == "1f1b" and not plan.schedule.orders and not plan.routes
    return is_1f1b and any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def _least_s(plan: Plan, costs: Costs) -> float:
    """Seconds that no order can beat: the computations of a worker, from the first forward that reaches it on, or those of a
    host over its cores."""
    cores = costs.profile.cluster.cores
    known: dict[tuple[int, int, int], float] = {}
    worst_s = 0.0
    of_host: dict[int, float] = {}
    # of a block the first pipeline has as much to do as any: the last micro-batch of a step may be smaller
    firsts = accumulate((block.n for block in plan.blocks[:-1]), initial=0)
    for p in firsts if cores is None else range(len(plan.pipelines)):
        pipeline, n_samples, reaches_s = plan.pipelines[p], plan.samples_of(p), 0.0
        for stage in pipeline.stages:
            key = (stage.first, stage.stop, n_samples)
            if key not in known:
                known[key] = sum(costs.compute_s(kind, *key) for kind in ("F", "I", "W"))
            worst_s = max(worst_s, reaches_s + known[key])
            reaches_s += costs.compute_s("F", stage.first, stage.stop, min(plan.micro_batch, n_samples))
            if cores is not None and stage.worker is not None:
                host = costs.host(stage.worker)
                of_host[host] = of_host.get(host, 0.0) + known[key]
    shared_s = max(of_host.values(), default=0.0) / cores if cores is not None else 0.0
    return max(shared_s, worst_s) * costs.profile.step_scale
