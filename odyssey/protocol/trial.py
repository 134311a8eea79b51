"""The plan of a trial: the steps that ranks try when a job starts, along the chain in which they measure its layers."""

from __future__ import annotations

from collections.abc import Sequence

from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.plan.proof import prove
from odyssey.protocol.model_spec import ModelSpec

N_MICRO_BATCHES = 2
"""For each stage, at most: a pipeline is full for half of the step then."""


def trial_plan(generation: int, chain: Sequence[Stage], spec: ModelSpec) -> Plan:
    """One pipeline along `chain` in plain 1F1B, or one copy of a sharded model, with as many of the step's micro-batches as
    show what they cost.

    Nothing is reduced in it: what several layers share is each stage's own for once.
    """
    n_micro_batches = min(-(-spec.global_batch // spec.micro_batch), N_MICRO_BATCHES * len(chain))
    return prove(
        Plan(
            generation=generation,
            strategy="trial",
            step=0,
            global_batch=min(spec.global_batch, n_micro_batches * spec.micro_batch),
            micro_batch=spec.micro_batch,
            n_layers=len(spec.layers),
            blocks=blocks_of((Pipeline(tuple(chain), 0, n_micro_batches),)),
            reductions=tuple(Reduction(tuple(stage.layers), ()) for stage in chain),
            state_from=StateFrom.SCRIPT,
            is_sharded=spec.n_shards > 1,
        )
    )
