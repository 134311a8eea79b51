"""Every order in which messages arrive, get lost, come twice, and agents time out, die, propose: all states that follow.

An agent is deterministic, so what it does next is computed once for each of its states; a state of the whole is a tuple of
numbers. Clocks do not exist here: a time-out happens whenever a budget allows one, whether or not others were heard, and
nobody's refusal to pre-vote is relied upon. A message may stay under way for ever, which is its loss.

That is soon too much. So there are rounds as well: an agent does something, its messages and the answers
to them, and to those, go to and fro between it and some others for a while, and what is then under way is lost. Histories
of rounds are fewer, and so can be followed through more elections.

Checked in every state (Raft, figure 3): election safety, log matching, leader completeness, state machine safety; and that
nobody decides anything new once a later leader is in charge.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import combinations
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from launcher.consensus import log
from launcher.consensus.candidacy import Candidacy
from launcher.consensus.leadership import Leadership, Progress
from launcher.consensus.log import Log
from launcher.consensus.membership import NOBODY, Configuration, Membership
from launcher.consensus.messages import Entry, InstallSnapshot, Message, PreVoted, RequestPreVote, TimeoutNow
from launcher.consensus.node import Node

HEARTBEAT_S, ELECTION_S = 1.0, 8.0
SOON, RESEND_AT, LATER, MUCH_LATER = 1.0, 5.0, 6.0, 20.0
"""Nobody is silent for long at SOON and LATER, everybody is at MUCH_LATER; what is unanswered is sent again at LATER."""
_SNAPSHOT = msgspec.msgpack.Decoder(tuple[Entry, ...])


class Budget(NamedTuple):
    """How often each may happen."""

    elections: int = 0
    heartbeats: int = 0
    proposals: int = 0
    step_downs: int = 0
    crashes: int = 0
    copies: int = 0
    compactions: int = 0
    changes: tuple[Membership, ...] = ()


class Case(NamedTuple):
    """`agents`: the members, who begin under agent 0, and joiners behind them. `with_pre_votes`: else those that time out stand
    for election whatever the others hear, which is more than can happen, in fewer states. `max_entries`: in a message."""

    agents: int
    membership: Membership
    budget: Budget
    with_pre_votes: bool = False
    in_rounds: bool = False
    max_entries: int = log.MAX_ENTRIES


class State(NamedTuple):
    """`agents`: numbers of their states, None for those that died; `network`: (from, to, number of the message); `chosen`:
    number of what has been decided so far, `leaders`: of who has led which term and who was in charge."""

    agents: tuple[int | None, ...]
    network: frozenset[tuple[int, int, int]]
    budget: Budget
    chosen: int
    leaders: int


class Local(NamedTuple):
    """An agent and all it was told to be decided."""

    agent: bytes
    applied: tuple[Entry, ...]
    log: tuple[Entry, ...]
    term: int
    is_leading: bool
    is_in_charge: bool
    base: int


class History(NamedTuple):
    """Leaders by term, and the newest term of which one was in charge."""

    of_term: frozenset[tuple[int, int]]
    in_charge: int


class Wrong(AssertionError):
    """A promise is broken."""


class Never:
    """In place of randomness."""

    def random(self) -> float:
        return 0.0


class Numbers:
    """Numbers for values, and back."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number: dict[Hashable, int] = {}

    def of(self, value: Hashable, keep: Any = None) -> int:
        number = self._number.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value if keep is None else keep)
        return number


class Exploration:
    """`states`: how many there are; `story` tells how a broken promise came about."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._locals = Numbers()
        self._messages = Numbers()
        self._chosen = Numbers()
        self._leaders = Numbers()
        self._done: dict[tuple[int, tuple[Any, ...]], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._matching: set[tuple[int, int]] = set()
        self.seen: dict[State, tuple[State | None, str]] = {}
        self._now: State | None = None
        self._round: list[str] = []

    def run(self, most: int = 1 << 40) -> int:
        """The number of states, all of them or the `most` nearest to the start. Raises Wrong."""
        with patch.object(log, "MAX_ENTRIES", self._case.max_entries):
            first = self._first()
            self.seen[first] = (None, "begin")
            ahead = deque([first])
            while ahead and len(self.seen) < most:
                state = self._now = ahead.popleft()
                for what, following in self._rounds(state) if self._case.in_rounds else self._following(state):
                    if following not in self.seen:
                        self.seen[following] = (state, what)
                        ahead.append(following)
        return len(self.seen)

    def met(self) -> dict[str, bool]:
        """What an exploration should have come upon."""
        logs = [local.log for local in self._locals.values]
        histories = list(self._leaders.values)
        return {
            "a later leader": any(len(history.of_term) > 1 for history in histories),
            "a later leader in charge": any(history.in_charge > 1 for history in histories),
            "an entry replaced": any(a[: len(b)] != b and b[: len(a)] != a for a in logs for b in logs),
            "a membership changed": any(
                isinstance(entry.content, Configuration) and entry.content.old is None and index
                for chosen in self._chosen.values
                for index, (entry, _) in enumerate(chosen)
            ),
            "a snapshot installed": any(isinstance(message, InstallSnapshot) for message in self._messages.values),
            "handed over": any(isinstance(message, TimeoutNow) for message in self._messages.values),
        }

    def _first(self) -> State:
        agents, network = [], set()
        leaders = History(frozenset(), 0)
        chosen: tuple[tuple[Entry, int], ...] = ()
        for number in range(self._case.agents):
            agent = Node(number, Never(), 0.0, heartbeat_s=HEARTBEAT_S, election_s=ELECTION_S)
            if number in self._case.membership.voters:
                agent.begin(self._case.membership, 0, 0.0)
            local, sent = self._taken(agent, ())
            agents.append(local)
            network |= {(number, to, message) for to, message in sent}
            chosen, leaders = self._checked(number, None, local, [], chosen, leaders)
        return State(tuple(agents), frozenset(network), self._case.budget, self._chosen.of(chosen), self._leaders.of(leaders))

    # -- what may happen -------------------------------------------------------------------------------------------------------

    def _following(self, state: State) -> Iterator[tuple[str, State]]:
        budget = state.budget
        for item in state.network:
            sender, to, message = item
            local = state.agents[to]
            assert local is not None
            yield self._after(state, to, ("receive", sender, message), budget, state.network - {item})
            if budget.copies:
                fewer = budget._replace(copies=budget.copies - 1)
                yield self._after(state, to, ("receive", sender, message), fewer, state.network)
        yield from self._unprompted(state)

    def _rounds(self, state: State) -> Iterator[tuple[str, State]]:
        """What an agent does of itself, with every number of others, for every number of times to and fro."""
        for what, begun in self._unprompted(state._replace(network=frozenset())):
            yield what, begun._replace(network=frozenset())
            (agent,) = {sender for sender, _, _ in begun.network} or {0}
            others = [number for number in range(len(state.agents)) if number != agent]
            for n in range(1, len(others) + 1):
                for some in combinations(others, n):
                    group, after, told = {agent, *some}, begun, [what]
                    self._round = told
                    while after.network:
                        arriving = sorted(item for item in after.network if {item[0], item[1]} <= group)
                        after = after._replace(network=frozenset())
                        for sender, to, message in arriving:
                            said, after = self._after(after, to, ("receive", sender, message), after.budget, after.network)
                            told.append(said)
                        yield "\n".join(told), after._replace(network=frozenset())
            self._round = []

    def _unprompted(self, state: State) -> Iterator[tuple[str, State]]:
        budget = state.budget
        for number, local in enumerate(state.agents):
            if local is None:
                continue
            known: Local = self._locals.values[local]
            for action, name in self._own(known):
                left = getattr(budget, name)
                if left:
                    fewer = budget._replace(**{name: left[1:] if name == "changes" else left - 1})
                    yield self._after(state, number, (*action, left[0]) if name == "changes" else action, fewer, state.network)
            if budget.crashes:
                agents = (*state.agents[:number], None, *state.agents[number + 1 :])
                network = frozenset(item for item in state.network if item[1] != number)
                fewer = budget._replace(crashes=budget.crashes - 1)
                yield f"agent {number} dies", state._replace(agents=agents, network=network, budget=fewer)

    @staticmethod
    def _own(known: Local) -> Iterator[tuple[tuple[Any, ...], str]]:
        """What an agent does of itself, and whose budget that is."""
        if known.is_leading:
            yield ("tick", LATER), "heartbeats"
            yield ("tick", MUCH_LATER), "step_downs"
            yield ("propose",), "proposals"
            yield ("change",), "changes"
        else:
            yield ("stand",), "elections"
        if len(known.applied) > known.base:
            yield ("compact",), "compactions"

    def _after(
        self, state: State, number: int, action: tuple[Any, ...], budget: Budget, network: frozenset[tuple[int, int, int]]
    ) -> tuple[str, State]:
        before = state.agents[number]
        assert before is not None
        what = f"agent {number}: {action}"
        try:
            local, sent = self._act(before, number, action)
            others = [other for index, other in enumerate(state.agents) if other is not None and index != number]
            history = self._chosen.values[state.chosen], self._leaders.values[state.leaders]
            chosen, leaders = self._checked(number, before, local, others, *history)
        except Exception as error:
            raise Wrong("\n".join([repr(error), *self.story(self._now), *self._round, self._told(what, action)])) from error
        agents = (*state.agents[:number], local, *state.agents[number + 1 :])
        network |= {(number, to, message) for to, message in sent if to < len(agents) and agents[to] is not None}
        network = frozenset(item for item in network if item[1] != number or self._matters(local, item))
        following = State(agents, network, budget, self._chosen.of(chosen), self._leaders.of(leaders))
        return self._told(what, action), following

    def _matters(self, local: int, item: tuple[int, int, int]) -> bool:
        """What changes nothing when it comes is as good as lost."""
        sender, number, message = item
        return self._act(local, number, ("receive", sender, message)) != (local, ())

    def _act(self, local: int, number: int, action: tuple[Any, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The agent's next state, and what it sends to whom."""
        done = self._done.get((local, action))
        if done is None:
            known: Local = self._locals.values[local]
            agent: Node = pickle.loads(known.agent)
            match action:
                case ("receive", sender, message):
                    said: Message = self._messages.values[message]
                    agent.receive(sender, said, MUCH_LATER if isinstance(said, RequestPreVote) else SOON)
                case ("tick", now):
                    agent.tick(now)
                case ("propose",):
                    agent.propose(b"%d.%d" % (agent.term, number), SOON)
                case ("change", wanted):
                    agent.change(wanted.voters, wanted.tie_breaker, SOON)
                case ("compact",):
                    agent.log.compact(len(known.applied), msgspec.msgpack.encode(known.applied))
                case ("stand",) if self._case.with_pre_votes:
                    agent.tick(MUCH_LATER)
                case ("stand",):
                    _stand(agent)
            done = self._done[local, action] = self._taken(agent, known.applied)
        return done

    def _taken(self, agent: Node, applied: tuple[Entry, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
        sent = tuple(dict.fromkeys((to, self._messages.of(message)) for to, message in agent.outbox.take()))
        snapshot = agent.log.take_snapshot()
        if snapshot is not None:
            applied = _SNAPSHOT.decode(snapshot[1])
            assert len(applied) == snapshot[0], "a snapshot that does not stand for what it says"
        for index, entry in agent.log.take_committed():
            assert index == len(applied) + 1, "decided out of order"
            applied = (*applied, entry)
        assert len(applied) == agent.log.commit, "what is decided did not come out"
        first = [self._case.membership] if agent.me in self._case.membership.voters else [NOBODY, self._case.membership]
        last = [entry.content for entry in (*applied, *agent.log._entries) if isinstance(entry.content, Configuration)][-1:]
        assert agent.configuration in (last or map(Configuration, first)), "another configuration than the last in the log"
        without_time(agent)
        log = (*applied[: agent.log.base], *agent.log._entries)
        local = Local(pickle.dumps(agent), applied, log, agent.term, agent.is_leading, agent.is_in_charge, agent.log.base)
        return self._locals.of((frozen(agent), applied), local), sent

    # -- what must hold --------------------------------------------------------------------------------------------------------

    def _checked(
        self,
        number: int,
        before: int | None,
        after: int,
        others: list[int],
        chosen: tuple[tuple[Entry, int], ...],
        history: History,
    ) -> tuple[tuple[tuple[Entry, int], ...], History]:
        """What has been decided, with the term of who decided it, and who has led. Raises AssertionError."""
        local: Local = self._locals.values[after]
        was: Local | None = None if before is None else self._locals.values[before]
        for other in others:
            self._match(after, other)
        for index, entry in enumerate(local.applied[: len(chosen)]):
            assert entry == chosen[index][0], f"two entries at {index + 1}: {chosen[index][0]} and {entry}"
        if len(local.applied) > len(chosen):
            assert local.term >= history.in_charge, (
                f"decided in term {local.term}, when one of {history.in_charge} is in charge"
            )
            chosen += tuple((entry, local.term) for entry in local.applied[len(chosen) :])
        if local.is_leading and not (was is not None and was.is_leading and was.term == local.term):
            leaders = {leader for term, leader in history.of_term if term == local.term}
            assert leaders <= {number}, f"two leaders of term {local.term}: {leaders | {number}}"
            for index, (entry, term) in enumerate(chosen):
                missing = term < local.term and local.log[index : index + 1] != (entry,)
                assert not missing, f"leader {number} of term {local.term} lacks entry {index + 1}, decided in term {term}"
            history = history._replace(of_term=history.of_term | {(local.term, number)})
        if local.is_in_charge and local.term > history.in_charge:
            assert len(local.applied) == len(chosen), f"agent {number} is in charge and does not know all"
            history = history._replace(in_charge=local.term)
        return chosen, history

    def _match(self, one: int, other: int) -> None:
        pair = (min(one, other), max(one, other))
        if pair not in self._matching:
            a, b = self._locals.values[one].log, self._locals.values[other].log
            same = [index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x.term == y.term]
            end = same[-1] + 1 if same else 0
            assert a[:end] == b[:end], f"logs differ before entry {end}, of the same term: {a}, {b}"
            self._matching.add(pair)

    def story(self, state: State | None) -> list[str]:
        """All that happened until then."""
        told = []
        while state is not None:
            state, what = self.seen[state]
            told.append(what)
        return told[::-1]

    def _told(self, what: str, action: tuple[Any, ...]) -> str:
        if action[0] != "receive":
            return what
        return f"{what.partition(':')[0]}: receive from {action[1]} {self._messages.values[action[2]]}"


def _stand(agent: Node) -> None:
    """All agree that it does, as often as it asks."""
    term, now = agent.term, MUCH_LATER
    for _ in range(2):
        if agent.term == term:
            agent.tick(now)
            for to, _ in agent.outbox.take():
                agent.receive(to, PreVoted(term, term, True), now)
            now += ELECTION_S


def without_time(agent: Node) -> None:
    """Set what depends on the clock to one of few values."""
    agent._heard_at = agent._candidacy._asked_at = agent.wakes_at = 0.0
    if agent.leading is not None:
        for peer in agent.leading._peers.values():
            peer.heard_at = 0.0
            peer.resend_at = RESEND_AT if peer.resend_at > 0 else -math.inf


def frozen(value: Any) -> Hashable:
    """All of an agent's state, as a value."""
    if isinstance(value, Node | Candidacy | Leadership | Log):
        fields = sorted(vars(value).items())
        return tuple((name, frozen(its)) for name, its in fields if name not in ("_random", "outbox", "_outbox"))
    if isinstance(value, Progress):
        return dataclasses.astuple(value)
    if isinstance(value, dict):
        return tuple((key, frozen(value[key])) for key in sorted(value))
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, set):
        return frozenset(value)
    return value


__all__ = ["Budget", "Case", "Exploration", "Wrong"]
