"""The process groups of one generation, and the cut that frees a rank from any wait on them.

Torch's collectives block in C++, and a Gloo wait on a peer that is alive but silent lasts until the group's time-out.
So the thread that owns the model never waits there itself: a thread of the generation waits, and the owner waits for
"done or cut". The link's thread cuts by shutting the group's sockets (Gloo's `abort` does nothing; NCCL's works).
A cut generation is abandoned: its thread and groups end on their own in the background.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from odyssey.runtime import nccl
from odyssey.runtime.connections import Connections, shut_all_to

Way = Literal["outputs", "gradients"]
"""Down the pipeline, or up."""
# A group that is cut in the middle of a send may wait on until this: nobody waits for it any more.
TIMEOUT = timedelta(seconds=60)
CONNECT_S = 10.0
"""The store's client connects in C++, again and again for so long. In between it is seen whether that is still wanted."""
NO_LIMIT = timedelta(days=365)
"""For a wait on what another rank does for as long as it takes: writes a file, runs the script's own code."""
END_S = 5.0
"""Beyond that, for threads to come back from C++ at the end."""
END_OF_WAIT_S = 0.5
"""The same for a thread that waits for a send that was cut: what does not come back soon stays until TIMEOUT."""
_living: set[Groups] = set()
"""Generations of this process whose threads may be in C++: there, the end of the interpreter would end them badly."""


class Cut(Exception):
    """The generation's communication ended before this wait did: `reason` says by what."""


class _Given(NamedTuple):
    """What all that build together must be given alike."""

    store: str
    generation: int
    subsets: list[tuple[int, ...]]
    movers: tuple[int, ...]


class Groups:
    """The groups of one generation as one rank sees them: all workers, and each set of workers that reduce together.

    `members`: workers in the order of their ranks in the group. `subsets`: for each reduction, the workers of its
    group. `movers`: who takes part in moves of state, the members and perhaps workers that have no work any more. All
    must build with the same arguments. One owner thread calls everything but `cut`.
    """

    def __init__(
        self,
        store: str,
        generation: int,
        members: Sequence[int],
        subsets: Sequence[Sequence[int]],
        movers: Sequence[int],
        me: int,
        device: torch.device,
    ) -> None:
        self.members = tuple(members)
        self.me = me
        self.device = device
        self._given = _Given(store, generation, [tuple(subset) for subset in subsets], tuple(movers) or self.members)
        self.by_subset: dict[tuple[int, ...], Any] = {}
        self.world: Any = None
        self._has_device_groups = _has_own_device(device)
        self._on_device: dict[Way, Any] = {}
        self._moving: Any = None
        self._lock = threading.Lock()
        self._connections = Connections()
        self._cut: str | None = None
        self._requests: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"odyssey-wait-{generation}", daemon=True)
        _living.difference_update([groups for groups in _living if not groups._thread.is_alive()])
        self._thread.start()
        _living.add(self)

    # -- the owner's side ---------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Connect all groups. Raises Cut if that ends early."""
        if len(self._given.movers) > 1:
            self.wait(self._build)

    def wait(self, blocking: Callable[[], Any]) -> Any:
        """Run `blocking` on the generation's thread and return its result. Raises Cut as soon as `cut` is called.

        Connection errors of the transport are raised as Cut too: a peer is gone, or has been cut before us.
        """
        if self._cut is not None:
            raise Cut(self._cut)
        self._requests.put(blocking)
        kind, value = self._outcomes.get()  # ended by `_serve` when done, by `cut` at any time
        if kind == "done":
            return value
        if kind == "raised" and not isinstance(value, RuntimeError):
            raise value
        raise Cut(str(value))

    @property
    def only_queues(self) -> bool:
        """Whether a wait for what goes from device to device ends before it is done there."""
        return self._has_device_groups

    def finish(self, work: Any) -> None:
        """Wait until `work` is done: on a device not only queued, as `Work.wait` has it. Raises Cut."""
        self.wait(partial(nccl.finish, work) if self.only_queues else work.wait)

    def check(self) -> None:
        """Raise Cut if the generation has been cut: between two computations nobody else would notice."""
        if self._cut is not None:
            raise Cut(self._cut)

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, limit: timedelta = TIMEOUT) -> Any:
        """Start a sum of `tensor` over `group` (default: all workers) in place; wait for the work it returns by `wait`."""
        options = dist.AllreduceOptions()
        options.timeout = limit
        return self._start(lambda: (group or self.world).allreduce([tensor], options))

    def send(self, tensor: torch.Tensor, worker: int, tag: int, way: Way | None = None) -> Any:
        """Start sending; keep tensor and the returned work until the step is committed. `way`: needed for a tensor on a
        device, where each has its communicator."""
        group, rank = self._way_to(tensor, worker, way)
        return self._start(lambda: group.send([tensor], rank, tag))

    def receive(self, tensor: torch.Tensor, worker: int, tag: int, way: Way | None = None) -> Any:
        """Start receiving into `tensor`, what was sent with this tag and `way`."""
        group, rank = self._way_to(tensor, worker, way)
        return self._start(lambda: group.recv([tensor], rank, tag))

    def _start(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:  # the connection has ended already
            raise Cut(str(error)) from None

    def _way_to(self, tensor: torch.Tensor, worker: int, way: Way | None) -> tuple[Any, int]:
        if worker in self.members and self.me in self.members:
            if tensor.device.type != "cpu":
                assert way is not None, f"a tensor on {tensor.device} goes no way"
                return self._on_device[way], self.members.index(worker)
            return self.world, self.members.index(worker)
        return self._moving, self._given.movers.index(worker)

    # Gloo sends and receives from host memory only: a rank that computes on a device but has no communicator of its own
    # there (ranks that share one GPU) passes its tensors through the host.

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must live to be sent, received or reduced."""
        return self.device if self._has_device_groups else torch.device("cpu")

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the transport takes it: contiguous, on `wire_device`."""
        return tensor.to(self.wire_device).contiguous()

    def from_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A received tensor where the model computes."""
        return tensor.to(self.device)

    def release(self) -> None:
        """Let go of a generation that is over. Peers that still wait for us are cut by it."""
        self.cut("the generation is over")
        self._requests.put(None)

    def close(self) -> None:
        """Release, and give the groups a moment to end, those of generations that were cut as well: the end of the
        interpreter must meet none that is still being built, and destroy none that still waits."""
        self.release()
        began = time.monotonic()
        over = [groups for groups in _living if groups._cut is not None]
        for groups in over:
            groups.release()
        while left := [groups for groups in over if groups._is_coming_back(time.monotonic() - began)]:
            left[0]._thread.join(0.1)
            if left[0]._thread.is_alive():
                left[0]._leave_store()
        for groups in over:
            if groups._thread.is_alive():
                groups._outlive()

    def _is_coming_back(self, waited_s: float) -> bool:
        return self._thread.is_alive() and waited_s < (END_OF_WAIT_S if self._connections.are_kept else CONNECT_S + END_S)

    def _outlive(self) -> None:
        """Never destroy the groups: that would wait for the thread that waits in C++. The end of the process ends both."""
        for group in [self.world, self._moving, *self.by_subset.values(), *self._on_device.values()]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # -- any thread ---------------------------------------------------------------------------------------------------

    def cut(self, reason: str) -> None:
        """End every wait of this generation now. Safe from any thread, and more than once."""
        with self._lock:
            if self._cut is None:
                self._cut = reason
                self._outcomes.put(("cut", reason))
            self._connections.shut()
            for group in {id(g): g for g in [*self._on_device.values(), *self.by_subset.values()]}.values():
                if self._has_device_groups and group is not self.world:
                    group.abort()

    def _leave_store(self) -> None:
        """End this process's connections to the store: a store that is stopped never answers, and its client waits for ever."""
        _, _, port = self._given.store.rpartition(":")
        if port:  # a process that trains alone has none
            shut_all_to(int(port))

    # -- the waiting thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (blocking := self._requests.get()) is not None:
            try:
                outcome = ("done", blocking())
            except Exception as error:  # handed to the owner, whole
                outcome = ("raised", error)
            self._outcomes.put(outcome)
            del blocking, outcome
        # Destroying a Gloo group joins a thread that polls every 10 ms; here nobody waits for that.
        self.by_subset.clear()
        self._on_device.clear()
        self.world = self._moving = None

    def _connect(self, host: str, port: int) -> Any:
        end = time.monotonic() + TIMEOUT.total_seconds()
        while True:
            self.check()
            try:
                client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
                continue
            client.set_timeout(TIMEOUT)
            self.check()
            return client

    def _build(self) -> None:
        store, generation, subsets, movers = self._given
        host, port = store.rsplit(":", 1)
        prefix = PrefixStore(f"generation-{generation}", self._connect(host, int(port)))
        local = _gloo_device(host)
        moving = None
        if movers != self.members:
            moving = _gloo(PrefixStore("moving", prefix), movers, self.me, local)
        self.check()
        world = None
        if self.me in self.members:
            world = _gloo(PrefixStore("world", prefix), self.members, self.me, local)
        by_subset: dict[tuple[int, ...], Any] = {}
        for subset in subsets:
            self.check()
            if self.me in subset and len(subset) > 1 and subset not in by_subset:
                own = PrefixStore("-".join(map(str, subset)), prefix)
                make = self._nccl if self._has_device_groups else lambda store, members: _gloo(store, members, self.me, local)
                by_subset[subset] = make(own, subset)
        on_device: dict[Way, Any] = {}
        if self._has_device_groups and self.me in self.members:
            # Two communicators: what goes down the pipeline never queues behind what comes up.
            on_device = {way: self._nccl(PrefixStore(way, prefix), self.members) for way in get_args(Way)}
            by_subset[self.members] = on_device["outputs"]
        opened = self._connections.opened()
        with self._lock:
            if self._cut is not None:
                raise Cut(self._cut)
            self.world, self._moving, self.by_subset = world, moving, by_subset
            self._on_device = on_device
            self._connections.keep(opened)

    def _nccl(self, store: Any, members: Sequence[int]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, tuple(members).index(self.me), len(members), options)


def _has_own_device(device: torch.device) -> bool:
    """Whether each rank of this host has a GPU to itself: NCCL refuses two ranks on one."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return False
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()


_devices: dict[str, Any] = {}


def _gloo_device(store_host: str) -> Any:
    """One transport device (a listening socket and its thread) for all generations of this process."""
    if store_host not in _devices:
        make = dist.ProcessGroupGloo
        if "GLOO_SOCKET_IFNAME" in os.environ:
            _devices[store_host] = make.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])
        elif store_host in ("127.0.0.1", "localhost", "::1"):
            _devices[store_host] = make.create_device(hostname="127.0.0.1")
        else:
            _devices[store_host] = make.create_default_device()
    return _devices[store_host]


def _gloo(store: Any, members: Sequence[int], me: int, device: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(store, tuple(members).index(me), len(members), options)
