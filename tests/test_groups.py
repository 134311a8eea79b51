"""A generation that is cut frees its rank at once, and leaves no thread in C++ behind when the rank ends."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

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
