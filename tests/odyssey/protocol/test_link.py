"""Only the rank speaks to the agent, and nothing that the rank has started, whatever that has inherited."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.joblog.events import Progressed
from launcher.options import Entry, RunOptions
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

RANK = """
import os, subprocess, sys
if "again" not in sys.argv and "exec" in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
import odyssey
from odyssey.protocol.link import connect
odyssey.heartbeat(1)
assert connect() is not None
number = os.environ["ODYSSEY_AGENT_FD"].partition(":")[0]
ask = "from odyssey.protocol.link import connect; sys.exit(0 if connect() is None else 3)"
another = f"import os, socket, sys; pair = socket.socketpair(); os.dup2(pair[0].fileno(), {number})"
still = f"import os, atexit; atexit.register(os.fstat, {number})"
assert subprocess.call([sys.executable, "-c", f"import sys; {ask}"], close_fds=False) == 0
assert subprocess.call([sys.executable, "-c", f"{another}; {still}; {ask}"]) == 0
child = os.fork()
if child == 0:
    os._exit(0 if connect() is None else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "entry"),
    [
        ((), {}, Entry.SCRIPT),
        (("exec",), {}, Entry.SCRIPT),
        (("exec",), {"ODYSSEY_ZYGOTE": "0"}, Entry.SCRIPT),
        ((), {}, Entry.PROGRAM),
    ],
    ids=["fork", "fork-exec", "spawn-exec", "below-a-program"],
)
def test_the_rank_is_heard_and_what_it_starts_is_not(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "script.py"
    script.write_text(RANK)
    given: dict[str, Any] = {"script": str(script), "arguments": arguments}
    if entry is Entry.PROGRAM:
        given = {"script": "/bin/bash", "arguments": ("-c", f"{sys.executable} {script}; exit $?")}
    ran = Ran(RunOptions(**given, entry=entry, log_dir=tmp_path / "logs", capture_output=True))

    assert ran.code == 0, ran.text("stderr")
    assert ran.all(Progressed) == [Progressed(0)]
