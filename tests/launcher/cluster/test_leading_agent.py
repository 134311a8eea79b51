"""An agent that leads, and those that come to it, come again, or came to another one: who is taken, told, heard and lost."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from launcher.cluster import wire
from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.links.connect import Address
from launcher.cluster.wire import WhichJob
from launcher.host.fitness.findings import Device, HostReport
from launcher.joblog.events import AgentInfo, Cause, CauseKind, RankExited, RankLost, RankStarted
from launcher.options import Rendezvous
from odyssey.protocol.reports import Finished
from odyssey.protocol.units import Position
from tests.launcher.cluster.leader_on_a_loop import LeaderOnALoop, leader, packed
from tests.launcher.cluster.links import join

__all__ = ["leader"]
pytestmark = pytest.mark.timeout(120)


def test_a_member_that_ends_as_it_is_looked_for_is_lost_when_nobody_listens_any_more(leader: LeaderOnALoop) -> None:
    """The kernel closes what a killed process has open one by one, its links before the socket that it listens at, or after."""
    server = socket.create_server(("127.0.0.1", 0))
    peer = leader.peer()
    words = join("far", session=b"e" * 16, port=server.getsockname()[1])
    peer.say_frame(msgspec.msgpack.encode(words))
    leader.answers(server)
    leader.until(lambda: leader.joined)
    peer.connection.close()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.accept)
        leader.until(accepted.done)
        accepted.result()[0].close()
    leader.turn()
    assert not leader.lost
    server.close()

    def looked_again() -> bool:
        leader.now += 1.0
        return bool(leader.lost)

    leader.until(looked_again)
    assert [number for number, _ in leader.lost] == [1]


def test_who_nobody_gets_through_to_waits_until_somebody_does(leader: LeaderOnALoop) -> None:
    """It has come by a link of its own; what all agree upon would not come to it."""
    peer, server = leader.peer(), socket.socket()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    peer.say_frame(packed(join(port=port)))
    leader.until(lambda: leader.said)
    why = f"nobody gets through to the agent of far at 127.0.0.1:{port}: Connection refused"
    assert peer.hear(wire.FromLeader) == wire.WaitForPlace(why)
    assert list(leader.roster.unreached.values()) == [why] and not leader.joined
    server.listen()
    leader.now += 10.0
    leader.answers(server)
    leader.until(lambda: leader.joined)
    assert [type(peer.hear(wire.FromLeader)) for _ in range(2)] == [wire.Others, wire.Welcome]
    assert not leader.roster.unreached
    server.close()


def test_an_agent_that_has_a_rank_no_more_is_not_heard_of_it(leader: LeaderOnALoop) -> None:
    first, second = leader.member("first"), leader.member("second")
    leader.within.agents[1].starts(0, 1)
    leader.within.agents[1].forget(0)
    leader.within.agents[2].starts(0, 2)
    first.say(wire.Happened(1, RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False)))
    first.say(wire.Notice("told"))
    leader.until(lambda: leader.said)
    second.say(wire.Happened(2, RankStarted(0, 7, 0)))
    leader.until(lambda: leader.fed)
    assert leader.fed == [RankStarted(0, 7, 0)]
    assert not leader.lost


def test_a_member_whose_link_is_cut_goes_on_over_another_one(leader: LeaderOnALoop) -> None:
    token = os.urandom(16)
    first = leader.peer()
    server_socket = socket.create_server(("127.0.0.1", 0))  # it lives
    first.say_frame(packed(join(session=token, port=server_socket.getsockname()[1])))
    leader.answers(server_socket)
    first.say(wire.Notice("one"))
    leader.until(lambda: leader.said)
    first.connection.close()
    again = leader.peer()
    again.say_frame(packed(wire.Resume(token, 0)))
    leader.turn()
    leader.turn()
    answer = msgspec.msgpack.decode(again.hear_frame(), type=wire.Answer)
    assert answer == wire.Resumed(1)
    assert isinstance(again.hear(wire.FromLeader), wire.Welcome)  # said again, as it had not been heard
    again.n_said = answer.n_received
    again.say(wire.Notice("two"))
    leader.until(lambda: len(leader.said) == 2)
    assert leader.said == ["agent 1: one", "agent 1: two"] and not leader.lost
    server_socket.close()


def test_a_member_whose_process_is_gone_is_lost_at_once(leader: LeaderOnALoop) -> None:
    """Nobody listens where it did."""
    peer = leader.peer()
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        peer.say_frame(packed(join(port=server_socket.getsockname()[1])))
        leader.answers(server_socket)
    leader.until(lambda: leader.joined)
    peer.hear(wire.FromLeader)
    peer.connection.close()
    leader.until(lambda: leader.lost)
    assert leader.lost == [(1, "connection closed")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_comes_knows_the_others_from_the_first_word_on_and_they_it(leader: LeaderOnALoop, has_begun: bool) -> None:
    """The job's log tells it later, or never, if the agent that leads is lost."""
    leader.roster.has_begun = has_begun
    first, second = leader.member(), leader.member()
    welcomes = [member.hear(wire.FromLeader) for member in (first, second)]
    assert [welcome.others for welcome in welcomes] == [(), (wire.Known(1, *leader.address),)]
    assert first.hear(wire.FromLeader) == wire.Known(2, *leader.address)


def test_who_was_taken_for_lost_is_told(leader: LeaderOnALoop) -> None:
    member = leader.peer()
    member.say_frame(packed(leader.join()))
    leader.until(lambda: leader.joined)
    member.say(wire.Leaving("gone"))
    leader.until(lambda: leader.lost)
    peer = leader.peer()
    peer.say_frame(packed(wire.Resume(b"s" * 16, 3)))
    leader.turn()
    leader.turn()
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Forgotten()
    assert leader.ends(peer.connection)


@pytest.mark.parametrize("words", [wire.Resume(b"u" * 16, 3), wire.Attach(b"u" * 16, 1, ())])
def test_who_was_never_here_is_not_told_that_it_was_taken_for_lost(
    leader: LeaderOnALoop, words: wire.Resume | wire.Attach
) -> None:
    """It looks for another process that listened here, whose job goes on, and must not end its ranks."""
    leader.member()
    peer = leader.peer()
    peer.say_frame(packed(words))
    leader.turn()
    leader.turn()
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Unknown()
    assert leader.ends(peer.connection)


def test_who_waits_knows_the_others_and_gets_a_place_when_its_host_has_cooled_down(leader: LeaderOnALoop) -> None:
    """All are of one host, of which two agents are lost."""
    leader.roster.has_begun = True
    members = [leader.member() for _ in range(3)]
    for member in members:
        member.hear(wire.FromLeader)
    waiting = leader.peer()
    waiting.say_frame(packed(leader.join(session=b"w" * 16)))
    leader.until(lambda: leader.said)
    assert isinstance(waiting.hear(wire.FromLeader), wire.WaitForPlace)
    assert waiting.hear(wire.FromLeader) == wire.Others((leader.address,) * 3)
    members[0].say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.joined) == 4)  # its place
    members[1].say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.lost) == 2)
    late = leader.peer()
    late.say_frame(packed(leader.join(session=b"l" * 16)))
    leader.until(lambda: len(leader.said) == 2)
    assert "so it may join in 30 s" in late.hear(wire.FromLeader).what
    leader.now += 30.0
    leader.until(lambda: len(leader.joined) == 5)


def test_a_place_is_offered_again_to_who_waited_while_its_host_cooled_down(leader: LeaderOnALoop) -> None:
    leader.roster.has_begun = True
    members = [leader.member() for _ in range(3)]
    for member in members:
        member.hear(wire.FromLeader)
    waiting = [leader.peer() for _ in range(2)]
    for i, peer in enumerate(waiting):
        peer.say_frame(packed(leader.join(session=bytes([i]) * 16)))
        leader.until(lambda i=i: len(leader.said) > i)
    for member in members[:2]:
        member.say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.lost) == 2)
    assert len(leader.joined) == 4, "one has taken the first place"
    leader.now += 30.0
    leader.until(lambda: len(leader.joined) == 5)


@pytest.mark.parametrize("number", [AT_ENDPOINT, 5])
def test_away_from_the_endpoint_nobody_is_taken_who_wants_a_job_with_another_one(number: int) -> None:
    """There its own may be led beside this one. At the endpoint its name may be another one to others."""
    leader = LeaderOnALoop(number=number)
    try:
        leader.member()
        for endpoint, is_taken in (("other", number == AT_ENDPOINT), ("127.0.0.1", True)):
            peer, n = leader.peer(), len(leader.joined)
            peer.say_frame(packed(msgspec.structs.replace(leader.join(session=os.urandom(16)), endpoint=endpoint)))
            with ThreadPoolExecutor(1) as pool:
                heard = pool.submit(peer.hear, wire.FromLeader)
                leader.until(heard.done)
            answer = heard.result()
            assert isinstance(answer, wire.Welcome) == is_taken == (len(leader.joined) > n)
            if not is_taken:
                assert answer == wire.OtherJob("", "127.0.0.1", ("127.0.0.1", 9))
        assert not leader.said
    finally:
        leader.close()


def test_an_agent_that_asks_to_join_again_before_it_was_answered_is_no_loss_of_its_host(leader: LeaderOnALoop) -> None:
    """It gives up after --detect, and the agent that leads was busy for longer. Other processes of its host are lost later."""
    leader.roster.has_begun = True
    for n in range(1, 5):
        peer = leader.peer()
        peer.say_frame(packed(leader.join(session=b"t" * 16)))
        peer.connection.close()
        leader.until(lambda n=n: len(leader.joined) == n == len(leader.lost) + 1)
    assert not leader.said
    for n in (4, 5):
        member = leader.member()
        assert isinstance(member.hear(wire.FromLeader), wire.Welcome)
        member.say(wire.Leaving("gone"))
        leader.until(lambda n=n: len(leader.lost) == n)
    late = leader.peer()
    late.say_frame(packed(leader.join(session=b"l" * 16)))
    leader.until(lambda: leader.said)
    assert "agents of far were lost 2 times, so it may join in 30 s" in leader.said[0]


def test_an_agent_that_asks_to_join_again_has_the_place_that_it_had() -> None:
    """Its node rank is taken by nobody but itself."""
    leader = LeaderOnALoop(rendezvous=Rendezvous.STATIC)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        words = msgspec.structs.replace(join(port=listens.getsockname()[1]), node_rank=1)
        first, again = leader.peer(), leader.peer()
        first.say_frame(packed(words))
        leader.answers(listens)
        leader.until(lambda: leader.joined)
        first.connection.close()
        leader.answers(listens)  # to who sees whether it lives
        again.say_frame(packed(words))
        leader.answers(listens)
        leader.until(lambda: len(leader.joined) == 2)
        welcome = again.hear(wire.FromLeader)
        assert isinstance(welcome, wire.Welcome) and welcome.number == 2
        assert leader.lost == [(1, "it asks to join again")]
        other = leader.peer()
        other.say_frame(packed(msgspec.structs.replace(words, session=b"o" * 16)))
        leader.answers(listens)
        leader.until(lambda: leader.said)
        assert "--node-rank 1 is taken by far" in other.hear(wire.FromLeader).what
    leader.close()


def test_who_would_begin_a_job_that_goes_on_elsewhere_sends_all_there(leader: LeaderOnALoop) -> None:
    member = leader.member()
    member.hear(wire.FromLeader)
    words = wire.LedBy("", "10.0.0.7", 5)
    leader.peer().say_frame(packed(wire.LedBy("another job", "10.0.0.8", 5)))
    leader.peer().say_frame(packed(words))
    leader.until(lambda: leader.led_elsewhere)
    assert leader.led_elsewhere == [Address("10.0.0.7", 5)]
    assert member.hear(wire.FromLeader) == words
    assert not leader.within.have_left
    member.say(wire.Leaving("sent on"))  # it may listen on, where the leader would look whether it lives
    leader.until(lambda: leader.within.have_left)


def test_who_waits_for_a_place_and_says_that_it_goes_is_not_waited_for(leader: LeaderOnALoop) -> None:
    waiting = [leader.peer() for _ in range(4)]
    for i, peer in enumerate(waiting):
        peer.say_frame(packed(leader.join(f"h{i}", session=bytes([i]) * 16)))
        leader.until(lambda i=i: len(leader.joined) == i + 1 or any("waits for a place" in text for text in leader.said))
    assert len(leader.joined) == 3
    leader.within.end(wire.JobIsOver(0, "over", ""))
    for peer in waiting:
        assert not leader.within.have_left
        peer.say(wire.Leaving("sent on"))
    leader.until(lambda: leader.within.have_left)


def test_of_two_jobs_that_have_begun_the_younger_one_is_given_up(leader: LeaderOnALoop) -> None:
    leader.roster.has_begun, leader.part.coordination.job = True, WhichJob(5.0, "h1:7")
    older, same, younger = WhichJob(4.0, "h9:1"), WhichJob(5.0, "h1:7"), WhichJob(5.0, "h2:7")
    for job, found, answer in ((None, 0, False), (same, 0, False), (younger, 0, True), (older, 1, False)):
        peer = leader.peer()
        peer.say_frame(packed(wire.LedBy("", "10.0.0.7", 5, job)))
        leader.turn()
        leader.turn()
        if answer:
            words = msgspec.msgpack.decode(peer.hear_frame(), type=wire.LedBy)
            assert words == wire.LedBy("", "127.0.0.1", leader.address[1], leader.part.coordination.job, "127.0.0.1")
        assert leader.ends(peer.connection)
        assert len(leader.given_up) == found
    assert leader.led_elsewhere == [Address("10.0.0.7", 5)] and "led at 10.0.0.7:5" in leader.said[-1]


@pytest.mark.parametrize("number", [AT_ENDPOINT, 5])
def test_a_job_with_another_endpoint_is_no_older_one_of_this_one(number: int) -> None:
    """Its leading agent looks at its own endpoint, at the host of which this agent leads, away from its own. An agent that is
    at the endpoint of its job may know that by another name."""
    leader = LeaderOnALoop(number=number)
    try:
        leader.roster.has_begun, leader.part.coordination.job = True, WhichJob(5.0, "h1:7")
        for endpoint, is_heard in (("other", number == AT_ENDPOINT), ("127.0.0.1", True)):
            n, peer = len(leader.given_up), leader.peer()
            peer.say_frame(packed(wire.LedBy("", "10.0.0.7", 5, WhichJob(4.0, "h9:1"), endpoint)))
            assert leader.ends(peer.connection)
            assert (len(leader.given_up) > n) == is_heard
    finally:
        leader.close()


def test_who_would_begin_a_job_hears_that_one_lives_that_nobody_leads(leader: LeaderOnALoop) -> None:
    for run_id in ("another job", ""):
        leader.peer().say_frame(packed(wire.StillLives(run_id)))
    leader.until(lambda: leader.said)
    leader.roster.has_begun = True
    peer = leader.peer()
    peer.say_frame(packed(wire.StillLives("")))
    assert leader.ends(peer.connection)
    assert leader.said == ["waits"]


def test_after_another_agent_led_only_current_processes_are_ranks(leader: LeaderOnALoop) -> None:
    """A member has had ranks that are another agent's by now, or have another process: what became of those is no event."""
    found: list[str] = []
    lost = RankLost(0, Cause(CauseKind.ENDED, "SIGTERM"), False)
    old = (wire.Happened(5, RankStarted(0, 7, 0)), wire.Happened(5, lost))
    begun = RankStarted(1, 8, 0)
    here = (wire.Happened(6, begun), wire.FromRank(6, Finished(1, Position(9, 0))), wire.Happened(6, RankExited(1)))
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    leader.within.take_over(agents, 9, lambda agent: {1: 6} if agent == 3 else {}, 1e9, lambda: found.append("all"))
    peer = leader.peer()
    peer.say_frame(packed(wire.Attach(b"a" * 16, 3, (*old, *here))))
    leader.until(lambda: found)
    assert [event for event in leader.fed if isinstance(event, RankStarted | RankExited | RankLost)] == [begun, RankExited(1)]
    assert leader.reports == [(1, Finished(1, Position(9, 0)))], "what it said last is heard before its end"
    assert leader.within.agents[3].has(1) and not leader.within.agents[3].has(0)
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Resumed(0)
    assert isinstance(peer.hear(wire.FromLeader), wire.Welcome)
    peer.say(wire.Happened(5, lost))  # again, on its way before
    peer.say(wire.Notice("still one of us"))
    leader.until(lambda: leader.said)
    assert leader.said == ["agent 3: still one of us"]


def test_a_member_that_comes_to_a_new_leading_agent_again_before_it_was_answered_goes_on(leader: LeaderOnALoop) -> None:
    """It connects again with the same words where the agent that leads is busy for long."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=listens.getsockname()[1]))
        found: list[str] = []
        leader.within.take_over(agents, 9, lambda agent: {}, 1e9, lambda: found.append("all"))
        words = packed(wire.Attach(b"a" * 16, 3, ()))
        first = leader.peer()
        first.say_frame(words)
        first.connection.close()
        leader.until(lambda: found)
        again = leader.peer()
        again.say_frame(words)
        leader.turn()
        leader.turn()
        assert msgspec.msgpack.decode(again.hear_frame(), type=wire.Answer) == wire.Resumed(0)
        assert isinstance(again.hear(wire.FromLeader), wire.Welcome)
        again.say(wire.Notice("still one of us"))
        leader.until(lambda: leader.said)
        assert leader.said == ["agent 3: still one of us"] and [number for number, _ in leader.lost] == [9]


def test_an_agent_that_stands_still_as_it_comes_to_lead_gives_its_members_their_time() -> None:
    leader = LeaderOnALoop(detect_s=5.0)
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    found: list[str] = []
    leader.within.take_over(agents, 9, lambda agent: {}, 10.0, lambda: found.append("all"))
    leader.now += 1000.0
    leader.turn()
    assert not found
    peer = leader.peer()
    peer.say_frame(packed(wire.Attach(b"a" * 16, 3, ())))
    leader.until(lambda: found)
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Resumed(0)
    assert [number for number, _ in leader.lost] == [9]
    leader.close()


def test_members_that_do_not_come_to_who_leads_in_their_time_are_lost() -> None:
    leader = LeaderOnALoop(detect_s=5.0)
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    leader.within.take_over(agents, 9, lambda agent: {}, 10.0, lambda: None)
    began = leader.now

    def passes() -> bool:
        leader.now += 0.5
        return bool(leader.lost)

    leader.until(passes)
    assert [number for number, _ in leader.lost] == [9, 3] and leader.now >= began + 10.0
    leader.close()


def computes(host: str, digest: str) -> HostReport:
    device = Device("cpu", "a processor", 1, 64 << 30, 60 << 30, 1e9, digest)
    return HostReport(host, 1, "", host, 8, 64 << 30, 60 << 30, own_addresses=("10.0.0.1",), devices=(device,))


@pytest.mark.parametrize("leader", [computes("here", "good")], indirect=True)
def test_who_comes_while_another_agent_begins_to_lead_is_compared_when_all_members_have_told(leader: LeaderOnALoop) -> None:
    hosts = {3: "far", 4: "farther"}
    agents = (AgentInfo(9, "before", 1, 1), *(AgentInfo(i, hosts[i], 2, 1, address="127.0.0.1", port=1) for i in hosts))
    leader.within.take_over(agents, 9, lambda agent: {}, 1e9, lambda: None)
    new = []
    for host, digest in (("bad", "bad"), ("new", "good")):
        new.append(leader.peer())
        words = msgspec.structs.replace(leader.join(session=os.urandom(16)), host=host, report=computes(host, digest))
        new[-1].say_frame(packed(words))
        leader.until(lambda: len(leader.said) == len(new))
    assert all("waits for a place: all hosts are compared first" in line for line in leader.said) and not leader.joined
    for i, host in hosts.items():
        leader.peer().say_frame(packed(wire.Attach(bytes([i]) * 16, i, (), computes(host, "good"))))
    leader.until(lambda: leader.joined)
    assert [agent.host for agent in leader.joined] == ["new"]
    assert "its host is left out: cpu computes other bits than 4 equal devices of 5" in leader.said[-1]


def test_an_agent_that_comes_when_the_job_is_over_keeps_nobody_waiting(leader: LeaderOnALoop) -> None:
    leader.within.end(wire.JobIsOver(0, "", ""))
    late = leader.peer()
    late.say_frame(packed(leader.join()))
    leader.turn()
    leader.turn()
    answer = late.hear(wire.FromLeader)
    assert isinstance(answer, wire.JobIsOver) and answer.code == 0
    assert leader.within.have_left
