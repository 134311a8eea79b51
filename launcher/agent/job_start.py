"""How a job begins: the first event of its log, and what goes on beside its ranks from then on."""

from __future__ import annotations

import os
import socket
import threading

import odyssey
from launcher.agent.coordination import assigned
from launcher.agent.drills import Faults
from launcher.agent.job_log import JobLog
from launcher.agent.remote_commands import owner_of_folder
from launcher.cluster.links.connect import Address
from launcher.coordinator.state import JobState, State, World
from launcher.health.stall_watch import StallWatch
from launcher.joblog import registry
from launcher.joblog.events import AgentInfo, JobStarted
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.planning import situations
from launcher.planning.planner import Planner
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent
from odyssey.plan.worker import Worker, worker_of
from perfmodel.profile.profile import Profile


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


class JobStart:
    """`number`: this agent's; `node_of`: worker -> node, kept here; `profile`: measured before, None for none."""

    def __init__(
        self,
        local: LocalAgent,
        number: int,
        log: JobLog,
        planner: Planner,
        faults: Faults,
        stalls: StallWatch,
        node_of: dict[Worker, int],
        profile: Profile | None,
    ) -> None:
        self._local = local
        self._number = number
        self._log = log
        self._planner = planner
        self._faults = faults
        self._stalls = stalls
        self._node_of = node_of
        self._profile = profile

    def number_nodes(self, world: World) -> None:
        """The ranks are seated, or seated anew."""
        found = assigned(self._local.options, world.seated, 0, 0)
        self._node_of.clear()
        self._node_of |= {worker_of(rank): assignment.node for rank, assignment in found.items()}

    def take_over(self, state: State) -> None:
        """The job has begun under another agent."""
        self.number_nodes(state.world)
        if isinstance(state, JobState):
            self._planner.live_profile.profile = state.profile
        self._stalls.start()

    def go_on(self, started: JobStarted) -> None:
        """The first ranks are being started."""
        if self._profile is not None:
            self._local.sink.event(self._planner.read(self._profile))
        if self._local.processes.spawner.are_safe and rank_process.imports_odyssey(self._local.options):
            # While the zygote imports torch on another core: what planning needs, of which the first loss must not wait.
            threading.Thread(target=situations.import_all, name="imports", daemon=True).start()
        self._faults.at_start()
        self._stalls.start()
        may_have_others = self._local.options.max_agents > 1
        number = self._number
        its = owner_of_folder(self._local, number, started, number, Address("", 0)) if may_have_others else None
        self._log.enter_registry(its)
