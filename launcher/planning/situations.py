"""The agent's side of planning: it makes a Situation of what the coordinator asks, and looks up what was computed ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.coordinator.state import World
from launcher.health.waits import Wait
from launcher.host.loop import Loop
from launcher.host.orphans import kill
from launcher.joblog.events import Proposed
from launcher.options import RunOptions
from launcher.planning import precompute
from odyssey.codec import Malformed
from odyssey.errors import StateLost
from odyssey.plan import Plan
from perfmodel.profile import Profile
from perfmodel.reliability import PRIOR_PER_NODE_DAY, ExpectedChange, seconds_to_change
from strategies.situation import Aim, Candidate, Situation


def expected_change(world: World, now: float, mtbf_s: float | None, failure_rate: float | None) -> ExpectedChange:
    """D, from what a user says of the job or has its log say. `failure_rate`: losses per node-day; None for what is usual."""
    node_s, n_nodes = world.exposure(now)
    speed = world.started.speed if world.started is not None else 1.0
    per_node_day = (PRIOR_PER_NODE_DAY if failure_rate is None else failure_rate) * speed
    return seconds_to_change(world.losses.n_events, node_s, n_nodes, mtbf_s=mtbf_s, per_node_day=per_node_day)


def situation_of(ask: Propose, profile: Profile, node_of: dict[int, int], expected: ExpectedChange, aim: Aim) -> Situation:
    return Situation(
        generation=ask.generation,
        step=ask.step,
        plan=ask.plan,
        alive=ask.alive,
        lost=ask.lost,
        respawnable=ask.respawnable,
        held=ask.held,
        node_of=node_of,
        profile=profile,
        seconds_to_change=expected.seconds,
        untrained=ask.untrained,
        n_behind=expected.n_behind,
        aim=aim,
    )


def proposed(
    ask: Propose,
    profile: Profile,
    node_of: dict[int, int],
    expected: ExpectedChange,
    strategy: str,
    layout: str,
    aim: Aim,
) -> Proposed:
    """The answer of a search that takes no time. `strategy`, `layout`, `aim`: as asked for on the command line.

    Raises OdysseyError if nothing can be proposed at all.
    """
    from strategies.search import answer

    # Where a rank was lost before the layout that was asked for could run, the best one for the others is.
    wanted = layout if len(ask.alive) == len(node_of) else "auto"
    candidates: list[Candidate] = []
    why_not = help = ""
    try:
        candidates = answer(situation_of(ask, profile, node_of, expected, aim), only(strategy), wanted)
    except StateLost as error:
        why_not, help = error.what, error.help
    return Proposed(tuple(candidates), expected.seconds, expected.source, 0.0, False, why_not, help)


def only(strategy: str) -> str | None:
    """The one that may propose, of what was asked for."""
    return None if strategy == "auto" else strategy


def single_losses(plan: Plan, alive: Sequence[int], can_respawn: bool) -> list[Propose]:
    """What would be asked after the loss of each one rank of `plan`, with every survivor holding what the plan says."""
    asks = []
    for lost in plan.workers:
        survivors = tuple(rank for rank in alive if rank != lost)
        held = {rank: plan.held.get(rank, frozenset()) for rank in survivors}
        asks.append(Propose(plan.generation + 1, plan.step, plan, survivors, (lost,), (lost,) if can_respawn else (), held))
    return asks


class PlanSearch:
    """Answers Propose with Proposed. Owned by the agent's thread; its process for planning ahead starts at the first Go."""

    def __init__(self, options: RunOptions, node_of: dict[int, int], loop: Loop) -> None:
        self._options = options
        self._node_of = node_of
        self._loop = loop
        self._only = only(options.strategy)
        self._process: precompute.Process | None = None
        self._number = 0
        self._asked: list[Propose] = []
        self._answers: dict[int, msgspec.Raw] = {}
        self._due: set[int] = set()
        """Indices of the newest Ask that are not answered yet."""

    def propose(self, ask: Propose, profile: Profile, expected: ExpectedChange) -> Proposed:
        """Raises OdysseyError if nothing can be proposed at all."""
        from strategies.search import rescore

        started = time.perf_counter()
        known = self._look_up(ask)
        if known is None:
            options = self._options
            found = proposed(ask, profile, self._node_of, expected, options.strategy, options.layout, options.aim)
            return replace(found, search_s=time.perf_counter() - started)
        search_s = time.perf_counter() - started
        candidates = rescore(known, expected, self._options.aim, search_s=search_s)
        return Proposed(tuple(candidates), expected.seconds, expected.source, search_s, ahead=True)

    def plan_ahead(
        self, plan: Plan, members: frozenset[int], can_respawn: bool, profile: Profile, expected: ExpectedChange
    ) -> None:
        """Have a plan ready for the loss of each one rank. Answers for an earlier plan are dropped; those for the same
        plan at older costs stay until the new ones are there."""
        asked = single_losses(plan, tuple(sorted(members)), can_respawn)
        if len(asked) != len(self._asked) or not all(map(_is_same, asked, self._asked)):
            self._answers = {}
        self._asked = asked
        self._number += 1
        self._due = set(range(len(asked)))
        situations = tuple(situation_of(ask, profile, self._node_of, expected, self._options.aim) for ask in self._asked)
        if self._process is None:
            self._process = precompute.Process()
        self._process.ask(precompute.Ask(self._number, self._only, situations))
        self._on_process(0)

    def _on_process(self, mask: int) -> None:
        process = self._process
        if process is None:
            return
        try:
            more = process.flush()
            for answer in process.answers():
                if answer.number == self._number:
                    self._answers[answer.index] = answer.candidates
                    self._due.discard(answer.index)
        except (OSError, EOFError):
            self.close()  # the next Go starts another one
            return
        self._loop.watch(process.socket.fileno(), self._on_process, write=more)

    def awaited(self) -> Iterator[Wait]:
        """The process that plans ahead, for the agent's watch. Without its answers the next loss is searched for."""
        if self._process is not None and self._due:
            yield Wait("the planner", "it plans for the next loss", self._process.pid, self._is_late, quiet=True)

    def _is_late(self, what: str) -> None:
        assert self._process is not None
        kill(self._process.pid)
        self.close()  # the next Go, or the next look at real costs, starts another one

    def _look_up(self, ask: Propose) -> list[Candidate] | None:
        for index, prepared in enumerate(self._asked):
            if index in self._answers and _is_same(prepared, ask):
                try:
                    found = precompute.decode_candidates(self._answers[index])
                except Malformed:
                    return None  # searched now
                return [_from_step(candidate, ask.step) for candidate in found] or None
        return None

    def close(self) -> None:
        """The end of file ends the process; the agent's last sweep does where it is in a long search."""
        if self._process is not None:
            self._loop.unwatch(self._process.socket.fileno())
            self._process.close()
            self._process = None


def _from_step(candidate: Candidate, step: int) -> Candidate:
    """The same plan, to go on from this step: which one that would be could not be known ahead."""
    if candidate.plan is None:
        return candidate
    return replace(candidate, plan=replace(candidate.plan, step=step))


def import_all() -> None:
    """What planning needs and the way to the first rank does not."""
    from perfmodel import merge, refine
    from strategies import search

    assert merge and refine
    search.warm_up()


def _is_same(prepared: Propose, ask: Propose) -> bool:
    """The plan's first step is all that may differ."""
    return (
        prepared.generation == ask.generation
        and prepared.alive == ask.alive
        and prepared.lost == ask.lost
        and prepared.respawnable == ask.respawnable
        and prepared.held == ask.held
    )
