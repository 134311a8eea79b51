"""Entries of the log, and what agents say to each other about it.

The sender of a message is never in it: the connection knows. `term`: the sender's own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from launcher.consensus.membership import Configuration

Term = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""The number of an entry; the first one has 1."""
MAX_ENTRIES = 1024
"""In one message."""


class Entry(msgspec.Struct, frozen=True):
    """`content`: the caller's bytes; who is a member from here on; or nothing, which a leader begins its term with."""

    term: Term
    content: bytes | Configuration | None


class RequestPreVote(msgspec.Struct, frozen=True, tag=True):
    """Would you vote for me in the next term? Changes nothing at who is asked, so that who was cut off disturbs nobody."""

    term: Term
    last: Index
    last_term: Term


class PreVoted(msgspec.Struct, frozen=True, tag=True):
    """`asked`: the term of the question."""

    term: Term
    asked: Term
    is_granted: bool


class RequestVote(msgspec.Struct, frozen=True, tag=True):
    """Vote for me in `term`. `last`: where my log ends."""

    term: Term
    last: Index
    last_term: Term


class Voted(msgspec.Struct, frozen=True, tag=True):
    """The answer."""

    term: Term
    is_granted: bool


class AppendEntries(msgspec.Struct, frozen=True, tag=True):
    """I lead, and after the entry `previous` come `entries`, if any. `commit`: up to here all is committed."""

    term: Term
    previous: Index
    previous_term: Term
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
    commit: Index


class InstallSnapshot(msgspec.Struct, frozen=True, tag=True):
    """`state` stands for all entries up to `index`, which the leader does not have any more."""

    term: Term
    index: Index
    index_term: Term
    configuration: Configuration
    state: bytes


class Appended(msgspec.Struct, frozen=True, tag=True):
    """My log is yours up to `index`."""

    term: Term
    index: Index


class Refused(msgspec.Struct, frozen=True, tag=True):
    """I do not have the entry before those, or your term is over. `commit`: up to here my log is every leader's."""

    term: Term
    commit: Index


class TimeoutNow(msgspec.Struct, frozen=True, tag=True):
    """I lead no longer: be elected, without waiting."""

    term: Term


Message = RequestPreVote | PreVoted | RequestVote | Voted | AppendEntries | InstallSnapshot | Appended | Refused | TimeoutNow


class Outbox:
    """What an agent has to say, in this order."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, Message]] = []

    def say(self, to: int, message: Message) -> None:
        """Put it in."""
        self._messages.append((to, message))

    def take(self) -> list[tuple[int, Message]]:
        """Take all out: to whom what is to be sent."""
        messages, self._messages = self._messages, []
        return messages
