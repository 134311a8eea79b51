"""Whoever is connected as a member of a group is that member."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from odyssey.plan.needs import Needs
from odyssey.protocol.orders import Known
from odyssey.protocol.reports import Offered
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import PREFACE_BYTES, TOKEN_BYTES, Listening
from odyssey.runtime.transport import ADDRESS

pytestmark = pytest.mark.timeout(60)
OFFERS = dict[int, Offered]


def build(n: int, hand_out: Callable[[int, OFFERS], dict[int, bytes]], limit: timedelta) -> list[str]:
    """Let `n` ranks of this process meet, and answer what each was cut by, or its sum.

    `hand_out(rank, offers)`: what it is told that all have offered.
    """
    offers: OFFERS = {}
    have_come = threading.Barrier(n)

    def run(rank: int) -> str:
        def offer(offered: Offered) -> None:
            offers[rank] = offered
            have_come.wait()
            groups.introductions.learn(Known(1, offered.name, hand_out(rank, offers)))

        groups = Groups(offer, 1, Needs(tuple(range(n)), limit=limit), rank, torch.device("cpu"))
        try:
            groups.build()
            total = torch.ones(1)
            groups.waiter.wait(groups.all_reduce(total).wait)
            return str(int(total))
        except Cut as cut:
            return str(cut)
        finally:
            have_come.wait()
            groups.release()
            groups.waiter.thread.join()

    with ThreadPoolExecutor(n) as ranks:
        return list(ranks.map(run, range(n)))


def as_offered(rank: int, offers: OFFERS) -> dict[int, bytes]:
    return {each: offers[each].value for each in offers}


@pytest.mark.parametrize("n", [2, 5])
def test_members_know_each_other(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    assert build(n, as_offered, timedelta(seconds=30)) == [str(n)] * n


def test_who_does_not_know_the_tokens_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is taken for one that has heard nothing from the agents."""
    monkeypatch.setenv(ADDRESS, "127.0.0.1")

    def hand_out(rank: int, offers: OFFERS) -> dict[int, bytes]:
        values = as_offered(rank, offers)
        return {each: os.urandom(TOKEN_BYTES) + value[TOKEN_BYTES:] for each, value in values.items()} if rank == 1 else values

    first, second = build(2, hand_out, timedelta(seconds=30))
    assert "somebody else is connected" in first and second != "2"


def is_read(connection: socket.socket) -> bool:
    """Whether the other end, on this host, has taken what `connection` has sent."""
    ends = f":{connection.getpeername()[1]:04X}", f":{connection.getsockname()[1]:04X}"
    for local, remote, _, queues in (line.split()[1:5] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]):
        if local.endswith(ends[0]) and remote.endswith(ends[1]):
            return queues.endswith(":00000000")
    return False


def test_nobody_stands_in_for_a_rank_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger says, to either rank, the numbers that are meant for the other, and nothing else: the one of them that is
    called by the other, whose address decides it, hears the stranger first."""
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    strangers: list[socket.socket] = []

    def hand_out(rank: int, offers: OFFERS) -> dict[int, bytes]:
        blob = offers[rank].value[PREFACE_BYTES:]
        for number in struct.unpack("@2N", blob[-16:]):
            stranger = socket.create_connection(Listening.read(blob).at)
            strangers.append(stranger)
            stranger.sendall(struct.pack("@N", number))
            while not is_read(stranger):
                pass
        has_called.wait()
        return as_offered(rank, offers)

    has_called = threading.Barrier(2)
    try:
        assert "2" not in build(2, hand_out, timedelta(seconds=2))
    finally:
        for stranger in strangers:
            stranger.close()
