"""Conversations with the coordinator in few words: each line is an event, what it answers is printed below.

start 4             job of 4 ranks (ours: imports odyssey; agents: one each; restarts=1 never=3 limit=2/60 backoff=5 same=yes)
join 0 1 (job=2 replicas=yes)  these ranks are there     progress 0      the first step of a script without a Job
profile             the merged profile arrives           plan 0:0-2,1:2-4 / 2:0-4 (spawned=2 idle=3 from=script at=7),
                                                         (takes=9: s after a step of 1 s), noplan, nostate
ready 0 1 (bad=1 acted=0)  at the gate                   commit 3 (3.1 is the second unit; kind=evaluate; g=1)
paused 1 5 compute  (held=0-2 passed=backward            lost 2 signal (slot), exit 0, fail 1, finish 0 (at=5)
                    hands=yes stuck=yes)
tick, broken 1, stop, leads 7                            pass 60         seconds
leave 2 (certain within=60)                              expired         the time that a notice gave
connected 0 1 (problem=gone attempt=1)                   all that are awaited, if none is named
stuck 1, saved 0 7  a replica cannot go on, or has saved (start 4 loss=auto)
agent 4 (ranks=2)   joins                                gone 4          that agent is lost
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from launcher.coordinator.actions import (
    Action,
    End,
    EndRanks,
    Kill,
    Propose,
    Record,
    RemindOfNotice,
    RenewStore,
    SendOrder,
    SetDeadline,
    Spawn,
    StartMeasure,
)
from launcher.coordinator.machine import step
from launcher.coordinator.state import JobState, OngoingRecovery, PlainState, State
from launcher.joblog import reader
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Draining,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    LeaderChanged,
    Note,
    NoticeExpired,
    NoticeGiven,
    Pausing,
    PlanChosen,
    Profiled,
    Progressed,
    Proposed,
    RankExited,
    RankLost,
    Restarting,
    SlotsReturned,
    StopRequested,
    Tick,
    UnitFinal,
    encode,
)
from odyssey.plan.estimate import Estimate, Transition
from odyssey.plan.form import layout_of
from odyssey.plan.moves import Move, move_runs
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.protocol.model_spec import LayerSpec, ModelSpec
from odyssey.protocol.orders import Connect, Drain, Finish, Go, Pause, Prepare
from odyssey.protocol.reports import Broken, CannotGoOn, Connected, Failed, Finished, HandOn, Hello, Paused, Ready, Saved
from odyssey.protocol.units import FIRST, Position, Result
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from strategies.situation import Candidate

N_LAYERS = 4
N_MICRO_BATCHES = 4


def model(n_layers: int = N_LAYERS, digest: str = "same") -> ModelSpec:
    layers = tuple(LayerSpec(f"block{i}", digest, 8, 8, 0) for i in range(n_layers))
    return ModelSpec(layers, (), (), 2 * N_MICRO_BATCHES, 2, 100, 0, "cpu")


def profile(n_layers: int = N_LAYERS) -> Profile:
    layer = {
        "forward_s": 1e-3,
        "input_gradient_s": 1e-3,
        "weight_gradient_s": 1e-3,
        "optimizer_s": 1e-4,
        "parameter_bytes": 8,
        "gradient_bytes": 8,
        "optimizer_bytes": 16,
        "buffer_bytes": 0,
        "activation_bytes": 8,
        "output_bytes": 8,
    }
    layers = tuple(LayerProfile(name=f"block{i}", digest="same", **layer) for i in range(n_layers))
    cluster = Cluster(1, 8, 2, 1 << 30, Link(1e-4, 1e9), Link(1e-4, 1e9))
    return Profile("model", 2, 8, layers, (), (), 0.0, 0.0, 0.0, 0, cluster, Recovery())


def make_plan(
    pipelines: list[list[tuple[int, int, int]]], held: dict[int, frozenset[int]] | None, **rest: tuple[int, ...]
) -> Plan:
    """`pipelines`: (worker, first, stop) of each stage. Micro-batches are dealt evenly, moves come from the lowest holder."""
    cuts = [N_MICRO_BATCHES * p // len(pipelines) for p in range(len(pipelines) + 1)]
    built = tuple(
        Pipeline(tuple(Stage(*stage) for stage in stages), cuts[p], cuts[p + 1]) for p, stages in enumerate(pipelines)
    )
    owners: dict[tuple[int, ...], list[int]] = {}
    for layer in range(N_LAYERS):
        holders = tuple(sorted(w for stages in pipelines for w, first, stop in stages if first <= layer < stop))
        owners.setdefault(holders, []).append(layer)
    reductions = tuple(Reduction(tuple(layers), ()) for layers in owners.values())
    moves = []
    for worker, first, stop in (stage for stages in pipelines for stage in stages):
        for layer in range(first, stop) if held is not None else ():
            if layer not in held.get(worker, ()):
                source = min(rank for rank, layers in held.items() if layer in layers)
                moves.append(Move(layer, source, worker))
    return Plan(
        0, "test", 0, 2 * N_MICRO_BATCHES, 2, N_LAYERS, blocks_of(built), reductions, move_runs=move_runs(moves), **rest
    )


def answer_to(ask: Propose, pipelines: list[list[tuple[int, int, int]]], **rest: tuple[int, ...]) -> Plan:
    """As a strategy would: what nobody holds any more is built by the script, if no unit is final."""
    is_anew = ask.plan is None or (ask.untrained and lacks_layers(ask))
    plan = make_plan(pipelines, None if is_anew else dict(ask.held), **rest)
    state_from = StateFrom.SCRIPT if is_anew else StateFrom.HOLDERS
    return replace(plan, generation=ask.generation, step=ask.step, state_from=state_from)


def lacks_layers(ask: Propose) -> bool:
    """Some layer has no holder any more."""
    return {layer for layers in ask.held.values() for layer in layers} != set(range(N_LAYERS))


class Talk:
    """Feeds events, remembers the state and all that was said."""

    def __init__(self) -> None:
        self.state: State = PlainState()
        self.events: list[Event] = []
        self.log: list[Event] = []
        """As the agent writes it: each event, and behind it what was decided."""
        self.actions: list[Action] = []
        self.asked: Propose | None = None
        self.now = 0.0
        self.processes: set[int] = set()
        """The numbers of all that were to be started: no two have one."""

    def feed(self, body: Body, generation: int | None = None) -> tuple[Action, ...]:
        self.now += 0.25
        event = Event(self.now, self.state.world.generation if generation is None else generation, "test", body)
        self.events.append(event)
        self.state, actions = step(self.state, event)
        generation = self.state.world.generation
        decided = [Event(self.now, generation, "coordinator", action.body) for action in actions if isinstance(action, Record)]
        self.log += [event, *decided]
        self.actions += actions
        for action in actions:
            if isinstance(action, Propose):
                self.asked = action
            elif isinstance(action, Spawn):
                number = self.state.world.ranks[action.rank].process
                assert number not in self.processes, f"a process of rank {action.rank} has the number of another, {number}"
                self.processes.add(number)
        return actions

    def write_log(self, folder: Path) -> None:
        """The log of the job so far, into a folder of its own."""
        folder.mkdir()
        (folder / reader.NAME).write_bytes(b"".join(map(encode, self.log)))

    def say(self, line: str) -> str:
        """One line of the words above; answers what was done, one action a line."""
        words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words[1:] if "=" not in word]
        generation = int(options["g"]) if "g" in options else None
        lines: list[str] = []
        for body in self._bodies(words[0], plain, options):
            lines += text_of(self.feed(body, generation))
        return "\n".join([*lines, f"  [{self.state.status}, generation {self.state.world.generation}]"])

    def _bodies(self, word: str, plain: list[str], options: dict[str, str]) -> Iterable[Body]:
        ranks = [int(text) for text in plain if text.isdigit()]
        of = int(options.get("g", self.state.world.generation))
        match word:
            case "start":
                restarts = int(options.get("restarts", "0"))
                n_allowed, _, window_s = options.get("limit", "").partition("/")
                yield JobStarted(
                    *("train.py", (), ranks[0], 1, restarts, "auto", "auto", None, "test", 1, "measure" in plain),
                    never_retry=(int(options["never"]),) if "never" in options else (),
                    restart_limit=(int(n_allowed), float(window_s)) if n_allowed else None,
                    restart_backoff_s=float(options.get("backoff", "1")),
                    retries_same_failure="same" in options,
                    may_build_job="ours" in plain,
                    on_loss=options.get("loss", "continue"),
                    agents=tuple(AgentInfo(i, f"host{i}", i, 1) for i in range(ranks[0])) if "agents" in plain else (),
                )
            case "join":
                for rank in ranks:
                    its = replace(model(digest=options.get("digest", "same")), replicas="replicas" in options)
                    yield Hello(rank, its, int(options.get("job", 1)))
            case "profile":
                yield Profiled(profile(), 0.1)
            case "plan":
                yield self._proposed(" ".join(plain), options)
            case "nostate":
                yield Proposed((), 60.0, "test", 0.0, False, "every holder of layer 2 (block2) is lost", "keep more copies")
            case "noplan":
                yield Proposed((Candidate("reroute", None, None, "no room"),), 60.0, "test", 0.0, False)
            case "ready":
                for rank in ranks:
                    is_bad, has_acted = (options.get(name) == str(rank) for name in ("bad", "acted"))
                    yield replace(self.ready(rank, bad=is_bad), has_acted=has_acted)
            case "commit":
                t, _, k = plain[0].partition(".")
                result = Result(Position(int(t), int(k or 0)), options.get("kind", "step"), (0.5, 1.0))
                yield UnitFinal(result)
            case "paused":
                rank, (t, _, k) = ranks[0], plain[1].partition(".")
                plan = self.state.plan if isinstance(self.state, JobState) else None
                held = tuple(sorted(plan.holds.get(rank, ()))) if plan is not None else ()
                if "held" in options:
                    first, _, last = options["held"].partition("-")
                    held = tuple(range(int(first), int(last or first) + 1)) if first else ()
                position = Position(int(t), int(k or 0))
                passed = Result(Position(position.step - 1, 0), options["passed"]) if "passed" in options else None
                phase, hands_on = plain[2] if len(plain) > 2 else "compute", "hands" in options
                why_not = "its DDP has static_graph" if "stuck" in options else ""
                yield Paused(rank, of, position, phase, held, passed=passed, hands_on=hands_on, why_not=why_not)
            case "connected":
                recovery = self.state.recovery if isinstance(self.state, JobState) else OngoingRecovery()
                for rank in ranks or sorted(recovery.unconnected):
                    yield Connected(rank, of, int(options.get("attempt", recovery.n_connects)), options.get("problem", ""))
            case "lost":
                kind = plain[1] if len(plain) > 1 else "signal"
                text = {"signal": "SIGKILL", "exit": "exit code 3", "hang": "did not answer for 1.0 s"}.get(kind, kind)
                status = {"signal": -9, "exit": 3}.get(kind)
                yield RankLost(ranks[0], Cause(CauseKind(kind), text, status), "slot" in plain)
            case "exit":
                for rank in ranks:
                    yield RankExited(rank)
            case "finish":
                for rank in ranks:
                    yield Finished(rank, Position(int(options.get("at", "0")), 0))
            case "fail":
                yield Failed(ranks[0], options.get("error", "ValueError: no"), "mend it", "Traceback …")
            case "progress":
                yield Progressed(ranks[0])
            case "pass":
                self.now += ranks[0]
            case "tick":
                yield Tick(self.state.world.deadline)
            case "leads":
                yield LeaderChanged(AgentInfo(int(ranks[0]), "far", 1, 1))
            case "back":
                yield SlotsReturned(tuple(ranks), "it was mended")
            case "leave":
                within_s = float(options["within"]) if "within" in options else None
                yield NoticeGiven(tuple(ranks), "it was asked to", "certain" in plain, within_s)
            case "expired":
                yield NoticeExpired()
            case "agent":
                yield AgentJoined(AgentInfo(ranks[0], f"host{ranks[0]}", ranks[0], int(options.get("ranks", "1"))))
            case "gone":
                yield AgentLost(AgentInfo(ranks[0], f"host{ranks[0]}", ranks[0], 1), "nothing was heard of it")
            case "broken":
                t, _, k = plain[1].partition(".") if len(plain) > 1 else ("0", "", "")
                yield Broken(ranks[0], of, Position(int(t), int(k or 0)), "Connection closed by peer")
            case "stuck":
                yield CannotGoOn(ranks[0], "a send met the loss")
            case "saved":
                yield Saved(ranks[0], ranks[1])
            case "stop":
                yield StopRequested("interrupted by Ctrl-C")
            case _:
                raise ValueError(f"unknown word {word!r}")

    def _proposed(self, text: str, options: dict[str, str]) -> Proposed:
        pipelines = []
        for part in text.split("/"):
            stages = []
            for stage in part.strip().split(","):
                worker, _, layers = stage.partition(":")
                first, _, stop = layers.partition("-")
                stages.append((int(worker), int(first), int(stop)))
            pipelines.append(stages)
        rest = {name: tuple(int(r) for r in options[name].split(",")) for name in ("spawned", "idle") if name in options}
        ask = self.asked if self.asked is not None else Propose(0, 0, None, (), (), (), {})
        plan = answer_to(ask, pipelines, **rest)
        if options.get("from") == "script":
            plan = replace(plan, state_from=StateFrom.SCRIPT, move_runs=())
        if "at" in options:
            plan = replace(plan, step=int(options["at"]))
        estimate = None
        if "takes" in options:  # steps of 1 s, and the transition
            estimate = Estimate(1.0, Transition(moves_s=float(options["takes"])), 0, 1.0)
            plan = replace(plan, estimate=estimate)
        return Proposed((Candidate("test", plan, estimate, "it is the best"),), 60.0, "test", 0.0, False)

    def ready(self, rank: int, *, bad: bool = False) -> Ready:
        """What a rank of the plan that moves would report; `bad`: with a digest of its own."""
        plan, generation = self.state.next_plan if isinstance(self.state, JobState) else None, self.state.world.generation
        if plan is None:  # too late, whatever it says
            return Ready(rank, generation, Position(0, 0), (), (), 0, 0.0, 0.0, 0)
        held = sorted(plan.holds.get(rank, ()))
        digests = tuple((layer, "other" if bad else f"state{layer}") for layer in held)
        last = {pipeline.stages[-1].worker: pipeline for pipeline in plan.pipelines}
        samples = tuple((k, plan.samples.n_of(k)) for k in last[rank].micro_batches) if rank in last else ()
        contracts = tuple((g, "same") for g in plan.groups_of.get(rank, ()))
        assert isinstance(self.state, JobState)
        position = self.state.end or FIRST
        return Ready(rank, generation, position, digests, samples, plan.global_batch, 0.01, 0.002, 0, contracts, "same")


def text_of(actions: Iterable[Action]) -> list[str]:
    """One line for each action; the same order to several ranks is one line."""
    lines: list[str] = []
    sent: dict[str, list[int]] = {}
    for action in actions:
        if isinstance(action, SendOrder):
            sent.setdefault(_order_text(action.order), []).append(action.rank)
        elif isinstance(action, Spawn):
            sent.setdefault("spawn", []).append(action.rank)
        else:
            lines.append(_text(action))
    return [*(f"  {what} -> {' '.join(map(str, ranks))}" for what, ranks in sent.items()), *(f"  {line}" for line in lines)]


def _order_text(order: object) -> str:
    match order:
        case Pause(generation=g, lost=lost):
            return f"pause({g}{', without ' if lost else ''}{' '.join(map(str, lost))})"
        case Drain(generation=g):
            return f"drain({g})"
        case Connect(generation=g, number=number):
            return f"connect({g}, attempt {number})"
        case Prepare(generation=g, results=results):
            return f"prepare({g}, results {_results(results)})"
        case HandOn(generation=g, giver=giver, takers=takers, result=result):
            return f"hand on({g}, {_results((result,))}, {giver} to {' '.join(map(str, takers))})"
        case Go(generation=g, has_acted=has_acted):
            return f"go({g}{', acted' if has_acted else ''})"
        case Finish(generation=g, results=results):
            return f"finish({g}, results {_results(results)})"
    return str(order)


def _results(results: tuple[Result, ...]) -> str:
    return " ".join(f"{r.position[0]}.{r.position[1]}:{r.kind}" for r in results) or "none"


def _text(action: Action) -> str:
    match action:
        case Kill(rank=rank, cause=cause):
            return f"kill {rank} ({cause.text if cause is not None else 'unwanted'})"
        case EndRanks(ranks=ranks):
            return f"end ranks {' '.join(map(str, ranks))}"
        case RenewStore():
            return "renew the store"
        case StartMeasure(generation=g, chain=chain):
            return f"measure({g}) along " + ", ".join(f"{stage.worker}:{stage.first}-{stage.stop}" for stage in chain)
        case Propose() as ask:
            kind = "first plan" if ask.plan is None else f"plan from step {ask.step}"
            who = f"alive {ask.alive} lost {ask.lost} respawnable {ask.respawnable}"
            who += f" leaving {ask.leaving}" if ask.leaving else ""
            who += f" arriving {ask.arriving}" if ask.arriving != ask.respawnable else ""
            who += ", all may start again" if ask.can_restart else ""
            return f"propose({ask.generation}): {kind}, {who}" + (", while it trains" if ask.is_running else "")
        case SetDeadline(seconds=seconds):
            return f"deadline {seconds:g} s" if seconds is not None else "no deadline"
        case RemindOfNotice(seconds=seconds):
            return f"reminder after {seconds:g} s"
        case End(code=code):
            return f"end {code}"
        case Record(body=Draining(reason=reason)):
            return f"decide: draining: {reason}"
        case Record(body=Pausing(lost=lost, reason=reason)):
            return f"decide: pausing, lost {lost}: {reason}"
        case Record(body=PlanChosen(plan=plan, reason=reason)):
            return f"decide: plan {plan.generation} at step {plan.step}, {layout_of(plan)}: {reason}"
        case Record(body=GenerationStarted() as went):
            total = "" if went.total_s is None else f" after {went.total_s:g} s"
            parts = (went.pause_s, went.plan_s, went.spawn_s, went.groups_s, went.moves_s, went.rest_s)
            assert went.total_s is None or abs(sum(part or 0.0 for part in parts) - went.total_s) < 1e-9
            spawning = "" if went.spawn_s is None else f", {went.spawn_s:g} s of it spawning"
            return f"decide: go{total}{spawning}"
        case Record(body=Restarting(attempt=attempt, reason=reason)):
            return f"decide: attempt {attempt}: {reason}"
        case Record(body=JobEnded(code=code, reason=reason, help=help)):
            return f"decide: ended {code}: {reason}" + (f" | help: {help}" if help else "")
        case Record(body=Note(text=text)):
            return f"note: {text}"
    return str(action)
