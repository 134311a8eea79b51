"""The agent's side of planning: it makes a Situation of what the coordinator asks, and looks up what was computed ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from functools import partial

from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.coordinator.state import World
from launcher.coordinator.workers import WORKERS
from launcher.health.waits import Wait
from launcher.host.loop import Loop
from launcher.joblog.events import Proposed
from launcher.joblog.wording import ranks_text
from launcher.options import RunOptions
from launcher.planning import precompute
from odyssey.errors import PlanError, StateLost, UsageError
from odyssey.plan.layout import parse_layout
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from odyssey.plan.worker import Worker
from perfmodel.goodput.reliability import PRIOR_PER_NODE_DAY, ExpectedChange, seconds_to_change
from perfmodel.profile.profile import Profile
from strategies.situation import Aim, Candidate, Situation
from strategies.situation.faults import attempt


def expected_change(world: World, now: float, mtbf_s: float | None, failure_rate: float | None) -> ExpectedChange:
    """D, from what a user says of the job or has its log say. `failure_rate`: losses per node-day; None for what is usual."""
    node_s, n_nodes = world.exposure(now)
    speed = world.started.speed if world.started is not None else 1.0
    per_node_day = (PRIOR_PER_NODE_DAY if failure_rate is None else failure_rate) * speed
    return seconds_to_change(world.losses.n_events, node_s, n_nodes, mtbf_s=mtbf_s, per_node_day=per_node_day)


def situation_of(
    ask: Propose,
    profile: Profile,
    node_of: dict[Worker, int],
    expected: ExpectedChange,
    aim: Aim,
    n_spares: int = 0,
    n_absent: int = 0,
) -> Situation:
    """`n_spares`: of those alive, that are to stand by if the job starts now, or may if it has. `n_absent`: as in Situation."""
    return Situation(
        generation=ask.generation,
        step=ask.step,
        plan=ask.plan,
        alive=ask.alive,
        lost=ask.lost,
        respawnable=ask.respawnable,
        arriving=ask.arriving,
        arrive_s=profile.recovery.spawn_s if ask.arriving else 0.0,
        leaving=ask.leaving,
        is_running=ask.is_running,
        slow=ask.slow,
        whole=ask.whole,
        held=ask.held,
        node_of=node_of,
        profile=profile,
        seconds_to_change=expected.seconds,
        untrained=ask.untrained,
        n_behind=expected.n_behind,
        aim=aim,
        n_spares=n_spares,
        can_restart=ask.can_restart,
        n_absent=n_absent,
    )


def proposed(
    ask: Propose,
    profile: Profile,
    node_of: dict[Worker, int],
    expected: ExpectedChange,
    strategy: str,
    layout: str,
    aim: Aim,
    n_spares: int = 0,
    n_absent: int = 0,
) -> Proposed:
    """The answer of a search that takes no time. `strategy`, `layout`, `aim`, `n_spares`: as asked for on the command line.
    `n_absent`: workers that the job began with and that have no number any more.

    Raises OdysseyError if nothing can be proposed at all.
    """
    from strategies.search import answer

    missing = tuple(sorted(node_of.keys() - set(ask.alive)))
    n_left = _n_left(n_spares, len(node_of) + n_absent, len(ask.alive))
    # Where ranks were lost before the layout that was asked for could run, the best one for the others is.
    has_room = not (missing or n_absent) or sum(parse_layout(layout) or ()) <= len(ask.alive) - n_left
    wanted = layout if has_room else "auto"
    if ask.plan is None:
        ask = replace(ask, lost=missing)
    candidates: list[Candidate] = []
    why_not = help = ""
    try:
        situation = situation_of(ask, profile, node_of, expected, aim, n_left, n_absent)
        candidates = answer(situation, only(strategy), wanted)
    except StateLost as error:
        why_not, help = error.what, error.help
    return Proposed(tuple(candidates), expected.seconds, expected.source, 0.0, False, why_not, help)


def check_each_has_work(profile: Profile, n_ranks: int) -> None:
    """Raises UsageError if a job of a script's own model starts with more copies of it at work than there are micro-batches."""
    n, n_copies = -(-profile.global_batch // profile.micro_batch), n_ranks // max(1, profile.n_shards)
    if profile.n_shards and n_copies > n:
        batch = f"global_batch {profile.global_batch} is {n} micro-batches of {profile.micro_batch}"
        most = max(1, profile.global_batch // n_copies)
        help = f"give a micro_batch of at most {most}, so that each has work, or --spares {n_ranks - n * profile.n_shards}"
        raise UsageError(f"{batch}, for {n_copies} copies of the model", help)


def _n_left(n_spares: int, n_workers: int, n_alive: int) -> int:
    """Those who still stand by: they take the places of lost ones."""
    return max(0, n_spares - (n_workers - n_alive))


def only(strategy: str) -> str | None:
    """The one that may propose, of what was asked for."""
    return None if strategy == "auto" else strategy


class PlanSearch:
    """Answers Propose with Proposed. Owned by the agent's thread; its process for planning ahead starts at the first Go."""

    def __init__(self, options: RunOptions, node_of: dict[Worker, int], loop: Loop) -> None:
        self._options = options
        self._node_of = node_of
        self._loop = loop
        self._only = only(options.strategy)
        self.n_absent = 0
        """Workers that the job began with and that have no number any more."""
        self._process: precompute.Process | None = None
        self._number = self._since = 0
        """The numbers of the newest Ask, and of the first one about this subject."""
        self._subject: tuple[Plan, tuple[Worker, ...], bool, dict[Worker, float]] | None = None
        """What the answers are for: the plan in force, who lives, whether the lost may come back, who is slow."""
        self._answers: dict[bytes, precompute.Answer] = {}
        self._n_classes = 0
        self._is_due = False
        """Whether answers to the newest Ask are still to come."""
        self._problem = ""
        """Why there are none to the newest Ask."""

    def propose(self, ask: Propose, profile: Profile, expected: ExpectedChange, *, is_first_start: bool = False) -> Proposed:
        """`is_first_start`: no rank has joined a job that runs. Raises OdysseyError if nothing can be proposed at all."""
        from strategies.search import best

        started = time.perf_counter()
        options = self._options
        if is_first_start:
            check_each_has_work(profile, len(ask.alive) - self._n_left(ask.alive))
        ahead = attempt("ahead", lambda: self._found_ahead(ask, profile, expected, started))
        candidates, problem = ([], ahead.reason) if isinstance(ahead, Candidate) else (ahead, self._problem)
        if best(candidates) is not None:
            search_s = time.perf_counter() - started
            found = Proposed(tuple(candidates), expected.seconds, expected.source, search_s, ahead=True)
        else:
            asked = options.strategy, options.layout, options.aim, options.n_spares, self.n_absent
            found = proposed(ask, profile, self._node_of, expected, *asked)
            found = replace(found, search_s=time.perf_counter() - started, ahead_problem=problem)
        return replace(found, n_planned=len(self._answers), n_to_plan=self._n_classes)

    def plan_ahead(
        self,
        plan: Plan,
        members: Set[Worker],
        can_respawn: bool,
        slow: dict[Worker, float],
        profile: Profile,
        expected: ExpectedChange,
        *,
        can_restart: bool = False,
    ) -> None:
        """Have plans ready for what may be lost next. Answers for an earlier plan are dropped; those for the same
        plan at older costs stay until the new ones are there."""
        subject = plan, tuple(sorted(members)), can_respawn, slow
        if subject != self._subject:
            self._answers, self._n_classes = {}, 0
            self._since = self._number + 1
        self._subject = subject
        self._number += 1
        self._is_due = True
        ask = _without_loss(plan, subject[1], slow, can_restart=can_restart)
        whole = situation_of(ask, profile, self._node_of, expected, self._options.aim, self._n_left(subject[1]), self.n_absent)
        if self._process is None:
            try:
                self._process = precompute.Process()
            except OSError as error:  # no more processes or descriptors are granted now; the next Go tries again
                self._is_due, self._problem = False, f"the planner cannot be started: {error.strerror}"
                return
        self._process.ask(precompute.Ask(self._number, self._only, can_respawn, whole))
        self._on_process(0)

    def _n_left(self, alive: Sequence[Worker]) -> int:
        return _n_left(self._options.n_spares, len(self._node_of) + self.n_absent, len(alive))

    def _on_process(self, mask: int) -> None:
        process = self._process
        if process is None:
            return
        try:
            more = process.flush()
            for answer in process.answers():
                self._problem = answer.problem
                if answer.number >= self._since and not answer.problem:
                    self._answers[answer.key] = answer
                    self._n_classes = answer.n_classes
                if answer.number == self._number:
                    self._is_due = answer.n_left > 0
        except (OSError, EOFError):
            self.close()  # the next Go starts another one
            return
        self._loop.watch(process.socket.fileno(), self._on_process, write=more)

    def awaited(self) -> Iterator[Wait]:
        """The process that plans ahead, for the agent's watch. Without its answers the next loss is searched for."""
        if self._process is not None and self._is_due:
            yield Wait("the planner", "planning for the next loss", self._process.pid, self._is_late, quiet=True)

    def _is_late(self, what: str) -> None:
        assert self._process is not None
        self._process.kill()
        self.close()  # the next Go, or the next look at real costs, starts another one

    def _found_ahead(self, ask: Propose, profile: Profile, expected: ExpectedChange, started: float) -> list[Candidate]:
        """The table for this loss, as one of its class was searched for; empty if none was. `started`: the look-up.

        Raises Malformed, or PlanError if what was found is no plan for this loss.
        """
        from perfmodel.transition.transition import groups_s
        from strategies.search import best, rescore
        from strategies.search.planned_losses import answer_for, key_of, symmetries

        if self._subject is None or not self._answers or not _is_planned(ask, *self._subject):
            return []
        aim = self._options.aim
        alike = symmetries(
            situation_of(_without_loss(*self._subject[:2], self._subject[3]), profile, self._node_of, expected, aim)
        )
        answer = self._answers.get(key_of(alike, ask.lost, bool(ask.respawnable)))
        if answer is None:
            return []
        names = alike.names(answer.lost, ask.lost)
        if names is None:
            of = WORKERS
            found, now = ranks_text(of.ranks(answer.lost)), ranks_text(of.ranks(ask.lost))
            raise PlanError(f"what was found for the loss of {found} is none for that of {now}")
        table = precompute.decode_candidates(answer.candidates)
        table = answer_for(table, names, ask.generation, ask.step)
        build_s = partial(groups_s, recovery=profile.recovery, whole=ask.whole)
        table = rescore(table, expected, aim, search_s=time.perf_counter() - started, build_s=build_s)
        chosen = best(table)
        if chosen is not None and chosen.plan is not None:
            if chosen.plan.is_cut and profile.uncut:
                return []  # it was found before that was known
            prove(chosen.plan, ask.held)  # the search proved what was best at its costs
        return table

    def close(self) -> None:
        """The end of file ends the process; the agent's last sweep does where it is in a long search."""
        if self._process is not None:
            self._loop.unwatch(self._process.socket.fileno())
            self._process.close()
            self._process = None


def _without_loss(plan: Plan, members: tuple[Worker, ...], slow: dict[Worker, float], *, can_restart: bool = False) -> Propose:
    """What is in force, with everybody alive. It leaves out who holds what: that is what the plan says."""
    return Propose(plan.generation, plan.step, plan, members, (), (), {}, slow=slow, can_restart=can_restart)


def _is_planned(ask: Propose, plan: Plan, members: tuple[Worker, ...], may_respawn: bool, slow: dict[Worker, float]) -> bool:
    """Whether the classes of losses are of this plan, and each survivor holds what the plan says."""
    return (
        ask.plan == plan
        and bool(ask.lost)
        and not ask.leaving
        and ask.slow == {worker: factor for worker, factor in slow.items() if worker in ask.alive}
        and tuple(sorted((*ask.alive, *ask.lost))) == members
        and ask.respawnable in ((), ask.lost)
        and ask.arriving == ask.respawnable
        and ask.held == {worker: plan.holds.get(worker, frozenset()) for worker in ask.alive}
    )


def import_all() -> None:
    """What planning needs and the way to the first rank does not."""
    from perfmodel import refine
    from perfmodel.profile import merge
    from strategies import search
    from strategies.search import planned_losses

    assert merge and refine and planned_losses
    search.warm_up()
