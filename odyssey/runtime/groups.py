"""The process groups of one generation, and the cut that frees a rank from any wait on them.

Torch's collectives block in C++, and a Gloo wait on a peer that is alive but silent lasts until the group's time-out.
So the thread that owns the model never waits there itself (waiter.py). The link's thread cuts by shutting the group's sockets
(Gloo's `abort` does nothing; NCCL's works). A cut generation is abandoned: its thread and groups end by themselves.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from odyssey.plan.needs import Needs, SumOver
from odyssey.plan.worker import Worker, all_ranks_of
from odyssey.protocol.reports import Offered, WholeGroup
from odyssey.runtime import nccl, peers
from odyssey.runtime.cut import Cut
from odyssey.runtime.introductions import Introductions
from odyssey.runtime.neighbour_memory import NeighbourMemory
from odyssey.runtime.sum_group import Sum, SumGroup
from odyssey.runtime.transport import Transport, Wire, gloo_device
from odyssey.runtime.tree import TreeSum
from odyssey.runtime.waiter import Waiter
from odyssey.runtime.works import Works

Way = Literal["outputs", "gradients"]
"""Down the pipeline, or up."""
END_S = 5.0
"""For threads to come back from C++ at the end."""
END_OF_WAIT_S = 0.5
"""The same for a thread that waits for a send that was cut: what does not come back soon stays until the limit."""
_OnDevice = dict[tuple[Way, Worker], Any]
"""By way, and by the other one of a pair."""
_living: set[Groups] = set()
"""Generations of this process whose threads may be in C++: there, the end of the interpreter would end them badly."""


class Groups:
    """The groups of one generation as one rank sees them: all workers, and each set of workers that reduce together.

    `offer`: tells the agent, whose answers are for `learn`. `here`: an address of this host to listen at; empty for the one of
    the environment. `attempt`: tells groups apart that are built in one generation, see Connect. `kept`: those that are needed
    and that another generation has handed over. One owner thread calls all but `build_beside`, `cut` and `whole`.
    """

    def __init__(
        self,
        offer: Callable[[Offered], None],
        generation: int,
        needs: Needs,
        me: Worker,
        device: torch.device,
        here: str = "",
        attempt: int = 0,
        kept: Iterable[SumGroup] = (),
    ) -> None:
        self.me = me
        self.needs = needs
        self._movers = needs.movers or needs.members
        prefix = f"{attempt} " if attempt else ""
        self._origin = f"{generation} {prefix}"
        """What names of groups begin with that are unlike any others of the job."""
        self._is_begun = False
        self._sums = {group.over: group for group in kept}
        """All groups in which this rank only sums, those that are being built as well."""
        self.kept_members = sum(len(over.members) for over in self._sums)
        self._tree: list[SumGroup] = []
        """The branches of it that this rank is in, from the leaves."""
        self._mesh: Any = None
        """In place of a tree: the group with all in it, in which they also send."""
        self._mesh_works = Works()
        self._is_in_root, self._is_in_leaf = needs.in_root(me), needs.in_leaf(me)
        self._pairs: dict[Worker, Any] = {}
        """On the host, by the other one; on a device `_on_device` has them."""
        self._here = here
        self._on_device: _OnDevice = {}
        self._moving: Any = None
        self.memory = NeighbourMemory()
        self._device: Any = None
        """The transport's own: it has the socket at which this rank listens."""
        self._lock = threading.Lock()
        _living.difference_update([groups for groups in list(_living) if not groups.waiter.thread.is_alive()])
        self.waiter: Waiter = Waiter(f"odyssey-wait-{generation}", self._forget)
        self.introductions = Introductions(generation, offer)
        self.wire = Wire(device)
        self._transport = Transport(me, self.wire, needs.limit, prefix, self.introductions, self.waiter)
        _living.add(self)

    # -- the owner's side ---------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Connect all groups, or wait for that if it has begun. Raises Cut if that ends early."""
        if self._has_none:
            return
        if not self._is_begun:
            self.waiter.check()
            self.waiter.begin(self._build)
        self.waiter.result()

    @property
    def _has_none(self) -> bool:
        return len(self._movers) < 2 or self.me not in self._movers

    def finish(self, work: Any) -> None:
        """Wait until `work` is done: on a device not only queued, as `Work.wait` has it. Raises Cut."""
        self.waiter.wait(partial(nccl.finish, work) if self.wire.is_on_device else work.wait)

    def all_reduce(self, tensor: torch.Tensor, subset: tuple[Worker, ...] | None = None, limit: timedelta | None = None) -> Any:
        """Start a sum of `tensor` over a subset that reduces (default: all workers) in place; wait for the work it returns by
        `wait`."""
        limit = limit or self.needs.limit
        options = dist.AllreduceOptions()
        options.timeout = limit
        if subset is not None:
            return self.over(subset, lambda group: group.allreduce([tensor], options))
        if not self.needs.is_tree:
            return Sum((), self._start(lambda: self._mesh.allreduce([tensor], options)), [self._mesh_works])
        branches = [branch.group for branch in self._tree]
        return self._sum(self._tree, partial(TreeSum, branches, tensor, limit, self._is_in_leaf, self._is_in_root))

    def over(self, subset: tuple[Worker, ...], operation: Callable[[Any], Any]) -> Sum:
        """Start any collective in the group of a subset that reduces, as `all_reduce` starts a sum. A group in which there was
        anything else than sums must not be handed over: a rank may have its part while another has not begun."""
        one = self._sums[SumOver(False, subset)]
        return self._sum([one], lambda: operation(one.group))

    def _sum(self, groups: Sequence[SumGroup], operation: Callable[[], Any]) -> Sum:
        with self._lock:
            self.waiter.check()  # what a cut has found whole stays so
            for group in groups:
                group.begin()
        started = self._start(operation, is_on_device=any(group.is_on_device for group in groups))
        return Sum(groups, started, [group.works for group in groups if not group.is_on_device])

    def send(self, tensor: torch.Tensor, worker: Worker, tag: int, way: Way | None = None) -> Any:
        """Start sending; keep tensor and the returned work until the step is committed. `way`: needed for a tensor on a
        device, where each has its communicator."""
        group, rank = self._way_to(tensor, worker, way)
        return self._start(lambda: group.send([tensor], rank, tag), is_on_device=tensor.device.type != "cpu")

    def receive(self, tensor: torch.Tensor, worker: Worker, tag: int, way: Way | None = None) -> Any:
        """Start receiving into `tensor`, what was sent with this tag and `way`."""
        group, rank = self._way_to(tensor, worker, way)
        return self._start(lambda: group.recv([tensor], rank, tag), is_on_device=tensor.device.type != "cpu")

    def _start(self, operation: Callable[[], Any], *, is_on_device: bool = False) -> Any:
        if is_on_device:
            return self.waiter.beside(nccl.on_this_stream(operation))
        try:
            return operation()
        except RuntimeError as error:  # the connection has ended already
            raise Cut(str(error)) from error.with_traceback(None)

    def _way_to(self, tensor: torch.Tensor, worker: Worker, way: Way | None) -> tuple[Any, int]:
        """The group, and the other one's rank in it."""
        is_on_device = tensor.device.type != "cpu"
        assert way is not None or not is_on_device, f"a tensor on {tensor.device} goes no way"
        if way is not None and is_on_device:
            if (way, worker) not in self._on_device:
                self.waiter.wait(partial(self._pair_on_device, worker))
            return self._on_device[way, worker], int(worker > self.me)
        if self.needs.are_meshed(self.me, worker):
            return self._mesh, self.needs.members.index(worker)
        if self._moving is not None:
            return self._moving, self._movers.index(worker)
        if worker not in self._pairs:
            self.waiter.wait(partial(self._build_pair, worker))
        return self._pairs[worker], int(worker > self.me)

    def hand_over(self, names: Iterable[str], needs: Needs) -> list[SumGroup]:
        """Give away the groups with these names that are needed next: they are no longer of this generation."""
        wanted = needs.sums_of(self.me)
        with self._lock:
            found = [over for over, group in self._sums.items() if over in wanted and group.name in names]
            return [self._sums.pop(over) for over in found]

    def release(self) -> None:
        """Let go of a generation that is over. Peers that still wait for us are cut by it, and what nobody has taken on ends:
        the thread that takes the groups down may still be waiting in one."""
        self.cut("the generation is over")
        with self._lock:
            for group in self._sums.values():
                group.close()
        self.waiter.end()

    def close(self) -> None:
        """Release, and give the groups a moment to end, those of generations that were cut as well: the end of the
        interpreter must meet none that is still being built, and destroy none that still waits."""
        self.release()
        began = time.monotonic()
        over = [groups for groups in list(_living) if groups.waiter.reason is not None]
        for groups in over:
            groups.release()
        while left := [groups for groups in over if groups._is_coming_back(time.monotonic() - began)]:
            left[0].waiter.thread.join(0.1)
            if left[0].waiter.thread.is_alive():
                left[0].cut("the generation is over")  # it may have connected once more
        for groups in over:
            if groups.waiter.thread.is_alive():
                groups._outlive()
                _living.discard(groups)  # nobody is to wait for it once more
        nccl.await_aborts(END_S)

    def _is_coming_back(self, waited_s: float) -> bool:
        return self.waiter.thread.is_alive() and waited_s < (END_OF_WAIT_S if self._transport.connections.are_kept else END_S)

    def _outlive(self) -> None:
        """Never destroy the groups: that would wait for the thread that waits in C++. The end of the process ends both."""
        for group in [*self._sums.values(), self._mesh, self._moving, *self._pairs.values(), *self._on_device.values()]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # -- any thread ---------------------------------------------------------------------------------------------------

    def build_beside(self, built: Callable[[], None], done: Callable[[str], None]) -> None:
        """Begin to connect all groups while the owner does something else, and waits later. On another thread `built` is called
        when they stand, and then `done`, with what has ended it if something has; not where that is `cut`."""
        if self._has_none:
            done("")
            return
        self._is_begun = True

        def build() -> None:
            try:
                self._build()
                built()
            except (Cut, RuntimeError) as error:
                if self.waiter.reason is None:
                    done(str(error))
                raise
            done("")

        self.waiter.begin(build)

    def whole(self) -> tuple[WholeGroup, ...]:
        """Groups that another generation can take on, as far as this rank knows. They stay whole in one that is cut."""
        with self._lock:
            whole = [group for group in self._sums.values() if group.is_whole and group.over.members not in self.needs.copies]
            return tuple(WholeGroup(each.name, len(all_ranks_of(each.over.members)), each.over.is_branch) for each in whole)

    def cut(self, reason: str) -> None:
        """End every wait of this generation now. Safe from any thread, and more than once."""
        with self._lock:
            if self.waiter.cut(reason):
                self.introductions.end(reason)
            self._transport.connections.shut()
            for each in self._sums.values():
                each.cut()
            for group in self._on_device.values():
                nccl.abort(group)

    # -- the waiting thread -------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Destroying a Gloo group joins a thread that polls every 10 ms, and of a cut group may never end; here nobody waits
        for that."""
        with self._lock:
            over, self._sums = list(self._sums.values()), {}
        for group in over:
            group.destroy()
        self._on_device.clear()
        self._tree.clear()
        self._pairs.clear()
        self._mesh = self._moving = self._device = None
        self._mesh_works.forget()
        self.memory.lent.clear()
        self.introductions.forget()

    def _build(self) -> None:
        needs, movers = self.needs, self._movers
        device = gloo_device(self._here)  # of its own: whoever connects to it means this generation
        connected: list[peers.Member] = []
        moving, mesh = None, None
        if needs.has_moving:
            moving = self._transport.gloo("moving", movers, device, connected)
        if not needs.is_tree and self.me in needs.members and len(needs.members) > 1:
            self.waiter.check()
            mesh = self._transport.gloo("all", needs.members, device, connected)
        sums = [self._sum_group(over, name, connected) for over, name in needs.sums_of(self.me).items()]
        pairs = {}
        for peer in needs.pairs_of(self.me):
            self.waiter.check()
            pairs[peer] = self._pair(peer, device, connected)
        for peer in needs.peers if self.wire.is_on_device else ():
            self._pair_on_device(peer)
        readers = peers.prove(connected)
        with self._lock:
            self.waiter.check()
            self.memory.add(connected, readers)
            self._tree = [group for group in sums if group.over.is_branch]
            self._mesh, self._moving, self._pairs = mesh, moving, pairs
            self._device = device
            self._transport.connections.keep()
            for group in sums:
                if not group.is_connected:
                    group.connected()

    def _sum_group(self, over: SumOver, name: str, connected: list[peers.Member]) -> SumGroup:
        """It is kept, or else built. Its transport is its own, as is what a cut of it ends."""
        with self._lock:
            self.waiter.check()
            if over in self._sums:
                return self._sums[over]
            made = SumGroup(self._origin + name, over, is_on_device=self.wire.is_on_device and not over.is_branch)
            self._sums[over] = made
        if made.is_on_device:
            made.group = self._transport.nccl(name, over.members, made)
        else:
            made.group = self._transport.gloo(name, over.members, gloo_device(self._here), connected, made)
        return made

    def _pair(self, worker: Worker, device: Any, connected: list[peers.Member]) -> Any:
        both = tuple(sorted((self.me, worker)))
        return self._transport.gloo("pair {} {}".format(*both), both, device, connected)

    def _pair_on_device(self, worker: Worker) -> None:
        """Two communicators: what goes down the pipeline never queues behind what comes up."""
        both = tuple(sorted((self.me, worker)))
        for way in get_args(Way):
            made = self._transport.nccl("pair {} {} ".format(*both) + way, both)
            with self._lock:
                self.waiter.check()
                self._on_device[way, worker] = made

    def _build_pair(self, worker: Worker) -> None:
        """With one that the plan has nothing to exchange with: it is there when that one wants it, too."""
        connected: list[peers.Member] = []
        pair = self._pair(worker, self._device, connected)
        readers = peers.prove(connected)
        with self._lock:
            self.waiter.check()
            self.memory.add(connected, readers)
            self._pairs[worker] = pair
            self._transport.connections.keep()
