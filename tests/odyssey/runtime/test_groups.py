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

from odyssey.plan.needs import Needs
from odyssey.protocol.frames import Deframer, frame
from odyssey.protocol.orders import Known
from odyssey.protocol.reports import Report
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.transport import ADDRESS

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


def test_a_rank_that_is_cut_while_others_have_not_come_ends_whole() -> None:
    """A thread that comes back from C++ when the interpreter has ended aborts the process."""
    of_somebody_else = Groups(to_nobody, 900, Needs((0,)), 0, CPU)
    has_come = threading.Event()
    cut, last = (Groups(lambda offered: has_come.set(), number, Needs((0, 1)), 0, CPU) for number in (901, 902))
    threads = [thread for thread in threading.enumerate() if thread.name[-3:] in ("901", "902")]
    cuts = threading.Thread(target=lambda: (has_come.wait(), cut.cut("a newer generation")))
    cuts.start()
    with pytest.raises(Cut, match="a newer generation"):
        cut.build()
    cuts.join()
    cut.release()  # as the next generation does
    last.close()
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
    of_somebody_else.waiter.check()  # it goes on
    of_somebody_else.close()


def test_what_ends_a_wait_by_no_exception_is_raised_to_its_owner_and_the_thread_goes_on() -> None:
    groups = Groups(to_nobody, 1, Needs((0,)), 0, CPU)
    with pytest.raises(SystemExit, match="3"):
        groups.waiter.beside(lambda: sys.exit(3))
    assert groups.waiter.beside(lambda: 4) == 4
    groups.close()


def introduce(ranks: list[socket.socket]) -> None:
    """What an agent does while one group is built: hand out to all what each offers."""
    offers = [next(Deframer(Report).feed(rank.recv(1 << 16))) for rank in ranks]
    known = Known(offers[0].generation, offers[0].name, {rank: offered.value for rank, offered in enumerate(offers)})
    for rank in ranks:
        rank.sendall(frame(known))


RECEIVER = """
import signal, socket, sys, torch
from odyssey.protocol.link import AgentLink
from odyssey.plan.needs import Needs
from odyssey.runtime.groups import Groups
link = AgentLink(socket.socket(fileno=int(sys.argv[1])), 0)
groups = Groups(link.report, 1, Needs((0, 1)), 1, torch.device("cpu"))
link.listen(groups.introductions.learn)
groups.build()
work = groups.receive(torch.empty(16_000_000), 0, 1)
groups.waiter.wait(groups.send(torch.zeros(1), 0, 2).wait)
print("posted", flush=True)
signal.pause()
"""
SENDER = """
import socket, sys, threading, torch
from odyssey.protocol.link import AgentLink
from odyssey.plan.needs import NO_LIMIT, Needs
from odyssey.runtime import groups
groups.END_S = 1e6
link = AgentLink(socket.socket(fileno=int(sys.argv[1])), 0)
mine = groups.Groups(link.report, 1, Needs((0, 1), limit=NO_LIMIT), 0, torch.device("cpu"))
link.listen(mine.introductions.learn)
mine.build()
mine.waiter.wait(mine.receive(torch.zeros(1), 1, 2).wait)
input()
work = mine.send(torch.empty(16_000_000), 1, 1)
waits = threading.Event()
threading.Thread(target=lambda: (waits.wait(), mine.cut("a newer generation"))).start()
try:
    mine.waiter.wait(lambda: (waits.set(), work.wait()))
except groups.Cut as cut:
    print(cut)
mine.close()
"""


def test_a_rank_that_was_cut_in_the_middle_of_a_send_ends_without_waiting_for_it() -> None:
    """Gloo never tells who waits for a send that has begun and whose connection then ends."""
    pairs = [socket.socketpair() for _ in range(2)]
    start = partial(subprocess.Popen, env=os.environ | {"OMP_NUM_THREADS": "1", ADDRESS: "127.0.0.1"}, text=True)
    (sends, its_end), (receives, other_end) = pairs
    sender_of, receiver_of = (
        [sys.executable, "-c", SENDER, str(its_end.fileno())],
        [sys.executable, "-c", RECEIVER, str(other_end.fileno())],
    )
    with (
        start(receiver_of, stdout=subprocess.PIPE, pass_fds=[other_end.fileno()]) as receiver,
        start(
            sender_of, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[its_end.fileno()]
        ) as sender,
    ):
        introduce([sends, receives])
        try:
            assert receiver.stdout and receiver.stdout.readline() == "posted\n"
            receiver.send_signal(signal.SIGSTOP)
            out, err = sender.communicate("go\n")  # a sender that waits for ever is ended by the test's own time limit
            assert (sender.returncode, out, err) == (0, "a newer generation\n", "")
        finally:
            sender.kill()
            receiver.kill()
            for end in (sends, its_end, receives, other_end):
                end.close()
