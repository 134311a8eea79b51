"""`--event-log-handler NAME`: what happens to ranks, recorded by torch.distributed.elastic.events as torchrun records it.

A reader of the event log like others. Only in this case is torch imported by the agent.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from launcher.joblog.events import CauseKind, Event, JobEnded, JobStarted, RankLost, RankStarted, Restarting
from launcher.options import RunOptions
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Failed

Watch = Callable[[Event], None]


def recording(options: RunOptions, watch: Watch) -> Watch:
    """`watch`, and record what it sees. Raises UsageError if no handler is registered under that name."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(options.event_log_handler)
    except KeyError:
        raise UsageError(
            f"--event-log-handler: no handler is registered as {options.event_log_handler!r}",
            "`console` and `null` are torch's own",
        ) from None
    recorder = _Recorder(options)

    def both(event: Event) -> None:
        recorder.take(event)
        watch(event)

    return both


class _Recorder:
    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._host = socket.getfqdn()
        self._run_id = options.run_id
        self._began = 0.0
        self._ended = 0.0
        self._n_groups = options.n_nodes
        self._n_restarts = 0
        self._pids: dict[Rank, int] = {}
        self._nodes: dict[Rank, int] = {}
        self._failed: dict[Rank, str] = {}

    def take(self, event: Event) -> None:
        match event.body:
            case JobStarted(n_nodes=n_nodes, run_id=run_id):
                self._began, self._n_groups, self._run_id = event.time, n_nodes, run_id
            case RankStarted(rank=rank, pid=pid, node=node):
                self._pids[rank], self._nodes[rank] = pid, node
                self._record("START", rank)
            case Restarting(attempt=attempt):
                self._n_restarts = attempt
                self._failed.clear()
            case Failed(rank=rank, error=error):
                self._failed[rank] = error
            case RankLost(rank=rank, cause=cause) if cause.kind is not CauseKind.ENDED:
                self._failed.setdefault(rank, cause.text)
            case JobEnded() as ended:
                self._ended = event.time
                self._end(ended)

    def _end(self, ended: JobEnded) -> None:
        if ended.code > 128:
            self._record("FAILED", None, ended.reason)  # by a signal; torchrun then says nothing of its ranks
            return
        for rank in sorted(self._pids):
            if ended.code == 0:
                self._record("SUCCEEDED", rank)
            elif rank in self._failed:
                self._record("FAILED", rank, self._failed[rank])
            else:
                self._record("TERMINATED", rank)
        self._record("SUCCEEDED", None)  # of the agent, as torchrun means it: it has done its work

    def _record(self, state: str, rank: Rank | None, error: str | None = None) -> None:
        """Record the state of a rank, or of the agent where there is none."""
        from torch.distributed.elastic.events import record
        from torch.distributed.elastic.events.api import Event as TorchEvent
        from torch.distributed.elastic.events.api import EventSource

        details: dict[str, Any] = {"group_world_size": self._n_groups, "entry_point": self._options.script}
        if rank is not None:
            local_rank = rank % (self._options.n_nodes * self._options.n_ranks_per_node)
            details |= {"local_rank": [local_rank], "worker_pid": [self._pids[rank]]}
        metadata: dict[str, Any] = {
            "run_id": self._run_id,
            "global_rank": rank,
            "group_rank": self._nodes[rank] if rank is not None else 0,
            "worker_id": str(self._pids[rank]) if rank is not None else None,
            "role": self._options.role,
            "hostname": self._host,
            "state": state,
            "total_run_time": int(self._ended - self._began) if self._ended else 0,
            "rdzv_backend": "static" if self._options.rendezvous == "local" else str(self._options.rendezvous),
            "raw_error": json.dumps({"message": error}) if error is not None else None,
            "metadata": json.dumps(details),
            "agent_restarts": self._n_restarts,
            "duration_ms": None,
        }
        source = EventSource.AGENT if rank is None else EventSource.WORKER
        record(TorchEvent(f"torchelastic.worker.status.{state}", source, metadata=metadata), self._options.event_log_handler)
