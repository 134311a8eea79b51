"""Where torch makes a group of all ranks, the script gets one of ours; what is not ours to carry stays torch's.

Torch's own `_new_process_group_helper` makes every group, whoever asks, and it is looked up when it is called: so it does not
matter what a script or a library has imported from where. A backend that is registered with torch makes ours.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

ON_LOSS = "ODYSSEY_ON_LOSS"
"""`continue` or `auto` where the script's ranks may go on after a loss."""
GOES_ON = ("continue", "auto")


def autoload() -> None:
    """Called at the end of `import torch` in any process, by its entry point for backends. Forks of a zygote are told later: it
    is to read nothing that is a rank's."""
    if "odyssey.zygote" not in sys.modules:
        install_if_asked()


def install_if_asked() -> None:
    """Install it where the environment of this process says so."""
    if os.environ.get(ON_LOSS) in GOES_ON:
        install()


def install() -> None:
    """Have this rank's groups be ours from now on. Nothing, where this process is no rank."""
    from odyssey.protocol import link

    connection = link.connect()
    distributed = sys.modules.get("torch.distributed")
    if connection is None or distributed is None or not distributed.is_available():
        return
    import torch.distributed.distributed_c10d as c10d

    if hasattr(c10d._new_process_group_helper, "_odyssey"):
        return
    made = _Made(connection)
    c10d.Backend.register_backend("odyssey", made.make, devices=["cpu"])
    c10d._new_process_group_helper = made.around(c10d._new_process_group_helper)
    c10d.destroy_process_group = made.ending(c10d.destroy_process_group)
    distributed.destroy_process_group = c10d.destroy_process_group  # type: ignore[attr-defined]
    made.watch_ddp()
    made.watch_saves()
    made.watch_rpc()


def _leave_out_of_graphs() -> None:
    """Where a compiled module has torch's C++ call a group of ours, that call is Python, and would be compiled with it."""
    from torch._dynamo import trace_rules

    trace_rules.add("odyssey")


def _wait_for_several() -> None:
    """Have what waits for several futures of a backward make them final."""
    import torch

    from odyssey.replicas.backward import collecting

    # Both functions of torch.futures look it up.
    torch._C._collect_all = collecting(torch._C._collect_all)  # type: ignore[assignment]


def _gather_by_the_group() -> Any:
    """Have this operator gather by its group: torch's asks for a backend of that, and ours has none. It does so for as long as
    what this gives lives."""
    import torch

    ops = torch.ops._c10d_functional

    def gathered(tensor: Any, n_ranks: int, group: Any, *, out: Any) -> Any:
        return out.copy_(ops.wait_tensor(ops.all_gather_into_tensor(tensor, n_ranks, group)).view_as(out))

    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor_out", gathered, "CPU")  # type: ignore[no-untyped-call]
    return library


class _Made:
    """The groups of this rank, and the replica that all of ours share."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._replica: Any = None
        self._before: Any = None
        """The session of groups that the script has let go of."""
        self._groups: list[Any] = []
        self._operators: Any = None
        """What stands in the place of torch's, for as long as this lives."""
        self._thread = 0
        """In which the script made its first group."""
        self._n_at_first = int(os.environ.get("WORLD_SIZE", "0"))
        self._not_carried = ""
        """What the script does beside its groups that a loss cannot be gone on from."""

    def make(self, store: Any, rank: int, size: int, timeout: Any) -> Any:
        """Torch asks for a group of all ranks."""
        from odyssey.replicas.group import ReplicaGroup
        from odyssey.replicas.second_thread import SecondThread

        group = ReplicaGroup(self.replica, rank, size, SecondThread(self.replica, self._thread, store, timeout))
        self._groups.append(group)
        return group

    @property
    def replica(self) -> Any:
        """Made, and joined with the others', when the script makes its first group."""
        if self._replica is None:
            import atexit

            from odyssey.joining import report_uncaught_errors
            from odyssey.replicas.replica import Replica

            if self._before is None:
                report_uncaught_errors()
                _leave_out_of_graphs()
                _wait_for_several()
                self._operators = _gather_by_the_group()
            self._thread = threading.get_ident()
            self._replica = Replica(self._connection, self._n_at_first, self._renumber, self._before)
            self._replica.not_carried = self._not_carried
            self._replica.session.start()
            atexit.register(self._replica.session.finish)
        return self._replica

    def around(self, helper: Callable[..., Any]) -> Callable[..., Any]:
        """Takes the place of torch's: `(size, rank, ranks of it, backend, …)`."""
        import torch.distributed.distributed_c10d as c10d

        @functools.wraps(helper)
        def new_group(size: int, rank: int, ranks: list[int], backend: Any, *others: Any, **named: Any) -> Any:
            if why := self._why_not(size, ranks, str(backend)):
                self._not_ours(ranks, named.get("group_name") or (others[1] if len(others) > 1 else ""), why)
                return helper(size, rank, ranks, backend, *others, **named)
            group, store = helper(size, rank, ranks, "odyssey", *others, **named)
            if store is not None:
                c10d._world.pg_map[group] = ("gloo", store)  # as the script asked for it
                c10d._world.pg_backend_config[group] = "cpu:gloo"
            return group, store

        new_group._odyssey = True  # type: ignore[attr-defined]
        return new_group

    def _why_not(self, size: int, ranks: list[int], backend: str) -> str:
        """Why a group stays torch's; empty for ours."""
        import torch

        of_cpu = ("gloo", "cpu:gloo") if torch.cuda.is_available() else ("gloo", "cpu:gloo", "undefined", "cpu:gloo,cuda:nccl")
        if backend not in of_cpu:
            return f"its group is by {backend}"
        whole = self._n_at_first if self._replica is None else len(self._replica.seen)
        return "" if size == whole and len(ranks) in (0, whole) else "partial"

    def _not_ours(self, ranks: list[int], name: str, why: str) -> None:
        """Said before it is made: torch may wait in it, without end, for a rank that is lost by then, or is already."""
        if self._replica is None:
            return  # a loss before ours is made is a restart anyway
        if why != "partial":
            self._replica.not_carried = why
        else:
            seen = self._replica.seen
            self._replica.partial_groups[name] = frozenset(seen[rank] for rank in ranks)
        if why := self._replica.why_not(self._replica.session.lost):
            self._replica.cannot_go_on(why)

    def _renumber(self) -> None:
        """Ranks are numbered anew, as a loss leaves no gap."""
        import torch.distributed.distributed_c10d as c10d

        n = len(self._replica.seen) if self._replica is not None else 0
        for group in self._groups:
            if group in c10d._world.pg_group_ranks:
                c10d._world.pg_group_ranks[group] = {place: place for place in range(n)}

    def ending(self, destroy: Callable[..., Any]) -> Callable[..., Any]:
        """Takes the place of torch's: with the group of all a script's part in the job ends."""
        import torch.distributed.distributed_c10d as c10d

        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> Any:
            is_all = group is None or group is c10d.GroupMember.WORLD
            name = getattr(group, "group_name", "")
            destroy(group)
            if self._replica is not None:
                self._replica.partial_groups.pop(name, None)
            if is_all and self._replica is not None:
                self._before = self._replica.session
                self._before.finish()
                self._replica, self._groups = None, []

        return destroy_process_group

    def watch_ddp(self) -> None:
        """What DDP holds equal is compared after a loss."""
        import torch.distributed.distributed_c10d as c10d
        from torch.distributed.algorithms.join import Join
        from torch.nn.parallel import DistributedDataParallel

        init, set_static = DistributedDataParallel.__init__, DistributedDataParallel._set_static_graph

        @functools.wraps(init)
        def __init__(ddp: Any, /, *arguments: Any, **named: Any) -> None:
            if self._replica is not None:
                self._replica.has_ddp = True  # a rank may be lost while others are still in here
            init(ddp, *arguments, **named)
            if self._replica is not None:
                self._replica.modules.add(ddp)
                if ddp.process_group not in c10d._world.pg_map:  # torch has not made it, and so nothing of it comes to us
                    self._replica.does_not_carry("its DDP reduces in a process group that the script has made by itself")

        @functools.wraps(set_static)
        def _set_static_graph(ddp: Any) -> None:
            if self._replica is not None:  # its first backward waits for reductions before our callback can come
                self._replica.not_carried, self._replica.is_immediate = "its DDP has static_graph", True
            set_static(ddp)  # type: ignore[no-untyped-call]

        enter = Join.__enter__

        @functools.wraps(enter)
        def __enter__(join: Any) -> Any:
            if self._replica is not None:  # those that have no more samples reduce outside of any backward
                self._replica.not_carried, self._replica.is_immediate = "its ranks have uneven inputs (Join)", True
            return enter(join)  # type: ignore[no-untyped-call]

        Join.__enter__ = __enter__  # type: ignore[method-assign]
        DistributedDataParallel._set_static_graph = _set_static_graph  # type: ignore[method-assign]
        DistributedDataParallel.__init__ = __init__  # type: ignore[assignment, method-assign]

    def watch_saves(self) -> None:
        """What the script saves is what a restart would begin with."""
        import torch

        save = torch.save

        @functools.wraps(save)
        def saved(obj: object, f: Any, *arguments: Any, **named: Any) -> None:
            save(obj, f, *arguments, **named)
            if self._replica is not None and isinstance(f, (str, os.PathLike, io.BufferedWriter, io.BufferedRandom)):
                self._replica.has_saved = True

        torch.save = saved

    def watch_rpc(self) -> None:
        """What ranks ask of each other by their names nobody begins anew."""
        from torch.distributed import rpc

        if not rpc.is_available():
            return
        init = rpc.init_rpc

        @functools.wraps(init)
        def init_rpc(*arguments: Any, **named: Any) -> None:
            self._not_carried = "its ranks call each other by torch.distributed.rpc"
            if self._replica is not None:
                self._replica.does_not_carry(self._not_carried)
            init(*arguments, **named)  # type: ignore[no-untyped-call]

        rpc.init_rpc = init_rpc
