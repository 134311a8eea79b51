"""What an agent does while it leads: one term in which it replicates its log, commits, and changes the membership."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.consensus.log import Log
from launcher.consensus.membership import Configuration, Membership
from launcher.consensus.messages import Appended, AppendEntries, Entry, InstallSnapshot, Outbox, Refused, TimeoutNow


@dataclass(slots=True)
class Progress:
    """Another agent, as the leader knows it.

    `match`: up to here it has said that its log is the leader's; `next`: the first entry to send; `sent`: the last one sent,
    which is to be answered until `resend_at`; `told`: up to here it was told at once that entries are committed.
    """

    next: int
    heard_at: float
    match: int = 0
    sent: int = 0
    told: int = 0
    resend_at: float = -math.inf


class Leadership:
    """`log`, `outbox`: of this agent; `election_s`: after how long others are taken for lost."""

    def __init__(self, me: int, term: int, log: Log, outbox: Outbox, election_s: float) -> None:
        self.is_over = False
        self._me = me
        self._term = term
        self._log = log
        self._outbox = outbox
        self._election_s = election_s
        self._peers: dict[int, Progress] = {}
        self._wanted: tuple[Membership, int] | None = None  # and where the log ended when it was asked for

    @property
    def is_in_charge(self) -> bool:
        """An entry of this term is committed, and so all that earlier leaders committed is known to be."""
        return self._log.term_of(self._log.commit) == self._term

    def hears_quorum(self, now: float) -> bool:
        """Whether a quorum, itself included, has answered within the time-out."""
        return self._log.configuration[1].is_quorum(self._near(now))

    def _near(self, now: float) -> set[int]:
        return {self._me} | {number for number, peer in self._peers.items() if now - peer.heard_at < self._election_s}

    def append(self, content: bytes | Configuration | None, now: float) -> int:
        """A new entry; its index."""
        index = self._log.append(Entry(self._term, content))
        self._advance(now)
        return index

    def change(self, wanted: Membership, now: float) -> None:
        """In place of what may still wait to be begun."""
        self._wanted = wanted, self._log.last
        self._advance(now)

    def send_heartbeats(self, now: float) -> None:
        """To everybody, with the entries that they lack."""
        for number in self._peers:
            self._send(number, now)

    def tell_commits(self) -> None:
        """A heartbeat at once to each that has more entries that are committed than it was told."""
        for number, peer in self._peers.items():
            reached = min(peer.match, self._log.commit)
            if peer.told < reached:
                peer.told = reached
                self._send_heartbeat(number)

    def tell_who_leads(self, number: int) -> None:
        """Say it to one that asks, and has no voice any more: it was cut off when it was told that, and that is told once."""
        if number not in self._peers:
            self._outbox.say(number, AppendEntries(self._term, 0, 0, (), 0))

    def answered(self, sender: int, answer: Appended | Refused, now: float) -> None:
        """One of this term's messages was."""
        peer = self._peers.get(sender)
        if peer is None:
            return
        peer.heard_at = now
        if isinstance(answer, Appended):
            peer.match = max(peer.match, answer.index)
            peer.next = max(peer.next, peer.match + 1)
        else:
            peer.next = max(peer.match, answer.commit) + 1
        if isinstance(answer, Refused) or answer.index >= peer.sent:
            peer.resend_at = -math.inf
        if self._is_changing or self._may_commit:
            self._advance(now)
        else:
            self._send_entries(sender, now)

    @property
    def _is_changing(self) -> bool:
        """A change of the membership is wanted, or under way."""
        since, configuration = self._log.configuration
        is_decided = since <= self._log.commit and configuration.old is None
        return self._wanted is not None or not is_decided or self._me not in configuration.voters

    @property
    def _may_commit(self) -> bool:
        """Fewer than half are never a quorum: of the answers to an entry few have to be weighed against those of all."""
        n_ahead = 1 + sum(peer.match > self._log.commit for peer in self._peers.values())
        return 2 * n_ahead >= len(self._log.configuration[1].voters)

    def _advance(self, now: float) -> None:
        """Commit what can be committed, take the next step of a change, send what is new."""
        self._track(now)
        while self._commits() or self._reconfigures(now):
            self._track(now)
        for number in self._peers:
            self._send_entries(number, now)
        since, configuration = self._log.configuration
        if self.is_in_charge and since <= self._log.commit and self._me not in configuration.voters:
            self._hand_over(now)

    # -- the log ---------------------------------------------------------------------------------------------------------

    def _commits(self) -> bool:
        """Entries of this term that a quorum has, and what precedes them. Counting older ones is not safe (Raft, 5.4.2)."""
        reached = {self._me: self._log.last, **{number: peer.match for number, peer in self._peers.items()}}
        for index in sorted(reached.values(), reverse=True):
            if index <= self._log.commit or self._log.term_of(index) != self._term:
                return False
            if self._log.configuration[1].is_quorum({number for number, match in reached.items() if match >= index}):
                self._log.commit_to(index)
                return True
        return False

    def _send(self, to: int, now: float) -> None:
        """What it lacks, or else that the leader lives."""
        if not self._send_entries(to, now):
            self._send_heartbeat(to)

    def _send_heartbeat(self, to: int) -> None:
        """In words that no log refuses."""
        match = self._peers[to].match
        known = match if match >= self._log.base else 0
        self._outbox.say(to, AppendEntries(self._term, known, self._log.term_of(known) or 0, (), self._log.commit))

    def _send_entries(self, to: int, now: float) -> bool:
        """Unless there are none, or those of last time are still to be answered."""
        log, peer = self._log, self._peers[to]
        if peer.next > log.last or now < peer.resend_at:
            return False
        if peer.next <= log.base:
            peer.sent = log.base
            self._outbox.say(to, InstallSnapshot(self._term, log.base, log.base_term, log.base_configuration, log.snapshot))
        else:
            entries, previous = log.batch(peer.next), peer.next - 1
            peer.sent = previous + len(entries)
            self._outbox.say(to, AppendEntries(self._term, previous, log.term_of(previous) or 0, entries, log.commit))
        peer.resend_at = now + self._election_s
        return True

    # -- the membership --------------------------------------------------------------------------------------------------

    def _reconfigures(self, now: float) -> bool:
        """The next step: old and new, then the new one alone, each when the one before is committed, by a leader in charge."""
        since, configuration = self._log.configuration
        if not self.is_in_charge or since > self._log.commit:
            return False
        if configuration.old is not None:
            following = Configuration(configuration.new)
        elif self._me in configuration.voters and self._wanted is not None and self._is_ready(*self._wanted, now):
            following = Configuration(self._wanted[0], old=configuration.new)
            self._wanted = None
        else:
            return False
        self._log.append(Entry(self._term, following))
        return True

    def _is_ready(self, wanted: Membership, index: int, now: float) -> bool:
        """Whether its new voters have the log up to `index`, and enough of all answer."""
        joining = wanted.voters - self._log.configuration[1].voters - {self._me}
        return all(self._peers[voter].match >= index for voter in joining) and wanted.is_quorum(self._near(now))

    def _track(self, now: float) -> None:
        """Those that vote or are to vote; and those that do no longer, until they are told, once, that this is decided."""
        since, configuration = self._log.configuration
        tracked = configuration.voters | (self._wanted[0].voters if self._wanted is not None else frozenset())
        for number in sorted(tracked - {self._me} - self._peers.keys()):
            self._peers[number] = Progress(self._log.last, now)
        if since <= self._log.commit:
            for number in sorted(self._peers.keys() - tracked):
                self._peers[number].resend_at = -math.inf
                self._send(number, now)
                del self._peers[number]

    def _hand_over(self, now: float) -> None:
        """The leader is no member any more. The one that has most of its log does not wait to be elected."""
        self.is_over = True
        self.send_heartbeats(now)
        best = max(sorted(self._log.configuration[1].voters), key=lambda voter: self._peers[voter].match)
        self._outbox.say(best, TimeoutNow(self._term))
