"""One start of a job in a replay: the coordinator of a real job, and what its ranks would tell it, at the times of the price.

Nothing is decided here. A lost node is told to `machine.step`; whatever that wants done is answered as the agent and the
ranks would: Pause by Paused after `pause_s`, Propose by the search, Spawn by Hello after `spawn_s`, Prepare by
Ready after groups and moves, all as the profile has it; and a deadline that passes is told. Between two changes no step is
simulated: the coordinator is told of one unit for all steps of such a stretch, as it keeps only the newest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count

import msgspec

from launcher.coordinator.actions import Action, Kill, Propose, Record, SendOrder, SetDeadline, Spawn
from launcher.coordinator.machine import step
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, PlainState, State
from launcher.coordinator.workers import WORKERS
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    PlanChosen,
    RankLost,
    Tick,
    UnitFinal,
)
from launcher.joblog.wording import REPORT, faults_texts, ranks_text
from launcher.planning.situations import expected_change, proposed
from odyssey.errors import OdysseyError
from odyssey.plan.plan import Plan
from odyssey.plan.sharded import reader
from odyssey.plan.worker import Rank, Worker, numbers_from, ranks_of, worker_of
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.orders import Connect, Drain, Pause, Prepare
from odyssey.protocol.reports import Connected, Hello, Paused, Ready
from odyssey.protocol.units import FIRST, Result, position_after
from perfmodel.profile.profile import Profile, layer_specs
from strategies.search import best
from strategies.situation import Aim

RESTARTS = 1 << 20
"""What --max-restarts would allow: as many as it takes."""
_NODE = Cause(CauseKind.AGENT, "its node was lost")
_PROCESS = Cause(CauseKind.SIGNAL, "SIGKILL", -9)
_NOT_STARTED = Cause(CauseKind.NOT_STARTED, "its node is gone")


class Setup(msgspec.Struct, frozen=True):
    """What a job is started with. `mtbf_s`: as the user says, None for the job's own estimate."""

    profile: Profile
    ranks_per_node: int
    layout: str = "auto"
    strategy: str = "auto"
    mtbf_s: float | None = None
    aim: Aim = Aim()


class SimulatedJob:
    """A job on some nodes, numbered from 0 in the job.
    `running_since_s`: None while no step is made; `drains`: the step that is made is the last one of this plan; `why_ended`:
    empty while it lives; `plan`: the one that runs, or is about to.
    """

    def __init__(self, setup: Setup, n_nodes: int, at_s: float, faults: dict[str, None], *, resumed: bool) -> None:
        """All ranks have built their Job at `at_s`. `resumed`: from a checkpoint. To `faults` comes what bugs have cost."""
        self.running_since_s: float | None = None
        self.drains = False
        self.why_ended = ""
        self.plan: Plan | None = None
        self._setup = setup
        self._faults = faults
        self._state: State = PlainState(profile=setup.profile)
        self._now_s = at_s
        self._dues = _Dues()
        self._dead: set[Rank] = set()
        """Ranks without a process, whether that has been noticed or not."""
        self._gone: set[int] = set()
        """Numbers of the agents of lost nodes."""
        self._held: dict[Rank, tuple[int, ...]] = {}
        self._are_connected = False
        """The groups of the next plan are there, as they were built beside the training."""
        self._position = FIRST
        self._is_to_resume = resumed
        agents = tuple(AgentInfo(node, f"node{node}", 1, setup.ranks_per_node) for node in range(n_nodes))
        self._n_agents = n_nodes
        ranks = tuple(numbers_from(Rank(0), n_nodes * setup.ranks_per_node))
        self._node_of = {worker_of(rank): rank // setup.ranks_per_node for rank in ranks}
        words = ("replay", (), n_nodes, setup.ranks_per_node, RESTARTS, setup.layout, setup.strategy, setup.mtbf_s, "replay", 1)
        self._feed(JobStarted(*words, agents=agents, aim=setup.aim))
        model = _model(setup.profile)
        for rank in ranks:
            self._feed(Hello(rank, model))

    # -- what happens to it --------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When something that is under way is done; infinite if nothing is."""
        return self._dues.next_s(self._state.world.generation)

    def go_on(self) -> None:
        """To `due_s`."""
        at_s, then = self._dues.pop(self._state.world.generation)
        self._now_s = max(self._now_s, at_s)
        then()

    def lose(self, nodes: Sequence[int], at_s: float, *, transient: bool, stepped: bool) -> None:
        """These nodes are lost, or only their processes. `stepped`: steps were made since the last change. The others train on
        where none of them is at work."""
        self._now_s = max(self._now_s, at_s)
        if stepped:
            self._commit("step", (0.0, 0.0))
        if self.is_at_work(nodes):
            self.running_since_s, self.drains = None, False
        agents = [self._state.world.seated[node] for node in nodes]
        self._dead.update(rank for node in nodes for rank in self._ranks_of(node))
        if not transient:
            self._gone.update(agent.number for agent in agents)
        told = () if transient else tuple(agents)
        self._later(self._setup.profile.recovery.detect_s, lambda: self._tell_lost(nodes, told))

    def is_at_work(self, nodes: Sequence[int]) -> bool:
        """The generation in force, or the one to come, counts on one of these."""
        return any(self._state.world.ranks.is_member(rank) for node in nodes for rank in self._ranks_of(node))

    def give(self, at_s: float) -> int:
        """There is one node more. Answers its number in the job, which may be that of one that is lost."""
        self._now_s = max(self._now_s, at_s)
        agent = AgentInfo(self._n_agents, f"node{self._n_agents}", 1, self._setup.ranks_per_node)
        self._n_agents += 1
        self._feed(AgentJoined(agent))
        seated = self._state.world.seated
        self._node_of = {worker_of(rank): node for node in range(len(seated)) for rank in self._ranks_of(node)}
        return seated.index(agent)

    def drained(self, at_s: float) -> None:
        """The step at which all stop is done."""
        self._now_s = max(self._now_s, at_s)
        self.running_since_s, self.drains = None, False
        self._commit("step", (0.0, 0.0))
        self._tell_paused(sorted(self._state.world.ranks.of(RankState.MEMBER)))

    @property
    def nodes_at_work(self) -> set[int]:
        """Those with a rank that computes; none while there is no plan."""
        return {self._node_of[worker] for worker in self.plan.workers} if self.plan is not None else set()

    def _tell_lost(self, nodes: Sequence[int], agents: Sequence[AgentInfo]) -> None:
        """`agents`: of nodes that are lost themselves."""
        for agent in agents:
            self._feed(AgentLost(agent, "its host is gone"))
        cause = _NODE if agents else _PROCESS
        for node in nodes:
            for rank in self._ranks_of(node):
                if rank in self._state.world.alive and not self.why_ended:
                    self._feed(RankLost(rank, cause, slot_lost=bool(agents)))

    def _is_gone(self, rank: Rank) -> bool:
        return self._state.world.homes[rank] in self._gone

    def _ranks_of(self, node: int) -> Iterable[Rank]:
        per_node = self._setup.ranks_per_node
        return numbers_from(Rank(node * per_node), per_node)

    def _commit(self, kind: str, values: tuple[float, ...]) -> None:
        assert self.plan is not None
        result = Result(self._position, kind, values)
        self._position = position_after(result)
        self._feed(UnitFinal(result))

    # -- what its coordinator wants done -------------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        return self._state.world.generation

    def _feed(self, body: Body) -> None:
        if self.why_ended:
            return
        before = self._state
        self._state, actions = step(before, Event(self._now_s, self._generation, "replay", body))
        if isinstance(before, JobState) and before.gives_up:
            # All ranks start again, with what they have saved: whoever replays the trace knows what that takes.
            self.why_ended, self.running_since_s = before.gives_up, None
            return
        paused: list[Rank] = []
        prepared: list[Rank] = []
        connecting: list[tuple[Rank, int]] = []
        wanted: Plan | None = None
        for action in actions:
            match action:
                case SendOrder(rank=rank, order=Pause()):
                    paused.append(rank)
                case SendOrder(rank=rank, order=Connect(number=number, plan=plan)):
                    connecting.append((rank, number))
                    wanted = plan
                case SendOrder(order=Drain()):
                    self.drains = True
                case SendOrder(rank=rank, order=Prepare()):
                    prepared.append(rank)
                case SendOrder():
                    pass  # Go and Follow need no answer
                case _:
                    self._obey(action)
        if connecting and wanted is not None and wanted.estimate is not None:
            self._later(wanted.estimate.beside_s, lambda: self._tell_connected(connecting), is_report=True)
        if paused:
            self._are_connected = False
            self._later(self._setup.profile.recovery.pause_s, lambda: self._tell_paused(paused), is_report=True)
        if prepared:
            self._later(self._move_s(), lambda: self._tell_ready(prepared), is_report=True)

    def _obey(self, action: Action) -> None:
        match action:
            case Record(body=JobEnded(reason=reason)):
                self.why_ended, self.running_since_s = reason, None
            case Record(body=PlanChosen(plan=plan)):
                self.plan = plan
            case Record(body=GenerationStarted()):
                self._go()
            case Propose():
                self._later(0.0, lambda: self._search(action), is_report=True)
            case Spawn(rank=rank) if isinstance(self._state, JobState):
                self._spawn(rank)
            case Kill(rank=rank, cause=Cause() as cause):
                self._later(0.0, lambda: self._feed(RankLost(rank, cause, slot_lost=self._is_gone(rank))))
            case SetDeadline(seconds=seconds):
                tick = Tick(self._state.world.deadline)
                self._dues.set_deadline(None if seconds is None else self._now_s + seconds, lambda: self._feed(tick))

    def _later(self, seconds: float, then: Callable[[], None], *, is_report: bool = False) -> None:
        """`is_report`: it is void when another generation has begun."""
        self._dues.add(self._now_s + seconds, self._state.world.generation if is_report else None, then)

    def _search(self, ask: Propose) -> None:
        world, setup = self._state.world, self._setup
        expected = expected_change(world, self._now_s, setup.mtbf_s, None)
        found = proposed(ask, setup.profile, self._node_of, expected, setup.strategy, setup.layout, setup.aim)
        self._faults |= dict.fromkeys(faults_texts(found.candidates))
        chosen = best(found.candidates)
        if chosen is not None and chosen.estimate is None:
            lost = ranks_text(WORKERS.ranks(ask.lost))
            raise OdysseyError(f"a loss of {lost} cannot be replayed: {chosen.reason}", REPORT)
        self._feed(found)

    def _spawn(self, rank: Rank) -> None:
        self._held.pop(rank, None)
        if self._is_gone(rank):
            self._later(0.0, lambda: self._feed(RankLost(rank, _NOT_STARTED, slot_lost=True)))
        else:
            self._dead.discard(rank)
            model = _model(self._setup.profile)
            self._later(self._setup.profile.recovery.spawn_s, lambda: self._feed(Hello(rank, model)))

    def _move_s(self) -> float:
        """Moves take so long, and groups that have not been built before, as the plan was priced."""
        assert self.plan is not None and self.plan.estimate is not None
        parts = self.plan.estimate.transition
        return parts.moves_s + (0.0 if self._are_connected else parts.groups_s)

    def _go(self) -> None:
        assert self.plan is not None and self.plan.estimate is not None
        held = ((worker, tuple(sorted(layers))) for worker, layers in self.plan.holds.items())
        self._held = {rank: layers for worker, layers in held for rank in ranks_of(worker)}
        self.running_since_s = self._now_s + self.plan.estimate.transition.warm_up_s
        self._are_connected = False
        if self._is_to_resume:
            self._is_to_resume = False
            self._commit("resume", (1.0,))

    # -- what its ranks say --------------------------------------------------------------------------------------------

    def _tell_connected(self, ranks: Sequence[tuple[Rank, int]]) -> None:
        self._are_connected = True
        for rank, number in ranks:
            if rank not in self._dead:
                self._feed(Connected(rank, self._generation, number))

    def _tell_paused(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            if rank not in self._dead:
                self._feed(Paused(rank, self._generation, self._position, "compute", self._held.get(rank, ())))

    def _tell_ready(self, ranks: Sequence[Rank]) -> None:
        """Each holds and trains just what the plan says."""
        plan = self.plan
        assert plan is not None
        counted: dict[Worker, list[tuple[int, int]]] = {}
        readers: set[Worker] = set()
        for k in range(plan.n_micro_batches):
            last = len(plan.pipelines[plan.home[k]].stages) - 1
            counted.setdefault(reader(plan, k) if plan.is_sharded else plan.runner(k, last), []).append(
                (k, plan.samples.n_of(k))
            )
            readers |= {plan.runner(k, 0), plan.runner(k, last)}
        shards: dict[frozenset[int], tuple[tuple[int, str], ...]] = {}
        for rank in ranks:
            if rank in self._dead:
                continue
            worker = worker_of(rank)
            layers = plan.holds.get(worker, frozenset())
            if layers not in shards:
                ties = (plan.n_layers + t for t, tie in enumerate(plan.ties) if not layers.isdisjoint(tie))
                shards[layers] = tuple((shard, "state") for shard in (*sorted(layers), *ties))
            self._feed(
                Ready(
                    rank,
                    self._generation,
                    self._position,
                    digests=shards[layers],
                    samples=tuple(counted.get(worker, ())),
                    denominator=plan.global_batch,
                    groups_s=0.0,
                    moves_s=0.0,
                    moved_bytes=0,
                    contracts=tuple((group, "sum") for group in plan.groups_of.get(worker, ())),
                    stream="samples" if worker in readers else None,
                )
            )


class _Dues:
    """What is to happen when, in order of time and then of entry, and one deadline."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int | None, Callable[[], None]]] = []
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._numbers = count()

    def add(self, at_s: float, generation: int | None, then: Callable[[], None]) -> None:
        """`generation`: void in any later one."""
        heapq.heappush(self._entries, (at_s, next(self._numbers), generation, then))

    def set_deadline(self, at_s: float | None, then: Callable[[], None]) -> None:
        """In place of the one before."""
        self._deadline = None if at_s is None else (at_s, then)

    def next_s(self, generation: int) -> float:
        while self._entries and self._entries[0][2] not in (None, generation):
            heapq.heappop(self._entries)
        entry_s = self._entries[0][0] if self._entries else math.inf
        return min(entry_s, self._deadline[0] if self._deadline is not None else math.inf)

    def pop(self, generation: int) -> tuple[float, Callable[[], None]]:
        """What is next; what was due at its deadline is in time."""
        at_s = self.next_s(generation)
        if self._entries and self._entries[0][0] == at_s:
            return at_s, heapq.heappop(self._entries)[3]
        assert self._deadline is not None
        then, self._deadline = self._deadline[1], None
        return at_s, then


@lru_cache(maxsize=4)
def _model(profile: Profile) -> ModelSpec:
    """What ranks tell that were given the profile's model."""
    sizes = (profile.global_batch, profile.micro_batch, profile.global_batch, 0, "replay")
    return ModelSpec(layer_specs(profile), profile.ties, profile.tie_bytes, *sizes, n_shards=profile.n_shards)
