"""This agent's part of its job, whether it leads that or not.
It is the log that all agree upon, the state and the ranks that follow from it, and what those have told.

An agent that comes to lead goes on with it (succession.py): all that it gains is the right to say what is to be decided.
"""

from __future__ import annotations

import secrets
import threading

from launcher.agent.coordination import Coordination
from launcher.agent.drills import Drill
from launcher.agent.job_log import JobLog, Watch
from launcher.agent.reconciliation import Reconciliation
from launcher.agent.remote_commands import answer_commands, owner_of_folder
from launcher.agent.voice import Voice
from launcher.cluster.agreement import Agreement
from launcher.cluster.endpoint import AT_ENDPOINT, other_job
from launcher.cluster.led.reported import Reported
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import say_once
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Join, LedBy
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.joblog.events import AgentInfo, JobEnded, JobStarted
from launcher.planning import situations
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent
from perfmodel.profile.profile import Profile


class Part:
    """It is made first, and given to all that work with it.
    `watch` sees what there is to say for people; `drills`, `profile`: for a job that begins here, the one measured before."""

    def __init__(self, local: LocalAgent, watch: Watch, drills: tuple[Drill, ...] = (), profile: Profile | None = None) -> None:
        self.local = local
        self.watch = watch
        self.drills = drills
        self.profile = profile
        self.number = self.leader = AT_ENDPOINT
        """The numbers of this agent, and of the one that leads."""
        self.agreement: Agreement | None = None
        """None where there can be only this agent, and before this one has a place in a job."""
        self.listener: Listener | None = None
        """Where other agents come in."""
        self.is_known = False
        """They may come: an agent that led has taken this one in, or it has led itself."""
        self.where: dict[int, Address] = {}
        """Where agents of the job are reached, or were, by number."""
        self.voice = Voice(local.loop, local.options.detect_s, lost=self.close)
        self._is_new()

    def _is_new(self) -> None:
        """Nobody here watches what another agent leads."""
        self.coordination = Coordination(self.local.options)
        self.log = JobLog(self.local.folder, None, self.coordination, self.local.now)
        self.reported = Reported()
        self.ended: JobEnded | None = None
        """How the job ended, as all have decided: whoever leads ends the others, and may be lost before that."""

    def agree(self, log: str) -> Agreement:
        """With all other agents, upon the log of this name."""
        assert self.listener is not None
        options, loop = self.local.options, self.local.loop
        self.agreement = Agreement(loop, self.listener, self.where, self.number, options.detect_s, log)
        return self.agreement

    def agree_anew(self) -> None:
        """Upon a log that begins here, of a name that no other has."""
        self.agree(secrets.token_hex(8))

    def may_be_found(self) -> None:
        """Others know where this agent listens."""
        assert self.listener is not None
        if not self.is_known:
            self.is_known = True
            answer_commands(self.local, self.listener, lambda: self.leader)

    def welcomed(self, number: int, leader: int, address: Address, log: str) -> Agreement:
        """This agent is in, and another one leads, at this address."""
        assert self.listener is not None
        self.may_be_found()
        self.number, self.leader = number, leader
        agreement = self.agree(log)
        self.know(leader, address)
        self.listener.give(Join, self._send_on)
        return agreement

    def _send_on(self, link: Link, words: Join) -> None:
        """Say to who comes here where the one that leads is reached, if that is known, or that this is another job."""
        at = self.where.get(self.leader)
        if at is not None and addresses.is_loopback(at.host) > addresses.is_loopback(link.addresses[1] or at.host):
            at = None  # there it would be another host
        if (other := other_job(self.local.options, words, at if self.leader != AT_ENDPOINT else None)) is not None:
            say_once(link, other)
        elif at is not None:
            say_once(link, LedBy(words.run_id, at.host, at.port))
        link.close()

    def know(self, number: int, address: Address) -> None:
        """Where another agent of the job is reached. The first word counts."""
        self.where.setdefault(number, address)

    def know_agent(self, agent: AgentInfo) -> None:
        """One that all have decided is there."""
        if agent.address:
            self.know(agent.number, Address(agent.address, agent.port))

    def those_before(self, here: str) -> list[Address]:
        """Where agents are reached that came before this one, which is reached at `here`. Where it listens itself, or one that
        came later, an earlier one is gone, though nobody has told so: else they would wait for each other."""
        assert self.listener is not None
        later = {Address(here, self.listener.port), *(at for its, at in self.where.items() if its > self.number)}
        return [at for its, at in sorted(self.where.items()) if its < self.number and at not in later]

    def forget(self, job_goes_on: bool) -> None:
        """This agent has no place any more, and no ranks; `job_goes_on`: without it, so that nobody of the job looks for it
        here. What comes now is another agent's log, from its beginning."""
        self.close()
        self.agreement = None
        self.is_known = self.is_known and not job_goes_on
        self.where.clear()
        self.local.folder.begin_again()
        self._is_new()
        self.reconciliation.all()

    def close(self) -> None:
        """The job is over."""
        if self.agreement is not None:
            self.agreement.close()

    # -- the job, as the log here tells --------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """This agent is in the job by what all have decided, not only by the word of who leads."""
        return self.coordination.state.world.started is not None

    def begins(self, started: JobStarted) -> None:
        """Or had begun before this agent came."""
        local, leader_at = self.local, self.where.get(self.leader, Address("", 0))
        if local.processes.spawner.are_safe and rank_process.imports_odyssey(local.options):
            # While the zygote imports torch on another core: what planning needs, of which no loss must wait.
            threading.Thread(target=situations.import_all, name="imports", daemon=True).start()
        may_have_others = local.options.max_agents > 1
        its = owner_of_folder(local, self.number, started, self.leader, leader_at) if may_have_others else None
        self.log.enter_registry(its)

    def can_follow(self, is_gone: bool) -> bool:
        """Whether another agent may lead now; `is_gone`: the process of the one that led has ended. Where it seems that none
        may, one can know better: that this agent votes, too, and that its vote is needed at once."""
        if self.agreement is None:
            return False
        if is_gone:
            self.agreement.leader_is_gone(self.leader)
        return self.agreement.could_go_on_without(self.leader)

    # -- the ranks here ------------------------------------------------------------------------------------------------

    @property
    def reconciliation(self) -> Reconciliation:
        """It makes the ranks here what all have decided."""
        return Reconciliation(self.local.processes, self.coordination, self.number, self._spawn)

    def _spawn(self, assignment: RankAssignment, number: int) -> None:
        self.reported.spawned(assignment.rank, number)
        self.local.processes.spawn(assignment, number)
