"""Which losses are alike: the plan found for one of them is that for the others, with its workers renamed.

Two losses are where a permutation of the workers and one of the nodes map the plan, the state that is held and who is on which
node onto themselves, and one loss onto the other. Here these permutations exchange whole pipelines that run and keep the same
layers at each stage and have as many micro-batches and samples, and idle workers, all as fast as those in whose places they
come. A pipeline that exceptions concern stays where it is.

    bunch      pipelines that are exchanged without any node: of one kind, stage by stage on the same nodes
    component  bunches that share hosts, and so can change places only together
    code       of a loss: the components that it hits, with their bunches, nodes and hosts numbered as they are come upon
               from a loss on. It says all that there is to say, so where two codes are equal the numbers are the permutation.

That equal codes make a permutation of this kind is proved of each one that is used (`is_symmetry`). Where bunches look the same
when they are come upon the plan's order decides, so of two losses that are alike it may not be seen; they are searched both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Cluster

MOST_BUNCHES = 16
"""The most bunches of a component. Pipelines of one length that fill nodes in turn make as many as a node has ranks, at most.
In a larger one, where they lie anyhow, only the pipelines of a bunch are exchanged."""

Row = tuple[Worker | None, ...]
"""The workers of a pipeline, stage by stage; or an idle one."""
Marks = tuple[tuple[int, ...], ...]
"""The lost stages of each row of a bunch that has lost any."""
Entry = tuple[int, int, Marks, tuple[int, ...], tuple[int, ...]]
"""A bunch in a code: kind, rows, marks, and the numbers of its nodes and hosts, stage by stage. In a component that is too
large the kind is -1, and the bunch's own number follows in place of the rows."""
Code = tuple[Entry, ...]
"""The code of a component."""


@dataclass(frozen=True, eq=False, slots=True)
class _Bunch:
    number: int
    kind: int
    nodes: tuple[int | None, ...]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class _Part:
    """A component that a loss hits, with its bunches in the code's order; `hit`: bunch -> row -> lost stages."""

    code: Code
    bunches: list[_Bunch]
    hit: Mapping[int, Mapping[int, tuple[int, ...]]]

    def workers(self) -> Iterator[Worker | None]:
        """All of them. The rows of a bunch that have lost stages come first, by these."""
        for bunch in self.bunches:
            hit = self.hit.get(bunch.number, {})
            for row in sorted(range(len(bunch.rows)), key=lambda row: (row not in hit, hit.get(row, ()), row)):
                yield from bunch.rows[row]


@dataclass(frozen=True, slots=True)
class Place:
    """A stage of a bunch, in which `n` workers are alike: `worker` is the first of them, `other` the second."""

    bunch: int
    component: int
    stage: int
    n: int
    worker: Worker
    other: Worker | None


class LossClasses:
    """The symmetries of one plan."""

    def __init__(
        self,
        plan: Plan,
        members: Iterable[Worker],
        node_of: Mapping[Worker, int],
        cluster: Cluster,
        slow: Mapping[Worker, float] | None = None,
    ) -> None:
        """`members`: all ranks that live. `node_of`, `slow`: as in a Situation."""
        everyone = sorted({*plan.workers, *members})
        self._node = {worker: node_of.get(worker, worker // cluster.ranks_per_node) for worker in everyone}
        self._per_host = cluster.nodes_per_host
        self._rows = _rows(plan, everyone, slow or {})
        self._bunches: list[_Bunch] = []
        self._at: dict[Worker, tuple[int, int, int]] = {}
        """Worker -> bunch, row, stage."""
        self._bunch_rows()
        self._on_host: dict[int, list[_Bunch]] = defaultdict(list)
        for bunch in self._bunches:
            for host in {node // self._per_host for node in bunch.nodes if node is not None}:
                self._on_host[host].append(bunch)
        self._component: dict[int, int] = {}
        """Bunch -> the lowest number of a bunch of its component."""
        self._sizes: dict[int, int] = {}
        for bunch in self._bunches:
            self._join(bunch)

    def _bunch_rows(self) -> None:
        known: dict[tuple[int, tuple[int | None, ...]], _Bunch] = {}
        for kind, row in self._rows:
            nodes = tuple(None if worker is None else self._node[worker] for worker in row)
            bunch = known.get((kind, nodes))
            if bunch is None:
                bunch = known[kind, nodes] = _Bunch(len(known), kind, nodes, [])
                self._bunches.append(bunch)
            for stage, worker in enumerate(row):
                if worker is not None:
                    self._at[worker] = bunch.number, len(bunch.rows), stage
            bunch.rows.append(row)

    def _join(self, first: _Bunch) -> None:
        """All that it shares hosts with, directly or by way of others."""
        if first.number in self._component:
            return
        self._component[first.number] = first.number
        found, hosts = [first], set[int]()
        for bunch in found:
            for host in {node // self._per_host for node in bunch.nodes if node is not None} - hosts:
                hosts.add(host)
                for other in self._on_host[host]:
                    if other.number not in self._component:
                        self._component[other.number] = first.number
                        found.append(other)
        self._sizes[first.number] = len(found)

    # -- what is where -------------------------------------------------------------------------------------------------

    def places(self) -> list[Place]:
        """All of them. The workers of one are alike."""
        return [
            Place(bunch.number, self._component[bunch.number], stage, len(bunch.rows), worker, _worker(bunch, 1, stage))
            for bunch in self._bunches
            for stage, worker in enumerate(bunch.rows[0])
            if worker is not None
        ]

    def on_nodes(self) -> list[tuple[Worker, ...]]:
        """The workers of each node."""
        found: dict[int, list[Worker]] = {}
        for worker, node in self._node.items():
            found.setdefault(node, []).append(worker)
        return [tuple(workers) for workers in found.values()]

    # -- losses --------------------------------------------------------------------------------------------------------

    def key(self, lost: Collection[Worker]) -> bytes:
        """The key of the loss of these workers at once: equal for two that are alike."""
        return blake2b(repr([part.code for part in self._parts(lost)]).encode(), digest_size=16).digest()

    def names(self, found: Collection[Worker], lost: Collection[Worker]) -> dict[Worker, Worker] | None:
        """New names that turn a plan for the loss of `found` into one for the loss of `lost`: a permutation, without those who
        keep their own. None where there is none."""
        one, other = self._parts(found), self._parts(lost)
        if [part.code for part in one] != [part.code for part in other]:
            return None
        pairs = (zip(a.workers(), b.workers(), strict=True) for a, b in zip(one, other, strict=True))
        names = _closed(chain.from_iterable(pairs))
        is_theirs = {names.get(worker, worker) for worker in found} == set(lost)
        return names if is_theirs and self.is_symmetry(names) else None

    def is_symmetry(self, names: Mapping[Worker, Worker]) -> bool:
        """Whether these names map the plan, what is held, nodes and hosts onto themselves."""
        if names.keys() != set(names.values()):
            return False
        known = set(self._rows)
        for kind, row in self._rows:
            after = tuple(None if worker is None else names.get(worker, worker) for worker in row)
            if after != row and (kind, after) not in known:
                return False
        nodes = {(node, self._node[names.get(worker, worker)]) for worker, node in self._node.items()}
        hosts = {(a // self._per_host, b // self._per_host) for a, b in nodes}
        return _is_one_to_one(nodes) and _is_one_to_one(hosts)

    def _parts(self, lost: Collection[Worker]) -> list[_Part]:
        """The components that are hit, by their codes."""
        hit: dict[int, dict[int, tuple[int, ...]]] = {}
        for bunch, row, stage in sorted(self._at[worker] for worker in lost):
            rows = hit.setdefault(bunch, {})
            rows[row] = (*rows.get(row, ()), stage)
        marks = {bunch: tuple(sorted(rows.values())) for bunch, rows in hit.items()}
        starts: dict[int, list[int]] = {}
        for number in hit:
            starts.setdefault(self._component[number], []).append(number)
        found = []
        for component, its in starts.items():
            if self._sizes[component] > MOST_BUNCHES:
                alone: Code = tuple((-1, number, marks[number], (), ()) for number in its)
                found.append(_Part(alone, [self._bunches[number] for number in its], hit))
            else:
                ways = (self._numbered(self._bunches[number], marks) for number in its)
                found.append(_Part(*min(ways, key=lambda way: way[0]), hit))
        return sorted(found, key=lambda part: part.code)

    def _numbered(self, start: _Bunch, marks: Mapping[int, Marks]) -> tuple[Code, list[_Bunch]]:
        """The bunches of a component as they are come upon: those of a host one after the other, then those of the next."""
        nodes: dict[int, int] = {}
        hosts: dict[int, int] = {}
        order: list[_Bunch] = []
        code: list[Entry] = []
        seen: set[int] = set()
        queue: list[int] = []

        def take(bunch: _Bunch) -> None:
            seen.add(bunch.number)
            own = [(-1, -1)] * len(bunch.nodes)
            for stage, node in enumerate(bunch.nodes):
                if node is not None:
                    host = node // self._per_host
                    if host not in hosts:
                        queue.append(host)
                    own[stage] = nodes.setdefault(node, len(nodes)), hosts.setdefault(host, len(hosts))
            order.append(bunch)
            its = marks.get(bunch.number, ())
            code.append((bunch.kind, len(bunch.rows), its, tuple(node for node, _ in own), tuple(host for _, host in own)))

        def look(bunch: _Bunch) -> tuple[object, ...]:
            seen_at = tuple(len(nodes) if node is None else nodes.get(node, len(nodes)) for node in bunch.nodes)
            return bunch.kind, len(bunch.rows), marks.get(bunch.number, ()), seen_at, bunch.number

        take(start)
        for host in queue:
            for bunch in sorted((its for its in self._on_host[host] if its.number not in seen), key=look):
                take(bunch)
        return tuple(code), order


def _rows(plan: Plan, everyone: Iterable[Worker], slow: Mapping[Worker, float]) -> list[tuple[int, Row]]:
    """Pipelines and idle workers, each with its kind: equal for those that may be exchanged."""
    kinds: dict[object, int] = {}
    special = {plan.home[k] for k, _ in plan.route_of}
    special |= {plan.place[worker][0] for worker in (*plan.routed_to, *plan.schedule.order_of)}
    rows: list[tuple[int, Row]] = []
    for p, pipeline in enumerate(plan.pipelines):
        kind: object = p
        if p not in special and pipeline.is_complete:
            ranges = pipeline.ranges
            factors = tuple(slow.get(worker, 1.0) for worker in pipeline.workers)
            kept = tuple(plan.keeps.get(worker) for worker in pipeline.workers) if plan.keep_runs else ()
            kind = ranges, len(pipeline.micro_batches), plan.samples.n_in(plan.pipelines[p]), factors, kept
        rows.append((kinds.setdefault(kind, len(kinds)), tuple(stage.worker for stage in pipeline.stages)))
    for worker in everyone:
        if worker not in plan.place:
            shard = worker % plan.n_layers if plan.is_sharded else None
            kind = "idle", slow.get(worker, 1.0), plan.keeps.get(worker), shard
            rows.append((kinds.setdefault(kind, len(kinds)), (worker,)))
    return rows


def _worker(bunch: _Bunch, row: int, stage: int) -> Worker | None:
    return bunch.rows[row][stage] if row < len(bunch.rows) else None


def _closed(pairs: Iterable[tuple[Worker | None, Worker | None]]) -> dict[Worker, Worker]:
    """These new names made a permutation: who gets none, and has given its own away, takes the one that is left over."""
    names = {old: new for old, new in pairs if old is not None and new is not None}
    back = {new: old for old, new in names.items()}
    for end in back.keys() - names.keys():
        start = end
        while start in back:
            start = back[start]
        names[end] = start
    return {old: new for old, new in names.items() if old != new}


def _is_one_to_one(pairs: Collection[tuple[int, int]]) -> bool:
    return len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})
