"""A job's agents and the network between them, in virtual time, all drawn from one seed; then the faults stop.

Links delay, lose, reorder and copy messages, are cut in both directions or in one; clocks go at different rates; agents die,
join, leave, compact. The judge knows nothing of how agents decide: it sees their logs, and what came out of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec

from launcher.consensus import log
from launcher.consensus.membership import NOBODY, Configuration, Membership
from launcher.consensus.messages import Entry, Message
from launcher.consensus.node import Node

HEARTBEAT_S = 1.0
ELECTION_S = 5.0
SLOWEST, FASTEST = 0.8, 1.25
"""Seconds of an agent's clock in one of the world's."""
FAULTS_END_S = 60.0
LEADS_WITHIN_S = 6 * ELECTION_S / SLOWEST
"""After the last fault, when a quorum lives: until somebody is in charge and has committed a proposal. It takes up to two
time-outs until somebody stands, and two more for each time that votes are split or that a term is to be caught up with."""
_SNAPSHOT = msgspec.msgpack.Decoder(tuple[Entry, ...])


class Agent:
    """One of them, its clock, and what it was told to be decided. `log`: since the beginning, for the judge only."""

    def __init__(self, number: int, random: Random, time: float) -> None:
        self.rate = random.uniform(SLOWEST, FASTEST)
        self.offset = random.uniform(-100, 100)
        self.node = Node(number, Random(random.random()), self.at(time), heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
        self.applied: list[Entry] = []
        self.is_alive = True
        self.led_in = 0
        self.was_leading = False
        self.was_log: list[Entry] = []
        self.first: Configuration | None = None  # that it began with
        self.since = 0  # index of the newest configuration before the call that is judged

    def at(self, time: float) -> float:
        return self.offset + self.rate * time

    def when(self, at: float) -> float:
        return (at - self.offset) / self.rate

    @property
    def log(self) -> list[Entry]:
        return self.applied[: self.node.log.base] + self.node.log._entries

    def configurations(self) -> dict[int, Configuration]:
        """All in the log, by index."""
        first = {} if self.first is None else {0: self.first}
        return first | {i: entry.content for i, entry in enumerate(self.log, 1) if isinstance(entry.content, Configuration)}

    def possible(self) -> list[Configuration]:
        """Those that may come to hold: the last committed one, those behind it, and what waits to become one."""
        found = self.configurations()
        committed = max((at for at in found if at <= self.node.log.commit), default=0)
        possible = [configuration for at, configuration in found.items() if at >= committed]
        leading = self.node.leading
        return possible if leading is None or leading._wanted is None else [*possible, Configuration(leading._wanted[0])]


def is_enough(configuration: Configuration, agents: Iterable[int]) -> bool:
    """The rule as weights: two for a voter, three for the tie breaker; more than half of all, in each membership."""

    def weight(membership: Membership, of: Iterable[int]) -> int:
        return sum(2 + (number == membership.tie_breaker) for number in membership.voters.intersection(of))

    memberships = [configuration.new] if configuration.old is None else [configuration.new, configuration.old]
    return all(2 * weight(its, agents) > weight(its, its.voters) for its in memberships)


class World:
    """`run` plays it; the judge raises AssertionError. `met` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.met: Counter[str] = Counter()
        self.chosen: list[Entry] = []
        self._chosen_in: list[int] = []  # term of who decided it
        self._leaders: dict[int, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self._cut: set[tuple[int, int]] = set()
        self._n_proposals = 0
        self.loss = random.choice([0.0, 0.0, 0.02, 0.2])
        self.copies = random.choice([0.0, 0.1])
        self.delay_s = random.choice([(0.001, 0.01), (0.01, 0.5), (0.1, 3.0)])
        self._max_entries = random.choice([1, 3, log.MAX_ENTRIES])
        self.n_spared = random.choice([1, 1, 2, 3])
        n = random.randint(2, 7)
        voters = frozenset(range(random.randint(1, n)))
        first = Membership(voters, random.choice([0, random.choice(sorted(voters)), None]))
        self.agents = {number: Agent(number, random, 0.0) for number in range(n)}
        self._first = Configuration(first)
        for number in sorted(voters):
            self.agents[number].first = self._first
            self.agents[number].node.begin(first, 0, self.agents[number].at(0.0))
        for number in self.agents:
            self._settle(number)

    # -- what happens ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, then none; then with a quorum it goes on, and without one it does not."""
        with patch.object(log, "MAX_ENTRIES", self._max_entries):
            self._run()

    def _run(self) -> None:
        self._each(0.7, self._propose)
        self._each(6.0, self._change)
        self._each(5.0, self._compact)
        self._each(4.0, self._fault)
        self._until(FAULTS_END_S)
        self._calm()
        verdict = self._verdict()
        self.met[f"verdict {verdict}"] += 1
        if verdict is True:
            self._must_go_on()
        elif verdict is False:
            self._must_not_go_on()

    def _fault(self) -> None:
        random, alive = self.random, self._alive()
        if self.now > FAULTS_END_S:
            return
        kind = random.choice(["partition", "one way", "heal", "heal", "die", "join"])
        if kind == "partition":
            side = set(random.sample(alive, random.randint(0, len(alive))))
            self._cut |= {(a, b) for a in self.agents for b in self.agents if (a in side) != (b in side)}
        elif kind == "one way":
            a = random.choice(alive)
            others = random.sample(sorted(self.agents), random.randint(1, len(self.agents)))
            self._cut |= {(a, b) for b in others} if random.random() < 0.5 else {(b, a) for b in others}
        elif kind == "heal":
            self._cut.clear()
        elif kind == "die" and len(alive) > self.n_spared:
            self.agents[random.choice(alive)].is_alive = False
        elif kind == "join" and len(alive) < 7:
            number = max(self.agents) + 1
            self.agents[number] = Agent(number, random, self.now)
        self.met[kind] += 1

    def _propose(self) -> None:
        """Everybody who thinks that it leads."""
        for number in self._alive():
            for _ in range(self.random.choice([0, 1, 1, 3])):
                if self.agents[number].node.is_leading:
                    self._do(number, lambda node, now: node.propose(self._payload(), now))

    def _payload(self) -> bytes:
        self._n_proposals += 1
        return b"%d" % self._n_proposals

    def _change(self) -> None:
        for number in self._alive():
            if self.agents[number].node.is_in_charge and self.now < FAULTS_END_S:
                alive = self._alive()
                voters = set(self.random.sample(alive, self.random.randint(1, len(alive))))
                if self.random.random() < 0.5:
                    voters = {a for a in alive if (number, a) not in self._cut} | {number}
                tie = self.random.choice([number if number in voters else None, min(voters), None])
                self._do(number, lambda node, now, v=voters, t=tie: node.change(v, t, now))

    def _compact(self) -> None:
        for number in self._alive():
            agent = self.agents[number]
            if self.random.random() < 0.5 and agent.applied:
                index = self.random.randint(1, len(agent.applied))
                agent.node.log.compact(index, msgspec.msgpack.encode(agent.applied[:index]))

    def _calm(self) -> None:
        self._cut.clear()
        self.loss, self.copies = 0.0, 0.0
        self.delay_s = (0.001, 0.05)

    def _alive(self) -> list[int]:
        return [number for number, agent in self.agents.items() if agent.is_alive]

    # -- how it happens --------------------------------------------------------------------------------------------------

    def _each(self, every_s: float, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self._later(self.random.uniform(0, 2 * every_s), again)

        self._later(self.random.uniform(0, 2 * every_s), again)

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (self.now + after_s, self._n_events, what))

    def _until(self, time: float, done: Callable[[], bool] = lambda: False) -> bool:
        while self._events and self._events[0][0] <= time and not done():
            self.now, _, what = heapq.heappop(self._events)
            what()
        is_done = done()
        self.now = self.now if is_done else time
        return is_done

    def _do(self, number: int, what: Callable[[Node, float], Any]) -> None:
        agent = self.agents[number]
        if agent.is_alive:
            what(agent.node, agent.at(self.now))
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Take out what the agent has to say, and judge it."""
        agent = self.agents[number]
        if agent.node.leading is not None:
            agent.node.leading.tell_commits()
        for to, message in agent.node.outbox.take():
            self.met[type(message).__name__] += 1
            if to in self.agents:
                self._send(number, to, message)
        self._judge(number)
        agent.since = max(agent.configurations(), default=0)
        wakes = agent.node.wakes_at
        if wakes < float("inf"):
            self._later(max(0.0, agent.when(wakes) - self.now), lambda: self._wake(number, wakes))

    def _wake(self, number: int, wakes_at: float) -> None:
        agent = self.agents[number]
        if agent.is_alive and agent.node.wakes_at == wakes_at:
            agent.node.tick(max(wakes_at, agent.at(self.now)))  # the sum may round down
            self._settle(number)

    def _send(self, sender: int, to: int, message: Message) -> None:
        for _ in range(2 if self.random.random() < self.copies else 1):
            if self.random.random() >= self.loss and (sender, to) not in self._cut:
                self._later(self.random.uniform(*self.delay_s), lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: int, to: int, message: Message) -> None:
        if (sender, to) not in self._cut:
            self._do(to, lambda node, now: node.receive(sender, message, now))

    # -- what must hold --------------------------------------------------------------------------------------------------

    def _judge(self, number: int) -> None:
        agent = self.agents[number]
        snapshot = agent.node.log.take_snapshot()
        if snapshot is not None:
            self.met["snapshot installed"] += 1
            agent.applied = list(_SNAPSHOT.decode(snapshot[1]))
            assert len(agent.applied) == snapshot[0]
            assert agent.applied == self.chosen[: snapshot[0]], "a snapshot of something else"
        for index, entry in agent.node.log.take_committed():
            assert index == len(agent.applied) + 1, "decided out of order"
            agent.applied.append(entry)
            if index > len(self.chosen):
                self._was_chosen(agent, index, entry)
            assert self.chosen[index - 1] == entry, (
                f"agent {number}: {entry} at {index}, where {self.chosen[index - 1]} was decided"
            )
        held = list(agent.configurations().values())[-1:] or [Configuration(NOBODY), self._first]  # a snapshot may bring it
        assert agent.node.configuration in held, f"agent {number} goes by {agent.node.configuration}, where its log has {held}"
        if agent.was_leading and not agent.node.is_leading:
            self.met["a leader stepped down"] += 1
        agent.was_leading = agent.node.is_leading
        if agent.log[: len(agent.was_log)] != agent.was_log[: len(agent.log)]:
            self.met["an entry replaced"] += 1
        agent.was_log = agent.log
        if agent.node.is_leading and agent.led_in != agent.node.term:
            agent.led_in = agent.node.term
            first = self._leaders.setdefault(agent.node.term, number)
            assert first == number, f"two leaders of term {agent.node.term}"
            n_before = sum(decided_in < agent.node.term for decided_in in self._chosen_in)
            assert agent.log[:n_before] == self.chosen[:n_before], f"leader {number} lacks some of what was decided"
            self.met["leaders"] += 1

    def _was_chosen(self, agent: Agent, index: int, entry: Entry) -> None:
        self.chosen.append(entry)
        self._chosen_in.append(agent.node.term)
        holders = {number for number, other in self.agents.items() if other.log[index - 1 : index] == [entry]}
        configurations = agent.configurations()
        since = max([agent.since, *(at for at in configurations if at <= index)])
        held = [configuration for at, configuration in configurations.items() if at >= since]  # some time in this call
        assert any(is_enough(its, holders) for its in held), f"decided by {holders}, which are no quorum of any of {held}"
        if isinstance(entry.content, Configuration):
            self.met["joint" if entry.content.old else "membership"] += 1
        if any(len(its.new.voters) == 2 * len(holders & its.new.voters) for its in held):
            self.met["half with the tie breaker"] += 1

    def _verdict(self) -> bool | None:
        """Whether those alive are a quorum; None where that depends on which of them leads."""
        alive = set(self._alive())
        may_lead = {a for a in alive if self.agents[a].log[: len(self.chosen)] == self.chosen}
        if not may_lead:
            return False
        best = max((self.agents[a] for a in may_lead), key=lambda agent: (agent.node.log.last_term, agent.node.log.last))
        voters = {voter for configuration in best.possible() for voter in configuration.voters}
        can = {is_enough(c, alive) for a in may_lead & voters for c in self.agents[a].possible()}
        if can == {True}:
            return True
        return False if not any(is_enough(c, alive) for a in may_lead for c in self.agents[a].possible()) else None

    def _must_go_on(self) -> None:
        began = self.now
        mine = len(self.chosen)

        def goes_on() -> bool:
            in_charge = [a for a in self._alive() if self.agents[a].node.is_in_charge]
            decided = [entry for entry in self.chosen[mine:] if isinstance(entry.content, bytes)]
            return bool(in_charge and decided and self.agents[max(in_charge, key=self._term)].led_in == decided[-1].term)

        assert self._until(began + LEADS_WITHIN_S, goes_on), f"nobody in charge {LEADS_WITHIN_S:g} s after the last fault"
        self.met["ms until somebody is in charge"] = round(1000 * (self.now - began))
        alive = frozenset(self._alive())
        wanted = Configuration(Membership(alive, min(alive)))

        def ask() -> None:
            for number in alive:
                node = self.agents[number].node
                if node.is_in_charge and node.configuration != wanted:
                    self._do(number, lambda node, now: node.change(alive, min(alive), now))

        def all_have_it() -> bool:
            return all(wanted in [entry.content for entry in self.agents[a].applied] for a in alive)

        self._each(ELECTION_S, ask)  # a leader that hands over forgets what it was asked for
        assert self._until(self.now + LEADS_WITHIN_S, all_have_it), "not all that live became members"

    def _term(self, number: int) -> int:
        return self.agents[number].node.term

    def _must_not_go_on(self) -> None:
        self._until(self.now + 3.0)  # what is still under way
        before = len(self.chosen)
        self._until(self.now + LEADS_WITHIN_S)
        assert len(self.chosen) == before, "decided without a quorum"
        assert not any(self.agents[a].node.leader is not None for a in self._alive()), "somebody thinks that there is a quorum"
