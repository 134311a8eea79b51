"""Copies of a sharded model: as many as the ranks make, whoever is lost or comes back, and no rank with another's shard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import strategies
from odyssey.errors import StateLost
from odyssey.plan.moves import keep_runs
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.proof import prove
from perfmodel.profile.profile import Link, Profile
from perfmodel.transition.keeping import kept_of_all_s
from strategies import Moment
from strategies.copies import shares_of
from strategies.search import answer, best, search
from strategies.search.planned_losses import LossKind, answer_for, losses, symmetries
from strategies.situation import Candidate, Situation
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, sharded, situation, without
from tests.strategies.test_planned_losses import after, some_losses, whole_of


def job(n_shards: int, n_micro_batches: int, ranks_per_node: int = 2) -> Profile:
    sizes = {"parameter_bytes": 10**6, "gradient_bytes": 10**6, "optimizer_bytes": 2 * 10**6}
    rows = [layer(str(i), 0.01, 0.01, 0.01, **sizes) for i in range(n_shards)]
    link = Link(1e-5, 1e9)
    return sharded(profile(rows, 2 * n_micro_batches - 1, 2, intra=link, inter=link, ranks_per_node=ranks_per_node))


def started(of: Profile, n_workers: int) -> Plan:
    found = best(answer(situation(of, None, range(n_workers))))
    assert found is not None and found.plan is not None
    return found.plan


def check(plan: Plan, now: Situation) -> None:
    """Everybody has the shard of its number, and there are as many copies as that makes and as there is work for."""
    n_shards = len(now.profile.layers)
    there = {*now.alive, *plan.spawned}
    has_n = Counter(worker % n_shards for worker in there)
    prove(plan, now.held if now.plan is not None else None)
    assert plan.is_sharded
    assert all([worker % n_shards for worker in its.workers] == list(range(n_shards)) for its in plan.pipelines)
    assert len(plan.pipelines) == min(*(has_n[shard] for shard in range(n_shards)), plan.n_micro_batches)
    assert set(plan.workers) == there and plan.idle == ()
    assert all(plan.holds[worker] == {worker % n_shards} for worker in there)


# -- shares ------------------------------------------------------------------------------------------------------------


def partitions(n: int, n_parts: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """`n` as so many numbers from 1 on, descending."""
    if n_parts == 0:
        yield from [()] if n == 0 else []
        return
    for part in range(1, min(n, n if most is None else most) + 1):
        yield from ((part, *rest) for rest in partitions(n - part, n_parts - 1, part))


@given(n_shards=st.integers(2, 5), n_copies=st.integers(1, 5), n_more=st.integers(0, 12))
def test_no_copy_has_more_turns_than_the_best_way_to_share_takes(n_shards: int, n_copies: int, n_more: int) -> None:
    n_micro_batches = n_copies + n_more
    shares = shares_of(n_micro_batches, n_copies, n_shards)

    def n_turns(parts: tuple[int, ...]) -> int:
        return max(len(range(0, part, n_shards)) for part in parts)

    assert min(shares) >= 1 and sum(shares) == n_micro_batches and len(shares) == n_copies
    assert n_turns(tuple(shares)) == min(map(n_turns, partitions(n_micro_batches, n_copies)))


# -- the life of a job -------------------------------------------------------------------------------------------------


class Life:
    """Ranks of a job that are lost, leave and come back, one change after the other."""

    def __init__(self, of: Profile, n_workers: int) -> None:
        self.of, self.everyone = of, range(n_workers)
        first = situation(of, None, self.everyone)
        self.plan = started(of, n_workers)
        check(self.plan, first)
        assert self.plan.state_from is StateFrom.SCRIPT and self.plan.moves == ()

    def now(self, alive: list[int], *, respawnable: tuple[int, ...] = (), leaving: tuple[int, ...] = ()) -> Situation:
        """With what those hold who live, by the plan in force."""
        held = {worker: self.plan.holds.get(worker, frozenset()) for worker in (*alive, *leaving)}
        its = situation(self.of, self.plan, alive, respawnable=respawnable, held=held)
        node_of = {worker: worker // self.of.cluster.ranks_per_node for worker in self.everyone}
        lost = tuple(worker for worker in its.lost if worker not in leaving)
        return replace(its, lost=lost, leaving=leaving, node_of=node_of)

    @property
    def members(self) -> list[int]:
        return without(self.plan)

    @property
    def n_turns(self) -> int:
        """Turns of a step by the plan in force."""
        return max(len(range(0, len(its.micro_batches), self.plan.n_layers)) for its in self.plan.pipelines)

    def n_turns_of(self, workers: tuple[int, ...]) -> int:
        """With as many copies as these make."""
        n_shards = self.plan.n_layers
        n_copies = min(sum(worker % n_shards == shard for worker in workers) for shard in range(n_shards))
        return math.ceil(self.plan.n_micro_batches / (n_copies * n_shards))

    def lose(self, lost: set[int], *, can_return: bool) -> bool:
        """Whether the job goes on."""
        alive = [worker for worker in self.members if worker not in lost]
        now = self.now(alive, respawnable=tuple(sorted(lost)) if can_return else ())
        if {shard for worker in alive for shard in now.held[worker]} != set(range(len(self.of.layers))):
            with pytest.raises(StateLost, match="every holder of layer"):
                answer(now)
            return False
        table = answer(now)
        assert {row.strategy for row in table} <= {"copies", "unchanged"}
        for row in table:
            if row.plan is not None and row.strategy == "copies":
                check(row.plan, now)
        self._take(now)
        return True

    def come(self, newcomer: int) -> None:
        """A rank that was lost is there again, with nothing, while the others train."""
        now = replace(self.now(sorted((*self.members, newcomer))), is_running=True)
        assert now.arrived == (newcomer,)
        assert {row.strategy for row in answer(now)} == {"copies", "unchanged"}
        before = self.n_turns
        self._take(now)
        assert self.n_turns <= before
        if self.n_turns_of(now.alive) < before:
            assert self.n_turns == self.n_turns_of(now.alive), "it makes steps shorter, and is left idle"

    def leave(self, worker: int) -> bool:
        """Whether the job goes on: without the last one who has a shard it cannot."""
        staying = [other for other in self.members if other != worker]
        now = self.now(staying, leaving=(worker,))
        if worker % len(self.of.layers) not in {other % len(self.of.layers) for other in staying}:
            table = answer(now)
            missing = f"no rank is there for shard {worker % len(self.of.layers)} of {len(self.of.layers)}"
            assert best(table) is None and missing in {row.reason for row in table}
            return False
        self._take(now)
        return True

    def _take(self, now: Situation) -> None:
        found = best(answer(now))
        assert found is not None and found.plan is not None
        if found.strategy == "unchanged":
            before = now.plan
            assert before is not None and found.plan.pipelines == before.pipelines
            prove(found.plan, now.held)
            assert not now.is_hit and found.plan.keep_runs == before.keep_runs
        else:
            check(found.plan, now)
        self.plan = found.plan


@settings(max_examples=examples(60))
@given(n_shards=st.integers(2, 4), n_copies=st.integers(1, 4), n_more=st.integers(0, 3), data=st.data())
def test_the_ranks_that_live_make_as_many_copies_as_they_can(
    n_shards: int, n_copies: int, n_more: int, data: st.DataObject
) -> None:
    of = job(n_shards, data.draw(st.integers(1, 12), "micro-batches"), data.draw(st.sampled_from([1, 2, 3, 8]), "per node"))
    life = Life(of, n_shards * n_copies + n_more)
    for _ in range(data.draw(st.integers(1, 8), "changes")):
        gone = sorted(set(life.everyone) - set(life.members))
        what = data.draw(st.sampled_from(["lose", "lose", "lose two", "leave", *["come"] * bool(gone)]))
        if what == "come":
            life.come(data.draw(st.sampled_from(gone)))
        elif what == "leave":
            if not life.leave(data.draw(st.sampled_from(life.members))):
                return
        else:
            n = min(len(life.members), 2 if what == "lose two" else 1)
            lost = set(data.draw(st.permutations(life.members))[:n])
            if not life.lose(lost, can_return=data.draw(st.booleans())):
                return


def test_what_is_left_of_two_copies_makes_one_and_the_others_keep_their_shards() -> None:
    of = job(3, 12)
    plan = started(of, 9)
    assert [its.workers for its in plan.pipelines] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    found = best(search(situation(of, plan, without(plan, 1, 3))))
    assert found is not None and found.plan is not None
    assert [its.workers for its in found.plan.pipelines] == [(6, 7, 8), (0, 4, 2)]
    assert found.plan.keeps == {5: {2}} and found.plan.moves == () and found.plan.idle == ()


def test_who_has_kept_its_shard_comes_before_who_holds_nothing() -> None:
    of = job(2, 1)
    plan = started(of, 6)
    kept = [keep for run in plan.keep_runs for keep in run.keeps if keep.worker != 2]
    plan = prove(replace(plan, keep_runs=keep_runs(kept), idle=(2,)))
    again = best_plan(search(situation(of, plan, without(plan, 0))))
    assert [its.workers for its in again.pipelines] == [(4, 5)]
    assert {move.target for move in again.moves} == {2}, "it gets its shard, to keep it"


def test_copies_are_on_one_node_where_that_can_be() -> None:
    """Also where ranks that come back hold nothing yet, and others would be there with their shards."""
    of = job(2, 8)
    plan = started(of, 6)
    left = best_plan(search(situation(of, plan, without(plan, 1, 2))))
    assert [its.workers for its in left.pipelines] == [(4, 5), (0, 3)]
    apart = best_plan(search(situation(of, plan, without(plan, 1, 2), respawnable=[1, 2])))
    assert {its.workers for its in apart.pipelines} >= {(4, 5)}
    back = situation(of, plan, [0, 3, 4, 5, 1, 2], held={w: plan.holds[w] for w in (0, 3, 4, 5)})
    assert {its.workers for its in best_plan(search(replace(back, lost=(1, 2)))).pipelines} == {(0, 1), (2, 3), (4, 5)}


def test_a_rank_that_comes_back_is_waited_for_where_it_makes_a_copy_whole() -> None:
    of = job(2, 8)
    plan = started(of, 4)
    table = search(situation(of, plan, [0, 1, 3], respawnable=[2], seconds_to_change=3600.0))
    back = [row.plan for row in table if row.plan is not None and row.plan.spawned]
    assert [(its.spawned, len(its.pipelines), [(m.layer, m.source, m.target) for m in its.moves]) for its in back] == [
        ((2,), 2, [(0, 0, 2)])
    ]
    in_vain = search(situation(of, best_plan(search(situation(of, plan, [0, 1, 3]))), [0, 1], respawnable=[3]))
    assert "who comes back makes no copy whole" in {row.reason for row in in_vain}


def best_plan(table: list[Candidate]) -> Plan:
    found = best(table)
    assert found is not None and found.plan is not None
    return found.plan


def test_before_the_first_step_who_is_left_begins_anew_where_that_makes_a_copy() -> None:
    of = job(2, 8)
    plan = started(of, 4)
    anew = replace(situation(of, plan, [1, 2], held={1: frozenset({1}), 2: frozenset()}), untrained=True)
    again = best_plan(answer(anew))
    assert again.state_from is StateFrom.SCRIPT and [its.workers for its in again.pipelines] == [(2, 1)]
    table = answer(replace(situation(of, plan, [1, 3]), untrained=True))
    assert [(row.plan, row.reason) for row in table] == [(None, "no rank is there for shard 0 of 2")]


def test_of_more_copies_than_micro_batches_the_last_keep_their_shards() -> None:
    """So it stays where a rank is lost: nobody is told that there is no plan."""
    of = job(2, 2)
    plan = started(of, 8)
    assert [its.workers for its in plan.pipelines] == [(0, 1), (2, 3)] and set(plan.keeps) == {4, 5, 6, 7}
    after_a_loss = best_plan(answer(situation(of, plan, without(plan, 1))))
    assert [its.workers for its in after_a_loss.pipelines] == [(2, 3), (4, 5)] and after_a_loss.moves == ()


def test_of_a_step_that_is_cut_nothing_is_kept() -> None:
    of = job(2, 8)
    plan = started(of, 4)
    found = best(search(situation(of, plan, without(plan, 2))))
    assert found is not None and found.estimate is not None and found.estimate.kept_s == 0.0
    assert kept_of_all_s(plan, 100.0) == 0.0
    assert kept_of_all_s(replace(plan, is_sharded=False), 100.0) > 0.0, "of layers there would be something"


def test_after_the_next_loss_steps_are_those_of_the_copies_that_are_left() -> None:
    """No rank takes over the micro-batches of a lost one's stage."""
    of = job(2, 12, ranks_per_node=100)
    found = best(answer(situation(of, None, range(6))))
    assert found is not None and found.at_next_loss is not None and found.estimate is not None
    survived = [its for its in found.at_next_loss.next_losses if not its.restart_s]
    assert [its.step_s for its in survived] == [pytest.approx(3 * 0.03)] and not survived[0].is_own
    assert found.estimate.step_s == pytest.approx(2 * 0.03, rel=0.1)


# -- losses that are alike -----------------------------------------------------------------------------------------------


@st.composite
def wholes(draw: st.DrawFn) -> Situation:
    """A job that has lost some ranks or none. Of those that are in no copy some may idle, as who has come and is not needed."""
    n_shards, n_copies, n_more = draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    of = job(n_shards, draw(st.integers(1, 12)))
    n_workers = n_shards * n_copies + n_more
    plan = started(of, n_workers)
    if draw(st.booleans()):
        try:
            plan = best_plan(search(situation(of, plan, without(plan, draw(st.integers(0, n_workers - 1))))))
        except StateLost:
            assume(False)
    idle = tuple(worker for worker in sorted(plan.keeps) if draw(st.booleans()))
    keeps = [keep for run in plan.keep_runs for keep in run.keeps if keep.worker not in idle]
    plan = prove(replace(plan, idle=idle, keep_runs=keep_runs(keeps)))
    node_of = {worker: draw(st.integers(0, 2)) for worker in range(n_workers)}
    return replace(whole_of(of, plan, node_of), slow=draw(st.sampled_from([{}, {0: 1.5}])))


@settings(max_examples=examples(60))
@given(wholes(), st.booleans())
def test_a_plan_for_a_loss_is_under_new_names_one_for_a_loss_that_is_alike(whole: Situation, returns: bool) -> None:
    alike = symmetries(whole)
    classes: dict[bytes, list[tuple[int, ...]]] = {}
    for lost in some_losses(whole):
        classes.setdefault(alike.key(lost), []).append(lost)
    for first, *others in classes.values():
        for lost in others[-2:]:
            names = alike.names(first, lost)
            assert names is not None
            assert all(old % whole.profile.n_shards == new % whole.profile.n_shards for old, new in names.items())
            there, here = (after(whole, gone, gone if returns else ()) for gone in (first, lost))
            try:
                table = search(there)
            except StateLost:
                with pytest.raises(StateLost):
                    search(here)
                continue
            check_renamed(answer_for(table, names, here.generation, here.step), here)


def check_renamed(table: list[Candidate], here: Situation) -> None:
    """What was found for another loss is as good here as what is found here."""
    for row in table:
        if row.plan is not None and row.estimate is not None:
            if row.strategy == "copies":
                check(row.plan, here)
            priced = price(row.plan, here.profile, seconds_to_change=3600.0, node_of=here.node_of, slow=here.slow)
            assert priced.step_s == pytest.approx(row.estimate.step_s) and priced.peak_bytes == row.estimate.peak_bytes
    mine, direct = best(table), best(search(here))
    assert mine is not None and direct is not None and mine.estimate is not None and direct.estimate is not None
    assert mine.estimate.step_s == pytest.approx(direct.estimate.step_s)


def test_ranks_with_one_shard_are_alike_and_those_with_others_are_not() -> None:
    """Three copies, of which two have as many micro-batches, and beside them who idles: two of a shard, and one of another. Who
    keeps its shard is like none of these."""
    of = job(2, 10, ranks_per_node=100)
    plan = started(of, 7)
    assert set(plan.keeps) == {6} and [len(its.micro_batches) for its in plan.pipelines] == [4, 4, 2]
    working = [((0,), 2), ((1,), 2), ((4,), 1), ((5,), 1)]
    idle = prove(replace(plan, keep_runs=(), idle=(6, 7, 8)))
    assert classes_of_ranks(whole_of(of, idle, dict.fromkeys(range(9), 0))) == [*working, ((6,), 2), ((7,), 1)]
    keeping = prove(replace(plan, idle=(7, 8)))
    assert classes_of_ranks(whole_of(of, keeping, dict.fromkeys(range(9), 0))) == [*working, ((6,), 1), ((7,), 1), ((8,), 1)]


def classes_of_ranks(whole: Situation) -> list[tuple[tuple[int, ...], int]]:
    found = losses(symmetries(whole), False).values()
    return sorted((its.lost, its.n_alike) for its in found if its.kind is LossKind.RANK)


# -- who is asked --------------------------------------------------------------------------------------------------------


def test_for_a_sharded_model_copies_are_asked_and_no_other_strategy() -> None:
    of = job(2, 8)
    plan = started(of, 4)
    lost = situation(of, plan, without(plan, 2))
    assert {row.strategy for row in answer(situation(of, None, range(4)))} == {"copies"}
    assert {row.strategy for row in search(replace(lost, respawnable=(2,)))} == {"copies"}
    slow = replace(situation(of, plan, without(plan)), slow={1: 3.0})
    assert {row.strategy for row in search(slow)} == {"unchanged"}


def test_copies_are_not_asked_for_another_model() -> None:
    of = replace(job(2, 8), n_shards=0)
    plan = first_plan(of, "2x2", 4)
    lost = situation(of, plan, without(plan, 2))
    assert "copies" not in {row.strategy for row in answer(situation(of, None, range(4)))}
    assert "copies" not in {row.strategy for row in search(lost)}
    assert [(row.plan, row.reason) for row in search(lost, "copies")] == [(None, "the model is not sharded")]


def test_a_script_with_one_whole_model_is_not_sharded() -> None:
    whole = replace(job(2, 8), n_shards=1)
    assert whole.is_whole and not whole.is_sharded
    assert sharded(whole).is_sharded and not sharded(whole).is_whole


def test_a_strategy_that_is_asked_for_by_name_says_that_the_model_is_sharded_and_the_job_goes_on_with_copies() -> None:
    of = job(2, 8)
    plan = started(of, 4)
    lost = situation(of, plan, without(plan, 2))
    assert [(row.strategy, row.plan, row.reason) for row in search(lost, "reroute")] == [
        ("reroute", None, "the model is sharded")
    ]
    table = answer(lost, "reroute")
    assert best_plan(table) == best_plan(answer(lost))
    assert {row.strategy: row.reason for row in table if row.plan is None} == {"reroute": "the model is sharded"}
    assert best_plan(answer(lost, "copies")) == best_plan(answer(lost))


def test_copies_are_no_value_of_the_option() -> None:
    assert not any("copies" in strategies.names(moment) for moment in Moment)
    asked = {moment: strategies.names(moment, sharded=True) for moment in Moment}
    copies = ("copies",)
    assert asked == {Moment.START: copies, Moment.PROPOSE: copies, Moment.GROW: copies, Moment.SLOW: (), Moment.PROTECT: ()}
    assert strategies.load("copies").is_sharded and not strategies.load("reroute").is_sharded


def test_who_stands_by_is_in_no_copy() -> None:
    of = job(2, 8)
    plan = best_plan(answer(replace(situation(of, None, range(6)), n_spares=2)))
    assert [its.workers for its in plan.pipelines] == [(0, 1), (2, 3)] and plan.idle == (4, 5) and not plan.keeps


def test_a_first_plan_has_the_layout_that_was_asked_for_or_says_which_it_has() -> None:
    of = job(2, 8)
    asked = answer(situation(of, None, range(4)), layout="2x2")
    assert len(best_plan(asked).pipelines) == 2
    other = answer(situation(of, None, range(4)), layout="1x2")
    assert [(row.plan, row.reason) for row in other] == [(None, "layout 2x2, where 1x2 was asked for")]
