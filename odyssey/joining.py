"""How a rank's part in a job begins: the link to its agent, what it tells of the job, and the session that it gets."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from types import TracebackType

import torch

from odyssey.errors import JobError, OdysseyError
from odyssey.model.model import Model
from odyssey.profiling.measure import measure
from odyssey.protocol import link
from odyssey.protocol.model_spec import ModelSpec
from odyssey.runtime.backend import Backend
from odyssey.runtime.batches import Batches, JobData
from odyssey.runtime.engine import Engine
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.layers import Layers, Measuring
from odyssey.runtime.local import LocalSession
from odyssey.runtime.session import Session
from odyssey.tracebacks import users_frames

_newest: Session[Engine] | None = None
"""The session of the last Job that the script has made under an agent. Those before are over."""


def model_spec(
    model: Model, batches: Batches, samples: JobData, clip_norm: float | None, autocast: torch.dtype | None
) -> ModelSpec:
    """What the agent and the other ranks are to know of a job."""
    return ModelSpec(
        layers=model.specs,
        ties=model.ties,
        tie_bytes=model.tie_bytes,
        global_batch=batches.global_batch,
        micro_batch=batches.micro_batch,
        n_samples=samples.n,
        stream=samples.digest,
        seed=batches.seed,
        device=model.device.type,
        clip_norm=None if clip_norm is None else float(clip_norm),
        autocast=str(autocast or ""),
        optimizers=model.optimizers(),
        n_shards=model.n_shards,
        values=() if _has_come_back() else model.values(),
    )


def _has_come_back() -> bool:
    """Whether this rank was started again by itself: then it begins with what others have, whatever its script builds."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.environ.get("ODYSSEY_ATTEMPT", "0") == "0"


def session_of(
    agent: link.AgentLink | None, model: Model, job_spec: JobSpec, backend: Backend
) -> Session[Engine] | LocalSession:
    """This rank's part of the job, which it has been given."""
    global _newest
    if agent is None:
        return LocalSession(model, job_spec, backend)
    _finish_newest()
    atexit.unregister(_finish_newest)
    measuring: Measuring = measure
    if model.is_divided:
        from odyssey.sharding.measure import measure as measuring
    _newest = session = Session(agent, agent.rank, Layers(model, job_spec, backend, measuring), _newest)
    session.start()
    atexit.register(_finish_newest)  # and no session's own: with that those before would stay, with all that they hold
    return session


def _finish_newest() -> None:
    if _newest is not None:
        _newest.finish()


def connection() -> link.AgentLink | None:
    """To this rank's agent; None where the script runs alone. Raises JobError for ranks of another launcher."""
    agent = link.connect()
    if agent is not None:
        report_uncaught_errors()
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise JobError("started by another launcher", "start it with `odyssey run`, which brings the same flags as torchrun")
    return agent


def device_of(asked: torch.device | str | None) -> torch.device:
    """What a script asks for; of several GPUs, and where it asks for none, this rank's, if there is one."""
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device


def begin_on(device: torch.device) -> None:
    """Make a GPU the current one, whose events they are, and have its libraries begin: on this thread and on autograd's, each
    has its own handle. They wait for the whole device, which must not be once ranks wait for each other there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        one = torch.ones(1, 1, device=device, requires_grad=True)
        # Elementwise first: autograd's thread has no context yet, of which cuBLAS would warn.
        torch.autograd.backward((one @ one).tanh())


def report_uncaught_errors() -> None:
    """Tell the agent of an exception that ends this script. Errors of ours are the agent's to print, once for all ranks."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link.report_failure(error)
        if isinstance(error, OdysseyError):
            return
        if isinstance(error, KeyboardInterrupt) and before is sys.__excepthook__:
            return  # of all ranks at once: Ctrl-C; if it was not, the agent tells of it
        if before is sys.__excepthook__:
            # In one write, so that the lines of ranks that fail together do not mix.
            sys.stderr.write("".join(traceback.format_exception(kind, error, users_frames(trace))))
        else:
            before(kind, error, trace)

    sys.excepthook = report
