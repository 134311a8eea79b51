"""How a job begins: the first event of its log."""

from __future__ import annotations

import os
import socket

import odyssey
from launcher.host import proc
from launcher.joblog import registry
from launcher.joblog.events import AgentInfo, JobStarted
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes import rank_process


def job_started(options: RunOptions, folder: JobFolder, agents: tuple[AgentInfo, ...]) -> JobStarted:
    """`agents`: in the order of their ranks; none where there can be only this one."""
    return JobStarted(
        options.script,
        options.arguments,
        len(agents) or options.n_nodes,
        options.n_ranks_per_node,
        options.max_restarts,
        options.layout,
        options.strategy,
        options.mtbf_s,
        odyssey.__version__,
        os.getpid(),
        options.write_profile is not None,
        agents=agents,
        min_agents=options.min_agents,
        join_timeout_s=options.join_timeout_s,
        never_retry=options.never_retry,
        restart_limit=options.restart_limit,
        restart_backoff_s=options.restart_backoff_s,
        retries_same_failure=options.retries_same_failure,
        pid_started=registry.started_at(os.getpid()) or 0.0,
        boot=proc.boot_id(),
        host=socket.gethostname(),
        folder=str(folder.path or ""),
        run_id=folder.run_id,
        rehearsed=options.rehearsed,
        speed=options.speed,
        aim=options.aim,
        failure_rate=options.failure_rate,
        on_loss=options.on_loss,
        may_build_job=rank_process.imports_odyssey(options),
    )
