"""A job, or this agent's part of one, from its options to its exit code."""

from __future__ import annotations

from collections.abc import Callable

from launcher.agent.drills import parse
from launcher.agent.job_log import Watch
from launcher.agent.leading import leading
from launcher.cluster import endpoint
from launcher.cluster.member import Member
from launcher.joblog import torch_events
from launcher.options import RunOptions
from launcher.output import torch_logs_specs
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent

Output = Callable[[int, str, bytes], None]


def run(options: RunOptions, watch: Watch, output: Output) -> int:
    """Run a job to its end; answers an ExitCode. To be called from the main thread.

    `watch` sees every event of the log; `output(rank, 'stdout' or 'stderr', data)` what ranks write if it is captured.
    Both are called from the agent's loop, so they must not block. Raises UsageError before anything is started.
    """
    options.check_script()
    rank_process.check(options)
    if options.logs_specs:
        torch_logs_specs.load(options.logs_specs)  # a wrong name is told before anything is started
    if options.event_log_handler != "null":
        watch = torch_events.recording(options, watch)
    drills = tuple(
        part
        for text in options.drills
        for part in parse(text, n_nodes=options.n_nodes, n_ranks_per_node=options.n_ranks_per_node)
    )
    profile = None
    if options.profile is not None:
        from perfmodel.profile import read

        profile = read(options.profile)
    listener = endpoint.host_or_join(options)
    try:
        local = LocalAgent(options, listener, output)
        role = Member(local, watch) if listener is None else leading(local, listener, watch, drills, profile)
        return local.run(role)
    finally:
        if listener is not None:
            listener.close()
