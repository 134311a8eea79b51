"""Our schedules against all there are, of small cases, and our price against what an order takes by the definition of its ops.

What benchmarks/schedules.py does with a constraint solver for larger ones.
"""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.schedule_cases import KINDS, Case, Op, drawn, kept, orders_of, plan_of, played, priced

MOST_TASKS = {"split": 8, "coupled": 12, "routed": 8}
"""Micro-batches at stages, of the cases that are tried exhaustively."""
N_TRIED = 12


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_priced_as_its_order_takes_and_keeps_no_more_than_it_may(seed: int) -> None:
    case = drawn(seed)
    plan = plan_of(case)
    orders = orders_of(plan)
    assert priced(case, plan) == pytest.approx(played(case, orders))
    assert all(kept(case, ops) <= case.limit(worker) for worker, ops in orders.items())


@pytest.mark.parametrize("kind", KINDS)
def test_small_schedules_are_near_the_best_of_all(kind: str) -> None:
    small = (case for seed in range(10**6) if (case := drawn(seed)).kind == kind and n_tasks(case) <= MOST_TASKS[kind])
    ratios = []
    for case, _ in zip(small, range(N_TRIED), strict=False):
        ours = played(case, orders_of(plan_of(case)))
        ratios.append(ours / Everything(case, ours).least)
    assert median(ratios) <= 1.01 and max(ratios) <= 1.05, sorted(ratios)


def n_tasks(case: Case) -> int:
    return case.n_pipelines * case.n_micro_batches * case.n_stages


class Everything:
    """All schedules of a case that end before `most`, as far as they can differ: ops are put down by when they start, each on
    its worker as early as it can. `least`: when the best of them ends, `most` if none is better."""

    def __init__(self, case: Case, most: int) -> None:
        self.case, self.least = case, most
        self._seen: set[object] = set()
        self._tasks = [(p, s, k) for p in range(case.n_pipelines) for k in case.micro_batches(p) for s in range(case.n_stages)]
        self._kinds = ["F", "I", "W"] if case.halves else ["F", "B"]
        self._extend({}, {}, dict.fromkeys(case.workers, 0), dict.fromkeys(case.workers, 0), 0)

    def _extend(
        self, ends: dict[Op, int], where: dict[tuple[int, int], int], clock: dict[int, int], live: dict[int, int], since: int
    ) -> None:
        state = (frozenset(ends.items()), frozenset(where.items()), since)
        if state in self._seen or self._least_left(ends, clock) >= self.least:
            return
        self._seen.add(state)
        if all(("B", s, k) in ends or ("W", s, k) in ends for _, s, k in self._tasks):
            self.least = max(clock.values())
            return
        case = self.case
        for op, workers, ready in self._next(ends, where):
            kind, s, k = op
            one, gradients = case.activation_bytes[s], case.output_bytes
            adds = {"F": one, "B": 0, "I": gradients, "W": 0}[kind]
            frees = {"F": 0, "B": one, "I": 0, "W": one + gradients}[kind]
            for worker in workers:
                start = max([clock[worker], *(at + (case.hop if on != worker else 0) for on, at in ready)])
                if start < since or live[worker] + adds > case.limit(worker):
                    continue
                end = start + case.ticks(kind, s)
                self._extend(
                    {**ends, op: end},
                    {**where, (s, k): worker},
                    {**clock, worker: end},
                    {**live, worker: live[worker] + adds - frees},
                    start,
                )

    def _next(
        self, ends: dict[Op, int], where: dict[tuple[int, int], int]
    ) -> list[tuple[Op, list[int], list[tuple[int, int]]]]:
        """Ops that may run, on whom, and when on which worker what they wait for is done."""
        case, found = self.case, []
        for p, s, k in self._tasks:
            back = next((ends[kind, s + 1, k] for kind in "BI" if (kind, s + 1, k) in ends), None)
            if ("F", s, k) not in ends:
                comes_next = s > 0 or k == case.micro_batches(p)[0] or ("F", 0, k - 1) in ends  # they differ in nothing
                if comes_next and (s == 0 or ("F", s - 1, k) in ends):
                    ready = [(where[s - 1, k], ends["F", s - 1, k])] if s else []
                    found.append((("F", s, k), case.runners(p, s), ready))
            elif ("I", s, k) in ends:
                if ("W", s, k) not in ends:
                    found.append((("W", s, k), [where[s, k]], []))
            elif ("B", s, k) not in ends and (s == case.n_stages - 1 or back is not None):
                ready = [(where[s, k], ends["F", s, k])] + ([(where[s + 1, k], back)] if back is not None else [])
                found += [((kind, s, k), [where[s, k]], ready) for kind in ("BI" if case.halves else "B")]
        return found

    def _least_left(self, ends: dict[Op, int], clock: dict[int, int]) -> int:
        """No way to go on ends before this: what each worker has to run itself comes behind what it has run."""
        left = dict(clock)
        for p, s, k in self._tasks:
            if len(runners := self.case.runners(p, s)) == 1:
                whole = ("B", s, k) in ends or ("B" not in self._kinds and False)
                done = sum(self.case.ticks(kind, s) for kind in self._kinds if (kind, s, k) in ends)
                left[runners[0]] += 0 if whole else self._least(s) - done
        return max(left.values())

    def _least(self, s: int) -> int:
        """What a micro-batch takes at a stage at least."""
        return self.case.ticks("F", s) + self.case.ticks("B", s)
