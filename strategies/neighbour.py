"""Neighbour does both (MeCeFO, NeurIPS 2025, arXiv 2510.16415): one worker runs its own stage and a lost one's, approximately.

The worker that does both holds the lost stage's layers already: it has the same stage in another pipeline, or keeps them. Its
forward is exact. Its backward, of both streams, leaves attention and its norm out (the gradient takes the residual connection),
computes feed-forwards again from their input, and takes the gradients of their weights in the span of a few singular vectors
(odyssey/runtime/approximate.py). That comes to 1.3 to 1.6 times one worker's computation, and about its memory. The parameters
of attention have the mean of the samples that others ran; where others ran none, they are not updated.

It is not exact, and proposes nothing unless `--allow-approximate` says so. It lasts until a plan without it is taken: when the
lost worker is back, or after another loss.
"""

from __future__ import annotations

from odyssey.plan.approximation import ApproximateCost
from strategies.building.routing import doubled
from strategies.building.taking_over import taken_over, without_lost
from strategies.situation import Proposal, Situation

NAME = "neighbour"
SUMMARY = "One rank with the lost one's layers does both ranks' work, with an approximate backward (--allow-approximate)."


def propose(situation: Situation) -> list[Proposal]:
    """Each lost stage on one worker that holds its layers: where a neighbour in the pipeline keeps them, on that one, too."""
    plan, low_rank = situation.plan, situation.aim.approximate
    if plan is None:
        return []
    if low_rank is None:
        return [Proposal(NAME, None, "its gradients are approximate, which --allow-approximate allows")]
    layers = situation.profile.layers
    if not any(isinstance(layer.approximate, ApproximateCost) for layer in layers):
        whys = dict.fromkeys(layer.approximate for layer in layers if isinstance(layer.approximate, str) and layer.approximate)
        why = next(iter(whys), "the profile was measured without --allow-approximate")
        return [Proposal(NAME, None, f"no layer has an approximate backward: {why}")]
    stages = without_lost(situation, plan)
    if all(stage.worker is not None for row in stages for stage in row):
        return [Proposal(NAME, None, "every stage has its worker")]
    taken = [taken_over(situation, row) for row in stages]
    ways = [stages] if taken == stages else [taken, stages]
    return [proposal for way in ways for proposal in doubled(situation, NAME, way, low_rank)]
