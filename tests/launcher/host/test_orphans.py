"""What ranks that are gone have left is found among the children of the agent."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from launcher.host import orphans
from launcher.host.handle import Handle


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """It leads a session, as a rank does."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as made:
        yield made
        made.kill()


def test_no_other_process_is_looked_at_where_nothing_was_left(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def family() -> orphans.Family:
        raise AssertionError("all processes of the host are looked at")

    monkeypatch.setattr(orphans, "family", family)
    orphans.end_orphans([Handle(child.pid + 1, 0.0)], "no such job")
    assert child.poll() is None


@pytest.mark.parametrize("has_list", [True, False], ids=["listed", "searched"])
def test_what_was_left_is_ended(child: subprocess.Popen[bytes], has_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel was built without a list of a process's children."""
    if not has_list:
        monkeypatch.setattr(orphans.proc, "children", lambda pid: [])
    orphans.end_orphans([Handle.of(child.pid)])
    assert child.wait() == -signal.SIGKILL
