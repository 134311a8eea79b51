"""The steps that a job has recorded, one of each generation, below what was predicted of them: from the events of its log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from launcher.joblog.events import Event, GenerationStarted, PlanChosen, Profiled, ProfileRefined, RankLost, RankStarted
from launcher.joblog.wording import ranks_text
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import program
from odyssey.plan.worker import Rank, all_ranks_of, worker_of
from odyssey.protocol.calls import ranks_alike
from odyssey.protocol.reports import StepTimes
from odyssey_cli.timeline.change import Stand
from odyssey_cli.timeline.picture import (
    Choice,
    Panel,
    Picture,
    choose,
    headline,
    is_hole,
    panel,
    places_left,
    predicted,
    slowed,
)
from perfmodel.profile.profile import Profile
from perfmodel.step.timeline import Span, timeline_of

NOT_RECORDED = "no step was recorded: it ran fewer than three"
Places = dict[Rank, tuple[int, int] | None]


class Generation(msgspec.Struct, frozen=True):
    """One that has run. `change`: after what; empty for the first. `newly_lost`: since the one before it.

    `profile`: with which its plan was chosen.
    `lost`: ranks that are gone, with the (pipeline, stage) of each that still has none. `times`: what each rank has recorded.
    """

    number: int
    change: str
    newly_lost: tuple[Rank, ...]
    plan: Plan
    profile: Profile | None
    lost: Places
    node_of: dict[Rank, int]
    host_of: dict[Rank, str]
    times: dict[Rank, StepTimes]


def generations(events: Iterable[Event]) -> list[Generation]:
    """Those of a job that have run, in order."""
    chosen: dict[int, Generation] = {}
    started: set[int] = set()
    profile: Profile | None = None
    plan: Plan | None = None
    lost: Places = {}
    newly_lost: set[Rank] = set()
    lost_since_go: set[Rank] = set()
    node_of: dict[Rank, int] = {}
    host_of: dict[Rank, str] = {}
    for event in events:
        match event.body:
            case Profiled() | ProfileRefined() as body:
                profile = body.profile
            case RankStarted(rank=rank, node=node, host=host):
                node_of[rank], host_of[rank] = node, host
            case RankLost(rank=rank):
                newly_lost.add(rank)
                lost_since_go.add(rank)
            case PlanChosen(plan=after):
                lost = _places(lost, newly_lost, plan, after)
                change = f"after the loss of {ranks_text(newly_lost)}" if newly_lost else "after a change"
                change, plan = change if chosen else "", after
                chosen[event.generation] = Generation(
                    event.generation,
                    change,
                    tuple(sorted(lost_since_go)),
                    plan,
                    profile,
                    lost,
                    dict(node_of),
                    dict(host_of),
                    {},
                )
                newly_lost = set()
            case GenerationStarted():
                started.add(event.generation)
                lost_since_go = set()
            case StepTimes(rank=rank) as times if event.generation in chosen:
                chosen[event.generation].times[rank] = times
    return [generation for number, generation in chosen.items() if number in started]


def _places(lost: Places, newly_lost: set[Rank], before: Plan | None, after: Plan) -> Places:
    """Where `after` has left the places of lost ranks empty, those lost now and those lost before. Without those that it has
    back."""
    found = places_left(newly_lost, before, after) if before is not None else dict.fromkeys(newly_lost)
    for rank, place in lost.items():
        is_left = place is not None and is_hole(after, *place) and place not in found.values()
        found.setdefault(rank, place if is_left else None)
    there = {*after.place, *after.idle}
    return {rank: place for rank, place in found.items() if worker_of(rank) not in there}


def picture(
    title: str, shown: Iterable[Generation], how: str = "measured", *, with_prediction: bool = True, speed: float = 1.0
) -> Picture:
    """Draw the step of each generation as predicted, as far as there is a profile, and below it as recorded, if one was.

    `how`: whether that was `measured` or `rehearsed`; `speed`: how many seconds of the picture pass in one of the log.
    """
    panels = (found for generation in shown for found in _panels(generation, how, with_prediction))
    return Picture(title, tuple(slowed(found, speed) for found in panels))


def stands(shown: Iterable[Generation]) -> list[Stand]:
    """Their layouts, for a picture of what has changed."""
    return [Stand(_title(f"generation {of.number} {of.change}".rstrip(), of), of.plan, of.newly_lost) for of in shown]


def _panels(generation: Generation, how: str, with_prediction: bool) -> list[Panel]:
    plan, profile, name = generation.plan, generation.profile, f"generation {generation.number} {generation.change}".rstrip()
    times = {rank: times for rank, times in generation.times.items() if _fits(plan, rank, times)}
    found = []
    choice = Choice(tuple(range(len(plan.pipelines))))
    if profile is not None:
        node_of = {worker_of(rank): node for rank, node in generation.node_of.items()}
        choice = choose(plan, timeline_of(plan, profile, node_of).twin)
        if with_prediction:
            title = _title(f"{name}, predicted", generation)
            prediction = predicted(title, plan, profile, lost=generation.lost, node_of=node_of)
            found.append(prediction if times else msgspec.structs.replace(prediction, notes=(*prediction.notes, NOT_RECORDED)))
    if times:
        found.append(_measured(f"{name}, {how}", generation, times, choice))
    return found


def _title(what: str, generation: Generation) -> str:
    return headline(what, generation.plan, generation.plan.strategy if generation.change else "")


def _fits(plan: Plan, rank: Rank, times: StepTimes) -> bool:
    """Whether the moments are those of the rank's program: a log may be of another version, or altered."""
    moments, worker = times.moments_us, worker_of(rank)
    if worker not in plan.holds or len(moments) != len(program(plan, worker)) + 1:
        return False
    return math.isfinite(times.began_s) and all(a <= b for a, b in pairwise(moments))


def _measured(name: str, generation: Generation, times: Mapping[Rank, StepTimes], choice: Choice) -> Panel:
    plan = generation.plan
    began_s, notes = _together(times, generation.host_of)

    def spans(rank: Rank) -> list[Span]:
        if rank not in times:
            return []
        moments = [began_s[rank] + at * 1e-6 for at in times[rank].moments_us]
        return [Span(op, *of) for op, of in zip(program(plan, worker_of(rank)), pairwise(moments), strict=True)]

    unknown = sorted(set(all_ranks_of(plan.workers)) - set(times))
    if unknown:
        notes.append(f"not recorded: {ranks_alike(unknown)}")
    step_s = max(began_s[rank] + of.moments_us[-1] * 1e-6 for rank, of in times.items())
    step = next(iter(times.values())).step
    return panel(_title(f"{name} at step {step}", generation), plan, step_s, spans, choice, lost=generation.lost, notes=notes)


def _together(times: Mapping[Rank, StepTimes], host_of: Mapping[Rank, str]) -> tuple[dict[Rank, float], list[str]]:
    """When each rank began the step, seconds after the first one; and what is to be said of it.

    Ranks of one host share a clock. The clocks of different hosts are aligned by what all ranks leave together: the commit
    point, which ends where the optimizer, the last op, begins.
    """
    committed: dict[str, float] = {}
    for rank, of in times.items():
        host, at = host_of.get(rank, ""), of.began_s + of.moments_us[-2] * 1e-6
        committed[host] = min(at, committed.get(host, at))
    began = {rank: of.began_s - committed[host_of.get(rank, "")] for rank, of in times.items()}
    first = min(began.values())
    notes = [f"clocks of {len(committed)} hosts aligned at the end of the commit point"] if len(committed) > 1 else []
    return {rank: at - first for rank, at in began.items()}, notes
