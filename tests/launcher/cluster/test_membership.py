"""Agents that come and go: who may join, when a job begins, and which rank sits where. Without processes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import odyssey
from benchmarks.coordinator import model
from launcher.agent.coordination import Coordination
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.leading.roster import Roster
from launcher.cluster.wire import Join, Refused, WaitForPlace
from launcher.coordinator.actions import EndRanks, SetDeadline, Spawn
from launcher.coordinator.machine import step
from launcher.coordinator.rank_assignment import assignments, homes, in_order
from launcher.coordinator.state import PlainState, State, Status
from launcher.host.fitness.findings import Device, HostReport
from launcher.joblog.event_sink import EventSink, Sender
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Event,
    JobEnded,
    JobStarted,
    RankExited,
    RankLost,
    RankStarted,
    StopRequested,
    Tick,
)
from launcher.options import Rendezvous, RunOptions
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Hello, Report
from tests.fake_loop import FakeLoop

agents = st.lists(
    st.builds(
        AgentInfo,
        number=st.integers(0, 99),
        host=st.just("host"),
        pid=st.just(1),
        n_ranks=st.integers(1, 5),
        role=st.sampled_from(["default", "trainer", ""]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda agent: agent.number,
)


@given(agents)
def test_seats_number_ranks_through_the_agents(found: list[AgentInfo]) -> None:
    """Against the definitions, counted one by one."""
    placed = assignments(found, 2, 3)
    everyone = [(node, local, agent) for node, agent in enumerate(found) for local in range(agent.n_ranks)]
    assert sorted(placed) == list(range(len(everyone)))
    met: Counter[str] = Counter()
    of_role = Counter(agent.role for _, _, agent in everyone)
    for rank, (node, local, agent) in enumerate(everyone):
        assignment = placed[rank]
        assert (assignment.rank, assignment.node, assignment.local_rank) == (rank, node, local)
        assert (assignment.n_ranks, assignment.n_nodes, assignment.n_local_ranks) == (len(everyone), len(found), agent.n_ranks)
        assert (assignment.role_rank, assignment.n_role_ranks) == (met[agent.role], of_role[agent.role])
        assert (assignment.n_restarts, assignment.attempt) == (2, 3)
        assert homes(tuple(found))[rank] == agent.number
        met[agent.role] += 1


def test_ranks_of_a_job_keep_their_seats_when_an_agent_is_lost() -> None:
    """One of another agent may have to be started again: it is no other rank now, and no other world."""
    coordination = Coordination(RunOptions("train.py", min_agents=1, max_agents=3))
    found = tuple(AgentInfo(i, f"h{i}", 1, 2) for i in range(3))
    started = JobStarted("train.py", (), 3, 2, 1, "auto", "auto", None, "", 1, agents=found, min_agents=1)
    coordination.take(Event(0.0, 0, "agent", started))
    before = [coordination.assignment(rank) for rank in range(6)]
    for rank in range(6):
        coordination.take(Event(0.0, 0, f"rank {rank}", Hello(rank, model(6))))
    coordination.take(Event(1.0, 0, "agent", AgentLost(found[1], "nothing heard of it")))

    assert [coordination.assignment(rank) for rank in range(6)] == before
    assert [coordination.home_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_who_leads_next_says_nothing_to_ranks_that_were_lost_with_their_agents_before() -> None:
    here = SimpleNamespace(has=lambda rank: rank == 1, send=lambda rank, data: heard.append(rank), is_there=lambda rank: True)
    heard: list[int] = []
    cluster = Cluster(here, SimpleNamespace(number=1, agents={}), lambda rank: rank)  # type: ignore[arg-type]
    for rank in (0, 1):
        cluster.send(Rank(rank), b"order")
        cluster.kill_rank(Rank(0), None)
    assert heard == [1]
    assert [cluster.is_there(Rank(rank)) for rank in (0, 1)] == [False, True]


def test_node_ranks_order_agents_only_if_all_ask_for_different_ones() -> None:
    def order(*asked: int | None) -> list[int]:
        return [agent.number for agent in in_order([AgentInfo(i, "h", 1, 1, node_rank=rank) for i, rank in enumerate(asked)])]

    assert order(2, 0, 1) == [1, 2, 0]
    assert order(0, 0, 0) == [0, 1, 2]
    assert order(None, 0, 1) == [0, 1, 2]


def test_an_agent_that_came_late_to_a_job_has_its_node_rank_when_all_start_again() -> None:
    its = [AgentInfo(i, f"host{i}", 1, 1, node_rank=i) for i in range(3)]
    back = AgentInfo(3, "host1", 1, 1, node_rank=1)
    first = JobStarted("train.py", (), 3, 1, 1, "auto", "auto", None, "test", 1, agents=tuple(its), on_loss="continue")
    replica = replace(model(3), replicas=True)
    state: State = PlainState()
    lost = [RankLost(Rank(rank), Cause(CauseKind.ENDED, "ended with the others"), False) for rank in (1, 2)]
    bodies = [first, Hello(Rank(0), replica, 1), AgentLost(its[1], "gone"), AgentJoined(back)]
    of_the_lost = RankLost(Rank(1), Cause(CauseKind.AGENT, "its agent was lost"), True)
    killed = RankLost(Rank(0), Cause(CauseKind.SIGNAL, "SIGKILL", -9), False)
    for at, body in enumerate([*bodies, of_the_lost, killed, *lost]):
        state, _ = step(state, Event(float(at), state.world.generation, "test", body))
    assert state.world.attempt == 1 and dict(state.world.homes) == {0: 0, 1: 3, 2: 2}


def join(run_id: str = "", node_rank: int | None = None, version: str = odyssey.__version__) -> Join:
    return Join(b"s" * 16, version, run_id, "other", 7, 2, "default", node_rank, "", 1)


def test_a_host_that_is_lost_again_and_again_waits_ever_longer() -> None:
    its = roster(1, 9)
    its.has_begun = True
    waits: list[float] = []
    now = 0.0
    for _ in range(5):
        now += 10.0
        came = its.join(join(), now)
        while isinstance(came, WaitForPlace):
            assert "agents of other were lost" in came.what
            waits.append(its.cool_down_s("other", now))
            now += waits[-1]
            came = its.join(join(), now)
        assert isinstance(came, AgentInfo)
        assert its.cool_down_s("another", now) == 0
        its.leave(came.number, now)
    assert waits == [20.0, 50.0, 110.0]
    assert isinstance(its.join(join(), 10_000.0), AgentInfo), "it is forgiven"


def test_a_host_is_not_blamed_for_an_agent_that_was_lost_with_who_led() -> None:
    """It may have been told its number, and not have been in the job yet; then it joins again under another one."""
    its = roster(1, 9)
    known = AgentInfo(4, "other", 7, 2)
    its.take_over((AgentInfo(0, "host", 1, 2), known), 0.0)
    assert its.number_now(known) is None
    came = its.join(join(), 1.0)
    assert isinstance(came, AgentInfo) and its.number_now(known) == came.number
    its.leave(known.number, 2.0, is_own_loss=False)
    its.leave(came.number, 3.0)
    assert its.cool_down_s("other", 3.0) == 0.0, "it was lost once"


def roster(least: int, most: int, now: float = 0.0, **rest: object) -> Roster:
    options = RunOptions("train.py", min_agents=least, max_agents=most, **({"rendezvous": Rendezvous.C10D} | rest))  # type: ignore[arg-type]
    return Roster(options, AgentInfo(0, "host", 1, 2, node_rank=options.node_rank), now)


def test_an_agent_that_takes_over_counts_itself_though_the_job_never_gave_it_ranks() -> None:
    us = AgentInfo(7, "late", 1, 2)
    options = RunOptions("train.py", min_agents=2, max_agents=3, rendezvous=Rendezvous.C10D)
    its = Roster(options, us, 0.0)
    its.take_over((AgentInfo(1, "a", 1, 2), AgentInfo(4, "b", 1, 2)), 0.0)
    assert its.agents[7] == us and sorted(its.agents) == [1, 4, 7]
    assert isinstance(its.join(join(), 0.0), WaitForPlace)
    its.leave(4, 0.0)
    came = its.join(join(), 0.0)
    assert isinstance(came, AgentInfo) and came.number > 7 + 100, "who led before may have given the next numbers"


def test_a_full_job_begins_at_once_and_others_get_a_last_call() -> None:
    met = roster(2, 3, last_call_s=30.0)
    assert met.starts_at() is None
    met.join(join(), 5.0)
    assert met.starts_at() == 35.0
    met.join(join(), 6.0)
    assert met.starts_at() == 5.0
    assert isinstance(met.join(join(), 7.0), WaitForPlace)


def test_an_agent_that_leaves_is_waited_for_again() -> None:
    met = roster(2, 2)
    agent = met.join(join(), 1.0)
    assert isinstance(agent, AgentInfo) and met.starts_at() == 1.0
    met.leave(agent.number, 2.0)
    assert met.starts_at() is None and met.missing() == "1 more agent"
    back = met.join(join(), 3.0)
    assert isinstance(back, AgentInfo) and back.number != agent.number


def test_strangers_are_refused_with_a_reason() -> None:
    met = roster(2, 3, run_id="a", rendezvous=Rendezvous.STATIC, node_rank=0)
    wrong_job = met.join(join("b"), 0.0)
    assert isinstance(wrong_job, Refused) and "'a', not 'b'" in wrong_job.what
    wrong_version = met.join(join("a", version="9.9"), 0.0)
    assert isinstance(wrong_version, Refused) and "9.9" in wrong_version.what
    taken = met.join(join("a", 0), 0.0)
    assert isinstance(taken, Refused) and "--node-rank 0 is taken by host (process 1)" in taken.what
    assert met.missing() == "node ranks 1, 2"


class Waiting:
    """A leading agent that waits for others to begin with, and what comes of it. `found`: its voters are asked for, in vain."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.roster = roster(2, 2, self.loop.now, join_timeout_s=60.0)
        self.told: list[str] = []
        self.fed: list[Body] = []
        self.found: list[tuple[AgentInfo, ...]] = []
        sink = EventSink()
        sink.read_by(self)
        self.within = Quorum(self.roster, self.loop, "node0:29400", sink, lambda agents: pytest.fail("it begins"))
        self.within.found = self.found.append
        self.within.start()

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        self.fed.append(body)
        self.within.end()

    def heard(self, sender: Sender, report: Report) -> None:
        pytest.fail("there are no ranks")

    def say(self, text: str) -> None:
        self.told.append(text)

    def lines_within(self, seconds: float) -> list[str]:
        n = len(self.told)
        self.loop.pass_s(seconds)
        return self.told[n:]


def test_a_job_does_not_begin_with_an_agent_that_nobody_gets_through_to_and_it_is_said_why() -> None:
    """An agent came, and is none of the job's until it is reached."""
    waiting, came = Waiting(), join()
    why = "nobody gets through to the agent of other at 10.0.0.2:19400: it does not answer"
    waiting.roster.unreached[came.session] = why
    assert waiting.roster.join(came, waiting.loop.now) == WaitForPlace(why)
    line = f"leading at node0:29400: 1 of 2 agents here, waiting for 1 more agent; {why}"
    assert waiting.lines_within(10.0) == [line] and not waiting.fed
    waiting.loop.pass_s(50.0)
    (stop,) = waiting.fed
    assert isinstance(stop, StopRequested) and stop.reason == f"1 more agent did not come within 60 s; {why}"
    assert "--local-addr" in stop.help


def test_agents_that_do_not_agree_that_a_job_begins_are_named_and_not_waited_for_for_ever() -> None:
    waiting = Waiting()
    waiting.loop.pass_s(5.0)
    came = waiting.roster.join(join(), waiting.loop.now)
    assert isinstance(came, AgentInfo)
    waiting.within.joined(came)
    waiting.within.vote(frozenset({0}))
    assert waiting.lines_within(20.0) == ["waiting for agent 1 (other) to agree that the job begins"] * 2
    waiting.loop.pass_s(39.0)
    assert not waiting.fed
    waiting.loop.pass_s(1.0)
    (stop,) = waiting.fed
    assert isinstance(stop, StopRequested) and stop.reason.startswith("agent 1 (other) did not agree within 60 s")


def checked(host: str, digest: str, node_rank: int | None = None) -> Join:
    """An agent whose host computes this."""
    device = Device("cpu", "a processor", 1, 64 << 30, 60 << 30, 1e9, digest)
    found = HostReport(host, 1, "", host, 8, 64 << 30, 60 << 30, own_addresses=("10.0.0.1",), devices=(device,))
    return Join(host.encode() * 16, odyssey.__version__, "", host, 7, 2, "default", node_rank, "", 1, found)


def comparing(least: int, most: int, **rest: object) -> Roster:
    options = RunOptions("train.py", min_agents=least, max_agents=most, **({"rendezvous": Rendezvous.C10D} | rest))  # type: ignore[arg-type]
    us = AgentInfo(0, "host", 1, 2, node_rank=options.node_rank)
    return Roster(options, us, 0.0, checked("L", "good").report)


def decided(its: Roster, *joins: Join) -> list[str]:
    """What each is told when the hosts are compared; empty for a place."""
    assert its.comparison is not None
    its.comparison.is_decided = True
    answers = [its.join(join, 9.0) for join in joins]
    return [getattr(answer, "what", "") for answer in answers]


def test_no_agent_has_a_place_before_the_hosts_are_compared() -> None:
    its = comparing(2, 2)
    came = its.join(checked("a", "good"), 1.0)
    assert isinstance(came, WaitForPlace) and "compared" in came.what
    assert its.starts_at() == 1.0, "all are here, and all are good"
    assert decided(its, checked("a", "good")) == [""] and its.starts_at() == 9.0


def test_a_bad_host_waits_when_a_spare_has_come() -> None:
    its = comparing(2, 2, last_call_s=30.0)
    a, b, c = checked("a", "bad"), checked("b", "good"), checked("c", "good")
    its.join(a, 1.0)
    assert its.starts_at() == 31.0, "of two that differ it is not known which is wrong: others may come"
    its.join(b, 2.0)
    assert its.starts_at() == 1.0
    its.join(c, 3.0)
    first, second, third = decided(its, a, b, c)
    assert "left out: cpu computes other bits" in first and not second and "has all its 2" in third


def test_a_bad_host_is_taken_where_there_are_too_few_others() -> None:
    its = comparing(3, 3, last_call_s=30.0)
    a, b = checked("a", "bad"), checked("b", "good")
    its.join(a, 1.0)
    its.join(b, 2.0)
    assert its.starts_at() == 32.0
    assert decided(its, a, b) == ["", ""]
    assert its.comparison is not None
    assert "a: cpu computes other bits" in its.comparison.verdict()[0] and "too few others" in its.comparison.verdict()[0]


def test_an_elastic_job_begins_without_a_bad_host() -> None:
    its = comparing(2, 4)
    a, b = checked("a", "bad"), checked("b", "good")
    its.join(a, 1.0)
    its.join(b, 2.0)
    assert [bool(what) for what in decided(its, a, b)] == [True, False]
    assert its.in_order()[1].host == "b"


def test_a_bad_host_stands_in_when_a_good_one_is_lost() -> None:
    its = comparing(2, 2)
    a, b, c = checked("a", "bad"), checked("b", "good"), checked("c", "good")
    for join in (a, b, c):
        its.join(join, 1.0)
    decided(its, a, b, c)
    its.has_begun = True
    its.leave(1, 10.0)
    assert isinstance(its.join(a, 11.0), WaitForPlace) and isinstance(its.join(c, 11.0), AgentInfo)
    its.leave(2, 12.0)
    assert isinstance(its.join(a, 13.0), AgentInfo)


def test_with_static_numbers_nobody_else_is_waited_for() -> None:
    its = comparing(2, 2, rendezvous=Rendezvous.STATIC, node_rank=0, last_call_s=30.0)
    assert its.missing() == "node rank 1"
    its.join(checked("a", "bad", 1), 1.0)
    assert its.starts_at() == 1.0
    assert isinstance(its.join(checked("b", "good", 1), 2.0), Refused)
    assert decided(its, checked("a", "bad", 1)) == [""]
    assert its.comparison is not None and "no majority" in its.comparison.verdict()[0]


def test_an_agent_that_was_not_checked_counts_as_bad() -> None:
    its = comparing(2, 2)
    a, b = join(), checked("b", "good")
    its.join(a, 1.0)
    its.join(b, 1.0)
    first, second = decided(its, a, b)
    assert "give --check to all agents" in first and not second


def test_who_comes_to_a_job_that_runs_is_compared_with_its_members() -> None:
    its = comparing(1, 9)
    a, b, late = checked("a", "good"), checked("b", "bad"), checked("c", "good")
    its.join(a, 1.0)
    assert decided(its, a) == [""]
    its.has_begun = True
    assert "left out: cpu computes other bits than 2 equal devices of 3" in getattr(its.join(b, 20.0), "what", "")
    assert isinstance(its.join(late, 21.0), AgentInfo)


def test_who_comes_after_another_agent_leads_is_compared_with_the_members_that_have_told_of_their_hosts() -> None:
    its = comparing(1, 9)
    members = [checked("a", "good"), checked("b", "good"), checked("c", "bad")]
    its.take_over(tuple(AgentInfo(7 + i, its.host, 1, 2) for i, its in enumerate(members)), 0.0)
    for i, member in enumerate(members[:2]):
        its.attached(its.agents[7 + i], member.session, member.report)
    bad, good = checked("d", "bad"), checked("e", "good")
    assert [getattr(its.join(new, 1.0), "what", "") for new in (bad, good)] == ["all hosts are compared first"] * 2
    assert its.has_compared() and isinstance(its.join(good, 2.0), AgentInfo)
    assert "left out: cpu computes other bits than 4 equal devices of 5" in getattr(its.join(bad, 2.0), "what", "")
    for number in (7, 8):
        its.leave(number, 3.0)
    assert "than 2 equal devices of 3" in getattr(its.join(bad, 4.0), "what", ""), "who has left is not compared with"


def test_without_a_check_nobody_waits_for_a_take_over() -> None:
    its = roster(1, 9)
    its.take_over((AgentInfo(7, "a", 1, 2),), 0.0)
    its.attached(its.agents[7], b"a" * 16, None)
    assert isinstance(its.join(join(), 1.0), AgentInfo) and not its.has_compared()


class Talk:
    """A coordinator of two agents, of 2 ranks and 1 rank, and what it wants done."""

    def __init__(self, min_agents: int, max_restarts: int, *, may_build_job: bool = False) -> None:
        self.agents = (AgentInfo(0, "a", 1, 2), AgentInfo(1, "b", 2, 1))
        self.state: State = PlainState()
        self.now = 0.0
        started = JobStarted(
            *("s.py", (), 2, 2, max_restarts, "auto", "auto", None, "1", 1),
            agents=self.agents,
            min_agents=min_agents,
            may_build_job=may_build_job,
        )
        self.actions: tuple[object, ...] = ()
        self.tell(started)

    def tell(self, body: object) -> None:
        self.now += 1.0
        self.state, self.actions = step(self.state, Event(self.now, self.state.world.generation, "agent", body))  # type: ignore[arg-type]

    def spawned(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, Spawn)]

    def ended(self) -> list[JobEnded]:
        return [a.body for a in self.actions if isinstance(getattr(a, "body", None), JobEnded)]  # type: ignore[attr-defined]


def test_a_lost_agent_costs_a_restart_on_the_agents_that_are_left() -> None:
    talk = Talk(min_agents=1, max_restarts=1)
    assert talk.spawned() == [0, 1, 2]
    talk.tell(AgentLost(talk.agents[1], "connection closed"))
    assert EndRanks((0, 1)) in talk.actions
    talk.tell(RankExited(0))
    talk.tell(RankExited(1))
    assert talk.spawned() == [0, 1] and talk.state.world.n_ranks == 2 and talk.state.world.restarts.n == 1
    talk.tell(AgentLost(talk.agents[0], "x"))
    assert talk.ended()


@pytest.mark.parametrize("has_started", [False, True])
def test_agents_that_are_lost_at_once_cost_one_restart(has_started: bool) -> None:
    """The second loss is heard of when all ranks have been asked for again; its own never started."""
    talk = Talk(min_agents=1, max_restarts=1)
    talk.tell(AgentJoined(AgentInfo(2, "c", 3, 1)))
    for rank in range(3):
        talk.tell(RankExited(rank))
    talk.tell(AgentLost(talk.agents[1], "nothing heard of it"))
    for rank in (0, 1, 3):
        talk.tell(RankExited(rank))
    assert talk.spawned() == [0, 1, 2] and talk.state.world.restarts.n == 1
    for rank in (0, 1, 2) if has_started else (0, 1):
        talk.tell(RankStarted(rank, 7, 0))
    talk.tell(AgentLost(AgentInfo(2, "c", 3, 1), "nothing heard of it"))
    for rank in (0, 1):
        talk.tell(RankExited(rank))
    assert bool(talk.ended()) == has_started
    assert talk.state.world.restarts.n == 1 and (has_started or talk.spawned() == [0, 1])


def test_an_agent_is_not_missed_whose_ranks_have_ended() -> None:
    talk = Talk(min_agents=2, max_restarts=0)
    talk.tell(RankExited(2))
    talk.tell(AgentLost(talk.agents[1], "nothing heard of it"))
    assert not talk.ended() and talk.state.status is Status.STARTING
    talk.tell(RankExited(0))
    talk.tell(RankExited(1))
    assert [ended.code for ended in talk.ended()] == [0]


def test_what_is_said_of_a_lost_agents_ranks_is_not_said_of_those_that_have_their_numbers_next() -> None:
    """The others' ends are agreed upon first: all have started again when the ranks of the lost agent are told of."""
    talk = Talk(min_agents=1, max_restarts=3)
    talk.tell(AgentLost(talk.agents[0], "nothing heard of it"))
    talk.tell(RankLost(2, Cause(CauseKind.SIGNAL, "SIGKILL", -9), False))
    assert talk.spawned() == [0]
    talk.tell(RankLost(0, Cause(CauseKind.AGENT, "agent 0 was lost: nothing heard of it"), True))
    assert talk.state.status is Status.STARTING and talk.state.world.alive == {0} and talk.state.world.restarts.n == 1


def test_a_late_agent_makes_the_job_larger_and_costs_no_restart() -> None:
    talk = Talk(min_agents=1, max_restarts=0)
    talk.tell(AgentJoined(AgentInfo(2, "c", 3, 2)))
    assert EndRanks((0, 1, 2)) in talk.actions
    for rank in range(3):
        talk.tell(RankExited(rank))
    assert talk.spawned() == [0, 1, 2, 3, 4]
    assert talk.state.world.restarts.n == 0 and talk.state.world.attempt == 1 and talk.state.status is Status.STARTING


def test_with_too_few_agents_it_waits_for_one_to_come_back() -> None:
    talk = Talk(min_agents=2, max_restarts=3)
    talk.tell(AgentLost(talk.agents[1], "gone"))
    talk.tell(RankExited(0))
    talk.tell(RankExited(1))
    assert not talk.spawned() and SetDeadline(600.0) in talk.actions
    talk.tell(AgentJoined(AgentInfo(2, "b", 9, 1)))
    assert talk.spawned() == [0, 1, 2] and SetDeadline(None) in talk.actions


def test_a_deadline_that_another_has_replaced_ends_no_wait_for_an_agent() -> None:
    """Ranks were to end within it, and the last one's end was on its way to be decided when it passed."""
    talk = Talk(min_agents=2, max_restarts=3)
    talk.tell(AgentLost(talk.agents[1], "gone"))
    to_end = Tick(talk.state.world.deadline)
    talk.tell(RankExited(0))
    talk.tell(RankExited(1))
    to_come = Tick(talk.state.world.deadline)
    talk.tell(to_end)
    assert not talk.actions and talk.state.status is Status.RESTARTING
    talk.tell(to_come)
    assert [ended.code for ended in talk.ended()] == [1]


def test_a_job_begins_without_an_agent_that_is_lost_before_it_is_built() -> None:
    talk = Talk(min_agents=1, max_restarts=0, may_build_job=True)
    talk.tell(AgentLost(talk.agents[1], "gone"))
    talk.tell(RankLost(2, Cause(CauseKind.AGENT, "agent 1 was lost"), True))
    assert not talk.actions and talk.state.world.alive == {0, 1}
    talk.tell(Hello(0, model(4)))
    talk.tell(Hello(1, model(4)))
    assert talk.state.status is Status.MEASURING


def test_nothing_is_started_again_at_an_agent_that_is_lost_after_its_rank() -> None:
    """A rank that has no process any more is not told as lost once more."""
    talk = Talk(min_agents=1, max_restarts=3, may_build_job=True)
    for rank in range(3):
        talk.tell(Hello(rank, model(4)))
    talk.tell(RankLost(2, Cause(CauseKind.SIGNAL, "SIGKILL", -9), False))
    assert not talk.state.world.slots_lost
    talk.tell(AgentLost(talk.agents[1], "gone"))
    assert talk.state.world.slots_lost == {2}


def test_with_fewer_than_it_needs_no_job_begins() -> None:
    talk = Talk(min_agents=2, max_restarts=0, may_build_job=True)
    talk.tell(AgentLost(talk.agents[1], "gone"))
    assert EndRanks((0, 1)) in talk.actions


def test_a_plain_script_ends_with_an_agent() -> None:
    talk = Talk(min_agents=1, max_restarts=0)
    talk.tell(AgentLost(talk.agents[1], "gone"))
    assert EndRanks((0, 1)) in talk.actions
