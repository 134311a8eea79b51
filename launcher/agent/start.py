"""A job, or this agent's part of one, from its options to its exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from launcher.agent.drills import Drill, parse
from launcher.agent.job_log import Watch
from launcher.agent.leading import founding, founding_anew, leading, taking_over
from launcher.agent.succession import Succession
from launcher.cluster import endpoint
from launcher.cluster.leading.redirects import LedElsewhere
from launcher.cluster.led.member import Member
from launcher.cluster.links import secret
from launcher.cluster.links.connect import Address
from launcher.host.fitness import child
from launcher.host.fitness.findings import HostReport
from launcher.joblog import torch_events
from launcher.joblog.events import Event, Note
from launcher.options import RunOptions
from launcher.output import torch_logs_specs
from launcher.processes import environment as environments
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent, Role
from odyssey.plan.worker import Rank
from perfmodel.profile.profile import Profile

Output = Callable[[Rank, str, bytes], None]


def run(options: RunOptions, watch: Watch, output: Output) -> int:
    """Run a job to its end; answers an ExitCode. To be called from the main thread.

    `watch` sees every event of the log; `output(rank, 'stdout' or 'stderr', data)` what ranks write if it is captured.
    Both are called from the agent's loop, so they must not block. Raises UsageError before anything is started.
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
        for part in parse(text, n_nodes=options.n_nodes, n_ranks_per_node=options.n_ranks_per_node)
    )
    profile = None
    if options.profile is not None:
        from perfmodel.profile.profile import read

        profile = read(options.profile)
    report = _checked(options, watch) if options.checks_hosts else None
    listener = endpoint.host_or_join(options)
    try:
        local = LocalAgent(options, listener, output, report)
        led = partial(_led, key=key, watch=watch, drills=drills, profile=profile)
        role: Role
        role = leading(local, founding(local, listener, key, watch), drills, profile) if listener is not None else led(local)
        while True:
            try:
                return local.run(role)
            except LedElsewhere as error:
                local = LocalAgent(options, None, output, report)
                role = led(local, error.addresses, was_in=error.was_in)
    finally:
        if listener is not None:
            listener.close()


def _led(
    local: LocalAgent,
    elsewhere: Sequence[Address] = (),
    *,
    key: bytes,
    watch: Watch,
    drills: tuple[Drill, ...],
    profile: Profile | None,
    was_in: bool = False,
) -> Member:
    """`elsewhere`, `was_in`: as for Succession."""
    found = partial(_found, local, drills, profile)
    return Succession(local, key, watch, partial(_take_over, local), found, elsewhere, was_in=was_in).member


def _checked(options: RunOptions, watch: Watch) -> HostReport:
    """This host, before it is offered to others: half of the time that these wait for it is left then."""
    watch(Event(time.time(), 0, "agent", Note("checking this host")))
    n_ranks = options.n_nodes * options.n_ranks_per_node
    environment = environments.for_all(os.environ, n_ranks)
    return child.report(n_ranks, options.log_dir, environment, options.join_timeout_s / 2)


def _found(local: LocalAgent, drills: tuple[Drill, ...], profile: Profile | None, succession: Succession) -> None:
    """The agent that led is gone before the job began, and it begins here."""
    local.processes.environments.store = local.processes.store.serve_here(succession.member.here)
    agent = leading(local, founding_anew(local, succession), drills, profile)
    local.become(agent)
    agent.start_elsewhere()


def _take_over(local: LocalAgent, succession: Succession) -> None:
    """From here on this agent leads."""

    local.processes.environments.store = local.processes.store.serve_here(succession.member.here)
    agent = leading(local, taking_over(succession), (), None)
    local.become(agent)
    reported, processes = succession.member.reported, succession.coordination.processes_at(succession.number)
    rank_of = {number: rank for rank, number in processes.items()}
    said = [(rank_of[message.process], message.report) for message in reported.said() if message.process in rank_of]
    ends = [event for number in rank_of for event in reported.ends(number)]
    agent.take_over(succession.leader, said, ends, succession.ended)
    if succession.member.leaves_by is not None:
        agent.leave(succession.member.leaves_by)
    succession.retell()
