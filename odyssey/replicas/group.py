"""The group that a script sees in the place of one of torch's: its calls are operations of the ranks that are there.

Torch calls these methods from Python and from C++, so their names and arguments are torch's. Numbers of ranks in them are the
script's: places in `seen`, which changes behind a unit and never within one. Where a rank was lost since, what it would have
given is missing in sums; where the script wants something of each rank, it gets what the first one has given once more, if it
does not train by that.
"""

# mypy: disable-error-code="override, assignment"
# Torch's stubs have each of these calls in several forms, of which the one with lists is what torch.distributed makes.

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from odyssey.plan.worker import Rank
from odyssey.replicas.backward import Awaited, hook_of, n_for_ddp
from odyssey.replicas.compiled import is_compiled_in
from odyssey.replicas.fsdp import is_of_shards
from odyssey.replicas.operation import Add, Begin, Operation, Peers, Sum, copies, fill, nothing
from odyssey.replicas.optimizer_step import is_in_step
from odyssey.replicas.replica import Replica
from odyssey.replicas.second_thread import SecondThread, in_its_thread
from odyssey.replicas.sized_objects import as_sized, is_of_objects, is_of_scattered_objects, is_of_shapes
from odyssey.runtime.cut import Cut
from odyssey.runtime.script_group import ScriptGroup

BACKEND = "odyssey"
Tensors = list[torch.Tensor]
_NOT_ASKED = "a hook in its backward sums without asking for the number of ranks, which it may have kept to divide by"
_SHARED_OUT = "its optimizer has collectives of its own: each rank may have a part of its state"
_COMPILED = "its compiled code has asked for a number of ranks, and keeps that"
_SHARDED = "its model is sharded by FSDP: no other rank has what a lost one had of it"


class ReplicaGroup(ScriptGroup):
    """All ranks of the script, `n_at_first` of them when it is made."""

    def __init__(self, replica: Replica, rank: int, n_at_first: int, second_thread: SecondThread) -> None:
        super().__init__(rank, n_at_first, BACKEND)
        self._replica = replica
        self.second_thread = second_thread
        self._n_at_first = n_at_first
        """What DDP's C++ divides by, whoever is lost later."""

    # -- who --------------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Ranks that the script counts. DDP's C++ in a backward always divides by those at first, which `Sum` puts right."""
        self._look_who_asks()
        n = len(self._replica.seen)
        if not n_for_ddp():
            return n
        hook = hook_of(sys._getframe())
        return self._n_at_first if hook is None else self._replica.backward.answer(hook, n)

    def rank(self) -> int:
        """This one's place among them."""
        self._look_who_asks()
        return self._replica.seen.index(self._replica.session.rank)

    def _look_who_asks(self) -> None:
        if is_compiled_in(sys._getframe(2)):
            self._replica.does_not_carry(_COMPILED)

    # -- sums -------------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """In place. What was divided by the ranks that there were, as DDP does in a backward, is scaled to those there are."""
        opts = opts or dist.AllreduceOptions()
        return self._sum("all_reduce", tensors, opts, lambda group, own: group.allreduce(own, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """In place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._sum("all_reduce_coalesced", tensors, opts, lambda group, own: group.allreduce_coalesced(own, opts))

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """In place, on the root."""
        is_root = opts.rootRank == self.rank()

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            own, its = copies(tensors), self._options(dist.ReduceOptions(), opts, peers)
            its.reduceOp = opts.reduceOp
            work = peers.start(lambda group: group.reduce(own, its))
            return work, partial(fill, tensors, own) if is_root else nothing

        return self._run("reduce", begin, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        """Each of these gets its part of the sum."""
        self._replica.gathers()
        reduce_op = (opts or dist.ReduceScatterOptions()).reduceOp
        places = self._places(inputs)

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            # In sums of all parts, as Gloo has nothing else on every version of torch.
            own = [torch.stack(_of(peers, parts, its)) for parts, its in zip(inputs, places, strict=True)]
            options = dist.AllreduceOptions()
            options.reduceOp = reduce_op
            mine = peers.ranks.index(self._replica.session.rank)
            works = [peers.start(partial(_allreduce, [each], options)) for each in own]
            return _Several(works), lambda: _fill_noted(outputs, [each[mine] for each in own])

        return self._run("reduce_scatter", begin, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        parts = list(input.reshape(self._n_parts(input, output), *output.shape).unbind())
        return self.reduce_scatter([output], [parts], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """One after the other."""
        return [self._reduce_scatter_base(output, input, opts) for output, input in zip(outputs, inputs, strict=True)][-1]

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _sum(self, name: str, tensors: Tensors, opts: Any, add: Add) -> Any:
        if not n_for_ddp():
            return self._start(Sum(name, tensors, add, 0))
        hook = hook_of(sys._getframe(2))
        divided_by = self._divided_by(hook) if opts.reduceOp == dist.ReduceOp.SUM else 0
        is_read = hook is None and not self._replica.is_immediate
        return self._start(Sum(name, tensors, add, divided_by, is_read=is_read))

    def _divided_by(self, hook: CodeType | None) -> int:
        """By which number of ranks a sum in a backward is divided, before or after it; 0 for none."""
        if hook is None:
            return self._n_at_first
        n = self._replica.backward.answered(hook)
        if not n and self._replica.backward.is_first:  # else it reduces upon what it has reduced, which is not carried either
            self._replica.does_not_carry(_NOT_ASKED)
        return n

    # -- what one has, or all have -----------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """In place."""

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            own, its = copies(tensors), self._options(dist.BroadcastOptions(), opts, peers)
            its.rootTensor = opts.rootTensor
            return peers.start(lambda group: group.broadcast(own, its)), partial(fill, tensors, own)

        return self._run("broadcast", begin, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """What each rank has, in its place."""
        self._replica.gathers()
        are_sized = is_of_objects(inputs)
        places = self._places(outputs, just_now=are_sized or is_of_shapes())

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            own = copies(inputs)
            found = [[torch.empty_like(each) for _ in peers.ranks] for each in own]
            work = peers.start(lambda group: group.allgather(found, own))

            def put() -> None:
                for output, each, its in zip(outputs, found, places, strict=True):
                    _fill_noted(output, _from(peers, each, its))

            return work, put

        return self._run(
            "all_gather",
            as_sized(begin, self._replica) if are_sized else begin,
            [tensor for output in outputs for tensor in output],
        )

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        parts = output.view(self._n_parts(output, input), *input.shape).unbind()
        return self.allgather([list(parts)], [input])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """One after the other."""
        works = [self._allgather_base(output, input) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """One after the other; `outputs` has a list of all for each rank."""
        return [self.allgather([list(each)], [own]) for *each, own in zip(*outputs, inputs, strict=True)][-1]

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """What each rank has, in its place, on the root."""
        self._replica.gathers()
        is_root = opts.rootRank == self.rank()
        are_sized = is_of_objects(inputs)
        places = self._places(outputs, just_now=are_sized)

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            own, its = copies(inputs), self._options(dist.GatherOptions(), opts, peers)
            found = [[torch.empty_like(own[0]) for _ in peers.ranks]] if is_root else []
            work = peers.start(lambda group: group.gather(found, own, its))

            def put() -> None:
                for output, each, its in zip(outputs, found, places, strict=True):
                    _fill_noted(output, _from(peers, each, its))

            return work, put

        return self._run(
            "gather",
            as_sized(begin, self._replica) if are_sized else begin,
            [tensor for output in outputs for tensor in output],
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """From the root."""
        places = self._places(inputs, just_now=is_of_scattered_objects())

        def begin(peers: Peers) -> tuple[Any, Callable[[], None]]:
            own, its = copies(outputs), self._options(dist.ScatterOptions(), opts, peers)
            parts = [_of(peers, each, ranks) for each, ranks in zip(inputs, places, strict=True)]
            return peers.start(lambda group: group.scatter(own, parts, its)), partial(fill, outputs, own)

        return self._run("scatter", begin, outputs)

    def barrier(self, opts: Any = None) -> Any:
        """To be final needs all."""
        return self._run("barrier", lambda peers: (None, nothing), [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """The same: who hangs is found by the agent."""
        self.barrier()

    # -- what is not ours to carry -----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Any:
        """To one rank; what is under way in a loss is gone."""
        return self._pass("send", lambda group, numbers: group.send(tensors, numbers[to], tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """From one rank."""
        return self._pass("recv", lambda group, numbers: group.recv(tensors, numbers[source], tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """From whoever sends."""
        return self._pass("recv", lambda group, numbers: group.recv_anysource(tensors, tag))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Each rank has something for each."""
        self._replica.gathers()
        return self._pass("all_to_all", lambda group, _: group.alltoall(outputs, inputs, opts or dist.AllToAllOptions()))

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Each rank has something for each."""
        self._replica.gathers()
        its = opts or dist.AllToAllOptions()
        return self._pass(
            "all_to_all_single", lambda group, _: group.alltoall_base(output, input, output_splits, input_splits, its)
        )

    all_to_all_single = alltoall_base

    def _pass(self, name: str, start: Callable[[Any, dict[int, int]], Any]) -> Any:
        self._look(())
        member = self._replica.member
        if self._replica.has_lost:
            self._replica.cannot_go_on(f"a {name} is between ranks by their numbers, which are others since a loss")
        numbers = {self._place(rank): number for number, rank in enumerate(member.ranks)}
        works: list[Any] = []

        def begin(group: Any) -> Any:
            works.append(start(group, numbers))
            return works[0]

        try:
            ours = member.start(begin)
        except (Cut, KeyError):
            self._replica.cannot_go_on(f"a {name} met the loss")
        return _Passed(ours, works[0], self._replica, name, lambda number: self._place(member.ranks[number]))

    # -- numbers ------------------------------------------------------------------------------------------------------------

    def _place(self, rank: Rank) -> int:
        """Where the script sees a rank."""
        seen = self._replica.seen
        return next(place for place, its in enumerate(seen) if its == rank)

    def _places(self, tensors: list[Tensors], *, just_now: bool = False) -> list[tuple[Rank, ...]]:
        """Which ranks these are of, or for."""
        return [self._replica.counted(len(each), just_now=just_now) for each in tensors]

    def _n_parts(self, whole: torch.Tensor, part: torch.Tensor) -> int:
        return whole.numel() // part.numel() if part.numel() else len(self._replica.seen)

    def _options(self, new: Any, given: Any, peers: Peers) -> Any:
        """With the root's number among these. The script may have learnt any number but 0 when ranks had others."""
        if given.rootRank and self._replica.has_lost:
            self._replica.cannot_go_on(f"a collective names rank {given.rootRank}, and ranks have other numbers since a loss")
        root = self._replica.seen[given.rootRank]
        if root not in peers.ranks:
            self._replica.cannot_go_on(f"rank {root}, whose values it waits for, was lost")
        new.rootRank = peers.ranks.index(root)
        return new

    # -- run ----------------------------------------------------------------------------------------------------------------

    def _run(self, name: str, begin: Begin, results: Sequence[torch.Tensor]) -> Any:
        return self._start(Operation(name, begin, results))

    def _look(self, tensors: Sequence[torch.Tensor]) -> None:
        """At whether memory carries what begins with these."""
        if is_in_step(sys._getframe(1)):
            self._replica.does_not_carry(_SHARED_OUT)
        if is_of_shards(sys._getframe(1)):
            self._replica.does_not_carry(_SHARDED)
        if (devices := {tensor.device.type for tensor in tensors} - {"cpu"}) and not self._replica.not_carried:
            self._replica.does_not_carry(f"its tensors are on {min(devices)}: there a backward reduces in a thread of its own")

    def _start(self, operation: Operation) -> Any:
        self._look(operation.results)
        operation.behind = self._replica.session.position
        n_backwards = n_for_ddp()
        if n_backwards > 1:
            self._replica.not_carried = "its backward runs others within it, as reentrant checkpoints do"
        if not n_backwards or self._replica.is_immediate:
            self._replica.make("collective", [operation])
            return _create_work_from_future(operation.future)
        operation.start_early(self._replica.member)
        return self._replica.backward.add(operation, is_nested=n_backwards > 1)


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("broadcast", "allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("all_gather_single_coalesced", "allgather_coalesced", "gather", "scatter", "barrier", "monitored_barrier"),
    *("send", "recv", "recv_anysource", "alltoall", "alltoall_base", "all_to_all_single"),
):
    setattr(ReplicaGroup, _name, in_its_thread(_name, getattr(ReplicaGroup, _name)))


class _Several:
    """Works of torch, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all are done."""
        for work in self._works:
            work.wait()


class _Passed(dist.Work):
    """What torch does between some ranks only. It cannot be begun anew. `work`: what this rank waits for; `torchs`: torch's,
    which is asked. `place_of`: a rank by its number there."""

    def __init__(self, work: Any, torchs: Any, replica: Replica, name: str, place_of: Callable[[int], int]) -> None:
        super().__init__()
        self._work = work
        self._torchs = torchs
        self._replica = replica
        self._name = name
        self._place_of = place_of
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        """Until it is done."""
        if not self._is_done:
            try:
                self._replica.member.wait([self._work])
            except Cut:
                self._replica.cannot_go_on(f"a {self._name} met the loss")
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Whether it is. What has failed never is: nobody is to read what has not come."""
        return self._is_done or (bool(self._torchs.is_completed()) and self.wait())

    def _source_rank(self) -> int:
        return self._place_of(self._torchs._source_rank())

    def get_future(self) -> Any:
        """Has what has come, when it is done."""
        return Awaited(self.wait).upon(self._torchs.get_future())


def _of(peers: Peers, parts: Sequence[torch.Tensor], places: Sequence[Rank]) -> Tensors:
    """What is meant for each peer, of one for each of these ranks."""
    return [parts[places.index(rank)] for rank in peers.ranks]


def _from(peers: Peers, found: Sequence[torch.Tensor], places: Sequence[Rank]) -> Tensors:
    """What has come from each of these ranks; the first one's where it is lost."""
    came = dict(zip(peers.ranks, found, strict=True))
    return [came.get(rank, found[0]) for rank in places]


def _fill_noted(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Put them there as `fill` does, and tell autograd of it, as torch's Gloo does where it copies."""
    fill(tensors, results)
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _allreduce(tensors: Tensors, options: Any, group: Any) -> Any:
    return group.allreduce(tensors, options)
