"""What a transition takes of memory: what real ranks have at most is what is priced."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

import pytest
from msgspec.structs import replace

from odyssey.model import packing
from odyssey.protocol.messages import Committed
from perfmodel import memory
from perfmodel.costs import Costs
from tests import ROOT
from tests.agent_runs import nothing_left
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

CLOSE = 0.01
"""Beside states: activations that a layer's input is, samples, counts of steps."""


def test_a_digest_is_counted_as_it_is_made() -> None:
    assert packing.DIGEST_BYTES == memory.PROOF_BYTES


def test_ranks_have_no_more_while_layers_move_than_is_priced(forks: Forks, tmp_path: Path) -> None:
    hold, out = tmp_path / "hold", tmp_path / "most"
    hold.touch()
    with contextlib.closing(MiniAgent(forks, 4, ROOT / "tests/jobs/counted.py", str(hold), str(out))) as agent:
        with hold.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            agent.start("2x2")
            agent.go()
            agent.wait(Committed, when=lambda report: report.result.position == (2, 0))
            agent.kill(3)
            paused = agent.pause()
            plan = agent.replan("repartition", paused)
            agent.send_prepare(plan)
        ready = agent.wait_ready()

        held = {rank: frozenset(report.held) for rank, report in paused.items()}
        of = replace(agent.profile, runtime_bytes=0)
        priced = memory.peaks_of_moves(plan, held, Costs(of))
        assert priced and set(priced) == {rank for rank, report in ready.items() if report.moved_bytes}
        for rank, size_bytes in priced.items():
            most = int(Path(f"{out}.{rank}").read_text())
            assert most == pytest.approx(size_bytes, rel=CLOSE), f"rank {rank}: {most / size_bytes:.3f} of what is priced"
        agent.go()
        agent.finish()
