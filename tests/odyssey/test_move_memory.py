"""What a transition takes of memory: what real ranks have at most is what is priced."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Sequence
from pathlib import Path

import pytest

from odyssey.model import packing
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from perfmodel.step.costs import Costs
from tests import ROOT
from tests.agent_runs import nothing_left
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

CLOSE = 0.01
"""Beside states: activations that a layer's input is, samples, counts of steps."""


def most_while_moving(own: frozenset[int], held: frozenset[int], received: Sequence[int], costs: Costs) -> int:
    """Peak bytes on the way to holding `own`, for who holds `held` (until all are ready) and receives some layers: what has
    been received is held twice until it is taken over; later come gradients, and what a proof has of a state at once."""
    of, sizes, holds = costs.profile, costs.move_bytes, own | held
    layers = [of.layers[i] for i in holds]
    states = sum(layer.parameter_bytes + layer.optimizer_bytes + layer.buffer_bytes for layer in layers)
    gradients = sum(of.layers[i].gradient_bytes for i in own)
    ties = sum(
        round(size * (1 + costs.state_per_parameter))
        for tie, size in zip(of.ties, of.tie_bytes, strict=True)
        if holds.intersection(tie)
    )
    proved = gradients + min(packing.DIGEST_BYTES, max(sizes[layer] for layer in holds))
    return states + ties + max(max(sizes[layer] for layer in received), proved)


def test_ranks_have_no_more_while_layers_move_than_is_priced(forks: Forks, tmp_path: Path) -> None:
    hold, out = tmp_path / "hold", tmp_path / "most"
    hold.touch()
    with contextlib.closing(MiniAgent(forks, 4, ROOT / "tests/jobs/counted.py", str(hold), str(out))) as agent:
        with hold.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            agent.start("2x2")
            agent.go()
            agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
            agent.kill(3)
            paused = agent.pause()
            plan = agent.replan("repartition", paused)
            agent.send_prepare(plan)
        ready = agent.wait_ready()

        received: dict[int, list[int]] = {}
        for move in plan.moves:
            received.setdefault(move.target, []).append(move.layer)
        priced = {
            rank: most_while_moving(plan.holds[rank], frozenset(paused[rank].held), layers, Costs(agent.profile))
            for rank, layers in received.items()
        }
        assert priced and set(priced) == {rank for rank, report in ready.items() if report.moved_bytes}
        for rank, size_bytes in priced.items():
            most = int(Path(f"{out}.{rank}").read_text())
            assert most == pytest.approx(size_bytes, rel=CLOSE), f"rank {rank}: {most / size_bytes:.3f} of what is priced"
        agent.go()
        agent.finish()
