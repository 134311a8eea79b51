"""What a rank proves at the gate, taken from the very things that will be trained: modules, optimizers, gradient buffers.

The coordinator compares it between ranks and with the plan (launcher/coordinator/gate.py), and nothing runs before all agree.
"""

from __future__ import annotations

import hashlib
import time

from odyssey.model.model import Model
from odyssey.model.packing import digest
from odyssey.protocol.reports import Ready
from odyssey.protocol.units import Position
from odyssey.runtime.data import layer_seed
from odyssey.runtime.engine import Engine
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.transfer import Moved


def ready(
    engine: Engine,
    model: Model,
    job_spec: JobSpec,
    data: Prefetcher,
    position: Position,
    *,
    groups_s: float,
    moves_s: float,
    moved: Moved,
) -> Ready:
    """The report for the gate of `engine`'s plan. Layers that leave with this plan are among the digests, as what has come
    of them elsewhere must equal them."""
    started_s = time.monotonic()
    digests = tuple((number, digest(model.shard_state(number))) for number in sorted(model.shards))
    return Ready(
        rank=engine.rank,
        generation=engine.plan.generation,
        position=position,
        digests=digests,
        samples=engine.samples,
        denominator=job_spec.spec.global_batch,
        groups_s=groups_s,
        moves_s=moves_s,
        moved_bytes=moved.n_bytes,
        read_bytes=moved.n_read_bytes,
        kept_members=engine.groups.kept_members,
        contracts=tuple(sorted(engine.gradients.contracts(model).items())),
        stream=_stream(job_spec, data, position[0]) if engine.reads_data else None,
        problem=problem(engine, model),
        proof_s=time.monotonic() - started_s,
    )


def problem(engine: Engine, model: Model) -> str:
    """Why a step would not train the modules of this rank's part of the plan: the first thing found, empty if it would."""
    return next((text for found in (model.problems(), engine.gradients.problems(model)) for text in found), "")


def _stream(job_spec: JobSpec, data: Prefetcher, step: int) -> str:
    """Digest of the samples and of the random numbers that the next step begins with."""
    facts = (data.ids(step, range(job_spec.spec.micro_batch)), layer_seed(job_spec.seed, step, 0, 0))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
