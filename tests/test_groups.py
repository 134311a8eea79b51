"""A generation that is cut frees its rank at once, and leaves no thread in C++ behind when the rank ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from odyssey.runtime import groups
from odyssey.runtime.groups import Cut, Groups

pytestmark = pytest.mark.timeout(60)


def test_a_rank_that_is_cut_while_the_store_does_not_answer_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from C++ when the interpreter has ended aborts the process."""
    monkeypatch.setattr(groups, "CONNECT_S", 0.5, raising=False)
    of_somebody_else = Groups("", 900, (0,), (), (), 0, torch.device("cpu"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        cut, last = (Groups(f"127.0.0.1:{port}", number, (0, 1), (), (), 0, torch.device("cpu")) for number in (901, 902))
        threads = [thread for thread in threading.enumerate() if thread.name[-3:] in ("901", "902")]
        silent.settimeout(30)
        accepts = threading.Thread(target=lambda: (silent.accept(), cut.cut("a newer generation")))
        accepts.start()
        with pytest.raises(Cut, match="a newer generation"):
            cut.build()
        accepts.join()
        cut.release()  # as the next generation does
        last.close()
        assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
    of_somebody_else.check()  # it goes on
    of_somebody_else.close()


RECEIVER = """
import signal, sys, torch
from odyssey.runtime.groups import Groups
groups = Groups(sys.argv[1], 1, (0, 1), (), (), 1, torch.device("cpu"))
groups.build()
work = groups.receive(torch.empty(16_000_000), 0, 1)
groups.wait(groups.send(torch.zeros(1), 0, 2).wait)
print("posted", flush=True)
signal.pause()
"""
SENDER = """
import sys, threading, torch
from odyssey.runtime import groups
groups.FORGOTTEN, groups.END_S = groups.NO_LIMIT, 1e6
mine = groups.Groups(sys.argv[1], 1, (0, 1), (), (), 0, torch.device("cpu"))
mine.build()
mine.wait(mine.receive(torch.zeros(1), 1, 2).wait)
input()
work = mine.send(torch.empty(16_000_000), 1, 1)
waits = threading.Event()
threading.Thread(target=lambda: (waits.wait(), mine.cut("a newer generation"))).start()
try:
    mine.wait(lambda: (waits.set(), work.wait()))
except groups.Cut as cut:
    print(cut)
mine.close()
"""


def test_a_rank_that_was_cut_in_the_middle_of_a_send_ends_without_waiting_for_it() -> None:
    """Gloo never tells who waits for a send that has begun and whose connection then ends."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = partial(subprocess.Popen, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE)
    receiver_of, sender_of = ([sys.executable, "-c", script, f"127.0.0.1:{store.port}"] for script in (RECEIVER, SENDER))
    with start(receiver_of) as receiver, start(sender_of, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        try:
            assert receiver.stdout and receiver.stdout.readline() == "posted\n"
            receiver.send_signal(signal.SIGSTOP)
            out, err = sender.communicate("go\n")  # a sender that waits for ever is ended by the test's own time limit
            assert (sender.returncode, out, err) == (0, "a newer generation\n", "")
        finally:
            sender.kill()
            receiver.kill()
