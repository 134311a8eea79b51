"""Traces of lost and returned nodes: the files that people have, read into one form.

Told apart by what is in them, see docs/operators/replay.md: InfiniteHBD's list of faults (JSON), SkyPilot's instances at each
tick (JSON), Parcae's `milliseconds,add|remove,node`, step points `seconds,count`, and our own
`seconds,node,lost|failed|returned`.
Where a file says how many nodes there are but not which, and where its names are no numbers, nodes are drawn with the seed.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

import configs
from odyssey.codec import field_first, for_people
from odyssey.errors import UsageError

MOST_NODES = 1 << 20
MOST_S = 1e10
DAY_S = 86400.0
_HELP = "docs/operators/replay.md has the formats that are read"


class NodeEventKind(enum.StrEnum):
    """What becomes of a node."""

    LOST = "lost"
    """It is gone, with all ranks on it."""
    FAILED = "failed"
    """Its processes are gone; the node is healthy, and could start others at once."""
    RETURNED = "returned"
    """It is there again."""


class Change(msgspec.Struct, frozen=True):
    """`at_s`: seconds since the trace began."""

    at_s: float
    node: int
    kind: NodeEventKind


class Trace(msgspec.Struct, frozen=True):
    """What becomes of nodes 0 to `n_nodes - 1` in `length_s` seconds, in order. `away`: not there when it begins.

    `notes`: what had to be decided to read it, for people.
    """

    name: str
    format: str
    n_nodes: int
    length_s: float
    changes: tuple[Change, ...]
    away: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def cut(self, n_nodes: int, length_s: float | None = None) -> Trace:
        """The trace of a job with `n_nodes` nodes, for `length_s` seconds at most: node i of the trace is node i of the job."""
        until = self.length_s if length_s is None else min(length_s, self.length_s)
        notes = self.notes
        if self.n_nodes > n_nodes:
            notes += (f"nodes {n_nodes} to {self.n_nodes - 1} of the trace are not the job's",)
        elif self.n_nodes < n_nodes:
            notes += (f"nodes {self.n_nodes} to {n_nodes - 1} of the job are not in the trace: they never fail",)
        changes = tuple(change for change in self.changes if change.node < n_nodes and change.at_s < until)
        away = frozenset(node for node in self.away if node < n_nodes)
        return Trace(self.name, self.format, n_nodes, until, changes, away, notes)

    @property
    def n_losses(self) -> int:
        """Lost nodes and failed ones."""
        return sum(change.kind is not NodeEventKind.RETURNED for change in self.changes)


def read(text: str, seed: int = 0, n_nodes: int | None = None) -> Trace:
    """The trace in a file, or the one that `configs/traces` has by this name. `n_nodes`: of the cluster that it is of, where it
    names only those that failed.

    Raises UsageError that names file, line or field, and what was expected.
    """
    known = {path.stem: path for path in sorted((Path(configs.__file__).parent / "traces").glob("*.csv"))}
    path = Path(text)
    try:
        data = (known.get(text, path) if not path.exists() else path).read_bytes()
    except OSError as error:
        what = f"name a trace ({', '.join(known)}, or a file), a job's folder, or exponential, weibull, correlated"
        raise UsageError(f"{path}: {error.strerror}", what) from None
    return parse(data, text, seed, n_nodes)


def parse(data: bytes, name: str, seed: int = 0, n_nodes: int | None = None) -> Trace:
    """As `read`, of the bytes of a file called `name`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: byte {error.start}: expected text", _HELP) from None
    match text.lstrip()[:1]:
        case "[":
            trace = _faults(_json(text, list[_Fault], name), name, seed, n_nodes)
        case "{":
            trace = _ticks(_json(text, _Ticks, name), name, seed)
        case _:
            trace = _csv(text, name, seed, n_nodes)
    if trace.n_nodes < 1 or not trace.length_s > 0:
        raise UsageError(f"{name}: expected nodes that come or go after 0 s, it has none", _HELP)
    return trace


# -- JSON --------------------------------------------------------------------------------------------------------------


class _FaultType(msgspec.Struct, frozen=True):
    Level: str = ""
    Class: str = ""
    Desc: str = ""


class _Edge(enum.StrEnum):
    START = "fault_start"
    END = "fault_end"


class _Fault(msgspec.Struct, frozen=True):
    node_id: str
    event_time: Annotated[float, msgspec.Meta(ge=0, le=MOST_S / DAY_S)]
    event_type: _Edge
    fault_type: _FaultType = _FaultType()


class _Metadata(msgspec.Struct, frozen=True):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0, le=MOST_S)]


class _Ticks(msgspec.Struct, frozen=True):
    metadata: _Metadata
    data: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MOST_NODES)]], msgspec.Meta(min_length=1)]


def _json(text: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {for_people(field_first(str(error)), 300)}", _HELP) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise UsageError(f"{name}: not JSON: {for_people(str(error), 300)}", _HELP) from None


def _faults(faults: Sequence[_Fault], name: str, seed: int, n_nodes: int | None) -> Trace:
    """InfiniteHBD: a node is away while it has any fault; one that ends and never began was there before the trace."""
    in_order = sorted(faults, key=lambda fault: fault.event_time)
    number, total, notes = _numbered([fault.node_id for fault in in_order], seed, n_nodes, name)
    open_faults: dict[str, int] = {}
    away, changes = set(), []
    for fault in in_order:
        node, at_s = number[fault.node_id], fault.event_time * DAY_S
        n_open = open_faults.get(fault.node_id)
        if fault.event_type is _Edge.START:
            if not n_open:
                changes.append(Change(at_s, node, NodeEventKind.LOST))
            open_faults[fault.node_id] = (n_open or 0) + 1
        elif n_open is None:
            away.add(node)
            changes.append(Change(at_s, node, NodeEventKind.RETURNED))
            open_faults[fault.node_id] = 0
        elif n_open > 0:
            open_faults[fault.node_id] = n_open - 1
            if n_open == 1:
                changes.append(Change(at_s, node, NodeEventKind.RETURNED))
    length_s = in_order[-1].event_time * DAY_S if in_order else 0.0
    return Trace(name, "faults of a cluster's nodes (InfiniteHBD)", total, length_s, tuple(changes), frozenset(away), notes)


def _ticks(ticks: _Ticks, name: str, seed: int) -> Trace:
    gap_s = ticks.metadata.gap_seconds
    if gap_s * len(ticks.data) > MOST_S:
        raise UsageError(f"{name}: metadata.gap_seconds: expected ticks of {MOST_S:g} s in all, at most", _HELP)
    points = [(i * gap_s, n) for i, n in enumerate(ticks.data)]
    return _drawn(points, len(ticks.data) * gap_s, name, "instances at each tick (SkyPilot)", seed)


def _drawn(points: Sequence[tuple[float, int]], length_s: float, name: str, format: str, seed: int) -> Trace:
    """Which nodes are lost is drawn with the seed; who was lost first returns first."""
    total = max(n for _, n in points)
    draw = random.Random(seed)
    there = sorted(draw.sample(range(total), points[0][1]))
    gone = [node for node in range(total) if node not in set(there)]
    away, changes = frozenset(gone), []
    for at_s, n in points[1:]:
        if n < len(there):
            lost = sorted(draw.sample(there, len(there) - n))
            there = sorted(set(there) - set(lost))
            gone += lost
            changes += [Change(at_s, node, NodeEventKind.LOST) for node in lost]
        elif n > len(there):
            n_back = n - len(there)
            back, gone = gone[:n_back], gone[n_back:]
            there = sorted({*there, *back})
            changes += [Change(at_s, node, NodeEventKind.RETURNED) for node in back]
    return Trace(name, format, total, length_s, tuple(changes), away, (f"which nodes are lost is drawn with seed {seed}",))


def _numbered(
    names: Sequence[str], seed: int, n_nodes: int | None, where: str
) -> tuple[Mapping[str, int], int, tuple[str, ...]]:
    """A number for each name, by lot: in the order of their first fault, a small job would have the worst nodes only."""
    known = list(dict.fromkeys(names))
    total = len(known) if n_nodes is None else n_nodes
    if total < len(known):
        raise UsageError(f"{where}: it names {len(known)} nodes, --trace-nodes says {total}", "give all of the cluster's")
    numbers = random.Random(seed).sample(range(total), len(known))
    notes: tuple[str, ...] = (f"its {len(known)} names are numbered by lot, seed {seed}",)
    if n_nodes is None:
        notes += ("nodes that never failed are not in it: --trace-nodes says how many there were",)
    return dict(zip(known, numbers, strict=True)), total, notes


# -- CSV ---------------------------------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    line: int
    at: float
    fields: tuple[str, ...]


def _csv(text: str, name: str, seed: int, n_nodes: int | None) -> Trace:
    rows = list(_rows(text, name))
    if not rows:
        raise UsageError(f"{name}: expected a trace, it has no line of one", _HELP)
    width = len(rows[0].fields)
    for row in rows:
        if len(row.fields) != width or not 1 <= width <= 2:
            expected = f"{width + 1} fields, as above" if 1 <= width <= 2 else "2 or 3 fields"
            raise _wrong(name, row, f"expected {expected}, got {len(row.fields) + 1}")
    rows.sort(key=lambda row: row.at)
    are_instances = width == 2 and rows[0].fields[0] in ("add", "remove")
    most, unit = (MOST_S * 1000, "ms") if are_instances else (MOST_S, "s")
    if rows[-1].at > most:
        raise _wrong(name, rows[-1], f"expected a time of at most {most:g} {unit}")
    if width == 1:
        points = [(row.at, _whole(row.fields[0], name, row, "a number of nodes")) for row in rows]
        return _drawn([(0.0, points[0][1]), *points], points[-1][0], name, "step points (seconds,count)", seed)
    if are_instances:
        return _instances(rows, name)
    return _own(rows, name, seed, n_nodes)


def _rows(text: str, name: str) -> Iterator[_Row]:
    """Every line that is no comment. The first one may be a heading."""
    is_first = True
    for line, content in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in content.split(",")]
        if not content.strip() or content.lstrip().startswith("#"):
            continue
        may_be_heading, is_first = is_first, False
        try:
            at = float(fields[0])
        except ValueError:
            if may_be_heading and fields[0][:1].isalpha():
                continue
            raise _wrong(name, _Row(line, 0.0, ()), f"expected a time, got {_quoted(fields[0])}") from None
        row = _Row(line, at, tuple(fields[1:]))
        if not at >= 0:
            raise _wrong(name, row, f"expected a time from 0 on, got {_quoted(fields[0])}")
        yield row


def _instances(rows: Sequence[_Row], name: str) -> Trace:
    """Parcae: spot instances, each with a name of its own. One that comes is the lowest node that is not there."""
    slots: dict[str, int] = {}
    free: list[int] = []
    n_nodes = 0
    first: frozenset[int] = frozenset()
    changes = []
    for row in rows:
        what, instance = row.fields
        at_s = row.at / 1000
        if what == "add":
            if instance in slots:
                raise _wrong(name, row, f"{_quoted(instance)} is added, and there already")
            if free:
                slot = heapq.heappop(free)
            else:
                slot, n_nodes = n_nodes, n_nodes + 1
            slots[instance] = slot
            if at_s > 0:
                changes.append(Change(at_s, slot, NodeEventKind.RETURNED))
        elif what == "remove":
            if instance not in slots:
                raise _wrong(name, row, f"{_quoted(instance)} is removed, and not there")
            slot = slots.pop(instance)
            heapq.heappush(free, slot)
            if at_s > 0:
                changes.append(Change(at_s, slot, NodeEventKind.LOST))
        else:
            raise _wrong(name, row, f"expected add or remove, got {_quoted(what)}")
        if at_s <= 0:
            first = frozenset(slots.values())
    away = frozenset(range(n_nodes)) - first
    return Trace(name, "spot instances (Parcae)", n_nodes, rows[-1].at / 1000, tuple(changes), away)


def _own(rows: Sequence[_Row], name: str, seed: int, n_nodes: int | None) -> Trace:
    notes: tuple[str, ...] = ()
    if all(row.fields[0].isdecimal() for row in rows):
        number: Mapping[str, int] = {row.fields[0]: _whole(row.fields[0], name, row, "a node") for row in rows}
        total = max(number.values()) + 1
        if n_nodes is not None and n_nodes < total:
            raise UsageError(f"{name}: it has a node {total - 1}, --trace-nodes says {n_nodes}", "give all of the cluster's")
        total = n_nodes or total
    else:
        number, total, notes = _numbered([row.fields[0] for row in rows], seed, n_nodes, name)
    is_there: dict[int, bool] = {}
    away, changes = set(), []
    for row in rows:
        node = number[row.fields[0]]
        if row.fields[1] not in tuple(NodeEventKind):
            raise _wrong(name, row, f"expected {', '.join(NodeEventKind)}, got {_quoted(row.fields[1])}")
        kind = NodeEventKind(row.fields[1])
        if kind is NodeEventKind.RETURNED and node not in is_there:
            away.add(node)
        elif is_there.get(node, True) is (kind is NodeEventKind.RETURNED):
            state = "there already" if kind is NodeEventKind.RETURNED else "not there"
            raise _wrong(name, row, f"{_quoted(row.fields[0])} is {kind}, and {state}")
        is_there[node] = kind is not NodeEventKind.LOST
        changes.append(Change(row.at, node, kind))
    return Trace(name, "seconds,node,lost|failed|returned", total, rows[-1].at, tuple(changes), frozenset(away), notes)


def _whole(text: str, name: str, row: _Row, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= MOST_NODES):
        raise _wrong(name, row, f"expected {what}, a whole number up to {MOST_NODES}, got {_quoted(text)}")
    return int(text)


def _wrong(name: str, row: _Row, what: str) -> UsageError:
    return UsageError(f"{name}: line {row.line}: {what}", _HELP)


def _quoted(text: str) -> str:
    return repr(for_people(text, 40))


def at_once(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """The changes, those of one moment together."""
    group: list[Change] = []
    for change in changes:
        if group and change.at_s != group[0].at_s:
            yield group
            group = []
        group.append(change)
    if group:
        yield group
