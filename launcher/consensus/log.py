"""The entries that one agent holds.

    1 ……… base │ base + 1 ……… taken ……… commit ……… last
    snapshot   │ handed out          │ to be         │ may yet be replaced by a leader's

Up to `base` entries are gone, `snapshot` stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.consensus.membership import Configuration
from launcher.consensus.messages import MAX_ENTRIES, Entry

MAX_BATCH_BYTES = 1 << 20
"""The most payload in one message, unless a single entry has more."""


class Log:
    """`configuration`: in effect before the first entry."""

    def __init__(self, configuration: Configuration) -> None:
        self.base = 0
        self.base_term = 0
        self.snapshot = b""
        self.commit = 0
        self._taken = 0
        self._is_installed = False
        self._entries: list[Entry] = []
        self._configurations = [(0, configuration)]

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return self.base + len(self._entries)

    @property
    def last_term(self) -> int:
        """Its term."""
        return self._entries[-1].term if self._entries else self.base_term

    @property
    def configuration(self) -> tuple[int, Configuration]:
        """The newest in the log, committed or not, and the index since which it holds."""
        return self._configurations[-1]

    @property
    def base_configuration(self) -> Configuration:
        """The one that held at `base`."""
        return self._configurations[0][1]

    @property
    def electable(self) -> frozenset[int]:
        """Voters of the last committed configuration and of those behind it. One that is to vote no longer may have to lead
        once more, when it has the entry that says so and those that stay do not (thesis, 4.2.2).
        """
        committed = max(since for since, _ in self._configurations if since <= self.commit)
        return frozenset().union(*(its.voters for since, its in self._configurations if since >= committed))

    def term_of(self, index: int) -> int | None:
        """None for what is not in the log, or not any more."""
        if index == self.base:
            return self.base_term
        return self._entries[index - self.base - 1].term if self.base < index <= self.last else None

    def holds(self, index: int, term: int) -> bool:
        """Whether the entry at `index`, of `term`, is in this log. What is committed is in everybody's."""
        return index <= self.commit or self.term_of(index) == term

    def is_covered_by(self, last: int, last_term: int) -> bool:
        """Whether a log that ends so has all that may be committed of this one."""
        return (last_term, last) >= (self.last_term, self.last)

    def batch(self, start: int) -> tuple[Entry, ...]:
        """As many entries from `start` on as go in one message."""
        batch: list[Entry] = []
        size_bytes = 0
        for entry in self._entries[start - self.base - 1 : start - self.base - 1 + MAX_ENTRIES]:
            size_bytes += len(entry.content) if isinstance(entry.content, bytes) else 0
            if batch and size_bytes > MAX_BATCH_BYTES:
                break
            batch.append(entry)
        return tuple(batch)

    def append(self, entry: Entry) -> int:
        """Its index."""
        self._entries.append(entry)
        if isinstance(entry.content, Configuration):
            self._configurations.append((self.last, entry.content))
        return self.last

    def contradicts(self, previous: int, previous_term: int, entries: Sequence[Entry]) -> bool:
        """Whether these are not what is committed here."""
        given = zip(range(previous, self.commit + 1), (previous_term, *(entry.term for entry in entries)), strict=False)
        return any(index >= max(self.base, 1) and self.term_of(index) != term for index, term in given)

    def merge(self, previous: int, entries: Sequence[Entry]) -> None:
        """Take over what comes after `previous`. What is here and the same stays, with all behind it: that may be news."""
        for index, entry in enumerate(entries, previous + 1):
            if index <= self.base or self.term_of(index) == entry.term:
                continue
            if index <= self.last:
                self._cut(index)
            self.append(entry)

    def commit_to(self, index: int) -> None:
        """Never back."""
        self.commit = max(self.commit, index)

    def take_committed(self) -> list[tuple[int, Entry]]:
        """What has been committed since it was last asked."""
        first = self._taken + 1
        self._taken = self.commit
        return list(enumerate(self._entries[first - self.base - 1 : self.commit - self.base], first))

    def take_snapshot(self) -> tuple[int, bytes] | None:
        """What another agent's log began with, in place of the entries up to its index. To be asked before `take_committed`."""
        is_installed, self._is_installed = self._is_installed, False
        return (self.base, self.snapshot) if is_installed else None

    def compact(self, index: int, snapshot: bytes) -> None:
        """Forget the entries up to `index`. Raises ValueError for those that have not been handed out."""
        if index > self._taken:
            raise ValueError(f"entries up to {index} are to be forgotten, those up to {self._taken} have been handed out")
        if index > self.base:
            self._begin_at(index, self._entries[index - self.base - 1].term, snapshot)

    def install(self, index: int, term: int, configuration: Configuration, snapshot: bytes) -> None:
        """Begin at another agent's snapshot, where it has more than is committed here. What is here and follows it, stays."""
        if index <= self.commit:
            return
        if self.term_of(index) != term:
            self._entries.clear()
            self._configurations = [(index, configuration)]
            self.base, self.base_term, self.snapshot = index, term, snapshot
        else:
            self._begin_at(index, term, snapshot)
        self.commit = self._taken = index
        self._is_installed = True

    def _begin_at(self, index: int, term: int, snapshot: bytes) -> None:
        before = [item for item in self._configurations if item[0] <= index]
        self._configurations = [before[-1], *self._configurations[len(before) :]]
        del self._entries[: index - self.base]
        self.base, self.base_term, self.snapshot = index, term, snapshot

    def _cut(self, index: int) -> None:
        del self._entries[index - self.base - 1 :]
        while self._configurations[-1][0] >= index:  # never the first: what is committed is not cut
            self._configurations.pop()
