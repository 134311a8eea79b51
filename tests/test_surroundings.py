"""Tests pass wherever they are started: what they start does not find the developer's terminal, shell or home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launchers import CLIENTS

HOSTILE = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.umask(0o077)
os.close(0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a program that inherits what nohup, a shell's background, and a careless parent leave."""


def test_a_process_finds_the_same_surroundings_everywhere() -> None:
    code = f"import json, sys; sys.path.insert(0, {str(CLIENTS)!r}); import probe; print(json.dumps(probe.facts()))"
    needs = {"MASTER_ADDR": "", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | needs, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    ignored = [number for number in found["SigIgn"] if number in signal.valid_signals()]  # the C library keeps some to itself
    assert ignored == [signal.SIGPIPE, signal.SIGXFSZ]  # by Python itself
    assert found["SigBlk"] == []
    assert found["umask"] == "0022"
    assert found["streams"][0] == os.devnull
    assert found["env"]["LANG"] == "C.UTF-8"
    assert found["env"]["PATH"] == os.environ["PATH"]
    assert not {"COLUMNS", "LC_ALL", "PYTHONPATH", "RANK", "TERM"} & set(found["env"])
    for name in ("HOME", "TMPDIR", "XDG_STATE_HOME"):
        assert found["env"][name].startswith("/tmp/odyssey-tests-") and os.access(found["env"][name], os.W_OK)


def test_so_it_does_when_the_tests_are_started_in_hostile_ones(tmp_path: Path) -> None:
    long = tmp_path / ("with spaces " + "x" * 120)
    long.mkdir()
    env = dict.fromkeys(("COLUMNS", "LC_ALL", "LANG", "PYTHONPATH", "RANK", "TERM"), "5")
    env |= {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(long)}
    first = f"{__file__}::{test_a_process_finds_the_same_surroundings_everywhere.__name__}"
    command = [sys.executable, "-c", HOSTILE, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", first]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
