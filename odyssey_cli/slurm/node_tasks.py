"""Several tasks of a step on one node: the first is the node's agent, the others wait for its end and exit as it does.

They do not leave at once: SLURM may end a step some time after its first task has ended (`srun --wait`), and it takes the
worst exit code of all tasks for the step's. The tasks meet at a socket without a file, whose name begins with the step's and
the node's, and ends with what nobody can foresee. Any user of the node may make such a socket, or connect to one: the kernel
tells whose process is at the other end, and only this user's and root's count. The kernel ends the connections of those that
wait with the agent.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.host import proc
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError, UsageError
from odyssey_cli.slurm.step import Step

MEET_S, RETRY_S = 120.0, 0.1
"""For the agent of a node to be there: tasks start together, but each reads its programs from a disk that all share."""
FAREWELL_S = 10.0
"""For those that have not come yet when the agent ends: a job may be over in a second."""
_CREDENTIALS = struct.Struct("3i")


class Others:
    """The other tasks of an agent's node. Taken by a thread as they come, so that no stranger's connections keep them out."""

    def __init__(self, listener: socket.socket, n: int) -> None:
        self._listener = listener
        self._n = n
        self._came: list[socket.socket] = []
        self._comes = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._take, name="tasks", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        """Until `close`."""
        while not self._is_over.is_set():
            try:
                connected, _address = self._listener.accept()
            except OSError:  # it is gone again, there is no descriptor for it, or nobody more comes
                self._is_over.wait(RETRY_S)
                continue
            if _is_ours(connected):
                with self._comes:
                    self._came.append(connected)
                    self._comes.notify()
            else:
                connected.close()

    def tell(self, code: int) -> None:
        """Have them exit with this code."""
        with self._comes:
            # who does not come was lost, or is so late that it finds nobody
            self._comes.wait_for(lambda: sum(map(_waits, self._came)) >= self._n, FAREWELL_S)
            for connected in self._came:
                try:
                    connected.sendall(bytes([code]))
                except OSError:
                    pass  # it was lost while it waited

    def close(self) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the `accept`
        self._thread.join()
        for connected in self._came:
            connected.close()


@contextmanager
def leading(step: Step) -> Iterator[Others]:
    """For the agent of a node, from before its job until it has told its end. Raises UsageError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = _place(step) + secrets.token_hex(8)
        listener.bind(f"\0{name}")
        listener.listen(step.n_tasks_here)
        if (other := _agent_of(step, but=name)) is not None:
            other.close()
            raise UsageError(
                f"another agent runs for this node of step {step.run_id}",
                "run one job in a step, or give --standalone or --rdzv-endpoint to the others",
            )
        others = Others(listener, step.n_tasks_here - 1)
        try:
            yield others
        finally:
            others.close()


def follow(step: Step) -> int:
    """For any other task: wait until the agent has ended, whatever signals come meanwhile; answers its exit code."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # they are the agent's too, which decides what to do about them
    with _found_agent(step) as agent:
        try:
            told = agent.recv(1)  # ended by the agent's end, however it ends, or by SLURM's SIGKILL
        except ConnectionResetError:
            told = b""
    if not told:
        print(f"odyssey: task {step.local_task}: the agent of this node has ended without an exit code", file=sys.stderr)
        return ExitCode.FAILED
    return told[0]


def _found_agent(step: Step) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while (found := _agent_of(step)) is None:
        if time.monotonic() > deadline:
            raise OdysseyError(
                f"task {step.local_task}: no agent of this node within {MEET_S:g} s", "see the output of the node's first task"
            )
        time.sleep(RETRY_S)
    return found


def _agent_of(step: Step, but: str = "") -> socket.socket | None:
    """Connected to it. `but`: a name that is not meant."""
    names = {name[1:] for name in proc.unix_sockets() if name.startswith(f"@{_place(step)}")}
    for name in names - {but}:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.setblocking(False)
            found.connect(f"\0{name}")
            if _is_ours(found):
                found.setblocking(True)
                return found
        except OSError:
            pass  # it has ended, or more wait for it than it takes
        found.close()
    return None


def _is_ours(connected: socket.socket) -> bool:
    """Whether a process of this user, or of root, is at the other end: it made the connection, or listened for it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def _waits(connected: socket.socket) -> bool:
    """Whether the task at the other end lives."""
    try:
        return connected.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _place(step: Step) -> str:
    """What the name begins with, in the kernel's own space of names, which is emptied with the last process that holds one."""
    return f"odyssey-{os.getuid()}-{step.job_id}.{step.step}.{step.restarts}-{step.node}-"
