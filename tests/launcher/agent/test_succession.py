"""An agent that another one leads has the ranks that all have decided it has, once it has the word of who leads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from launcher.agent.agent import Agent
from launcher.agent.coordination import Coordination
from launcher.agent.job_log import JobLog
from launcher.agent.member import Member
from launcher.agent.part import Part
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Leaving, LedBy, OtherJob, Welcome
from launcher.consensus.membership import Configuration, Membership
from launcher.consensus.messages import AppendEntries, Entry, Message, PreVoted, RequestPreVote
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.joblog.events import (
    AgentInfo,
    Body,
    Cause,
    CauseKind,
    Event,
    JobStarted,
    LeaderChanged,
    Note,
    ProfileRefined,
    Proposed,
    RankLost,
    RankStarted,
    encode,
)
from launcher.options import Rendezvous, RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes.local_agent import LocalAgent
from tests.launcher.cluster.links import KEY, PORT
from tests.launcher.coordinator.talk import profile

AGENTS = tuple(AgentInfo(number, f"h{number}", 1, 1, address="127.0.0.1", port=9) for number in range(3))


class MemberOfThree:
    """Agent 1, of one rank, as agents 0 and 2 see it: they send it entries, and Welcome. What it starts is noted, with the
    port of the store that it would be told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = RunOptions(
            "train.py", min_agents=3, max_agents=3, rendezvous=Rendezvous.C10D, master_addr="127.0.0.1", master_port=PORT
        )
        self.local = LocalAgent(options, None, lambda rank, stream, data: None)
        self.part = Part(self.local, lambda event: None)
        self.within = Member(self.part, KEY)
        self.local.become(self.within)
        self.started: list[tuple[int, int]] = []
        monkeypatch.setattr(self.local.processes, "spawn", self._spawn)
        server_socket = addresses.listen("127.0.0.1", socket.AF_INET, [0])
        self.part.listener = Listener(self.local.loop, server_socket, KEY, PORT)
        self.n_entries = 0
        self.within._following.follow(Address("127.0.0.1", 9))
        self.welcome(0, 4000)

    def _spawn(self, assignment: RankAssignment, number: int) -> None:
        self.started.append((number, self.local.processes.environments.store.port))

    def welcome(self, leader: int, store_port: int) -> None:
        self.within._received(Welcome(1, leader, "127.0.0.1", store_port, "", "a log"))

    def decided(self, leader: int, term: int, *bodies: Body) -> None:
        """By all, as who leads in this term tells."""
        assert self.part.agreement is not None
        entries = [Entry(term, encode(Event(float(term), -1, "agent", body))) for body in bodies]
        if not self.n_entries:
            entries = [Entry(term, Configuration(Membership(frozenset(range(3)), 0))), *entries]
        before, self.n_entries = self.n_entries, self.n_entries + len(entries)
        message = AppendEntries(term, before, term - 1 if before else 0, tuple(entries), self.n_entries)
        self.part.agreement._received(leader, message)

    def close(self) -> None:
        self.within.close()
        self.local.processes.close()
        self.local.loop.close()
        self.local.folder.close()


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemberOfThree]:
    made = MemberOfThree(monkeypatch)
    yield made
    made.close()


def test_a_member_starts_no_rank_before_the_welcome_of_who_leads(member: MemberOfThree) -> None:
    """Ranks are told where the store is: that of the agent that led before is lost with it."""
    member.decided(0, 1, JobStarted("train.py", (), 3, 1, 3, "auto", "auto", None, "", 1, agents=AGENTS, min_agents=1))
    assert member.started == [(2, 4000)]
    member.decided(2, 2, *(RankLost(rank, Cause(CauseKind.EXIT, "exit code 1"), False) for rank in range(3)))
    assert member.part.leader == 2 and member.part.coordination.process_of(1) == 5, "all ranks start again"
    assert member.started == [(2, 4000)]
    member.welcome(2, 5000)
    assert member.started == [(2, 4000), (5, 5000)]


def test_a_member_votes_at_once_when_who_led_is_gone_though_it_does_not_know_yet_that_it_may(
    member: MemberOfThree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has joined, and agent 2 has the entry by which it votes: without its vote nobody leads."""
    agreement = member.part.agreement
    assert agreement is not None
    said: list[tuple[int, Message]] = []
    monkeypatch.setattr(agreement._mesh, "send", lambda number, message: said.append((number, message)))
    agreement._received(0, AppendEntries(1, 0, 0, (), 0))
    for is_granted in (False, True):
        agreement._received(2, RequestPreVote(1, 3, 1))
        assert said[-1] == (2, PreVoted(1, 1, is_granted))
        member.within._following._leader_is_gone("connection closed")


def test_who_was_to_begin_the_job_before_an_agent_is_gone_where_a_later_one_listens(
    member: MemberOfThree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or this one itself, which may have come again before the loss of its first process was known."""
    waited_for: list[Address] = []
    following = member.within._following
    monkeypatch.setattr(following.search, "take_turns", lambda before, is_first: waited_for.extend(before))
    assert member.part.listener is not None
    own, earlier, later = Address("127.0.0.1", member.part.listener.port), Address("127.0.0.1", 8), Address("127.0.0.1", 7)
    following.here, member.part.number = own.host, 5
    for number, at in ((1, own), (2, later), (6, later), (3, earlier)):
        member.part.know(number, at)
    following._lost("connection closed")
    assert waited_for == [Address("127.0.0.1", 9), earlier]


@pytest.mark.parametrize("words", [LedBy("", "127.0.0.1", 9), OtherJob("", "elsewhere")])
def test_a_member_that_is_sent_on_says_that_it_goes(
    member: MemberOfThree, monkeypatch: pytest.MonkeyPatch, words: LedBy | OtherJob
) -> None:
    """It listens on, so who has sent it would take it for one that comes back."""
    said: list[object] = []
    session = member.within._following._session
    assert session is not None
    monkeypatch.setattr(session, "send", said.append)
    member.within._received(words)
    assert said == [Leaving("sent on")]


def test_an_agent_that_takes_over_tells_that_its_ranks_have_started_before_what_else_happens(
    member: MemberOfThree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had told the agent that led, and that may have decided nothing more."""
    member.decided(0, 1, JobStarted("train.py", (), 3, 1, 3, "auto", "auto", None, "", 1, agents=AGENTS, min_agents=1))
    started, lost = RankStarted(1, 100, 1), RankLost(1, Cause(CauseKind.EXIT, "exit code 1"), False)
    for body in (started, lost):
        member.within.take(body, "agent", None)
    member.within._succession.leads(True)
    agent = member.local._role
    assert isinstance(agent, Agent)
    told: list[Event] = []
    monkeypatch.setattr(agent._replication, "take", told.append)
    agent._has_taken_over()
    assert [event.body for event in told[:2]] == [started, lost]
    assert isinstance(told[2].body, LeaderChanged)
    agent.close()


def test_what_comes_for_as_long_as_a_job_trains_is_told_again_as_it_is_now() -> None:
    """An agent may follow for months before it leads: a profile every ten minutes would fill its memory."""
    log = JobLog(JobFolder(RunOptions("train.py"), 0.0, pytest.fail), None, Coordination(RunOptions("train.py")), lambda: 0.0)
    for step in range(10_000):
        if step in (0, 5_000):
            log.record(Note("a loss"), "agent")
        log.record(ProfileRefined(profile()), "agent")
        log.record(Proposed((), float(step), "", 0.0, False), "agent")
    retold: list[Body] = []
    log.watch = lambda event: retold.append(event.body)
    log.retell()
    assert retold == [Note("a loss"), Note("a loss"), ProfileRefined(profile()), Proposed((), 9_999.0, "", 0.0, False)]
