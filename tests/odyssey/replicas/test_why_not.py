"""What a rank knows by itself against going on without others, and when it says so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from launcher.coordinator.replicas import plan_of
from launcher.coordinator.state import JobState, World
from odyssey.errors import JobError
from odyssey.plan.worker import Rank, worker_of
from odyssey.protocol.orders import Finish, Pause, Prepare
from odyssey.protocol.reports import CannotGoOn, Paused, Report
from odyssey.protocol.units import Position, Result
from odyssey.replicas.group import ReplicaGroup
from odyssey.replicas.install import _Made
from odyssey.replicas.operation import Operation
from odyssey.replicas.replica import Replica
from odyssey.runtime.transaction import Transaction

N_RANKS = 4


class Link:
    """Keeps what is reported."""

    rank, reached_at = Rank(0), ""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def report(self, report: Report) -> None:
        self.reports.append(report)


class Given(Exception):
    """In the place of a wait that the agent ends."""


class Known(Replica):
    """In a script of four ranks, all of which have been seen, with a model in DDP."""

    def __init__(self, link: Link) -> None:
        super().__init__(cast(Any, link), N_RANKS, lambda: None, None)
        self._see(tuple(map(Rank, range(N_RANKS))))
        self.has_ddp = True

    def cannot_go_on(self, what: str) -> Any:
        self._link.report(CannotGoOn(self._link.rank, what))
        raise Given


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def replica(link: Link) -> Known:
    return Known(link)


def ranks(*numbers: int) -> frozenset[Rank]:
    return frozenset(map(Rank, numbers))


@pytest.mark.parametrize(
    ("members", "lost", "why"),
    [
        ((0, 1), (2,), ""),
        ((0, 1), (2, 3), ""),
        ((), (2,), ""),
        ((2, 3), (1,), "without rank 1 ranks of its group 'some' have other numbers"),
        ((0, 3), (2,), "without rank 2 ranks of its group 'some' have other numbers"),
        ((0, 1), (1, 2), "rank 1 was in its group 'some' of 2 ranks"),
        ((2, 3), (), ""),
        ((2, 3), (7,), ""),
    ],
)
def test_a_group_of_some_goes_on_where_its_ranks_keep_their_numbers(
    members: tuple[int, ...], lost: tuple[int, ...], why: str, replica: Known
) -> None:
    replica.partial_groups["some"] = ranks(*members)
    assert replica.why_not(ranks(*lost)) == why


def test_without_ddp_nobody_goes_on(replica: Known) -> None:
    replica.has_ddp = False
    assert replica.why_not(ranks()) == ""
    assert replica.why_not(ranks(2)).startswith("without DistributedDataParallel")


@pytest.mark.parametrize("lost", [(), (2,)])
def test_a_rank_tells_it_when_it_is_paused(lost: tuple[int, ...], link: Link, replica: Known) -> None:
    """Its script may be anywhere, and wait for what will never come."""
    replica.not_carried = "its DDP has static_graph"
    control = replica.session._control
    control.change(lambda phase: phase.preparing(1))
    control.change(lambda phase: phase.ready())
    control.change(lambda phase: phase.running(1))
    control.change(lambda phase: phase.left())
    control.handle(Pause(2, tuple(map(Rank, lost))))
    (paused,) = link.reports
    assert isinstance(paused, Paused) and paused.generation == 2
    assert paused.why_not == (replica.not_carried if lost else "")


def test_groups_are_not_built_for_a_script_that_cannot_go_on(link: Link, replica: Known) -> None:
    """A rank that never comes would be waited for there."""
    replica.not_carried = "its DDP has static_graph"
    job = JobState(World())
    job.plan = plan_of(job, 0, map(worker_of, replica.seen))
    replica.session.runner = cast(Any, SimpleNamespace(plan=job.plan, stop=lambda: None))
    replica.session._prepare(Prepare(2, plan_of(job, 5, map(worker_of, ranks(0, 1, 3))), (), ()), None)
    assert link.reports == [CannotGoOn(Rank(0), replica.not_carried)]


def making(replica: Known, members: list[int], link: Link, backend: str = "gloo") -> list[Any]:
    """What is known when torch begins to make a group of these, of some or by another backend."""
    made, known = _Made(link), list[Any]()
    made._replica = replica

    def helper(size: int, rank: int, ranks: list[int], its_backend: str, *others: Any, **named: Any) -> tuple[Any, Any]:
        assert its_backend == backend
        known.append(dict(replica.partial_groups) or replica.not_carried)
        return SimpleNamespace(), None

    made.around(helper)(len(members), 0, members, backend, None, "some")
    return known


def test_a_group_is_known_before_torch_makes_it(link: Link, replica: Known) -> None:
    assert making(replica, [1, 2], link) == [{"some": ranks(1, 2)}]


def test_no_group_is_made_with_a_rank_that_is_lost(link: Link, replica: Known) -> None:
    """The others would wait for it in torch."""
    replica.session._control.lost = ranks(2)
    assert making(replica, [0, 1], link) == [{"some": ranks(0, 1)}]
    with pytest.raises(Given):
        making(replica, [1, 2], link)
    assert link.reports == [CannotGoOn(Rank(0), "rank 2 was in its group 'some' of 2 ranks")]


@pytest.mark.parametrize("backend", ["nccl", "mine", "cpu:gloo,cuda:mine"])
def test_a_group_by_another_backend_stays_torchs_and_is_told_by_name(backend: str, link: Link, replica: Known) -> None:
    """A user's own backend, too, and one beside Gloo."""
    assert making(replica, [0, 1, 2, 3], link, backend) == [f"its group is by {backend}"]
    assert replica.why_not(ranks(2)) == f"its group is by {backend}"


class Wrapped(nn.Module):
    """It has a model in it, as DDP has."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)


def test_a_number_that_is_kept_is_served_where_no_model_trains(link: Link, replica: Known) -> None:
    """Or where the call that asks for it has counted the ranks itself."""
    before = replica.seen
    replica._see(tuple(map(Rank, (0, 1, 3))))
    assert replica.counted(3) == replica.seen
    assert replica.counted(4, just_now=True) == before
    with pytest.raises(Given):
        replica.counted(4)  # nothing of DDP tells
    models = [Wrapped(), Wrapped()]
    replica.modules.update(cast(Any, models))
    models[0].module.eval()
    with pytest.raises(Given):
        replica.counted(4)
    models[1].eval()
    with pytest.warns(UserWarning, match="keeps the number of ranks"):
        assert replica.counted(4) == before
    with pytest.raises(ValueError, match="5 tensors"):
        replica.counted(5)
    what = "a collective has places for 4 ranks, and there are 3: the script keeps their number"
    assert link.reports == [CannotGoOn(Rank(0), what)] * 2


@pytest.mark.parametrize("position", [Position(0, 0), Position(1, 0)])
def test_who_lacks_sums_that_others_have_ended_with_says_so(position: Position, link: Link, replica: Known) -> None:
    """Where nobody has made its unit, it is the script that calls what others do not."""
    control = replica.session._control
    for step in (
        lambda phase: phase.preparing(1),
        lambda phase: phase.ready(),
        lambda phase: phase.running(1),
        lambda phase: phase.left(),
        lambda phase: phase.entered("collective"),
        lambda phase: phase.broken(),
    ):
        control.change(step)
    unit = Transaction[Any](
        "collective",
        lambda member: (),
        lambda sums: (),
        lambda *_: None,
        0,
        is_told=False,
        began_s=None,
        receive=lambda *_: None,
    )
    finish = Finish(1, (Result(position, "collective", ()),))
    if position == replica.session.position:
        assert not replica.session._is_way_on(finish, unit)
        assert link.reports == [CannotGoOn(Rank(0), "it lacks what others have ended their scripts with")]
    else:
        with pytest.raises(JobError, match="ended their script"):
            replica.session._is_way_on(finish, unit)


class Making(Known):
    """Carries nothing out."""

    def make(self, kind: str, operations: Sequence[Operation]) -> None:
        pass


@pytest.mark.parametrize(("device", "is_carried"), [("cpu", True), ("meta", False)])
def test_tensors_of_a_device_are_not_carried(device: str, is_carried: bool, link: Link) -> None:
    replica = Making(link)
    group = ReplicaGroup(replica, 0, N_RANKS, cast(Any, SimpleNamespace(is_asked=False)))
    group.allreduce([torch.ones(2), torch.ones(2, device=device)])
    assert (replica.why_not(ranks(2)) == "") == is_carried
