"""Searches find the same to the last bit, whichever kernel they run on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from odyssey import kernel
from tests import ROOT


def lines(first: int, stop: int, variable: str) -> list[str]:
    """What tables.py says of these situations in a process of its own."""
    command = [sys.executable, "-m", "tests.strategies.tables", str(first), str(stop)]
    env = os.environ | {"ODYSSEY_KERNEL": variable}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(
    not kernel.IS_COMPILED, reason="the kernel is not compiled here: no C compiler, or plain.py was edited since"
)
@pytest.mark.parametrize(
    ("first", "stop"), [(0, 4), *(pytest.param(i, i + 250, marks=pytest.mark.soak) for i in range(0, 1000, 250))]
)
def test_tables_on_the_compiled_kernel_are_those_on_its_source(first: int, stop: int) -> None:
    compiled, plain = lines(first, stop, ""), lines(first, stop, "plain")
    assert (compiled[0], plain[0]) == ("True", "False")
    assert compiled[1:] == plain[1:] and len(plain) == 1 + stop - first
