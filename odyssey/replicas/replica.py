"""A rank of a script with a loop of its own: it holds all there is, and takes part in every unit."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odyssey.errors import OdysseyError
from odyssey.model.packing import digest
from odyssey.plan.plan import Plan
from odyssey.plan.rest import Rest, Summed
from odyssey.plan.schedule import Op
from odyssey.plan.worker import Rank, Worker, all_ranks_of, ranks_of
from odyssey.protocol.link import AgentLink
from odyssey.protocol.model_spec import Boundary, LayerSpec, ModelSpec
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import CannotGoOn, Measured, Ready, Report, Saved
from odyssey.protocol.units import Position
from odyssey.replicas.backward import Backward
from odyssey.replicas.operation import Kept, Operation, Sum, handed_on
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.session import Session
from odyssey.runtime.transaction import Transaction
from odyssey.runtime.transfer import Moved
from odyssey.runtime.transport import gloo_device

_SPEC = ModelSpec(
    layers=(LayerSpec("the script's model", "", 0, 0, 0),),
    ties=(),
    tie_bytes=(),
    global_batch=1,
    micro_batch=1,
    n_samples=1,
    seed=0,
    device="cpu",
    replicas=True,
)
_TWICE = "the script keeps the number of ranks: what it evaluates has the first rank's values in the place of each that is lost"
_GATHERED = "what is gathered while it trains is of other ranks than are left, which have other numbers then"


class Member:
    """The part of this rank in one generation: a Runner, and the Peers of operations."""

    def __init__(self, plan: Plan, worker: Worker, groups: Groups) -> None:
        self.plan = plan
        self.worker = worker
        (self.rank,) = ranks_of(worker)
        self.groups = groups
        self.now: tuple[Op | str, float] = ("between collectives", time.monotonic())
        self.begun: set[Operation] = set()
        self.ranks = all_ranks_of(plan.workers)
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._alone = None if len(self.ranks) > 1 else _group_of_one()

    def start(self, operation: Callable[[Any], Any]) -> Any:
        """In the group of all. Raises Cut."""
        self.groups.waiter.check()
        if self._alone is not None:
            return operation(self._alone)
        with _telling_refusals():
            return self.groups.over(self.plan.workers, operation)

    def wait(self, works: Sequence[Any]) -> None:
        """Raises Cut."""
        with _telling_refusals():
            self.groups.waiter.wait(lambda: [work.wait() for work in works])

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory that was used before, if there is some: new pages cost more than the copy."""
        if tensor.is_sparse:
            return tensor.detach().clone()
        free = self._free[tensor.shape, tensor.dtype]
        own = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        return own.copy_(tensor.detach())

    def free(self, copies: Sequence[torch.Tensor]) -> None:
        """Keeps them for the next."""
        for own in copies:
            if not own.is_sparse:
                self._free[own.shape, own.dtype].append(own)

    def stop(self) -> None:
        """What is under way was cut."""
        for operation in tuple(self.begun):
            operation.let_go()


@contextmanager
def _telling_refusals() -> Iterator[None]:
    """Have the script see torch's own error where torch refuses an operation, for its type say: connections end by errors of
    Gloo's transport, which are told with their place in it. Raises Cut for these."""
    try:
        yield
    except Cut as cut:
        if isinstance(error := cut.__cause__, RuntimeError) and "gloo/transport" not in str(error):
            raise error from None
        raise


def _receive(sums: Sequence[Sum], groups: Groups, giver: Worker) -> None:
    for its in sums:
        its.take_over(lambda tensor: groups.waiter.wait(_send_on(groups, giver, tensor).wait))


def _send_on(groups: Groups, giver: Worker, tensor: torch.Tensor) -> Any:
    """From one to all in these groups."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = groups.needs.members.index(giver), 0
    return groups.over(groups.needs.members, lambda group: group.broadcast([tensor], options))


def _digest(modules: Iterable[nn.Module]) -> str:
    found = sorted(digest(dict(module.named_parameters())) for module in modules)
    return hashlib.blake2b(" ".join(found).encode(), digest_size=8).hexdigest()


def _group_of_one() -> Any:
    """Torch's: operations need no special case where only one rank is left."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo_device("")]
    options._timeout = timedelta(hours=1)
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)  # type: ignore[attr-defined]


class NoNewcomers:
    """The part of a State that has to do with ranks which join: here none does."""

    has_adopted = False

    def joining(self) -> None:
        """No rank joins later."""

    def replaying(self) -> None:
        """None of them."""

    def replayed(self) -> None:
        """There was nothing to pass."""

    def difference(self, runner: Member, kind: str) -> str:
        """None is looked for."""
        return ""


class Replica(NoNewcomers):
    """The State of its session. `seen`: the ranks that the script counts: those that the newest unit was made by."""

    def __init__(self, link: AgentLink, n_at_first: int, renumber: Callable[[], None], before: Session[Member] | None) -> None:
        """`n_at_first`: ranks of the script. `renumber`: what its group is, and where this rank is in it, has changed.
        `before`: of groups that it had before these."""
        self._link = link
        self._renumber = renumber
        self.modules: WeakSet[DistributedDataParallel] = WeakSet()
        """What DDP holds equal on all ranks."""
        self.has_ddp = False
        self.not_carried = ""
        """Why the script cannot go on after a loss."""
        self.has_lost = False
        """Ranks have other numbers than they had at first."""
        self.has_saved = False
        """The script has written a file since its last step."""
        self.is_immediate = False
        """Reductions of a backward become final one by one, and not together."""
        self.partial_groups: dict[str, frozenset[Rank]] = {}
        """Groups of torch's own with some ranks only, by name, from before they are made."""
        self._step_began_s: float | None = None
        self._kept = Kept()
        self.seen: tuple[Rank, ...] = ()
        self._seen_before = {n_at_first: tuple(map(Rank, range(n_at_first)))}
        self.backward = Backward(self._make_step)
        self.session: Session[Member] = Session(link, link.rank, self, before)

    # -- units, in the script's thread ------------------------------------------------------------------------------------

    def _make_step(self, operations: list[Operation], is_first: bool) -> None:
        """What comes behind the first unit of a backward could not be begun anew together with it."""
        if is_first:
            self.backward.begun_by = self.seen
        else:
            self.not_carried = self.not_carried or "it reduces again upon what it has reduced, within a backward"
            if self.seen != self.backward.begun_by:  # by whose number it may divide this
                self.cannot_go_on(self.not_carried)
        self.make("backward" if is_first else "collective", operations)

    def make(self, kind: str, operations: Sequence[Operation]) -> None:
        """They are one unit."""
        if self.backward.gathered_by and self._evaluates:
            self.backward.gathered_by = ()

        def body(member: Member) -> Sequence[float]:
            if self.backward.gathered_by not in ((), member.ranks):
                self.cannot_go_on(_GATHERED)
            member.now = (operations[0].name, time.monotonic())
            for operation in operations:
                operation.start(member)
            if works := [work for operation in operations for work in operation.works]:
                member.wait(works)
            return ()

        sums = handed_on(operations, self.session.position)

        def take(member: Member, values: tuple[float, ...]) -> None:
            for operation in operations:
                operation.put()
            for its in self._kept.sums:
                its.free(member)  # nobody comes to the end of a unit before all have the one before (I13)
            self._kept = Kept([each for each in operations if isinstance(each, Sum)], bool(sums))
            self._see(member.ranks)
            member.now = ("between collectives", time.monotonic())

        is_step = kind == "backward"
        # One rank tells of steps, for all: which units are final is told by whoever pauses.
        is_told = is_step and self.member.rank == min(self.member.ranks)
        began_s, receive = self._step_began_s if is_step else None, partial(_receive, sums) if sums else None
        try:
            self.session.run(Transaction(kind, body, lambda sums: (), take, 0, is_told, began_s, receive=receive))
        except Exception:  # torch has refused it
            for operation in operations:
                operation.let_go()
            raise
        for operation in operations:
            operation.tell()
        if is_step:
            self._step_began_s = time.monotonic()
            if self.has_saved:
                self.has_saved = False
                self._link.report(Saved(self._link.rank, self.session.position[0]))

    def counted(self, n: int, *, just_now: bool = False) -> tuple[Rank, ...]:
        """The ranks that the script has `n` places for in what it begins now. It may have counted them when there were more: in
        the call that makes this, `just_now`; or long ago, and then the first one's values would come in the place of others for
        ever, which is for evaluations only. Raises ValueError."""
        if n == len(self.seen):
            return self.seen
        if n not in self._seen_before:
            raise ValueError(f"{n} tensors, where there are {len(self.seen)} ranks")
        if not just_now and not self._evaluates:
            there = f"there are {len(self.seen)}"
            self.cannot_go_on(f"a collective has places for {n} ranks, and {there}: the script keeps their number")
        if not just_now and self._link.rank == self.seen[0]:
            warnings.warn(_TWICE, stacklevel=1)  # once, as the place is the same
        return self._seen_before[n]

    def gathers(self) -> None:
        """The script gets something of each rank. Where it trains it may find its own part by its number, in its loss or in the
        backward of that: so until one is final all are to have the numbers that they have now."""
        if any(ddp.module.training for ddp in self.modules):
            self.backward.gathered_by = self.seen

    @property
    def _evaluates(self) -> bool:
        """Whether none of its models is in training mode, as DDP itself may be where the script has called `eval` of what is in
        it."""
        return bool(self.modules) and not any(ddp.module.training for ddp in self.modules)

    @property
    def member(self) -> Member:
        """In the generation that this rank knows of."""
        member = self.session.runner
        assert member is not None
        return member

    def does_not_carry(self, what: str) -> None:
        """This is in the script: a loss is a restart, also one that has been."""
        self.not_carried = what
        if self.has_lost:
            self.cannot_go_on(what)

    def cannot_go_on(self, what: str) -> NoReturn:
        """Have all ranks started again, this one among them."""
        self._link.report(CannotGoOn(self._link.rank, what))
        threading.Event().wait()  # ended by the agent
        raise AssertionError("nobody sets it")

    # -- State ------------------------------------------------------------------------------------------------------------

    device = torch.device("cpu")
    spec = _SPEC
    held = frozenset({0})
    changes_between_units = True

    def summed(self) -> tuple[Summed, ...]:
        """Nothing of a unit that was cut is kept."""
        return ()

    def forget_unit(self) -> None:
        """Operations end by themselves."""

    def measure(self, order: Measure, worker: Worker, groups: Groups) -> Measured:
        """There is no order for it."""
        raise OdysseyError("a script's own loop was to be measured", "please report this bug")

    def built(self, plan: Plan, since_s: float, kept_members: int = 0) -> None:
        """Nothing waits for it."""

    def why_not(self, lost: Collection[Rank]) -> str:
        """All ranks have made the same groups, of which torch numbers the members by their numbers among all ranks."""
        gone = sorted(set(lost).intersection(self.seen))
        if not gone:
            return ""
        if self.not_carried:
            return self.not_carried
        if not self.has_ddp:
            return "without DistributedDataParallel nothing tells that each rank has the whole model"
        for name, ranks in tuple(self.partial_groups.items()):
            if its := ranks.intersection(gone):
                return f"rank {min(its)} was in its group {name!r} of {len(ranks)} ranks"
            if any(rank > gone[0] for rank in ranks):
                return f"without rank {gone[0]} ranks of its group {name!r} have other numbers"
        return ""

    def let_go(self, runner: Member, plan: Plan, rest: Rest | None) -> None:
        """Here it is known who goes on."""
        if set(self.seen).difference(all_ranks_of(plan.workers)):
            self.has_lost = True

    def take_on(self, plan: Plan, worker: Worker, groups: Groups) -> Moved:
        """Each rank has everything."""
        return Moved()

    def runner(self, plan: Plan, worker: Worker, groups: Groups, boundaries: Iterable[Boundary], rest: Rest | None) -> Member:
        """For the generation of `plan`."""
        member = Member(plan, worker, groups)
        if not self.seen:
            self._see(member.ranks)
            self.has_lost = member.ranks != tuple(range(len(member.ranks)))
        return member

    def _see(self, ranks: tuple[Rank, ...]) -> None:
        if ranks != self.seen:
            self.seen = self._seen_before[len(ranks)] = ranks
            self._renumber()

    def ready(self, runner: Member, position: Position, *, groups_s: float, moves_s: float, moved: Moved) -> Ready:
        """All are at the beginning of the same unit, so what DDP holds equal must be equal."""
        started_s = time.monotonic()
        plan = runner.plan
        mine = [k for k in range(plan.n_micro_batches) if plan.runner(k, 0) == runner.worker]
        return Ready(
            rank=runner.rank,
            generation=plan.generation,
            position=position,
            digests=((0, _digest(self.modules)),),
            samples=tuple((k, plan.samples.n_of(k)) for k in mine),
            denominator=len(runner.ranks),
            groups_s=groups_s,
            moves_s=moves_s,
            moved_bytes=0,
            contracts=((0, str(runner.ranks)),),
            stream="the script's own",
            proof_s=time.monotonic() - started_s,
        )

    @property
    def hands_on(self) -> bool:
        """Whether others may lack sums that this rank has."""
        return self._kept.may_be_lacked

    def hand_on(self, groups: Groups) -> None:
        """Give the newest unit's sums, which are to the bit what the script here has got (I14)."""
        for its in self._kept.sums:
            for tensor in its.sums:
                _send_on(groups, self.session.worker, tensor).wait()

    def run_only(self, runner: Member) -> None:
        """At the gate all had the newest unit."""
        self._kept = Kept()

    def interrupted(self, runner: Member, cut: Cut) -> Report | None:
        """Nothing beside."""
        return None

    def close(self) -> None:
        """Nothing goes on beside the script."""

    def reports(self, runner: Member) -> Iterator[Report]:
        """None."""
        return iter(())
