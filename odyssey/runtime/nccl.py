"""What NCCL, as torch drives it, does that a rank which is to outlive others must not be left to.

    an operation  is only queued when its `Work.wait` returns: what it comes to is known when the device has done it
    a communicator  is connected by its first operation, which waits in C++ for all others to begin theirs: ranks whose first
                  operations come in different orders wait for ever, and no cut ends that
    a communicator that fails  is looked after by a thread of torch's. As it is set by default, that thread ends the process;
                  or it aborts the communicator, after which what was queued there counts as done, whatever came of it
    an operation that fails  leaves the thread that began it within an open group of operations: what it begins from then on, in
                  any communicator, is not done, and counts as done at once

So it is told to do neither: a communicator is aborted by a cut (groups.py) and by nothing else, and a generation that was cut
contributes nothing. All are connected when a generation is built, in one order, and its own thread begins its operations.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

OF_TORCHRUN = "ODYSSEY_TORCHRUN_VARIABLES"
"""Names of variables that the launcher has set as torchrun does, and not the user."""
OUTLIVING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""How a rank outlives its peers. The second one: else what one rank has put on the store about a failure ends all the others
minutes later, in generations that have nothing to do with it."""
BESIDE_KERNELS = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_RUNTIME_CONNECT": "0"}
"""How a rank computes while it waits for others in a kernel of NCCL. By default CUDA loads a kernel when it is first run, and
waits for all that are running; and NCCL connects for an algorithm at the first operation that takes it, which waits for the
others. No rank that waits for another one goes on then."""
LOOK_S = 0.0002
_aborts: set[threading.Thread] = set()


def outlive_peers() -> None:
    """Before the first communicator. What the user has set stays."""
    of_torchrun = os.environ.get(OF_TORCHRUN, "").split(",")
    for name, value in OUTLIVING.items():
        if name in of_torchrun or name not in os.environ:
            os.environ[name] = value


def abort(group: Any) -> None:
    """End whatever waits in a group's communicators, without waiting for that: what an abort frees on the device waits until
    the device has nothing under way, of other communicators either. So all are aborted at once."""
    _aborts.difference_update([thread for thread in list(_aborts) if not thread.is_alive()])
    thread = threading.Thread(target=group.abort, name="odyssey-abort", daemon=True)
    _aborts.add(thread)
    thread.start()


def await_aborts(limit_s: float) -> None:
    """The end of the interpreter would end threads in C++ badly."""
    until_s = time.monotonic() + limit_s
    for thread in list(_aborts):
        thread.join(max(0.0, until_s - time.monotonic()))


def connect_sums(group: Any, word: Any) -> None:
    """Blocks until all members of a new group in which they sum are connected, by a sum of `word`. Raises RuntimeError."""
    finish(group.allreduce([word]))


def connect_pair(group: Any, word: Any, place: int) -> None:
    """The same for a group of two that exchange tensors, by a message there and one back: each direction is connected by its
    first."""
    there, back = (group.recv, group.send) if place else (group.send, group.recv)
    for operation in (there, back):
        finish(operation([word], 1 - place, 0))


def on_this_stream(operation: Callable[[], Any]) -> Callable[[], Any]:
    """The same for another thread, whose operations would else be of its own stream."""
    import torch  # the launcher reads this file

    stream = torch.cuda.current_stream()

    def begin() -> Any:
        with torch.cuda.stream(stream):
            return operation()

    return begin


def finish(work: Any) -> None:
    """Wait until the device has done `work`. Raises RuntimeError if it failed.

    Whether it was aborted on the way nobody tells: the caller knows who aborts. A wait on a communicator that is never aborted
    may last for ever.
    """
    work.wait()
    while not work.is_completed():
        time.sleep(LOOK_S)
    work.wait()  # of what has failed, only now
