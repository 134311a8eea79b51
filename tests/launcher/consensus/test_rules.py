"""The rules of the consensus one by one: quorums, elections, changes of the membership, snapshots, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.consensus import log, messages
from launcher.consensus.membership import NOBODY, Configuration, Membership
from launcher.consensus.messages import (
    Appended,
    AppendEntries,
    Entry,
    InstallSnapshot,
    Message,
    PreVoted,
    Refused,
    RequestPreVote,
    RequestVote,
    TimeoutNow,
    Voted,
)
from launcher.consensus.node import MAX_TERMS_AHEAD, Node, NotLeading, ProtocolError
from odyssey.codec import Malformed, Packed
from tests.examples import examples

HEARTBEAT_S, ELECTION_S = 1.0, 5.0


def of(*voters: int, tie_breaker: int | None = None) -> Membership:
    return Membership(frozenset(voters), tie_breaker)


class Group:
    """Agents that hear each other at once; those in `cut` hear and are heard by nobody, until they are taken out again."""

    def __init__(self, membership: Membership, joiners: Iterable[int] = (), leader: int = 0) -> None:
        self.now = 0.0
        self.cut: set[int] = set()
        self.said: list[tuple[int, int, Message]] = []
        self.nodes = {n: self._node(n) for n in sorted(membership.voters | set(joiners))}
        self.came: dict[int, list[Entry]] = {n: [] for n in self.nodes}
        for number in membership.voters:
            self.nodes[number].begin(membership, leader, self.now)
        self.settle()

    def _node(self, number: int) -> Node:
        return Node(number, Random(number), self.now, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)

    def settle(self) -> None:
        """Everything that is said arrives, and what is said to it."""
        while [number for number in self.nodes if self._said_by(number)]:
            pass

    def settle_until(self, done: Callable[[], bool]) -> None:
        """No further; what has not been taken out of agents by then may still be lost."""
        while not done():
            for number in self.nodes:
                if not done():
                    self._said_by(number)

    def _said_by(self, number: int) -> bool:
        said = self.nodes[number].outbox.take()
        for to, message in said:
            if to in self.nodes and not {number, to} & self.cut:
                self.said.append((number, to, message))
                self.nodes[to].receive(number, message, self.now)
        for index, entry in self.nodes[number].log.take_committed():
            self.came[number][index - 1 :] = [entry]
        return bool(said)

    def wait(self, seconds: float) -> None:
        """Whoever wakes until then does."""
        end = self.now + seconds
        while (at := min(node.wakes_at for node in self.nodes.values())) <= end:
            self.now = max(self.now, at)
            for node in self.nodes.values():
                node.tick(self.now)
            self.settle()
        self.now = end

    def propose(self, number: int, payload: bytes) -> int:
        index = self.nodes[number].propose(payload, self.now)
        self.settle()
        return index

    def change(self, number: int, membership: Membership) -> None:
        self.nodes[number].change(membership.voters, membership.tie_breaker, self.now)
        self.settle()

    def payloads(self, number: int) -> list[bytes]:
        return [entry.content for entry in self.came[number] if isinstance(entry.content, bytes)]

    @property
    def leaders(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.is_leading and number not in self.cut]


# -- quorums -----------------------------------------------------------------------------------------------------------


def subsets(numbers: Iterable[int]) -> list[set[int]]:
    pool = list(numbers)
    return [set(some) for n in range(len(pool) + 1) for some in itertools.combinations(pool, n)]


@pytest.mark.parametrize("n", range(1, 7))
def test_any_two_quorums_meet_and_all_but_a_minority_is_one(n: int) -> None:
    for tie_breaker in (*range(n), None):
        membership = of(*range(n), tie_breaker=tie_breaker)
        quorums = [some for some in subsets(range(n)) if membership.is_quorum(some)]

        assert all(one & other for one in quorums for other in quorums)
        assert all(some in quorums for some in subsets(range(n)) if len(some) > n / 2)
        if tie_breaker is not None:
            assert all((some in quorums) != (set(range(n)) - some in quorums) for some in subsets(range(n))), "one side goes on"


def test_half_of_an_even_number_is_enough_with_the_tie_breaker_only() -> None:
    two, four = of(0, 1, tie_breaker=0), of(0, 1, 2, 3, tie_breaker=2)

    assert two.is_quorum({0}) and not two.is_quorum({1})
    assert four.is_quorum({2, 3}) and not four.is_quorum({0, 1}) and not four.is_quorum({2})
    assert not of(0, 1, 2, tie_breaker=0).is_quorum({0, 7, 8})
    assert not of(0, 1).is_quorum({0})
    assert not NOBODY.is_quorum({0, 1})


def test_who_breaks_ties_votes() -> None:
    with pytest.raises(ValueError, match="agent 3 is to break ties"):
        of(0, 1, tie_breaker=3)


def test_on_the_way_from_one_membership_to_the_next_both_must_agree() -> None:
    both = Configuration(of(0, 3, 4), old=of(0, 1, 2))

    assert both.is_quorum({0, 1, 3})
    assert not both.is_quorum({0, 1, 2}) and not both.is_quorum({0, 3, 4})
    assert both.voters == {0, 1, 2, 3, 4}


# -- alone, and two ----------------------------------------------------------------------------------------------------


def test_a_single_voter_decides_at_once_without_a_message() -> None:
    node = Node(0, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0), 0, 0.0)
    assert node.is_in_charge

    index = node.propose(b"event", 0.0)

    assert node.log.take_committed()[-1] == (index, Entry(1, b"event"))
    assert node.outbox.take() == []


def test_of_two_the_tie_breaker_goes_on_alone_and_the_other_stops() -> None:
    group = Group(of(0, 1, tie_breaker=0))
    group.cut = {1}
    group.propose(0, b"alone")
    group.wait(20 * ELECTION_S)

    assert group.nodes[0].is_in_charge and group.payloads(0) == [b"alone"]
    assert group.nodes[1].leader is None and group.nodes[1].term == 1

    group.cut = set()
    group.wait(2 * ELECTION_S)
    assert group.payloads(1) == [b"alone"] and group.nodes[1].leader == 0


def test_of_two_the_other_does_not_take_over_from_the_tie_breaker() -> None:
    group = Group(of(0, 1, tie_breaker=0))
    group.cut = {0}
    group.wait(20 * ELECTION_S)

    assert group.nodes[1].leader is None and not group.nodes[1].is_leading


@pytest.mark.parametrize("tie_breaker", [0, 2])
def test_four_split_evenly_go_on_where_the_tie_breaker_is(tie_breaker: int) -> None:
    group = Group(of(0, 1, 2, 3, tie_breaker=tie_breaker))
    with_it, without_it = ({0, 1}, {2, 3}) if tie_breaker == 0 else ({2, 3}, {0, 1})
    group.cut = without_it
    group.wait(10 * ELECTION_S)
    (leader,) = group.leaders
    group.propose(leader, b"after the split")

    assert leader in with_it
    assert all(group.payloads(number) == [] for number in without_it)
    assert not any(group.nodes[number].leader is not None for number in without_it)


# -- elections ---------------------------------------------------------------------------------------------------------


def test_when_the_leader_is_lost_another_goes_on_with_all_that_was_decided() -> None:
    group = Group(of(0, 1, 2))
    group.propose(0, b"before")
    group.cut = {0}
    group.wait(10 * ELECTION_S)

    (leader,) = group.leaders
    group.propose(leader, b"after")
    group.wait(HEARTBEAT_S)
    assert group.nodes[leader].is_in_charge
    assert group.payloads(1) == group.payloads(2) == [b"before", b"after"]


def test_a_leader_that_hears_no_quorum_steps_down_within_a_time_out_and_a_heartbeat() -> None:
    group = Group(of(0, 1, 2))
    group.wait(ELECTION_S)
    group.cut = {0}
    group.wait(ELECTION_S + HEARTBEAT_S)

    assert not group.nodes[0].is_leading and group.nodes[0].leader is None
    with pytest.raises(NotLeading, match="agent 0 does not lead, nobody does"):
        group.nodes[0].propose(b"", group.now)


def test_what_a_cut_off_leader_proposed_is_replaced() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {0}
    group.propose(0, b"never decided")
    group.wait(10 * ELECTION_S)
    (leader,) = group.leaders
    group.propose(leader, b"decided")
    group.cut = set()
    group.wait(2 * ELECTION_S)

    assert all(group.payloads(number) == [b"decided"] for number in range(3))


def test_who_was_cut_off_disturbs_nobody_when_it_is_back() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {2}
    group.wait(20 * ELECTION_S)
    assert group.nodes[2].term == 1 and group.nodes[2].leader is None

    group.cut = set()
    group.wait(3 * ELECTION_S)
    assert [node.term for node in group.nodes.values()] == [1, 1, 1]
    assert group.leaders == [0] and group.nodes[2].leader == 0


@pytest.mark.parametrize("gone", [0, 2])
def test_who_was_cut_off_and_has_no_voice_any_more_hears_who_leads(gone: int) -> None:
    """It is told once that it has none, and was cut off then."""
    group = Group(of(0, 1, 2))
    group.cut = {gone}
    group.wait(10 * ELECTION_S)
    (leader,) = group.leaders
    group.change(leader, of(*{0, 1, 2} - {gone}))
    group.propose(leader, b"decided without it")
    group.cut = set()
    group.wait(3 * ELECTION_S)

    assert group.nodes[gone].leader == leader and group.leaders == [leader]
    assert group.payloads(gone) == []


def test_who_does_not_hear_the_leader_alone_is_not_elected_by_those_that_do() -> None:
    group = Group(of(0, 1, 2))
    group.nodes[2].tick(group.nodes[2].wakes_at)
    group.settle()

    assert (0, 2, PreVoted(1, 1, False)) in group.said and (1, 2, PreVoted(1, 1, False)) in group.said
    assert group.leaders == [0]


def test_those_that_take_part_in_no_quorum_are_not_elected_for_their_shorter_log() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {2}
    group.propose(0, b"decided without agent 2")
    group.cut = {0}
    group.wait(10 * ELECTION_S)

    assert group.leaders == [1]


def test_a_vote_is_given_once_a_term_and_again_only_to_the_same() -> None:
    node = Group(of(0, 1, 2)).nodes[2]
    for sender, is_granted in ((1, True), (0, False), (1, True)):
        node.receive(sender, RequestVote(2, 1, 1), 0.0)
        assert node.outbox.take() == [(sender, Voted(2, is_granted))]


def test_a_pre_vote_goes_to_whose_log_has_all_of_ones_own_and_changes_nothing() -> None:
    node = Group(of(0, 1, 2)).nodes[2]
    node.receive(0, AppendEntries(1, 1, 1, (Entry(1, b"x"),), 1), 0.0)
    node.outbox.take()
    for asked, last, last_term, is_granted in (
        (1, 1, 1, False),
        (0, 9, 1, False),
        (1, 9, 0, False),
        (1, 2, 1, True),
        (7, 2, 1, True),
    ):
        node.receive(1, RequestPreVote(asked, last, last_term), ELECTION_S)
        assert node.outbox.take() == [(1, PreVoted(1, asked, is_granted))]
    assert node.term == 1 and node.leader == 0


def test_members_do_not_vote_in_the_term_that_they_begin_with() -> None:
    node = Group(of(0, 1, 2)).nodes[2]
    node.receive(1, RequestVote(1, 9, 1), 0.0)

    assert node.outbox.take() == [(1, Voted(1, False))]


def test_pre_votes_and_votes_of_another_term_are_not_counted() -> None:
    node = Group(of(0, 1, 2)).nodes[1]
    for _ in range(2):
        node.tick(now := node.wakes_at)
        node.receive(0, PreVoted(1, 0, True), now)
        assert not any(isinstance(message, RequestVote) for _, message in node.outbox.take())
        node.receive(0, PreVoted(1, 1, True), now)
    assert [message for _, message in node.outbox.take()] == [RequestVote(2, 1, 1)] * 2
    node.receive(0, Voted(1, True), 9.0)
    node.receive(0, PreVoted(1, 1, True), 9.0)
    assert not node.is_leading
    node.receive(0, Voted(2, True), 9.0)
    assert node.is_leading and not node.is_in_charge


def test_a_leader_of_an_older_term_is_told_and_steps_down() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {0}
    group.wait(3 * ELECTION_S)
    stale = Group(of(0, 1, 2)).nodes[0]
    group.nodes[1].receive(0, AppendEntries(1, 1, 1, (), 1), group.now)
    ((_, answer),) = [item for item in group.nodes[1].outbox.take() if item[0] == 0]
    stale.receive(1, answer, 0.0)

    assert isinstance(answer, Refused) and not stale.is_leading and stale.term == answer.term == group.nodes[1].term


@pytest.mark.parametrize("silence_s", [5.5 + i / 2 for i in range(50)])
def test_who_led_before_all_were_silent_leads_after_it(silence_s: float) -> None:
    """Whoever led instead would have it taken for lost, though nobody is."""
    group = Group(of(0, 1, 2))
    group.cut = {0, 1, 2}
    group.wait(silence_s)
    group.cut = set()
    group.wait(2 * HEARTBEAT_S)
    assert group.leaders == [0]


def test_who_hears_its_leader_lets_it_lead_again_when_it_asks() -> None:
    """It was not heard itself: the others stood still, and their clocks with them."""
    node = Node(1, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0, 1, 2), 0, 0.0)
    for sender, is_granted in ((2, False), (0, True)):
        node.receive(sender, RequestPreVote(1, 1, 1), 0.5)
        assert node.outbox.take() == [(sender, PreVoted(1, 1, is_granted))]


@pytest.mark.parametrize(("late_s", "again_s"), [(0.1, HEARTBEAT_S), (2 * HEARTBEAT_S, ELECTION_S)])
def test_who_led_is_listened_for_once_more_before_another_stands(late_s: float, again_s: float) -> None:
    """It may have been the network that was silent, as it was if an answer was long on its way: then links take their time."""
    node = Node(1, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0, 1, 2), 0, 0.0)
    node.tick(asked_at := node.wakes_at)
    node.receive(2, PreVoted(1, 1, True), asked_at + late_s)
    assert node.term == 1 and (node.wakes_at <= asked_at + again_s) == (late_s < HEARTBEAT_S)
    node.tick(asked_at := node.wakes_at)
    node.receive(2, PreVoted(1, 1, True), asked_at + late_s)
    assert node.term == 2


def test_who_is_known_to_be_gone_is_listened_for_no_more() -> None:
    node = Node(1, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0, 1, 2), 0, 0.0)
    node.is_gone(0, 0.5)
    node.tick(node.wakes_at)
    node.receive(2, PreVoted(1, 1, True), node.wakes_at)
    assert node.term == 2


def test_entries_of_older_terms_are_not_decided_by_counting_them() -> None:
    """Raft, figure 8: agent 2 leads with an entry of term 1 that then everybody has, and may still lose it."""
    group = Group(of(0, 1, 2))
    node = group.nodes[2]
    node.receive(0, AppendEntries(1, 1, 1, (Entry(1, b"old"),), 1), 0.0)
    for _ in range(2):
        node.tick(now := node.wakes_at)
        node.receive(1, PreVoted(1, 1, True), now)
    node.receive(1, Voted(2, True), 9.0)
    node.receive(1, Appended(2, 2), 9.0)
    assert node.is_leading and node.log.commit == 1 and not node.is_in_charge

    node.receive(1, Appended(2, 3), 9.0)
    assert node.log.commit == 3 and node.is_in_charge


def test_the_end_of_a_message_is_the_most_that_is_taken_for_committed() -> None:
    """Entries behind it may be those of an earlier leader."""
    node = Group(of(0, 1, 2)).nodes[2]
    node.receive(0, AppendEntries(1, 1, 1, (Entry(1, b"a"), Entry(1, b"b")), 1), 0.0)
    node.receive(1, AppendEntries(2, 2, 1, (), 9), 0.0)

    assert node.log.commit == 2


def test_members_learn_with_a_heartbeat_what_was_decided_last() -> None:
    group = Group(of(0, 1, 2))
    group.propose(0, b"event")
    assert group.payloads(0) == [b"event"] and group.payloads(1) == []

    group.wait(HEARTBEAT_S)
    assert group.payloads(1) == group.payloads(2) == [b"event"]


def test_members_are_told_at_once_what_is_decided_and_once() -> None:
    """Each as soon as it has the entries, though a quorum had them before."""
    group = Group(of(0, 1, 2, 3))
    group.cut = {3}
    group.propose(0, b"event")
    group.nodes[0].leading.tell_commits()
    group.settle()
    assert [group.payloads(number) for number in range(4)] == [[b"event"]] * 3 + [[]]
    group.nodes[0].leading.tell_commits()
    assert group.nodes[0].outbox.take() == []

    group.cut = set()
    group.wait(ELECTION_S)  # it is sent again
    group.nodes[0].leading.tell_commits()
    group.settle()
    assert group.payloads(3) == [b"event"]


def test_messages_in_any_order_and_twice_leave_the_same_log() -> None:
    sent = [AppendEntries(1, i, 1, tuple(Entry(1, b"%d" % j) for j in range(i, i + 2)), i) for i in range(1, 4)]
    for order in itertools.permutations([*sent, *sent], 6):
        node = Node(2, Random(2), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
        node.begin(of(0, 1, 2), 0, 0.0)
        node.receive(0, AppendEntries(1, 0, 0, (Entry(1, None),), 0), 0.0)
        for message in order:
            node.receive(0, message, 0.0)
        node.receive(0, sent[0], 0.0)
        node.receive(0, sent[1], 0.0)
        node.receive(0, AppendEntries(1, 4, 1, (Entry(1, b"4"),), 5), 0.0)
        assert [entry.content for _, entry in node.log.take_committed()] == [None, b"1", b"2", b"3", b"4"]


# -- changes of the membership -----------------------------------------------------------------------------------------


def test_three_shrink_to_one_as_agents_are_lost() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {2}
    group.change(0, of(0, 1, tie_breaker=0))
    group.cut = {1, 2}
    assert group.nodes[0].configuration == Configuration(of(0, 1, tie_breaker=0))
    group.propose(0, b"alone of two")
    group.change(0, of(0))
    group.propose(0, b"alone")
    group.wait(10 * ELECTION_S)

    assert group.nodes[0].is_in_charge and group.payloads(0) == [b"alone of two", b"alone"]
    assert group.nodes[1].leader is None and group.nodes[2].leader is None


def test_a_change_that_old_members_do_not_agree_to_is_none() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {1, 2}
    group.change(0, of(0))
    group.propose(0, b"not decided")

    assert group.nodes[0].configuration == Configuration(of(0), old=of(0, 1, 2))
    assert group.payloads(0) == []
    group.wait(10 * ELECTION_S)
    assert group.nodes[0].leader is None
    group.cut = {0}
    group.wait(10 * ELECTION_S)
    assert len(group.leaders) == 1, "the others go on without"


def test_a_new_leader_finishes_a_change_that_has_begun() -> None:
    group = Group(of(0, 1, 2), joiners=[3])
    group.nodes[0].change({1, 2, 3}, None, 0.0)
    group.settle_until(lambda: group.nodes[0].configuration == Configuration(of(1, 2, 3)))
    both = Configuration(of(1, 2, 3), old=of(0, 1, 2))
    assert {group.nodes[number].configuration for number in (1, 2, 3)} == {both}
    group.cut = {0}
    group.settle()
    group.wait(10 * ELECTION_S)

    (leader,) = group.leaders
    assert {group.nodes[number].configuration for number in (1, 2, 3)} == {Configuration(of(1, 2, 3))}
    assert group.nodes[leader].is_in_charge


def test_joiners_catch_up_before_they_count() -> None:
    group = Group(of(0), joiners=[1])
    group.propose(0, b"before")
    group.cut = {1}
    group.change(0, of(0, 1))
    group.propose(0, b"while it is away")
    assert group.nodes[0].configuration == Configuration(of(0)) and group.payloads(0) == [b"before", b"while it is away"]

    group.cut = set()
    group.wait(2 * ELECTION_S)
    assert group.nodes[0].configuration == Configuration(of(0, 1))
    assert group.payloads(1) == [b"before", b"while it is away"]
    group.cut = {1}
    group.propose(0, b"together only")
    assert b"together only" not in group.payloads(0)


def test_changes_wait_for_each_other_and_the_last_one_of_them_is_taken() -> None:
    group = Group(of(0, 1, 2), joiners=[3])
    group.cut = {1, 2}
    group.change(0, of(0, 1))
    group.change(0, of(0, 2))
    group.change(0, of(0, 1, 2, 3))
    assert group.nodes[0].configuration == Configuration(of(0, 1), old=of(0, 1, 2))

    group.cut = set()
    group.wait(2 * ELECTION_S)
    assert group.nodes[0].configuration == Configuration(of(0, 1, 2, 3))
    seen = [entry.content.new for entry in group.came[3] if isinstance(entry.content, Configuration)]
    assert of(0, 2) not in seen and seen == [of(0, 1, 2), of(0, 1), of(0, 1), of(0, 1, 2, 3), of(0, 1, 2, 3)]


def test_a_change_to_members_that_do_not_answer_waits() -> None:
    group = Group(of(0, 1, 2, 3, tie_breaker=0))
    group.wait(ELECTION_S)
    group.cut = {2, 3}
    group.wait(ELECTION_S)
    group.change(0, of(0, 2, 3))

    assert group.nodes[0].configuration == Configuration(of(0, 1, 2, 3, tie_breaker=0))


def test_a_leader_that_leaves_hands_over_at_once() -> None:
    group = Group(of(0, 1, 2))
    group.propose(0, b"before")
    group.change(0, of(1, 2, tie_breaker=1))

    assert not group.nodes[0].is_leading
    (leader,) = group.leaders
    assert leader in (1, 2) and group.nodes[leader].is_in_charge and group.now == 0.0
    group.propose(leader, b"after")
    assert group.payloads(leader) == [b"before", b"after"]
    assert b"after" not in group.payloads(0)
    group.wait(10 * ELECTION_S)
    assert group.leaders == [leader] and group.nodes[0].leader is None


def test_a_leader_that_left_steps_down_though_nobody_hears_it() -> None:
    group = Group(of(0, 1, 2))
    group.nodes[0].change({1, 2}, 1, 0.0)
    group.settle_until(lambda: group.nodes[0].configuration == Configuration(of(1, 2, tie_breaker=1)))
    group.settle_until(lambda: group.nodes[0].log.commit == 3)

    assert not group.nodes[0].is_leading and group.nodes[0].leader is None
    assert [message for _, message in group.nodes[0].outbox.take() if isinstance(message, TimeoutNow)] == [TimeoutNow(1)]


def test_a_membership_that_was_never_decided_is_forgotten_with_its_entry() -> None:
    node = Group(of(0, 1, 2)).nodes[2]
    both = Configuration(of(2), old=of(0, 1, 2))
    node.receive(0, AppendEntries(1, 1, 1, (Entry(1, b"x"), Entry(1, both)), 1), 0.0)
    assert node.configuration == both

    node.receive(1, AppendEntries(2, 2, 1, (Entry(2, None),), 1), 0.0)
    assert node.configuration == Configuration(of(0, 1, 2))


def test_those_that_are_put_out_are_told_so() -> None:
    group = Group(of(0, 1, 2))
    group.change(0, of(0, 1, tie_breaker=0))

    assert group.came[2][-1].content == Configuration(of(0, 1, tie_breaker=0))
    said = len(group.said)
    group.wait(ELECTION_S / 2)
    assert not [item for item in group.said[said:] if item[1] == 2], "and then nothing more"


def test_one_that_votes_no_longer_leads_once_more_where_only_it_knows() -> None:
    """Agents 0 and 1 have the entry that makes agent 2 the only voter, agent 2 has not, and 0 dies."""
    group = Group(of(0, 1, 2))
    group.nodes[0].change({2}, None, 0.0)
    group.settle_until(lambda: group.nodes[0].configuration == Configuration(of(2)))
    for to, message in group.nodes[0].outbox.take():
        if to == 1:
            group.nodes[1].receive(0, message, 0.0)
    group.nodes[1].outbox.take()
    assert group.nodes[1].configuration == Configuration(of(2)) != group.nodes[2].configuration
    group.cut = {0}
    group.wait(10 * ELECTION_S)

    assert group.leaders == [2] and group.nodes[2].is_in_charge


@pytest.mark.parametrize(("voters", "tie_breaker"), [((), None), ((0, 1), 2)])
def test_a_membership_that_cannot_be_is_refused(voters: tuple[int, ...], tie_breaker: int | None) -> None:
    group = Group(of(0, 1, 2))

    with pytest.raises(ValueError, match=r"nobody|break ties"):
        group.nodes[0].change(voters, tie_breaker, 0.0)
    with pytest.raises(NotLeading, match="agent 1 does not lead, agent 0 does"):
        group.nodes[1].change((1, 2), None, 0.0)


def test_an_agent_begins_once_and_with_itself_and_the_leader_as_members() -> None:
    for me, membership, leader in ((0, of(1, 2), 1), (0, of(0, 1), 2)):
        with pytest.raises(ValueError, match="cannot begin"):
            Node(me, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S).begin(membership, leader, 0.0)
    with pytest.raises(ValueError, match="cannot begin"):
        Group(of(0, 1)).nodes[0].begin(of(0, 1), 0, 0.0)


# -- snapshots and batches ---------------------------------------------------------------------------------------------


def test_a_joiner_gets_the_snapshot_and_what_follows() -> None:
    group = Group(of(0), joiners=[1])
    group.propose(0, b"forgotten")
    index = group.propose(0, b"forgotten too")
    group.nodes[0].log.compact(index, b"state")
    group.propose(0, b"after")
    group.cut = {1}
    group.change(0, of(0, 1, tie_breaker=0))
    group.cut = set()
    group.wait(ELECTION_S + HEARTBEAT_S)

    assert group.nodes[1].log.take_snapshot() == (index, b"state")
    assert group.nodes[1].log.take_snapshot() is None
    assert group.payloads(1)[-1:] == [b"after"]
    assert group.nodes[1].configuration == Configuration(of(0, 1, tie_breaker=0))


def test_a_member_that_was_away_for_long_gets_the_snapshot() -> None:
    group = Group(of(0, 1, 2))
    group.cut = {2}
    for number in range(20):
        index = group.propose(0, b"%d" % number)
    group.nodes[0].log.compact(index, b"state")
    group.cut = set()
    group.wait(2 * ELECTION_S)

    assert group.nodes[2].log.take_snapshot() == (index, b"state") and group.nodes[2].log.commit == index
    assert [type(message) for _, to, message in group.said if to == 2].count(InstallSnapshot) == 1


def test_a_snapshot_that_comes_late_takes_nothing_away() -> None:
    """What this agent has said that it has, it keeps."""
    node = Group(of(0, 1, 2)).nodes[1]
    node.receive(0, AppendEntries(1, 1, 1, tuple(Entry(1, b"%d" % i) for i in range(2, 7)), 2), 0.0)
    node.outbox.take()
    node.receive(0, InstallSnapshot(1, 4, 1, Configuration(of(0, 1, 2)), b"state"), 0.0)
    node.receive(0, InstallSnapshot(1, 3, 1, Configuration(of(0, 1, 2)), b"older"), 0.0)
    node.receive(0, AppendEntries(1, 6, 1, (), 6), 0.0)

    assert node.log.take_snapshot() == (4, b"state")
    assert node.log.take_committed() == [(5, Entry(1, b"5")), (6, Entry(1, b"6"))]
    assert [message for _, message in node.outbox.take()] == [Appended(1, 4), Appended(1, 3), Appended(1, 6)]


def test_a_snapshot_of_what_is_decided_here_already_changes_nothing() -> None:
    node = Group(of(0, 1, 2)).nodes[1]
    node.receive(0, AppendEntries(1, 1, 1, tuple(Entry(1, b"%d" % i) for i in range(2, 7)), 5), 0.0)
    node.log.take_committed()
    node.receive(0, InstallSnapshot(1, 4, 1, Configuration(of(0, 1, 2)), b"state"), 0.0)

    assert node.log.take_snapshot() is None and node.log.take_committed() == [] and node.log.commit == 5


def test_a_snapshot_replaces_entries_that_were_never_decided() -> None:
    node = Group(of(0, 1, 2)).nodes[1]
    node.receive(0, AppendEntries(1, 1, 1, (Entry(1, b"x"), Entry(1, Configuration(of(1)))), 1), 0.0)
    node.receive(2, InstallSnapshot(3, 3, 2, Configuration(of(0, 1, 2)), b"state"), 0.0)

    assert node.configuration == Configuration(of(0, 1, 2)) and node.log.commit == 3
    assert node.log.take_snapshot() == (3, b"state") and node.log.take_committed() == []


def test_a_snapshot_keeps_the_membership_that_holds() -> None:
    group = Group(of(0, 1), joiners=[2])
    group.change(0, of(0, 1, 2))
    group.wait(HEARTBEAT_S)
    for node in group.nodes.values():
        node.log.compact(node.log.commit, b"state")

    assert {node.configuration for node in group.nodes.values()} == {Configuration(of(0, 1, 2))}
    group.cut = {0}
    group.wait(10 * ELECTION_S)
    assert len(group.leaders) == 1


def test_only_what_was_taken_can_be_forgotten() -> None:
    node = Node(0, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0), 0, 0.0)
    with pytest.raises(ValueError, match="entries up to 1 are to be forgotten, those up to 0 have been handed out"):
        node.log.compact(1, b"")


def test_entries_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_ENTRIES", 3)
    monkeypatch.setattr(log, "MAX_BATCH_BYTES", 10)
    group = Group(of(0), joiners=[1])
    for size in (4, 4, 4, 30, 1, 1, 1, 1, 1):
        group.propose(0, b"x" * size)
    group.change(0, of(0, 1, tie_breaker=0))

    batches = [m.entries for _, to, m in group.said if to == 1 and isinstance(m, AppendEntries) and m.entries]
    sizes = [[len(e.content) for e in batch if isinstance(e.content, bytes)] for batch in batches]
    assert sizes[1:6] == [[4, 4], [4], [30], [1, 1, 1], [1, 1]]
    assert all(len(batch) <= 3 for batch in batches)
    group.wait(HEARTBEAT_S)
    assert [len(payload) for payload in group.payloads(1)] == [4, 4, 4, 30, 1, 1, 1, 1, 1]


def test_what_is_not_answered_is_sent_again_after_a_time_out_and_not_before() -> None:
    node = Node(0, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0, 1, tie_breaker=0), 0, 0.0)
    sent = []
    for now in range(8):
        node.tick(float(now))
        sent += [(now, len(message.entries)) for _, message in node.outbox.take()]

    assert sent == [(0, 1), (1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 0), (7, 0)]


@pytest.mark.parametrize("n", [5, 64, 256])
def test_an_entry_is_weighed_as_often_however_many_answer(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of hundreds weighed against those of all is what a step would cost its leader most."""
    group = Group(Membership(frozenset(range(n)), 0))
    weighed = []
    is_quorum = Membership.is_quorum
    monkeypatch.setattr(Membership, "is_quorum", lambda its, agents: weighed.append(its) or is_quorum(its, agents))
    group.propose(0, b"unit")

    assert group.payloads(0)[-1] == b"unit"
    assert len(weighed) <= 4


# -- what others may say -----------------------------------------------------------------------------------------------

CONFIGURATION = Configuration(of(0, 1, 2))


@pytest.mark.parametrize(
    ("at", "sender", "message", "problem"),
    [
        (1, 1, AppendEntries(1, 0, 0, (), 0), "number of this agent"),
        (1, 2, AppendEntries(1, 0, 0, (), 0), "agent 0 was elected in this term"),
        (0, 2, AppendEntries(1, 0, 0, (), 0), "agent 0 was elected in this term"),
        (1, 2, InstallSnapshot(1, 9, 1, CONFIGURATION, b""), "agent 0 was elected in this term"),
        (1, 2, TimeoutNow(1), "agent 0 was elected in this term"),
        (1, 0, AppendEntries(1, 0, 0, (Entry(2, None),), 0), "terms of entries go down"),
        (1, 0, AppendEntries(2, 1, 1, (Entry(2, None), Entry(1, None)), 0), "terms of entries go down"),
        (1, 2, AppendEntries(2, 0, 0, (Entry(2, None),), 1), "what is committed here is different"),
        (1, 2, AppendEntries(2, 1, 2, (), 1), "what is committed here is different"),
        (0, 1, Appended(1, 99), "it has entries up to 99, and there are 1"),
        (0, 1, Refused(1, 99), "it has entries up to 99, and there are 1"),
        (0, 1, RequestVote(MAX_TERMS_AHEAD + 2, 9, 9), "so many elections were not held"),
    ],
)
def test_what_contradicts_the_protocol_is_refused_and_changes_nothing(
    at: int, sender: int, message: Message, problem: str
) -> None:
    group = Group(of(0, 1, 2))
    group.wait(HEARTBEAT_S)
    node = group.nodes[at]
    assert node.log.commit == 1
    before = (node.term, node.leader, node.log.commit, node.wakes_at, node.configuration)

    with pytest.raises(ProtocolError, match=f"agent {sender} in term {message.term}, to agent {at} in term 1: .*{problem}"):
        node.receive(sender, message, group.now)
    assert (node.term, node.leader, node.log.commit, node.wakes_at, node.configuration) == before
    assert node.outbox.take() == []


NUMBER = st.one_of(st.integers(0, 6), st.sampled_from([1 << 20, 1 << 53]))
FEW = st.integers(0, 4)
MEMBERSHIP = st.frozensets(FEW, max_size=4).flatmap(
    lambda voters: st.builds(Membership, st.just(voters), st.sampled_from([None, *sorted(voters)]))
)
ANY_CONFIGURATION = st.builds(Configuration, MEMBERSHIP, st.one_of(st.none(), MEMBERSHIP))
ENTRY = st.builds(Entry, FEW, st.one_of(st.none(), st.binary(max_size=3), ANY_CONFIGURATION))
ANYTHING = st.one_of(
    st.builds(RequestPreVote, NUMBER, NUMBER, NUMBER),
    st.builds(PreVoted, NUMBER, NUMBER, st.booleans()),
    st.builds(RequestVote, NUMBER, NUMBER, NUMBER),
    st.builds(Voted, NUMBER, st.booleans()),
    st.builds(AppendEntries, NUMBER, NUMBER, NUMBER, st.lists(ENTRY, max_size=4).map(tuple), NUMBER),
    st.builds(InstallSnapshot, NUMBER, NUMBER, NUMBER, ANY_CONFIGURATION, st.binary(max_size=3)),
    st.builds(Appended, NUMBER, NUMBER),
    st.builds(Refused, NUMBER, NUMBER),
    st.builds(TimeoutNow, NUMBER),
)


@settings(max_examples=examples(300))
@given(
    st.lists(st.one_of(st.tuples(st.integers(1, 9), ANYTHING), st.sampled_from([b"propose", b"tick", b"change"])), max_size=25)
)
def test_whatever_others_say_only_a_protocol_error_is_raised(said: list[bytes | tuple[int, Message]]) -> None:
    node = Node(0, Random(0), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
    node.begin(of(0, 1, 2), 0, 0.0)
    commit = 0
    for what in said:
        try:
            match what:
                case b"propose":
                    node.propose(b"x", 0.0)
                case b"change":
                    node.change((0, 1, 3), None, 0.0)
                case b"tick":
                    node.tick(node.wakes_at)
                case (sender, message):
                    node.receive(sender, message, 0.0)
        except (ProtocolError, NotLeading):
            pass
        node.log.take_snapshot()
        node.log.take_committed()
        node.outbox.take()
        assert node.log.commit >= commit
        commit = node.log.commit


@given(ANYTHING)
def test_messages_survive_the_wire(message: Message) -> None:
    assert Packed(Message).decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Voted", "term": -1, "is_granted": True},
        {"type": "Voted", "term": 1 << 60, "is_granted": True},
        {"type": "Appended", "term": 1, "index": 1.5},
        {"type": "Elected", "term": 1},
        {"type": "AppendEntries", "term": 1, "previous": 0, "previous_term": 0, "commit": 0,
         "entries": [{"term": 1, "content": None}] * (messages.MAX_ENTRIES + 1)},
        {"type": "AppendEntries", "term": 1, "previous": 0, "previous_term": 0, "commit": 0,
         "entries": [{"term": 1, "content": {"new": {"voters": [1], "tie_breaker": 2}}}]},
        {"type": "AppendEntries", "term": 1, "previous": 0, "previous_term": 0, "commit": 0,
         "entries": [{"term": 1, "content": {"new": {"voters": [-1]}}}]},
    ],
)  # fmt: skip
def test_what_is_no_message_is_malformed(body: object) -> None:
    with pytest.raises(Malformed):
        Packed(Message).decode(msgspec.msgpack.encode(body))
