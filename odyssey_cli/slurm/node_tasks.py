"""Several tasks of a step on one node: the first is the node's agent, the others wait for its end and exit as it does.

They do not leave at once: SLURM may end a step some time after its first task has ended (`srun --wait`), and it takes the
worst exit code of all tasks for the step's. The tasks meet at a socket without a file: its name is the step's and the node's.
Nobody serves it while the job runs. The kernel holds the connections of those that wait, and ends them with the agent.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.slurm.step import Step

MEET_S, RETRY_S = 120.0, 0.1
"""For the agent of a node to be there: tasks start together, but each reads its programs from a disk that all share."""
FAREWELL_S = 10.0
"""For those that have not come yet when the agent ends: a job may be over in a second."""
_CREDENTIALS = struct.Struct("3i")


class Others:
    """The other tasks of an agent's node."""

    def __init__(self, listener: socket.socket, n: int) -> None:
        self._listener = listener
        self._n = n

    def tell(self, code: int) -> None:
        """Have them exit with this code."""
        deadline = time.monotonic() + FAREWELL_S
        for _ in range(self._n):
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connected, _address = self._listener.accept()
            except TimeoutError:
                return  # it was lost, or it is so late that it finds nobody
            with connected:
                try:
                    connected.sendall(bytes([code]))
                except OSError:
                    pass  # it was lost while it waited


@contextmanager
def leading(step: Step) -> Iterator[Others]:
    """For the agent of a node, from before its job until it has told its end. Raises UsageError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_place(step))
        except OSError as error:
            raise UsageError(
                f"another agent runs for this node of step {step.run_id} ({error.strerror})",
                "run one job in a step, or give --standalone or --rdzv-endpoint to the others",
            ) from None
        listener.listen(step.n_tasks_here)
        yield Others(listener, step.n_tasks_here - 1)


def follow(step: Step) -> int:
    """For any other task: wait until the agent has ended, whatever signals come meanwhile; answers its exit code."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # they are the agent's too, which decides what to do about them
    with _agent_of(step) as agent:
        try:
            told = agent.recv(1)  # ended by the agent's end, however it ends, or by SLURM's SIGKILL
        except ConnectionResetError:
            told = b""
    if not told:
        print(f"odyssey: task {step.local_task}: the agent of this node has ended without an exit code", file=sys.stderr)
        return ExitCode.FAILED
    return told[0]


def _agent_of(step: Step) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while True:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.connect(_place(step))
        except OSError as error:
            found.close()
            if time.monotonic() > deadline:
                raise OdysseyError(
                    f"task {step.local_task}: no agent of this node within {MEET_S:g} s ({error.strerror})",
                    "see the output of the node's first task",
                ) from None
            time.sleep(RETRY_S)
            continue
        credentials = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            found.close()
            raise OdysseyError(f"task {step.local_task}: another user's process is where the agent of this node should be")
        return found


def _place(step: Step) -> str:
    """In the kernel's own space of names, which is emptied with the last process that holds one."""
    return f"\0odyssey-{os.getuid()}-{step.job_id}.{step.step}.{step.restarts}-{step.node}"
