"""Ranks of a Job learn from their agents where they reach each other: at any address, and from nobody else."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.agent.introductions import MAX_OPEN
from launcher.agent.introductions import Introductions as OfAgent
from launcher.joblog.events import Event, GenerationStarted, RankLost
from launcher.options import RunOptions
from odyssey.plan.needs import Needs
from odyssey.protocol.orders import Command, Known
from odyssey.protocol.reports import Broken, Committed, Offered
from odyssey.runtime.connections import Connections
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import PREFACE_BYTES, GlooStore, Introductions, Listening, NcclStore
from odyssey.runtime.transport import ADDRESS
from tests import ROOT
from tests.agent_runs import TRAIN, Ran
from tests.launcher.cluster.test_agents import Agent, start
from tests.launchers import free_port

__all__ = ["start"]
pytestmark = pytest.mark.timeout(120)
LIMIT = timedelta(seconds=30)


# -- the agent's side ----------------------------------------------------------------------------------------------------


class Handed:
    """What ranks were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Command]] = []
        self.agent = OfAgent(lambda rank, order: self.sent.append((rank, order)))

    def offer(self, rank: int, name: str, n: int, generation: int = 1) -> None:
        self.agent.offered(rank, Offered(generation, name, n, f"{name} of {rank}".encode()))


def test_all_get_what_all_have_offered_when_the_last_one_has_come() -> None:
    handed = Handed()
    handed.offer(4, "world", 3)
    handed.offer(2, "world", 3)
    handed.offer(2, "reduce 0", 2)
    assert handed.sent == []
    handed.offer(7, "world", 3)
    known = Known(1, "world", {4: b"world of 4", 2: b"world of 2", 7: b"world of 7"})
    assert handed.sent == [(4, known), (2, known), (7, known)]
    assert all(order is handed.sent[0][1] for _, order in handed.sent), "each would be framed anew"


def test_who_has_come_for_another_generation_is_not_met() -> None:
    handed = Handed()
    handed.offer(0, "world", 2, generation=1)
    handed.offer(1, "world", 2, generation=2)
    assert handed.sent == []
    handed.offer(0, "world", 2, generation=2)
    assert [rank for rank, _ in handed.sent] == [1, 0]


def test_a_rank_that_offers_without_end_is_heard_no_more_and_the_others_meet() -> None:
    handed = Handed()
    for number in range(2 * MAX_OPEN):
        handed.offer(0, f"nonsense {number}", 2)
    handed.offer(1, f"nonsense {MAX_OPEN}", 2)
    assert handed.sent == []
    for rank in (1, 2):
        handed.offer(rank, "world", 2)
    assert [rank for rank, _ in handed.sent] == [1, 2]


# -- the rank's side -----------------------------------------------------------------------------------------------------


def value_of_gloo(monkeypatch: pytest.MonkeyPatch, address: str, here: str = "") -> bytes:
    """What one of a group of two offers."""
    monkeypatch.setenv(ADDRESS, address)
    offered: list[Offered] = []

    def offer(offer: Offered) -> None:
        offered.append(offer)
        groups.cut("seen")

    groups = Groups(offer, 1, Needs((0, 1)), 0, torch.device("cpu"), here)
    with pytest.raises(Cut, match="seen"):
        groups.build()
    groups.close()
    return offered[0].value


def test_where_the_agent_says_that_a_rank_is_reached_counts_for_more_than_what_it_was_started_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = value_of_gloo(monkeypatch, "127.0.0.1", here="127.0.1.1")
    assert Listening.read(value[PREFACE_BYTES:]).at.host == "127.0.1.1"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_where_a_rank_listens_is_read_as_gloo_writes_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = value_of_gloo(monkeypatch, address)
    value = value[PREFACE_BYTES:]
    found = Listening.read(value)
    assert found.at.host == address and found.at.port > 0 and found.n_numbers == 2
    for length in range(len(value)):
        if length != len(value) - 8 and length != len(value) - 16:  # without numbers it is one of a group of another size
            with pytest.raises(ValueError, match="bytes"):
                Listening.read(value[:length])


def malformed(value: bytes) -> list[bytes]:
    """But for its token and its handle."""
    random.seed(0)
    preface, value = value[:PREFACE_BYTES], value[PREFACE_BYTES:]
    size = struct.pack("@N", 1 << 63)
    nonsense = [
        b"",
        b"x",
        random.randbytes(len(value)),
        size + value[8:],
        value[:8] + value[8:].replace(struct.pack("@N", 136), size),
        value + bytes(8),
        value[:-8],
        value + b"x",
        bytes(len(value)),
        b"\xff" * len(value),
    ]
    return [preface + each for each in nonsense]


@pytest.mark.parametrize("number", range(10))
def test_nonsense_that_a_rank_offers_never_reaches_gloo(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    value = value_of_gloo(monkeypatch, "127.0.0.1")
    introductions = Introductions(1, lambda offered: None)
    store = GlooStore(introductions, "world", (3, 5), Connections(), LIMIT)
    store.set("0/0", value[PREFACE_BYTES:])
    introductions.learn(Known(1, "world", {3: value, 5: malformed(value)[number]}))
    with pytest.raises(Cut, match="rank 5"):
        store.get("0/1")


def test_others_than_its_members_are_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    value = value_of_gloo(monkeypatch, "127.0.0.1")
    introductions = Introductions(1, lambda offered: None)
    store = GlooStore(introductions, "world", (3, 5), Connections(), LIMIT)
    introductions.learn(Known(1, "world", {3: value, 4: value}))
    with pytest.raises(Cut, match="ranks \\[3, 4\\] have come as the group world of ranks \\[3, 5\\]"):
        store.get("0/1")


def test_what_is_of_another_generation_is_not_learnt() -> None:
    introductions = Introductions(2, lambda offered: None)
    introductions.learn(Known(1, "world", {0: b"", 1: b""}))
    assert not introductions.knows("world")


def test_one_member_says_how_to_connect_and_the_others_ask() -> None:
    """As NCCL does: by a number all of a group, by `a:b` two of them."""
    ranks: dict[int, Introductions] = {}
    agent = OfAgent(lambda rank, known: ranks[rank].learn(known))  # type: ignore[arg-type]

    def meet(rank: int) -> NcclStore:
        ranks[rank] = Introductions(1, lambda offered: agent.offered(rank, offered))
        return NcclStore(ranks[rank], "outputs", 3, LIMIT)

    stores = {rank: meet(rank) for rank in (4, 6, 9)}
    stores[4].set("0", b"root")
    stores[6].set("1:2", b"pair")
    stores[9]._offer("0", b"")
    assert stores[6].get("0") == stores[9].get("0") == b"root"
    assert not stores[9].check(["1:2"])
    assert stores[9].get("1:2") == b"pair" and stores[9].check(["0", "1:2"])


# -- whole jobs ----------------------------------------------------------------------------------------------------------


N_STEPS = 30
"""Enough for a drill at the sixth, whose agent may be late."""


def options(tmp_path: Path, script: str = TRAIN, **rest: object) -> RunOptions:
    arguments = ("--steps", str(N_STEPS), "--pause", "0.05")
    return RunOptions(script, arguments, log_dir=tmp_path / "logs", capture_output=True, **rest)  # type: ignore[arg-type]


def test_what_a_stranger_puts_into_the_store_is_nothing_to_a_job(tmp_path: Path) -> None:
    """Under whatever keys: all that may be written there, and all that are there."""
    strangers: list[TCPStore] = []
    port = free_port()

    def spoil(event: Event, ran: Ran) -> None:
        if isinstance(event.body, Committed) and not strangers:
            strangers.append(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
            for generation in range(10):
                for rank in range(3):
                    for group in ("world", "moving", "0-1", "0-1-2"):
                        strangers[0].set(f"generation-{generation}/{group}/0/{rank}", "nonsense")

    wanted = options(tmp_path, n_nodes=3, layout="3x1", drills=("step=5 kill=2",), master_port=port)
    ran = Ran(wanted, spoil)
    assert strangers and ran.code == 0
    assert ran.steps() == list(range(N_STEPS))
    assert [lost.rank for lost in ran.all(RankLost)] == [2] and len(ran.all(GenerationStarted)) == 2


OFFERS_NONSENSE = """
import os, sys
sys.path.insert(0, {root!r})
from odyssey.runtime.introductions import Introductions
from tests.jobs import train
offer = Introductions.offer
if os.environ["RANK"] == "1":
    def once(self, name, n, value):
        nonsense = self.generation == 2
        offer(self, name, n, b"nonsense" if nonsense else value)
    Introductions.offer = once
train.main()
"""


def test_a_build_that_nonsense_has_broken_is_done_again(tmp_path: Path) -> None:
    """Rank 1 offers it in the second generation."""
    script = tmp_path / "nonsense.py"
    script.write_text(OFFERS_NONSENSE.format(root=str(ROOT)))
    ran = Ran(options(tmp_path, str(script), n_nodes=3, layout="3x1", drills=("step=5 kill=2",)))
    assert ran.code == 0, ran.text("stderr")
    assert ran.steps() == list(range(N_STEPS))
    assert "rank 1 does not say where it listens" in ran.all(Broken)[0].what
    assert [lost.rank for lost in ran.all(RankLost)] == [2]


def test_a_job_of_two_agents_on_an_ipv6_endpoint_starts_and_recovers(start: Callable[..., Agent]) -> None:
    given = {"rdzv_endpoint": f"[::1]:{free_port()}", "nproc_per_node": 2, "layout": "2x2", "max_restarts": 1, "script": TRAIN}
    drill = {"drill": "step=5 kill=1"}
    agents = [start("--steps", str(N_STEPS), "--pause", "0.05", **given, **drill) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].lines + agents[1].lines
    assert any("recovered in" in line for line in agents[0].lines + agents[1].lines)
