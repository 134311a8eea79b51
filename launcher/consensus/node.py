"""One agent's part in the consensus: who leads, and what is heard from whom.

Nothing is kept on disk. Raft stores term, vote and log because a server that comes back under its number must not vote twice
in a term, nor lose what it has acknowledged. An agent that dies never comes back under its number: a new process is a new
agent, which counts only when a change of the membership has put it in. What a number has promised is forgotten only together
with the number, which is silent from then on, and that much the proof of Raft allows for.

Time is an argument: seconds of a clock of this agent's that never goes back. Only how soon something happens depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from random import Random

from launcher.consensus.candidacy import Candidacy
from launcher.consensus.leadership import Leadership
from launcher.consensus.log import Log
from launcher.consensus.membership import NOBODY, Configuration, Membership
from launcher.consensus.messages import (
    Appended,
    AppendEntries,
    InstallSnapshot,
    Message,
    Outbox,
    PreVoted,
    Refused,
    RequestPreVote,
    RequestVote,
    TimeoutNow,
    Voted,
)

MAX_TERMS_AHEAD = 1 << 20
"""Every term is an election: who claims that so many were held without this agent has made it up."""


class NotLeading(Exception):
    """Only the leader proposes. The text says who that is."""


class ProtocolError(Exception):
    """What no agent says that keeps to the protocol. The text says why; the message has changed nothing."""


class Role(Enum):
    """A pre-candidate asks whether it would be elected, a candidate wants to be."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Node:
    """One agent's part in the consensus.
    The caller hands in what happens (`receive`, `tick`, `propose`, `change`), and after each of them takes out what is to be
    sent (of `outbox`) and what is decided (of `log`: the snapshot first).

    `me`: the number of this agent, that no other one ever had; `heartbeat_s`: how often a leader is heard; `election_s`: after
    how long it is taken for lost. `wakes_at`: when `tick` is due.

    It begins without a membership, and waits until a leader makes it a member; the first members begin with `begin`.
    """

    def __init__(self, me: int, random: Random, now: float, *, heartbeat_s: float, election_s: float) -> None:
        self.me = me
        self.term = 0
        self.wakes_at = math.inf
        self._heartbeat_s = heartbeat_s
        self._election_s = election_s
        self._role = Role.FOLLOWER
        self._voted_for: int | None = None
        self._elected: int | None = None  # who leads this term, or led it
        self._heard_at = now
        self._candidacy = Candidacy(random, heartbeat_s, election_s)
        self.leading: Leadership | None = None
        self.log = Log(Configuration(NOBODY))
        self.outbox = Outbox()

    def begin(self, membership: Membership, leader: int, now: float) -> None:
        """The job begins, with these members and a leader whom all of them know: as after an election, in term 1.

        Raises ValueError where this agent has heard from others already, and where it or the leader is no member.
        """
        if self.term or not {self.me, leader} <= membership.voters:
            raise ValueError(f"agent {self.me} cannot begin in term {self.term} with {membership} and leader {leader}")
        self.term, self._voted_for, self.log = 1, leader, Log(Configuration(membership))
        if leader == self.me:
            self._lead(Configuration(membership), now)
        else:
            self._follow(leader, now)

    # -- what is known ---------------------------------------------------------------------------------------------------

    @property
    def leader(self) -> int | None:
        """The agent that leads. None where nobody was heard for a time-out, or this agent led and has not heard from enough."""
        if self._role is Role.FOLLOWER and self._elected == self.me:
            return None
        return self._elected if self._role in (Role.FOLLOWER, Role.LEADER) else None

    @property
    def is_leading(self) -> bool:
        """Elected, and hears a quorum."""
        return self.leading is not None

    @property
    def is_in_charge(self) -> bool:
        """Leads, and knows all that was ever decided: whoever led before decides nothing more."""
        return self.leading is not None and self.leading.is_in_charge

    @property
    def configuration(self) -> Configuration:
        """The newest in the log, committed or not: it holds from there on."""
        return self.log.configuration[1]

    # -- what the caller does --------------------------------------------------------------------------------------------

    def propose(self, payload: bytes, now: float) -> int:
        """Append an entry; its index. It is decided when it comes out of the log.

        If this agent ceases to lead before, the next leader commits it, or another one in its place. Raises NotLeading.
        """
        index = self._leadership().append(payload, now)
        self._leave_if_over(now)
        return index

    def change(self, voters: Iterable[int], tie_breaker: int | None, now: float) -> None:
        """Make these the members, when no other change is under way, a quorum of them answers, and those that join have what
        the log holds now: until then they are learners, which get the log and do not count.

        It is done when a configuration of them alone comes out of the log. Only the last of several changes that wait is
        kept, and none when this agent ceases to lead. Raises NotLeading, and ValueError for no voters, or a tie breaker
        that is none of them.
        """
        wanted = Membership(frozenset(voters), tie_breaker)
        if not wanted.voters:
            raise ValueError("a membership of nobody")
        self._leadership().change(wanted, now)
        self._leave_if_over(now)

    def is_gone(self, agent: int, now: float) -> None:
        """Its process has ended, and that is sure: if it led, what it might still say is not waited for."""
        if self._role is Role.FOLLOWER and self._elected == agent:
            self._heard_at, self._candidacy.is_hasty = -math.inf, True
            self.wakes_at = now + (self._candidacy.wait_s() - self._heartbeat_s) / 2

    # -- what others say, and time ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed. Does nothing before `wakes_at`."""
        if now < self.wakes_at:
            return
        if self.leading is None:
            self._ask_whether_to_stand(now)
        elif not self.leading.hears_quorum(now):
            self._candidacy.leads_on = True
            self._cease_to_lead(now)
        else:
            self.leading.send_heartbeats(now)
            self.wakes_at = now + self._heartbeat_s

    def receive(self, sender: int, message: Message, now: float) -> None:
        """Take in what `sender`, known by its connection, has said. Raises ProtocolError.

        It need not be a member here: a candidate's log may be ahead of this one, and name members that this one does not.
        """
        if problem := self._problem(sender, message):
            raise ProtocolError(f"agent {sender} in term {message.term}, to agent {self.me} in term {self.term}: {problem}")
        if message.term > self.term and not isinstance(message, RequestPreVote):
            self._enter(message.term, now)
        match message:
            case RequestPreVote():
                self._asked_whether_to_stand(sender, message, now)
            case RequestVote():
                self._asked_for_vote(sender, message, now)
            case PreVoted():
                if self._role is Role.PRE_CANDIDATE and message.is_granted and message.asked == self.term:
                    self._count(sender, now)
            case Voted():
                if self._role is Role.CANDIDATE and message.is_granted and message.term == self.term:
                    self._count(sender, now)
            case Appended() | Refused():
                if self.leading is not None and message.term == self.term:
                    self.leading.answered(sender, message, now)
                    self._leave_if_over(now)
            case _ if message.term < self.term:
                self.outbox.say(sender, Refused(self.term, self.log.commit))
            case _:
                self._led(sender, message, now)

    def _problem(self, sender: int, message: Message) -> str | None:
        """Why nobody who keeps to the protocol says this."""
        if sender == self.me:
            return "it has the number of this agent"
        if message.term > self.term + MAX_TERMS_AHEAD:
            return "so many elections were not held"
        if message.term < self.term:
            return None  # of somebody who does not know better
        is_now = message.term == self.term
        match message:
            case AppendEntries() | InstallSnapshot() | TimeoutNow() if is_now and self._elected not in (None, sender):
                return f"agent {self._elected} was elected in this term"
            case AppendEntries(previous=previous, previous_term=before, entries=entries):
                terms = [before, *(entry.term for entry in entries), message.term]
                if terms != sorted(terms):
                    return "terms of entries go down"
                if self.log.contradicts(previous, before, entries):
                    return "what is committed here is different"
            case Appended(index=index) | Refused(commit=index) if is_now and self.is_leading and index > self.log.last:
                return f"it has entries up to {index}, and there are {self.log.last}"
        return None

    def _led(self, leader: int, message: AppendEntries | InstallSnapshot | TimeoutNow, now: float) -> None:
        self._follow(leader, now)
        match message:
            case AppendEntries() if not self.log.holds(message.previous, message.previous_term):
                self.outbox.say(leader, Refused(self.term, self.log.commit))
            case AppendEntries():
                self.log.merge(message.previous, message.entries)
                last = message.previous + len(message.entries)
                self.log.commit_to(min(message.commit, last))  # what is here behind `last` may not be the leader's
                self.outbox.say(leader, Appended(self.term, last))
            case InstallSnapshot():
                self.log.install(message.index, message.index_term, message.configuration, message.state)
                self.outbox.say(leader, Appended(self.term, message.index))
            case TimeoutNow():
                self._stand(now)

    # -- elections -------------------------------------------------------------------------------------------------------

    def _ask_whether_to_stand(self, now: float) -> None:
        """The term stays until a quorum agrees that nobody leads, so that who was cut off disturbs nobody."""
        self._candidacy.asks(self.me, now, again=self._role is Role.PRE_CANDIDATE)
        self._role = Role.PRE_CANDIDATE
        self.wakes_at = now + self._candidacy.wait_s()
        self._ask(RequestPreVote(self.term, self.log.last, self.log.last_term), now)

    def _asked_whether_to_stand(self, sender: int, message: RequestPreVote, now: float) -> None:
        hears_leader = self.leader is not None and (self.is_leading or now - self._heard_at < self._election_s)
        leads_no_more = message.term == self.term and sender == self._elected  # as it says by asking
        is_fit = message.term >= self.term and self.log.is_covered_by(message.last, message.last_term)
        self.outbox.say(sender, PreVoted(self.term, message.term, is_fit and (leads_no_more or not hears_leader)))
        if self.leading is not None:
            self.leading.tell_who_leads(sender)

    def _stand(self, now: float) -> None:
        self._enter(self.term + 1, now)
        self._role, self._voted_for = Role.CANDIDATE, self.me
        self.wakes_at = now + self._candidacy.wait_s()
        self._ask(RequestVote(self.term, self.log.last, self.log.last_term), now)

    def _asked_for_vote(self, sender: int, message: RequestVote, now: float) -> None:
        is_free = message.term == self.term and self._voted_for in (None, sender)
        is_granted = is_free and self.log.is_covered_by(message.last, message.last_term)
        if is_granted and self._voted_for is None:
            self._role, self._voted_for = Role.FOLLOWER, sender
            self.wakes_at = now + self._candidacy.wait_s()
        self.outbox.say(sender, Voted(self.term, is_granted))

    def _ask(self, message: RequestPreVote | RequestVote, now: float) -> None:
        if self.me in self.log.electable:
            for voter in sorted(self.configuration.voters - {self.me}):
                self.outbox.say(voter, message)
            self._count(self.me, now)

    def _count(self, voter: int, now: float) -> None:
        self._candidacy.votes.add(voter)
        if self.configuration.is_quorum(self._candidacy.votes):
            if self._role is Role.CANDIDATE:
                self._lead(None, now)
            elif self._candidacy.is_sure:
                self._stand(now)
            else:
                self.wakes_at = min(self.wakes_at, self._candidacy.asks_once_more_at(now))

    # -- what this agent is ----------------------------------------------------------------------------------------------

    def _enter(self, term: int, now: float) -> None:
        """Nobody is known to lead in it."""
        if self.is_leading:
            self._cease_to_lead(now)
        self.term, self._voted_for, self._elected = term, None, None
        self._role, self._candidacy.votes, self._candidacy.leads_on = Role.FOLLOWER, set(), False

    def _follow(self, leader: int, now: float) -> None:
        self._role, self._elected, self._heard_at = Role.FOLLOWER, leader, now
        self._candidacy.hears_leader()
        self.wakes_at = now + self._candidacy.wait_s()

    def _lead(self, content: Configuration | None, now: float) -> None:
        """The first entry of the term, once committed, commits what others have left behind."""
        self._role, self._elected = Role.LEADER, self.me
        self.leading = Leadership(self.me, self.term, self.log, self.outbox, self._election_s)
        self.wakes_at = now + self._heartbeat_s
        self.leading.append(content, now)

    def _leadership(self) -> Leadership:
        if self.leading is None:
            who = "nobody" if self.leader is None else f"agent {self.leader}"
            raise NotLeading(f"agent {self.me} does not lead, {who} does")
        return self.leading

    def _leave_if_over(self, now: float) -> None:
        if self.leading is not None and self.leading.is_over:
            self._cease_to_lead(now)

    def _cease_to_lead(self, now: float) -> None:
        self._role, self.leading = Role.FOLLOWER, None
        self.wakes_at = now + self._candidacy.wait_s()
