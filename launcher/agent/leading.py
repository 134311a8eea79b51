"""The leading agent, put together: each part is given those that it needs, which are there before it.

what there is on this host ─► the job's state and log ─► the ranks, here and elsewhere ─► watches ─► who acts ─► Agent
"""

from __future__ import annotations

import os
import socket
from functools import partial

from launcher.agent.agent import Agent
from launcher.agent.awaited import Awaited
from launcher.agent.coordination import Coordination
from launcher.agent.drills import Faults
from launcher.agent.executor import Executor
from launcher.agent.introductions import Introductions
from launcher.agent.job_end import JobEnd
from launcher.agent.job_start import job_started
from launcher.agent.leaving import Leaving
from launcher.agent.notice_socket import NoticeSocket
from launcher.agent.orders import Orders
from launcher.agent.other_jobs import OtherJobs
from launcher.agent.part import Part
from launcher.agent.replication import Replication
from launcher.agent.report_router import ReportRouter
from launcher.agent.units import Units
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.inspection import Inspection
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import addresses
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Welcome
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.joblog.events import AgentInfo, Cause, CauseKind, Suspected
from launcher.planning.planner import Planner
from launcher.processes.local_agent import LocalAgent
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank
from odyssey.protocol.frames import frame
from odyssey.protocol.orders import ReachedAt
from odyssey.protocol.reports import Broken, Failed
from odyssey.protocol.units import SAME_CALLS, Position
from odyssey.text import as_unicode


def founding(part: Part, server_socket: socket.socket, key: bytes) -> Part:
    """The job begins here. `server_socket`: of the store; `key`: of the agents' secret."""
    local, options, environments = part.local, part.local.options, part.local.processes.environments
    if addresses.is_only_here(environments.store.host):
        environments.address = environments.store.host
    elif options.max_agents == 1:
        environments.address = "127.0.0.1"
    if options.max_agents > 1:
        port = local.processes.store.address.port
        server_socket = addresses.listen_beside(server_socket, addresses.control_ports(port))
        part.listener = Listener(local.loop, server_socket, key, port)
        part.may_be_found()
        part.agree_anew()
    return part


def leading(part: Part) -> Agent:
    """This agent leads from now on."""
    local, coordination, log = part.local, part.coordination, part.log
    options, loop, sink, processes = local.options, local.loop, local.sink, local.processes
    log.watch = part.watch
    leader, quorum, other_jobs = _others(part)
    cluster = Cluster(processes, leader, coordination.home_of)
    planner = Planner(options, coordination.node_of, loop, state=lambda: coordination.state, now=local.now, feed=sink.event)
    orders = Orders(cluster, coordination)
    faults = Faults(() if part.has_begun else part.drills, loop, cluster, sink)
    hangs = _watch_over_jobs(local, cluster, orders, coordination)
    stalls = _watch_over_scripts(local, cluster, coordination)
    processes.waits.watch(planner.awaited)
    processes.waits.watch(Awaited(processes, cluster, quorum, coordination))
    explain = sink.say if options.verbose else lambda text: None
    units = Units(sink, coordination, planner, hangs, faults, log, orders)
    introductions = Introductions(orders.send)
    router = ReportRouter(loop, sink, coordination, processes.spawner, planner, hangs, stalls, units, introductions, explain)
    end = JobEnd(part, cluster, quorum, hangs, stalls, faults)
    executor = Executor(part, cluster, orders, planner, hangs, stalls, faults, end)
    replication = Replication(part, leader, quorum, hangs, end, other_jobs)
    leaving = Leaving(part, leader, replication)
    notices = NoticeSocket(loop, local.folder.path, sink) if part.listener is None else None
    return Agent(
        *(part, leader, cluster, quorum, planner, stalls, router, executor, end, replication, leaving, notices),
    )


def _others(part: Part) -> tuple[Leader, Quorum, OtherJobs]:
    """Other agents where there may be some, who waits for these, and who hears of those of other jobs."""
    local, options, processes = part.local, part.local.options, part.local.processes
    role = as_unicode(options.role)  # as the other agents' arrive here
    address = addresses.local_address(options.local_addr) if options.local_addr else ""
    port = part.listener.port if part.listener is not None else 0
    us = AgentInfo(
        part.number, socket.gethostname(), os.getpid(), options.n_ranks_per_node, role, options.node_rank, address, port
    )
    roster = Roster(options, us, local.loop.clock(), local.report)
    where = str(processes.store.address)
    quorum = Quorum(roster, local.loop, where, local.sink, partial(job_started, options, local.folder))
    store, log = processes.environments.store, part.agreement.log if part.agreement is not None else ""
    leader = Leader(
        local.loop,
        roster,
        quorum,
        Welcome(part.number, part.number, store.host, store.port, processes.environments.run_id, log),
        options.detect_s,
        local.sink,
        stopped=processes.waits.look,
        reached=partial(_is_reached, processes),
        are_enough=part.agreement.are_enough if part.agreement is not None else lambda numbers: True,
    )
    if part.listener is not None:
        leader.open(part.listener)
    return leader, quorum, OtherJobs(part, roster, leader, quorum)


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
