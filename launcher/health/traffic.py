"""What ranks say to each other, as the kernel counts it on their connections.
It is a sign of life that needs neither output nor much of a processor.

Counted are connections from the process of one rank to that of another: here by who holds both ends, elsewhere by the addresses
of the other agents. Nothing else is progress: the store, which what waits asks again and again; what a rank says to processes
that it has started, or to services that collect measurements, which goes on beside a script that does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from launcher.host import proc, tcp
from odyssey.plan.worker import Rank


def between_ranks(pids: Mapping[Rank, int], store_port: int, elsewhere: Collection[str]) -> dict[Rank, int]:
    """Bytes of each rank so far, both ways; empty where the kernel does not tell. `pids`: of the ranks here; `elsewhere`:
    addresses of the hosts of others."""
    try:
        connections = tcp.connections()
    except OSError:
        return {}
    ranks = {inode: rank for rank, pid in pids.items() for inode in _sockets(pid)}
    theirs = [(ranks[its.inode], its) for its in connections if its.inode in ranks]
    rank_at = {(its.local, its.remote): rank for rank, its in theirs}
    found = dict.fromkeys(pids, 0)
    for rank, its in theirs:
        other = rank_at.get((its.remote, its.local))
        is_ranks = its.remote[0] in elsewhere if other is None else other != rank
        if is_ranks and store_port not in (its.local[1], its.remote[1]):
            found[rank] += its.n_bytes
    return found


def _sockets(pid: int) -> list[int]:
    """Their inodes; none of a process that has ended."""
    try:
        names = [name for _, name in proc.descriptors(pid)]
    except OSError:
        return []
    return [int(found[1]) for name in names if (found := re.fullmatch(r"socket:\[(\d+)\]", name))]
