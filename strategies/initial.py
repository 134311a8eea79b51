"""Initial, the first layout of a job: the one the user asks for, or the fastest among those that survive a loss.

Consecutive workers form a pipeline, so that the copies of a stage sit on different nodes wherever they can. A single
pipeline keeps one copy of each layer; `auto` takes it only where no other layout exists, or none that survives what it
has to. One of the layouts that are priced survives the loss of any node, where there is one.
"""

from __future__ import annotations

from functools import partial

from strategies.building.compose import n_micro_batches_of
from strategies.building.effort import FEW_WORKERS
from strategies.building.layout_to_plan import UnplacedLayout, no_layout, realise
from strategies.building.layouts import layouts
from strategies.building.placement_score import PlacementScore
from strategies.building.shapes import Shapes, shapes_of
from strategies.situation import Candidate, Proposal, Situation
from strategies.situation.faults import attempt

NAME = "initial"
SUMMARY = "The layout that was asked for, or the fastest that survives a loss."
N_PRICED, N_PRICED_OF_FEW = 6, 12
"""Layouts that are priced exactly; of few workers more, whose closed form is farther from the price."""


def start(situation: Situation) -> list[Proposal | Candidate]:
    """Plans for pipelines of the lengths that were asked for, or the best few of all. A layout that fails costs its row."""
    lengths = situation.lengths
    n_workers = len(situation.alive)
    n_layers = len(situation.profile.layers)
    shapes = shapes_of(situation.profile, n_micro_batches_of(situation))
    score = PlacementScore(situation, shapes)
    if lengths is None:
        at_least = max(2, situation.aim.n_ranks + 1)

        def is_safe(row: tuple[int, ...]) -> bool:
            return _n_nodes(situation, shapes, row) > max(1, situation.aim.n_nodes)

        rooms = tuple(score.rooms.values())
        n_priced = N_PRICED_OF_FEW if n_workers <= FEW_WORKERS else N_PRICED
        chosen = layouts(shapes, n_workers, n_priced, at_least, is_safe, rooms)
        chosen = chosen or layouts(shapes, n_workers, n_priced, rooms=rooms)
        if situation.aim.n_nodes and not any(map(is_safe, chosen)):
            chosen += [(n,) for n in range(1, min(n_workers, n_layers) + 1) if (n,) not in chosen and shapes.of(n) is not None]
    else:
        chosen = [lengths]
    rows: list[Proposal | Candidate] = []
    for row in chosen:
        layout: UnplacedLayout = []
        for n_stages in row:
            shape = shapes.of(n_stages)
            if shape is None:
                limit = situation.profile.cluster.memory_bytes / 1e9
                stages = "one stage" if n_stages == 1 else f"{n_stages} stages"
                reason = f"no split of {n_layers} layers in {stages} fits {limit:.1f} GB each"
                rows.append(Proposal(NAME, None, reason))
                break
            layout.append((shape.ranges, [None] * n_stages))
        else:
            rows.append(attempt(NAME, partial(realise, score, NAME, layout)))
    return rows or [Proposal(NAME, None, no_layout(situation, n_workers))]


def _n_nodes(situation: Situation, shapes: Shapes, lengths: tuple[int, ...]) -> int:
    """The nodes that hold a layer, of the layer that has fewest, where consecutive workers form a pipeline."""
    workers = iter(situation.alive)
    nodes: list[set[int]] = [set() for _ in situation.profile.layers]
    for length in lengths:
        shape = shapes.of(length)
        assert shape is not None, "layouts are made of shapes that fit"
        for first, stop in shape.ranges:
            node = situation.node_of[next(workers)]
            for layer in range(first, stop):
                nodes[layer].add(node)
    return min(map(len, nodes))
