"""A layout in words, beside the short form in which people write it.

`4x4+15x1 cut split 1x` is `4 pipelines of 4 stages + 15 whole copies; micro-batches cut to share them out evenly; backward in
halves`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby

from odyssey.plan.plan import Plan
from odyssey_cli.display import quantities

_SHAPE = "x"
_LEGEND = {
    _SHAPE: "2x4: two pipelines of four stages; 2x1: two whole copies; 3+2: one of three stages, one of two",
    "-": "-1: one stage has no rank, and others run its micro-batches",
    "cut": "cut: smaller micro-batches, so that pipelines share them out evenly",
    "split": "split: backward in halves, with so many times the activations of 1F1B (max: as memory allows)",
    "sharded": "sharded: each pipeline is a copy of the model, whose ranks have a shard each",
    "protected": "protected: ranks also keep layers of others, which a loss then leaves whole",
    "approximate": "approximate: some gradients are approximate",
}
"""What a word of the short form means, by how it begins; each form has a shape."""


def in_words(plan: Plan) -> str:
    """All that the short form says, and whether backwards are in halves in the orders of single workers."""
    lengths = [len(pipeline.stages) for pipeline in plan.pipelines]
    n_lost = sum(stage.worker is None for pipeline in plan.pipelines for stage in pipeline.stages)
    of = _copies if plan.is_sharded else _of_length
    parts = [" + ".join(of(length, len(list(run))) for length, run in groupby(lengths))]
    if n_lost:
        parts.append(f"{quantities.plural(n_lost, 'stage')} without a rank, whose micro-batches others run")
    if plan.is_cut:
        parts.append("micro-batches cut to share them out evenly")
    if plan.schedule.has_halves:
        parts.append("backward in halves")
    if plan.keep_runs and not plan.is_sharded:
        parts.append("ranks keep layers of others")
    if plan.is_sharded and (n_others := len(plan.workers) - len(plan.place)):
        parts.append(f"{quantities.plural(n_others, 'rank')} outside of them that keep{'s' if n_others == 1 else ''} a shard")
    if plan.approximation is not None:
        parts.append("some gradients approximate")
    return "; ".join(parts)


def wrapped(head: str, plan: Plan, width: int) -> str:
    """The layout in words behind `head`, further lines below its first word."""
    lines = textwrap.wrap(in_words(plan), max(20, width - len(head)), break_on_hyphens=False)
    return f"\n{' ' * len(head)}".join([head + lines[0], *lines[1:]])


def _of_length(n_stages: int, n: int) -> str:
    if n_stages == 1:
        return quantities.plural(n, "whole copy", "whole copies")
    return f"{quantities.plural(n, 'pipeline')} of {n_stages} stages"


def _copies(n_shards: int, n: int) -> str:
    return f"{quantities.plural(n, 'copy', 'copies')} of the model in {quantities.plural(n_shards, 'shard')}"


def legend(forms: Iterable[str]) -> list[str]:
    """What the words mean that stand in these short forms."""
    words = {word for form in forms for word in form.split()}
    return [text for key, text in _LEGEND.items() if key == _SHAPE or any(word.startswith(key) for word in words)]
