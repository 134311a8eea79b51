"""Which ranks measure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.coordinator.actions import StartMeasure
from launcher.coordinator.rank_assignment import homes
from launcher.coordinator.transition import measure
from launcher.joblog.events import AgentInfo
from tests.launcher.coordinator.talk import model


@pytest.mark.parametrize(
    ("n_layers", "agents", "lost", "chain"),
    [
        (8, (8, 8), (), (0, 1, 2, 3, 8, 9, 10, 11)),
        (5, (8, 8), (), (0, 1, 2, 8, 9)),
        (2, (4, 4, 4), (), (0, 4)),
        (1, (4, 4), (), (0,)),
        (6, (8, 1, 1), (), (0, 1, 2, 3, 8, 9)),
        (6, (4, 4), (1, 2), (0, 3, 4, 5, 6, 7)),
        (6, (2, 2, 2, 2), (), (0, 1, 2, 3, 4, 5)),
        (9, (2, 2), (), (0, 1, 2, 3)),
        (3, (), (), (0, 1, 2)),
    ],
)
def test_layers_are_measured_along_ranks_of_more_than_one_host(
    n_layers: int, agents: tuple[int, ...], lost: tuple[int, ...], chain: tuple[int, ...]
) -> None:
    """No agent is named where there can be one only. Neighbours within a host are among them where there are layers enough."""
    seated = tuple(AgentInfo(i, f"host{i}", i, n_ranks) for i, n_ranks in enumerate(agents))
    members = frozenset(range(sum(agents) or 4)) - set(lost)
    world = SimpleNamespace(homes=homes(seated), generation=0)
    job = cast(Any, SimpleNamespace(model=model(n_layers), members=members, world=world))
    *_, start = measure(job)
    assert isinstance(start, StartMeasure)
    assert tuple(stage.worker for stage in start.chain) == chain
    assert [layer for stage in start.chain for layer in stage.layers] == list(range(n_layers))
