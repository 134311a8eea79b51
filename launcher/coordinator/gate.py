"""The gate before `go`: what the ranks report must agree, or nothing runs (I9). Pure; answers what differs, and where."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import zip_longest

from msgspec.structs import replace

from launcher.coordinator.workers import WORKERS
from launcher.joblog.wording import ranks_text
from odyssey.plan.moves import Move
from odyssey.plan.needs import SumOver
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, ranks_of, worker_of
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.reports import Paused, Ready, WholeGroup
from odyssey.protocol.units import FIRST, Position, Result, position_after


def model_difference(models: Mapping[Rank, ModelSpec]) -> str | None:
    """Which ranks were given another model than the others, and the first layer or value that differs."""
    models = {rank: replace(model, optimizers=(), values=()) for rank, model in models.items()}
    first_rank = min(models)
    first = models[first_rank]
    others = {rank: model for rank, model in models.items() if model != first}
    if not others:
        return None
    rank = min(others)
    same = tuple(r for r, model in models.items() if model == others[rank])
    alike = tuple(r for r, model in models.items() if model == first)
    where = f"{ranks_text(same)} built another model than {ranks_text(alike)}"
    for i, (mine, its) in enumerate(zip(first.layers, others[rank].layers, strict=False)):
        if mine != its:
            return f"{where}: layer {i} ({mine.name}) differs"
    if len(first.layers) != len(others[rank].layers):
        return f"{where}: {len(others[rank].layers)} layers, expected {len(first.layers)}"
    if first.stream != others[rank].stream:
        return f"{ranks_text(same)} read other first samples of data than {ranks_text(alike)}"
    fields = [name for name in ModelSpec.__struct_fields__ if getattr(first, name) != getattr(others[rank], name)]
    values = f"{getattr(others[rank], fields[0])}, expected {getattr(first, fields[0])}"
    return f"{where}: {fields[0]} is {values}"


def difference_at_start(models: Mapping[Rank, ModelSpec]) -> tuple[str, str] | None:
    """What ranks with the same model were given differently all the same, and what to do about it: that no rank has trained
    yet is assumed. Values of a script's own model are no error, see `built_otherwise`."""
    first_rank = min(models)
    first = models[first_rank]
    for rank, model in sorted(models.items()):
        for mine, its in zip_longest(first.optimizers, model.optimizers, fillvalue="none"):
            if mine != its:
                that, this = _where_it_differs(its, mine), _where_it_differs(mine, its)
                makers = "the optimizer and scheduler be" if first.is_whole else "optimizer() and scheduler() make"
                return (
                    f"rank {rank} trains with {that}, rank {first_rank} with {this}",
                    f"let {makers} the same on all ranks: no learning rate that depends on the rank",
                )
        for layer, (mine, its) in enumerate(zip(first.values, model.values, strict=False)):
            if mine != its and not first.is_whole:
                return (
                    f"rank {rank} built layer {layer} ({first.layers[layer].name}) with other values than rank {first_rank}",
                    "let layers() depend on the seed only, not on the rank, the host or the time",
                )
    return None


def built_otherwise(models: Mapping[Rank, ModelSpec], plan: Plan, had_work: Set[Rank] = frozenset()) -> list[Move]:
    """From the first rank with a layer to those with it whose script has built its own model with other values, or which have
    not told theirs: they begin with that one's. `had_work`: if any had, in the Job before, it is the first of these, as the
    model may be the same; the others have what it was when they last had some, whatever they tell."""
    order = [rank for rank in sorted(models, key=lambda rank: (rank not in had_work, rank)) if models[rank].is_whole]
    its = {rank: models[rank].values if rank in had_work or not had_work else () for rank in order}
    moves = []
    for layer in range(plan.n_layers):
        having = [rank for rank in order if layer in plan.holds.get(worker_of(rank), ())]
        alike = {rank for rank in having if its[rank] and its[rank][layer : layer + 1] == its[having[0]][layer : layer + 1]}
        moves += [Move(layer, worker_of(having[0]), worker_of(rank)) for rank in having[1:] if rank not in alike]
    return moves


def _where_it_differs(words: str, others: str) -> str:
    """`AdamW(lr=0.02)` of all the settings, if the rest is the same."""
    kind, _, rest = words.partition("(")
    known = set(_SETTING.findall(others))
    settings = [setting for setting in _SETTING.findall(rest) if setting not in known]
    return f"{kind}({', '.join(settings)})" if settings and others.startswith(f"{kind}(") else words


_SETTING = re.compile(r"\w+=(?:\([^)]*\)|[^,;()])*")


def roll_forward_problem(
    paused: Mapping[Rank, Paused], results: tuple[Result, ...], handed: Collection[Rank] = ()
) -> str | None:
    """Why some survivor cannot be brought to the position behind the newest result; None if all can.

    A rank that passes the commit point needed everybody's contribution, so a holder of state is there, or one unit behind
    with everything of that unit done but its result. `handed`: ranks one unit behind that are given what they lack.
    """
    held = held_at_end(paused, results)
    holders = {rank: report for rank, report in paused.items() if held[rank]}
    if not holders:
        return None
    end = final_position(paused, results)
    newest = results[-1].position if results else None
    for rank, report in sorted(holders.items()):
        at = report.position
        if at == newest and report.phase != "contributed" and rank not in handed:
            return f"rank {rank} has not contributed to {at.in_words}, which others report as final ({report.phase})"
        if at in (end, newest):
            continue
        if end.is_before(at):
            return f"rank {rank} is at {at.in_words}, but no result before {at.in_words} was reported"
        return f"rank {rank} is at {at.in_words}, more than one call behind {end.in_words}"
    return None


def held_at_end(paused: Mapping[Rank, Paused], results: tuple[Result, ...]) -> dict[Rank, tuple[int, ...]]:
    """The layers that ranks have as they are behind the newest result.

    An idle rank that has not come there has none: Go has not reached it, so it has still what it gave away, and the others have
    trained that since. It lets go of it with the first unit that it hears of.
    """
    end = final_position(paused, results)
    return {rank: () if its.phase == "idle" and its.position != end else its.held for rank, its in paused.items()}


def final_position(paused: Mapping[Rank, Paused], results: tuple[Result, ...]) -> Position:
    """Behind the newest result; where there is none yet, where the ranks are."""
    if results:
        return position_after(results[-1])
    return max((report.position for report in paused.values()), default=FIRST)


def whole_groups(paused: Mapping[Rank, Paused]) -> dict[str, SumOver]:
    """Groups that serve on, by name: all their ranks are here, and each has said that nothing is under way in it."""
    members: dict[WholeGroup, set[Rank]] = {}
    for rank, report in paused.items():
        for group in report.whole:
            members.setdefault(group, set()).add(rank)
    return {
        group.name: SumOver(group.is_branch, tuple(sorted(WORKERS.any_of(ranks))))
        for group, ranks in sorted(members.items(), key=lambda item: item[0].name)
        if len(ranks) == group.n
    }


def gate_problem(
    plan: Plan, ready: Mapping[Rank, Ready], end: Position | None, held_before: Mapping[Rank, Collection[int]]
) -> str | None:
    """The first thing in which the ranks at the gate disagree with each other or with the plan; None: go.

    `held_before`: the layers that ranks had before the plan, which they let go only when it runs.
    """
    return next(_gate_problems(plan, ready, end, held_before), None)


def _gate_problems(
    plan: Plan, ready: Mapping[Rank, Ready], end: Position | None, held_before: Mapping[Rank, Collection[int]]
) -> Iterator[str]:
    at_work = sorted(WORKERS.ranks(plan.workers))
    expected = end if end is not None else ready[at_work[0]].position
    for rank, report in sorted(ready.items()):
        if report.problem:
            yield f"rank {rank} would not train what it holds: {report.problem}"
        if report.position != expected:
            yield f"rank {rank} stands at {report.position.in_words}, expected {expected.in_words}"
    digests: dict[int, dict[Rank, str]] = {}
    for rank, report in sorted(ready.items()):
        mine, planned = dict(report.digests), _shards(plan, plan.holds.get(worker_of(rank), ()))
        for shard in sorted(planned - set(mine)):
            yield f"rank {rank} lacks {_name(plan, shard)}, against the plan"
        for shard in sorted(set(mine) - planned - _shards(plan, held_before.get(rank, ()))):
            yield f"rank {rank} holds {_name(plan, shard)}, against the plan"
        for shard, digest in mine.items():
            digests.setdefault(shard, {})[rank] = digest
    for shard, by_rank in sorted(digests.items()):
        if len(set(by_rank.values())) > 1:
            texts = ", ".join(f"rank {rank} {digest}" for rank, digest in sorted(by_rank.items()))
            yield f"{_name(plan, shard)} differs between its holders: {texts}"
    yield from _reduction_problems(plan, ready, at_work)
    yield from _stream_problems(plan, ready, at_work)
    owner: dict[int, Rank] = {}
    for rank in at_work:
        for micro_batch, n_samples in ready[rank].samples:
            if micro_batch in owner:
                yield f"micro-batch {micro_batch} is run by {ranks_text([owner[micro_batch], rank])}"
            owner[micro_batch] = rank
            if not 0 <= micro_batch < plan.n_micro_batches or n_samples != plan.samples.n_of(micro_batch):
                yield f"rank {rank} counts {n_samples} samples in micro-batch {micro_batch}"
        if ready[rank].denominator != plan.global_batch:
            yield f"rank {rank} divides by {ready[rank].denominator} samples, the global batch is {plan.global_batch}"
    for micro_batch in range(plan.n_micro_batches):
        if micro_batch not in owner:
            yield f"micro-batch {micro_batch} is run by no rank"
    counted = sum(n_samples for rank in at_work for _, n_samples in ready[rank].samples)
    if counted != plan.global_batch:
        yield f"the ranks count {counted} samples in all, the global batch is {plan.global_batch}"


def _reduction_problems(plan: Plan, ready: Mapping[Rank, Ready], at_work: Sequence[Rank]) -> Iterator[str]:
    for g, group in enumerate(plan.reduce):
        contracts = {rank: dict(ready[rank].contracts).get(g) for rank in WORKERS.ranks(group.workers)}
        if None in contracts.values() or len(set(contracts.values())) > 1:
            texts = ", ".join(f"rank {rank} {contract}" for rank, contract in sorted(contracts.items()))
            yield f"the gradients of layers {list(group.layers)} are summed differently: {texts}"
    for rank in at_work:
        if foreign := set(dict(ready[rank].contracts)) - set(plan.groups_of.get(worker_of(rank), ())):
            yield f"rank {rank} takes part in reduction {min(foreign)}, against the plan"


def _stream_problems(plan: Plan, ready: Mapping[Rank, Ready], at_work: Sequence[Rank]) -> Iterator[str]:
    streams = {rank: ready[rank].stream for rank in at_work if ready[rank].stream is not None}
    if len(set(streams.values())) > 1:
        texts = ", ".join(f"rank {rank} {stream}" for rank, stream in sorted(streams.items()))
        yield f"the samples or random numbers of the next step differ: {texts}"
    for k in range(plan.n_micro_batches):
        for stage in (0, len(plan.pipelines[plan.home[k]].stages) - 1):
            for rank in ranks_of(plan.runner(k, stage)):
                if rank not in streams:
                    yield f"rank {rank} does not know the samples of micro-batch {k}"


def _shards(plan: Plan, held: Collection[int]) -> set[int]:
    """What digests of `held` layers are of: these, and the ties that they take part in, numbered behind all layers."""
    return {*held, *(plan.n_layers + t for t, tie in enumerate(plan.ties) if not set(held).isdisjoint(tie))}


def _name(plan: Plan, shard: int) -> str:
    return f"layer {shard}" if shard < plan.n_layers else f"tie {shard - plan.n_layers}"
