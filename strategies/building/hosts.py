"""Which stage of a layout is on which host, before anybody says which worker it gets.

Two ways, for two kinds of models: pipelines keep to hosts, and reductions cross between them; or the same stages of all
pipelines do, and activations cross. What is between is found from these by small steps (placement.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, pairwise

from perfmodel.profile.profile import Cluster

Hosts = list[list[int]]
"""The host of each stage of each pipeline."""


def is_apart(cluster: Cluster) -> bool:
    """Whether it matters which hosts workers are on."""
    return cluster.intra_host != cluster.inter_host


def room_of(cluster: Cluster) -> int:
    """Workers that a host has."""
    return cluster.ranks_per_node * cluster.nodes_per_host


def rooms_of(cluster: Cluster, hosts: Iterable[int]) -> dict[int, int]:
    """Host -> its workers, most first, of the hosts of all workers; empty where it makes no difference on which they are."""
    rooms = Counter(hosts)
    return dict(sorted(rooms.items(), key=lambda item: (-item[1], item[0]))) if is_apart(cluster) and len(rooms) > 1 else {}


def pipelines_together(
    lengths: Sequence[int], rooms: Mapping[int, int], kept: Mapping[tuple[int, int], float] | None = None
) -> Hosts:
    """Pipelines on one host each, as far as that goes. `rooms`: host -> workers, as many as there are stages at least.

    Longest first, on the host that keeps most of it (`kept`: of pipeline and host), then on the one that it fills best; what
    fits nowhere is spread over those with most room.
    """
    left, kept = dict(rooms), kept or {}
    rows: Hosts = [[] for _ in lengths]
    for p in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        n = lengths[p]
        whole = [host for host, room in left.items() if room >= n]
        if whole:
            host = min(whole, key=lambda host: (-kept.get((p, host), 0.0), left[host], host))
            rows[p] = [host] * n
            left[host] -= n
            continue
        for host in sorted(left, key=lambda host: (-left[host], -kept.get((p, host), 0.0), host)):
            taken = min(n - len(rows[p]), left[host])
            rows[p] += [host] * taken
            left[host] -= taken
    return rows


def stages_together(lengths: Sequence[int], rooms: Mapping[int, int], n_hosts: int = 1) -> Hosts:
    """The same depth of all pipelines on one host, or on so many, as far as that goes: from the first stages to the last on one
    group of hosts after the other, as `rooms` has them. In a group pipelines keep to hosts."""
    places = sorted(((s + 0.5) / n, p, s) for p, n in enumerate(lengths) for s in range(n))
    rows: Hosts = [[0] * n for n in lengths]
    left = iter(places)
    hosts = list(rooms)
    for group in (hosts[i : i + n_hosts] for i in range(0, len(hosts), n_hosts)):
        own = islice(left, sum(rooms[host] for host in group))
        on = iter([host for host in group for _ in range(rooms[host])])
        for _, p, s in sorted(own, key=lambda place: (place[1] % len(group), place)):
            rows[p][s] = next(on)
    return rows


def apart(row: Sequence[int]) -> tuple[bool, ...]:
    """For each two stages that follow each other, whether they are on different hosts."""
    return tuple(a != b for a, b in pairwise(row))


@cache
def cut_every(n_stages: int, room: int) -> tuple[bool, ...]:
    """`apart` of a pipeline that has so many stages on each host."""
    return tuple((s + 1) % room == 0 for s in range(n_stages - 1))
