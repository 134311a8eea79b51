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
from launcher.agent.drills import Drill, Faults
from launcher.agent.executor import Executor
from launcher.agent.job_end import JobEnd
from launcher.agent.job_log import JobLog, Watch
from launcher.agent.job_start import JobStart, job_started
from launcher.agent.orders import Orders
from launcher.agent.report_router import ReportRouter
from launcher.cluster import endpoint
from launcher.cluster.cluster import Cluster
from launcher.cluster.leader import Leader
from launcher.cluster.quorum import Quorum
from launcher.cluster.roster import Roster
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.joblog.events import AgentInfo, Cause, CauseKind, RankFailed, Suspected
from launcher.planning.planner import Planner
from launcher.processes.local_agent import LocalAgent
from odyssey.text import as_unicode
from perfmodel.profile import Profile


def leading(
    local: LocalAgent, listener: socket.socket, watch: Watch, drills: tuple[Drill, ...], profile: Profile | None
) -> Agent:
    """`listener`: of the store; `watch` sees every event of the log; `profile`: measured before."""
    options, loop, news, processes = local.options, local.loop, local.news, local.processes
    coordination = Coordination(options)
    log = JobLog(local.folder, watch, coordination, local.now)
    cluster, quorum = _cluster(local, listener)
    node_of: dict[int, int] = {}
    planner = Planner(options, node_of, loop, state=lambda: coordination.state, now=local.now, feed=news.event)
    orders = Orders(cluster, processes.store.address, coordination)
    faults = Faults(drills, loop, cluster, news.say)
    hangs = _watch_over_jobs(local, cluster, orders)
    stalls = _watch_over_scripts(local, cluster, coordination)
    processes.waits.watch(planner.awaited)
    processes.waits.watch(Awaited(processes, cluster, quorum, coordination))
    router = ReportRouter(loop, news, coordination, processes.spawner, planner, hangs, stalls, faults)
    start = JobStart(local, log, planner, faults, stalls, node_of, profile)
    end = JobEnd(local, log, cluster, quorum, hangs, stalls, faults)
    executor = Executor(local, coordination, log, cluster, orders, planner, hangs, faults, end)
    return Agent(local, coordination, log, cluster, quorum, planner, stalls, router, executor, start, end)


def _cluster(local: LocalAgent, listener: socket.socket) -> tuple[Cluster, Quorum]:
    """This agent's ranks, those of others where there may be others, and who waits for these."""
    options, processes = local.options, local.processes
    role = as_unicode(options.role)  # as the other agents' arrive here
    us = AgentInfo(0, socket.gethostname(), os.getpid(), options.n_ranks_per_node, role, options.node_rank)
    roster = Roster(options, us, options.run_id, local.loop.clock())
    where = str(processes.store.address)
    quorum = Quorum(roster, local.loop, where, local.news, partial(job_started, options, local.folder))
    leader = Leader(
        local.loop,
        roster,
        local.folder.run_id,
        local.news,
        joined=quorum.joined,
        lost=quorum.lost,
        stopped=processes.waits.look,
    )
    if options.max_agents > 1:
        processes.store.keys[endpoint.LEADER_KEY] = leader.listen(listener)
    return Cluster(processes, leader), quorum


def _watch_over_jobs(local: LocalAgent, cluster: Cluster, orders: Orders) -> JobHangs:
    news = local.news
    return JobHangs(
        local.loop,
        orders.ping,
        lambda rank, text: cluster.kill_rank(rank, Cause(CauseKind.HANG, text)),
        lambda text: news.event(Suspected(text)),
        lambda rank, text: news.event(RankFailed(rank, text, "let all ranks make the same calls in the same order", "", True)),
        cluster.vitals_of,
    )


def _watch_over_scripts(local: LocalAgent, cluster: Cluster, coordination: Coordination) -> StallWatch:
    def pids() -> dict[int, int]:
        """Of the living ranks without a Job on this host."""
        if local.code is not None:
            return {}
        found = {rank: cluster.pid_here(rank) for rank in coordination.plain_ranks}
        return {rank: pid for rank, pid in found.items() if pid is not None}

    return StallWatch(
        local.loop,
        local.options.stall_timeout_s,
        local.options.ends_stalled,
        ranks=pids,
        written=local.processes.n_bytes_of,
        feed=local.news.event,
        kill=cluster.kill_rank,
    )
