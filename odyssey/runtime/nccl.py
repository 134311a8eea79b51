"""What NCCL, as torch drives it, does that a rank which is to outlive others must not be left to.

    an operation  is only queued when its `Work.wait` returns: what it comes to is known when the device has done it
    a communicator that fails  is looked after by a thread of torch's. As it is set by default, that thread ends the process;
                  or it aborts the communicator, after which what was queued there counts as done, whatever came of it

So it is told to do neither: a communicator is aborted by a cut (groups.py) and by nothing else, and a generation that was cut
contributes nothing.
"""

from __future__ import annotations

import os
import time
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
LOOK_S = 0.0002


def outlive_peers() -> None:
    """Before the first communicator. What the user has set stays."""
    of_torchrun = os.environ.get(OF_TORCHRUN, "").split(",")
    for name, value in OUTLIVING.items():
        if name in of_torchrun or name not in os.environ:
            os.environ[name] = value


def finish(work: Any) -> None:
    """Wait until the device has done `work`. Raises RuntimeError if it failed.

    Whether it was aborted on the way nobody tells: the caller knows who aborts. A wait on a communicator that is never aborted
    may last for ever.
    """
    work.wait()
    while not work.is_completed():
        time.sleep(LOOK_S)
    work.wait()  # of what has failed, only now
