"""A job, or this agent's part of one, from its options to its exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from launcher.agent.drills import parse
from launcher.agent.job_log import Watch
from launcher.agent.leading import founding, leading
from launcher.agent.member import Member
from launcher.agent.other_jobs import LedElsewhere
from launcher.agent.part import Part
from launcher.cluster import endpoint
from launcher.cluster.links import secret
from launcher.host.fitness import child
from launcher.host.fitness.findings import HostReport
from launcher.host.signals import Signals
from launcher.joblog import torch_events
from launcher.joblog.events import Event, Note
from launcher.options import RunOptions
from launcher.output import torch_logs_specs
from launcher.processes import environment as environments
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent, Role
from odyssey.plan.worker import Rank

Output = Callable[[Rank, str, bytes], bool | None]


def run(options: RunOptions, watch: Watch, output: Output, hurried: Callable[[], None] = lambda: None) -> int:
    """Run a job to its end; answers an ExitCode. To be called from the main thread.

    `watch` sees every event of the log; `output(rank, 'stdout' or 'stderr', data)` what ranks write if it is captured, and
    answers whether that is more than it can take at the time: then nothing more is read until it does not, asked without data.
    Both are called from the agent's loop, so they must not block. `hurried()`: the end was asked for twice, so nobody waits for
    what is not shown yet. Raises UsageError before anything is started.
    """
    options.check_script()
    rank_process.check(options)
    key = secret.key(os.environ, options.secret_file) if options.max_agents > 1 else b""
    os.environ.pop(secret.VARIABLE, None)  # nothing that is started from here on finds it
    if options.logs_specs:
        torch_logs_specs.load(options.logs_specs)  # a wrong name is told before anything is started
    if options.event_log_handler != "null":
        watch = torch_events.recording(options, watch)
    drills = tuple(
        part
        for text in options.drills
        for part in parse(text, n_nodes=options.n_nodes * options.max_agents, n_ranks_per_node=options.n_ranks_per_node)
    )
    profile = None
    if options.profile is not None:
        from perfmodel.profile.profile import read

        profile = read(options.profile)
    report = _checked(options, watch) if options.checks_hosts else None
    listener = endpoint.host_or_join(options)
    signals = Signals(options)
    try:
        signals.watch()
        local = LocalAgent(options, listener, output, report)
        part = Part(local, watch, drills, profile)
        role: Role = leading(founding(part, listener, key)) if listener is not None else Member(part, key)
        while True:
            try:
                code = local.run(role, signals)
                if local.is_hurried:
                    hurried()
                return code
            except LedElsewhere as error:
                local = LocalAgent(options, None, output, report)
                role = Member(Part(local, watch, drills, profile), key, error.addresses, was_in=error.was_in)
            except endpoint.EndpointIsFree as error:
                listener = error.server_socket
                local = LocalAgent(options, listener, output, report)
                role = leading(founding(Part(local, watch, drills, profile), listener, key))
    finally:
        signals.close()
        if listener is not None:
            listener.close()


def _checked(options: RunOptions, watch: Watch) -> HostReport:
    """This host, before it is offered to others: half of the time that these wait for it is left then."""
    watch(Event(time.time(), 0, "agent", Note("checking this host")))
    n_ranks = options.n_nodes * options.n_ranks_per_node
    environment = environments.for_all(os.environ, n_ranks)
    return child.report(n_ranks, options.log_dir, environment, options.join_timeout_s / 2)
