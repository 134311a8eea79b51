"""The leading agent, put together: each part is given those that it needs, which are there before it.

what there is on this host ─► the job's state and log ─► the ranks, here and elsewhere ─► watches ─► who acts ─► Agent
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from functools import partial

from launcher.agent import other_jobs
from launcher.agent.agent import Agent
from launcher.agent.awaited import Awaited
from launcher.agent.coordination import Coordination
from launcher.agent.drills import Drill, Faults
from launcher.agent.executor import Executor
from launcher.agent.introductions import Introductions
from launcher.agent.job_end import JobEnd
from launcher.agent.job_log import JobLog, Watch
from launcher.agent.job_start import JobStart, job_started
from launcher.agent.leaving import Leaving
from launcher.agent.notice_socket import NoticeSocket
from launcher.agent.orders import Orders
from launcher.agent.reconciliation import Reconciliation
from launcher.agent.remote_commands import answer_commands
from launcher.agent.replication import Replication
from launcher.agent.report_router import ReportRouter
from launcher.agent.succession import Succession
from launcher.agent.units import Units
from launcher.cluster.agreement import Agreement
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.inspection import Inspection
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.leading.redirects import give_way
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.joblog.events import AgentInfo, Cause, CauseKind, Suspected
from launcher.planning.planner import Planner
from launcher.processes.local_agent import LocalAgent
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.frames import frame
from odyssey.protocol.orders import ReachedAt
from odyssey.protocol.reports import Broken, Failed
from odyssey.protocol.units import SAME_CALLS, Position
from odyssey.text import as_unicode
from perfmodel.profile.profile import Profile


@dataclass(frozen=True)
class Began:
    """How an agent came to lead. `coordination`, `log`: of the job so far. Where there can be other agents: `agreement` of all,
    and where they come in. `number`: this agent's."""

    number: int
    coordination: Coordination
    log: JobLog
    agreement: Agreement | None
    listener: Listener | None


def founding(local: LocalAgent, server_socket: socket.socket, key: bytes, watch: Watch) -> Began:
    """The job begins here. `server_socket`: of the store; `key`: of the agents' secret; `watch` sees every event."""
    options, loop = local.options, local.loop
    environments = local.processes.environments
    if addresses.is_only_here(environments.store.host):
        environments.address = environments.store.host
    elif options.max_agents == 1:
        environments.address = "127.0.0.1"
    coordination = Coordination(options)
    log = JobLog(local.folder, watch, coordination, local.now)
    if options.max_agents == 1:
        return Began(0, coordination, log, None, None)
    port = local.processes.store.address.port
    listener = Listener(loop, addresses.listen_beside(server_socket, addresses.control_ports(port)), key, port)
    agreement = Agreement(loop, listener, 0, options.detect_s, _new_log())
    answer_commands(local, listener, lambda: 0)
    return Began(0, coordination, log, agreement, listener)


def _new_log() -> str:
    """A name that no other log has."""
    return secrets.token_hex(8)


def founding_anew(local: LocalAgent, succession: Succession) -> Began:
    """The job begins here, after all who were to begin it are gone."""
    assert succession.listener is not None
    succession.log.watch = succession.watch
    agreement = Agreement(local.loop, succession.listener, succession.number, local.options.detect_s, _new_log())
    return Began(succession.number, succession.coordination, succession.log, agreement, succession.listener)


def taking_over(succession: Succession) -> Began:
    """The job goes on here."""
    log, agreement = succession.log, succession.agreement
    log.watch = succession.watch
    return Began(succession.number, succession.coordination, log, agreement, succession.listener)


def leading(local: LocalAgent, began: Began, drills: tuple[Drill, ...], profile: Profile | None) -> Agent:
    """`profile`: measured before."""
    options, loop, sink, processes = local.options, local.loop, local.sink, local.processes
    coordination, log = began.coordination, began.log
    leader, quorum = _others(local, began)
    cluster = Cluster(processes, leader, coordination.home_of)
    reconciliation = Reconciliation(processes, coordination, began.number, processes.spawn)
    node_of: dict[Worker, int] = {}
    planner = Planner(options, node_of, loop, state=lambda: coordination.state, now=local.now, feed=sink.event)
    orders = Orders(cluster, coordination)
    faults = Faults(drills, loop, cluster, sink)
    hangs = _watch_over_jobs(local, cluster, orders, coordination)
    stalls = _watch_over_scripts(local, cluster, coordination)
    processes.waits.watch(planner.awaited)
    processes.waits.watch(Awaited(processes, cluster, quorum, coordination))
    explain = sink.say if options.verbose else lambda text: None
    units = Units(sink, coordination, planner, hangs, faults, log, orders)
    introductions = Introductions(orders.send)
    router = ReportRouter(loop, sink, coordination, processes.spawner, planner, hangs, stalls, units, introductions, explain)
    start = JobStart(local, began.number, log, planner, faults, stalls, node_of, profile)
    end = JobEnd(local, log, cluster, quorum, hangs, stalls, faults, began.agreement)
    executor = Executor(local, coordination, log, cluster, orders, reconciliation, planner, hangs, faults, end)
    replication = Replication(local, began.agreement, began.listener, leader, cluster, quorum, coordination, hangs)
    leaving = Leaving(local, coordination, leader, replication, end)
    notices = NoticeSocket(loop, local.folder.path, sink) if began.listener is None else None
    return Agent(
        *(local, coordination, log, cluster, quorum, planner, stalls, router, executor, start, end, replication),
        leaving,
        notices,
    )


def _others(local: LocalAgent, began: Began) -> tuple[Leader, Quorum]:
    """Other agents where there may be some, and who waits for these."""
    options, processes = local.options, local.processes
    role = as_unicode(options.role)  # as the other agents' arrive here
    address = addresses.local_address(options.local_addr) if options.local_addr else ""
    port = began.listener.port if began.listener is not None else 0
    us = AgentInfo(
        began.number, socket.gethostname(), os.getpid(), options.n_ranks_per_node, role, options.node_rank, address, port
    )
    roster = Roster(options, us, local.loop.clock(), local.report)
    where = str(processes.store.address)
    quorum = Quorum(roster, local.loop, where, local.sink, partial(job_started, options, local.folder))
    leader = Leader(
        local.loop,
        roster,
        began.number,
        processes.environments.run_id,
        processes.environments.store,
        began.agreement.log if began.agreement is not None else "",
        options.detect_s,
        local.sink,
        joined=quorum.joined,
        lost=quorum.lost,
        stopped=processes.waits.look,
        reached=partial(_is_reached, processes),
        waits=quorum.look,
        are_enough=began.agreement.are_enough if began.agreement is not None else lambda numbers: True,
    )
    quorum.choose = leader.choose
    if began.listener is not None:
        leader.open(began.listener)
        give_way(
            began.listener,
            roster,
            leader,
            lambda: began.coordination.job,
            led_elsewhere=partial(_is_led_elsewhere, local),
            is_younger=partial(other_jobs.is_younger, local),
            waits=quorum.wait,
        )
    return leader, quorum


def _is_led_elsewhere(local: LocalAgent, address: Address) -> None:
    """This agent has begun no job yet, and is to join one."""
    local.sink.say(f"the job of this endpoint goes on: it is led at {address}, and this agent joins it there")
    other_jobs.joins(local, address, was_in=False)


def _is_reached(processes: Processes, address: str) -> None:
    """By other agents, at this address: so ranks of theirs reach the ones here by the interface that has it. Ranks that began
    before anybody came are told."""
    environments = processes.environments
    if environments.interface:
        return
    environments.address, environments.interface = address, addresses.interface_of(address)
    if environments.tells_address:
        for rank in processes.ranks:
            processes.send(rank, frame(ReachedAt(address)))


def _watch_over_jobs(local: LocalAgent, cluster: Cluster, orders: Orders, coordination: Coordination) -> JobHangs:
    sink = local.sink

    def stuck(rank: Rank, position: Position, what: str) -> None:
        generation = coordination.generation
        sink.event(Broken(rank, generation, position, what), generation=generation)

    return JobHangs(
        local.loop,
        orders.ping,
        Inspection(cluster, local.own_ranks, list).sample,
        lambda rank, text: cluster.kill_rank(rank, Cause(CauseKind.HANG, text)),
        lambda text: sink.event(Suspected(text)),
        lambda rank, text: sink.event(Failed(rank, text, SAME_CALLS, "", True)),
        stuck,
    )


def _watch_over_scripts(local: LocalAgent, cluster: Cluster, coordination: Coordination) -> StallWatch:
    def watched() -> list[Rank]:
        """The living ranks without a Job."""
        return coordination.plain_ranks if local.code is None else []

    inspection = Inspection(cluster, local.own_ranks, watched)
    return StallWatch(
        local.loop,
        local.options.stall_timeout_s,
        local.options.ends_stalled,
        inspection=inspection,
        feed=local.sink.event,
        kill=cluster.kill_rank,
    )
