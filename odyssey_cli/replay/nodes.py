"""Which nodes of a trace are there now, which of them a job uses, and how long healthy ones were idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odyssey_cli.replay.traces import Change, NodeEventKind, Trace


class Nodes:
    """`there`: healthy ones."""

    def __init__(self, trace: Trace) -> None:
        self.there: set[int] = set(range(trace.n_nodes)) - trace.away
        self._used: set[int] = set()
        self._idle_s = 0.0
        self._counted_s = 0.0

    @property
    def n_idle(self) -> int:
        """Healthy ones that no job uses."""
        return len(self.there) - len(self._used)

    def use(self, nodes: Iterable[int], at_s: float) -> None:
        """From now on these, and no others."""
        self.idle_until(at_s)
        self._used = set(nodes) & self.there

    def take(self, changes: Sequence[Change]) -> None:
        """What becomes of nodes at one moment."""
        self.idle_until(changes[0].at_s)
        for change in changes:
            if change.kind is NodeEventKind.LOST:
                self.there.discard(change.node)
            elif change.kind is NodeEventKind.RETURNED:
                self.there.add(change.node)
        self._used &= self.there

    def idle_until(self, at_s: float) -> float:
        """Seconds that healthy nodes were idle, times their number, up to then."""
        self._idle_s += self.n_idle * max(0.0, at_s - self._counted_s)
        self._counted_s = max(self._counted_s, at_s)
        return self._idle_s


def told(changes: Sequence[Change]) -> str:
    """`nodes 3, 4 lost; node 7 returned`."""
    parts = []
    for kind in NodeEventKind:
        nodes = [str(change.node) for change in changes if change.kind is kind]
        if nodes:
            many = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
            parts.append(f"{'nodes' if len(nodes) > 1 else 'node'} {', '.join(nodes[:8])}{many} {kind}")
    return "; ".join(parts)
