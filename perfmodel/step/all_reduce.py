"""What an all-reduce takes: by each way that a cluster has, and by the quickest."""

from __future__ import annotations

from perfmodel.profile.profile import AllReduce, Cluster, Link


def all_reduce_s(cluster: Cluster, n_hosts: int, n_on_host: int, size_bytes: float) -> float:
    """Seconds of an all-reduce of `size_bytes` among up to `n_on_host` workers on each of so many hosts, by the quickest way
    that the cluster has."""
    n_workers = n_hosts * n_on_host
    link = cluster.intra_host if n_hosts == 1 else cluster.inter_host
    ways = {
        AllReduce.RING: lambda: ring_s(link, n_workers, size_bytes),
        AllReduce.TREE: lambda: tree_s(link, n_workers, size_bytes),
        AllReduce.HIERARCHICAL: lambda: _hierarchical_s(cluster, n_hosts, n_on_host, size_bytes),
    }
    return min(ways[way]() for way in cluster.all_reduce)


def _hierarchical_s(cluster: Cluster, n_hosts: int, n_on_host: int, size_bytes: float) -> float:
    """Within hosts each worker gets its share of the sums, hosts then sum each share for itself, and within hosts all get
    all of it. NCCL's rings come to that where a host has several network interfaces and each ring leaves by another one."""
    share_bytes, between = size_bytes / n_on_host, cluster.inter_host
    if cluster.interface_bandwidth is not None:
        between = Link(between.latency_s, min(between.bandwidth, cluster.interface_bandwidth / n_on_host))
    return ring_s(cluster.intra_host, n_on_host, size_bytes) + min(
        ring_s(between, n_hosts, share_bytes), tree_s(between, n_hosts, share_bytes)
    )


def ring_s(link: Link, n_workers: int, size_bytes: float) -> float:
    """All-reduce around a ring: every worker sends 2(n-1) pieces of 1/n of it, one after the other."""
    if n_workers < 2:
        return 0.0
    return 2 * (n_workers - 1) * (link.latency_s + size_bytes / n_workers / link.bandwidth)


def tree_s(link: Link, n_workers: int, size_bytes: float) -> float:
    """All-reduce up and down two binary trees, each for half of it, in which no worker has children in both: every worker sends
    all of it twice (Sanders, Speck and Träff 2009; in NCCL since 2.4)."""
    if n_workers < 2:
        return 0.0
    return 2 * ((n_workers - 1).bit_length() * link.latency_s + size_bytes / link.bandwidth)
