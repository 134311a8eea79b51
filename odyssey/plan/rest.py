"""The rest of a step that was cut: gradients that survivors have summed stay where they are, and are not computed again. Pure.

A gradient is a sum over the samples of the step. Whichever holder of a layer has added a sample's part, the reduction counts it
once (I6). So a rank says at a Pause which samples it has added, layer by layer (`Summed`); the next plan keeps what it leaves
in its place; and of the step only those samples are run again of which some layer lacks its part. Where they pass layers that
have theirs, these go forward, and back to their input, and add nothing.

What a rank has added cannot be taken out again, so a whole layer's sum goes, with all its samples, where it moves, where its
holder is lost, where its reduction has begun, and where one of the layers that it shares a parameter with goes. (Unicron, arXiv
2401.00134, section 4.2, keeps whole micro-batches of data-parallel replicas that are intact. Here layers are looked at one by
one, and the replicas may be cut anew.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise

import msgspec

from odyssey.codec import Count
from odyssey.plan.plan import Plan, derived_alike
from odyssey.plan.samples import Samples
from odyssey.plan.worker import Rank, Worker, worker_of

Span = tuple[int, int]
"""Positions `[first, stop)` in the step's global batch."""


class Summed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers `[first, stop)` have the gradients of the samples at these positions: ascending, apart from each other."""

    first: Count
    stop: Count
    samples: tuple[Span, ...]

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The samples at positions `[first, stop)` take the way of the plan's micro-batch number `micro_batch`."""

    micro_batch: int
    first: int
    stop: int


class Rest(msgspec.Struct, frozen=True):
    """What is to be run of a step that was cut, and what need not be added any more. `summed`: by some worker or another."""

    parts: tuple[Part, ...]
    summed: tuple[Summed, ...]

    @property
    def layers(self) -> frozenset[int]:
        """Those of which something is kept."""
        return frozenset(layer for its in self.summed for layer in its.layers)


class RestPlan(Plan, frozen=True, dict=True, kw_only=True):
    """A plan whose next step is the rest of one: the same workers, layers and reductions, and fewer micro-batches."""

    rest: Rest

    @cached_property
    def samples(self) -> Samples:
        return RestSamples(super().samples, self.rest, self.micro_batch, self.global_batch)


class RestSamples(Samples):
    """Those of the rest of a step, each on the way of one of the plan's micro-batches; `whole`: those of the plan's steps."""

    def __init__(self, whole: Samples, rest: Rest, micro_batch: int, global_batch: int) -> None:
        self._whole = whole
        self._part_of = {part.micro_batch: part for part in rest.parts}
        super().__init__(micro_batch, global_batch, self._part_of.keys())
        self._summed = {
            part.micro_batch: frozenset(
                layer
                for its in rest.summed
                if any(first <= part.first and part.stop <= stop for first, stop in its.samples)
                for layer in its.layers
            )
            for part in rest.parts
        }

    def positions(self, micro_batch: int) -> range:
        part = self._part_of.get(micro_batch)
        return self._whole.positions(micro_batch) if part is None else range(part.first, part.stop)

    def n_of(self, micro_batch: int) -> int:
        part = self._part_of.get(micro_batch)
        return self._whole.n_of(micro_batch) if part is None else part.stop - part.first

    def number(self, micro_batch: int) -> int:
        return self.positions(micro_batch).start // self._micro_batch

    def summed(self, micro_batch: int) -> frozenset[int]:
        return self._summed[micro_batch]


def rest_plan(plan: Plan, rest: Rest) -> RestPlan:
    """`plan`, for the rest of its first step."""
    return derived_alike(plan, RestPlan(**{name: getattr(plan, name) for name in Plan.__struct_fields__}, rest=rest))


# -- what a rank has summed ------------------------------------------------------------------------------------------------


def summed_of(samples: Mapping[int, Iterable[Span]]) -> tuple[Summed, ...]:
    """The same, by layer, with what is alike written once. Raises ValueError if a layer has a sample twice."""
    merged = [(layer, spans) for layer in sorted(samples) if (spans := _merged(layer, samples[layer]))]
    found = []
    for (spans, _), alike in groupby(enumerate(merged), lambda it: (it[1][1], it[1][0] - it[0])):
        layers = [layer for _, (layer, _) in alike]
        found.append(Summed(layers[0], layers[-1] + 1, spans))
    return tuple(found)


def _merged(layer: int, spans: Iterable[Span]) -> tuple[Span, ...]:
    found: list[Span] = []
    for first, stop in sorted(spans):
        if found and first < found[-1][1]:
            raise ValueError(f"layer {layer} has the gradient of sample {first} of the step twice")
        if found and first == found[-1][1]:
            first, _ = found.pop()
        found.append((first, stop))
    return tuple(found)


def left(layers: Collection[int], lost: Collection[int], ties: Iterable[Collection[int]]) -> frozenset[int]:
    """Those of `layers` whose sums stay where those of `lost` go: a shared parameter has one sum for all that share it."""
    gone, before = set(lost), -1
    while len(gone) > before:
        before = len(gone)
        for tie in ties:
            if not gone.isdisjoint(tie):
                gone.update(layer for layer in tie if layer in layers)
    return frozenset(layers) - gone


def kept_layers(summed: Iterable[Summed], plan: Plan, worker: Worker) -> frozenset[int]:
    """Those whose sums `plan` leaves in their place on a worker that has said what it has summed."""
    mine = {layer for its in summed for layer in its.layers}
    stay = plan.holds.get(worker, frozenset()) - plan.moved_to.get(worker, frozenset())
    return left(mine, mine - stay, plan.ties)


# -- what is left of the step ------------------------------------------------------------------------------------------------


def rest_of_step(plan: Plan, summed: Mapping[Rank, Sequence[Summed]]) -> Rest | None:
    """What the step that was cut comes to under `plan`, by what each rank has summed of it. None: all of it is run.

    Raises ValueError if two ranks have summed the same, or one what there is not.
    """
    samples: defaultdict[int, list[Span]] = defaultdict(list)
    for rank, its in summed.items():
        kept = kept_layers(its, plan, worker_of(rank))
        for one in its:
            if any(not 0 <= first < stop <= plan.global_batch for first, stop in one.samples):
                raise ValueError(f"rank {rank} has gradients of samples {list(one.samples)} of {plan.global_batch}")
            for layer in kept.intersection(one.layers):
                samples[layer] += one.samples
    found = summed_of(_apart(plan, {layer: _merged(layer, spans) for layer, spans in samples.items()}))
    missing = _missing(plan, found)
    n = plan.n_micro_batches
    are_whole = all(first % plan.micro_batch == 0 and stop - first == _whole(plan, first) for first, stop in missing)
    if not found or len(missing) > n or not (plan.is_cut or are_whole):
        return None
    ways = [i * n // len(missing) for i in range(len(missing))]
    return Rest(tuple(_on_their_ways(plan, ways, missing)), found)


def _apart(plan: Plan, samples: dict[int, tuple[Span, ...]]) -> dict[int, tuple[Span, ...]]:
    """Without layers that share a parameter within one stage, and have not the same samples: their parts of its gradient come
    of one backward, and cannot be added one without the other."""
    spans = {(column.first, column.stop) for block in plan.blocks for column in block.columns}
    together = [[layer for layer in tie if first <= layer < stop] for tie in plan.ties for first, stop in spans]
    unlike = {layer for those in together if len({samples.get(layer, ()) for layer in those}) > 1 for layer in those}
    stay = left(samples.keys(), unlike, plan.ties)
    return {layer: spans for layer, spans in samples.items() if layer in stay}


def _missing(plan: Plan, summed: Sequence[Summed]) -> list[Span]:
    """The samples that not all layers have, in parts of which each layer has all or nothing, a micro-batch at most."""
    ends = {end for its in summed for span in its.samples for end in span}
    ends |= {*range(0, plan.global_batch, plan.micro_batch), plan.global_batch}
    places = {end: i for i, end in enumerate(sorted(ends))}
    covered = [0] * (len(places) + 1)
    for its in summed:
        for first, stop in its.samples:
            covered[places[first]] += its.stop - its.first
            covered[places[stop]] -= its.stop - its.first
    found, n_layers = [], 0
    for part, change in zip(pairwise(places), covered, strict=False):
        n_layers += change
        if n_layers < plan.n_layers:
            found.append(part)
    return found


def _whole(plan: Plan, first: int) -> int:
    return min(plan.micro_batch, plan.global_batch - first)


def _on_their_ways(plan: Plan, ways: Sequence[int], missing: Sequence[Span]) -> list[Part]:
    """Each on its own way where that is one of them, as its samples are there already; the others on those that are free."""
    own = {k: span for span in missing if (k := span[0] // plan.micro_batch) < plan.n_micro_batches}
    at_home = {k: own[k] for k in ways if k in own and plan.samples.positions(k) == range(*own[k])}
    others = set(missing).difference(at_home.values())
    elsewhere = dict(zip((k for k in ways if k not in at_home), sorted(others), strict=True))
    return [Part(k, *span) for k, span in sorted({**at_home, **elsewhere}.items())]
