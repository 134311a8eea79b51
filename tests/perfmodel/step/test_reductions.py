"""What an all-reduce costs, against bounds that hold for any algorithm, and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from perfmodel.profile.profile import ANY_WAY, AllReduce, Link
from perfmodel.step.all_reduce import all_reduce_s, ring_s, tree_s
from perfmodel.step.costs import Costs
from tests.planning import profile

LINK = Link(10e-6, 1e9)
FAST = Link(1e-6, 100e9)


def costs(ways: tuple[AllReduce, ...], ranks_per_node: int = 8, interface: float | None = None) -> Costs:
    of = profile(1, 1, ranks_per_node=ranks_per_node, intra=FAST, inter=LINK)
    return Costs(replace(of, cluster=replace(of.cluster, all_reduce=ways, interface_bandwidth=interface)))


@given(st.integers(2, 5000), st.floats(1, 1e10))
def test_no_way_beats_what_any_algorithm_needs(n: int, size_bytes: float) -> None:
    """Chan et al. 2007, table 1: ceil(log2 n) messages one after the other, and 2 (n-1)/n of all bytes through each worker."""
    least_s = max(math.ceil(math.log2(n)) * LINK.latency_s, 2 * (n - 1) / n * size_bytes / LINK.bandwidth)
    assert ring_s(LINK, n, size_bytes) >= least_s * (1 - 1e-9)
    assert least_s * (1 - 1e-9) <= tree_s(LINK, n, size_bytes) <= 4 * least_s


def test_a_ring_passes_each_piece_round_twice() -> None:
    n, size_bytes = 5, 1000.0
    at = [0.0] * n
    for _ in range(2 * (n - 1)):  # in each round each worker sends a piece to the next, when it has got the one before
        at = [max(at[i], at[i - 1]) + LINK.latency_s + size_bytes / n / LINK.bandwidth for i in range(n)]
    assert ring_s(LINK, n, size_bytes) == pytest.approx(max(at))


def test_one_worker_has_nothing_to_sum() -> None:
    assert ring_s(LINK, 1, 1e9) == tree_s(LINK, 1, 1e9) == all_reduce_s(costs(ANY_WAY).profile.cluster, 1, 1, 1e9) == 0


def test_the_quickest_way_is_taken_of_those_that_there_are() -> None:
    ring, any_way = costs((AllReduce.RING,)), costs(ANY_WAY)
    assert all_reduce_s(ring.profile.cluster, 2048, 1, 1e6) == pytest.approx(ring_s(LINK, 2048, 1e6))
    assert all_reduce_s(any_way.profile.cluster, 2048, 1, 1e6) == pytest.approx(tree_s(LINK, 2048, 1e6))
    assert all_reduce_s(any_way.profile.cluster, 2, 1, 1e9) == pytest.approx(ring_s(LINK, 2, 1e9))


def test_within_hosts_first_where_links_between_them_are_slow() -> None:
    """8 workers on each of 2 hosts: an eighth of the bytes through each of a host's 8 interfaces, or all through one."""
    within_s = ring_s(FAST, 8, 8e9)
    assert all_reduce_s(costs(ANY_WAY).profile.cluster, 2, 8, 8e9) == pytest.approx(within_s + ring_s(LINK, 2, 1e9))
    shared = costs((AllReduce.HIERARCHICAL,), interface=LINK.bandwidth)
    over_one_s = within_s + 8 * (1e9 / LINK.bandwidth) + 2 * LINK.latency_s
    assert all_reduce_s(shared.profile.cluster, 2, 8, 8e9) == pytest.approx(over_one_s)


def test_workers_of_one_host_use_its_own_link() -> None:
    assert all_reduce_s(costs((AllReduce.RING,)).profile.cluster, 1, 3, 1e9) == pytest.approx(ring_s(FAST, 3, 1e9))
