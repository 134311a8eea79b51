"""What a training script imports, and the Plan that ranks and agents both speak.

This package imports nothing else of ours: a rank never loads `launcher`, `strategies`, `perfmodel` or `odyssey_cli`,
so that a user's own module of such a name never clashes with ours. `odyssey.plan`, `odyssey.protocol` and `odyssey.kernel`
import no torch; the parts that need it load when `odyssey.Job` is first touched.

In reading order:

job.py        what a script hands over, and the loop that it gets back; own_model.py: with a model and an optimizer of its own;
              model_layers.py: a whole model as the layers of one; model_shards.py: of one that is sharded;
              joining.py: how a rank becomes part of a job
plan          who holds which layers and runs what, when; kernel: its list scheduler
protocol      what a rank and its agent say to each other
runtime       one rank at work: transactions, the engine, communication that can be cut
profiling     what a rank measures when a job starts; sharding: ranks that have a model together
model         the layers that it holds, and their state
checkpoints   what of it outlives the job
replicas      a script with a loop of its own, which goes on when ranks are lost
zygote        a process that has imported torch, which ranks are forks of
errors.py     what people are told; codec.py: bytes from outside; tracebacks.py: of whose code; text.py: in Unicode
own_process.py what /proc tells of it; control_group.py: what is left to it of the host
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odyssey.job import Job, Step
    from odyssey.model_layers import layers_of
    from odyssey.model_shards import shard_mesh
    from odyssey.own_model import resilient
    from odyssey.runtime.heartbeat import heartbeat

__version__ = "0.1.0"
__all__ = ["Job", "Step", "heartbeat", "layers_of", "resilient", "shard_mesh"]


def __getattr__(name: str) -> Any:
    if name == "heartbeat":
        from odyssey.runtime.heartbeat import heartbeat

        globals()[name] = heartbeat  # so that a loop does not come here again
        return heartbeat
    if name == "layers_of":
        from odyssey.model_layers import layers_of

        return layers_of
    if name == "resilient":
        from odyssey.own_model import resilient

        return resilient
    if name == "shard_mesh":
        from odyssey.model_shards import shard_mesh

        return shard_mesh
    if name in __all__:
        from odyssey import job

        return getattr(job, name)
    raise AttributeError(f"module 'odyssey' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
