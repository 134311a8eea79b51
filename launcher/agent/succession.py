"""An agent that does not lead keeps the job's state and log up, so that it can lead when the one that does is lost.

decided (cluster/agreement.py) ─► the coordinator's state, the log ─► elected ─► the leading agent (leading.py)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from launcher.agent.coordination import Coordination
from launcher.agent.job_log import JobLog, Watch
from launcher.agent.reconciliation import Reconciliation
from launcher.agent.remote_commands import answer_commands, owner_of_folder
from launcher.cluster.agreement import Agreement
from launcher.cluster.leading.redirects import send_on
from launcher.cluster.led.member import Member
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.coordinator.actions import Record
from launcher.failures.history import RETOLD
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    AtStep,
    Body,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    UnitFinal,
    decode,
)
from launcher.planning import situations
from launcher.processes import rank_process
from launcher.processes.local_agent import LocalAgent
from odyssey.protocol.reports import Committed, Connected, Paused, Ready, StepTimes


class _Story:
    """It has all that those are told who have not watched the job so far."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._newest_unit: Event | None = None

    def note(self, event: Event) -> None:
        if isinstance(event.body, Committed):
            self._newest_unit = event
        elif not isinstance(event.body, StepTimes | AtStep | UnitFinal | Paused | Connected | Ready):
            self._events.append(event)

    def events(self) -> list[Event]:
        newest = [self._newest_unit] if self._newest_unit is not None else []
        return [replace(event, origin=RETOLD) for event in (*self._events, *newest)]


class Succession:
    """`take_over(succession)`: this agent leads from now on; `found(succession)`: and the job has not begun. `watch` sees what
    there is to say for people."""

    def __init__(
        self,
        local: LocalAgent,
        key: bytes,
        watch: Watch,
        take_over: Callable[[Succession], None],
        found: Callable[[Succession], None],
        elsewhere: Sequence[Address] = (),
        *,
        was_in: bool = False,
    ) -> None:
        """`elsewhere`: as for Member; `was_in`: as for Successors."""
        self._local = local
        self._take_over = take_over
        self._found = found
        self.watch = watch
        self.was_in = was_in
        self.member = Member(local, key, watch, self, elsewhere)
        self.coordination = Coordination(local.options)
        self.log = self._new_log()
        self.agreement: Agreement | None = None
        self.listener: Listener | None = None
        self.number = 0
        self.leader = 0
        self._where: dict[int, Address] = {}
        self._story = _Story()
        self.ended: JobEnded | None = None
        """How the job ended, as all have decided: whoever leads ends the others, and may be lost before that."""

    def _new_log(self) -> JobLog:
        """Nobody here watches what another agent leads."""
        return JobLog(self._local.folder, lambda event: None, self.coordination, self._local.now)

    # -- what the member tells -----------------------------------------------------------------------------------------

    def welcomed(self, listener: Listener, number: int, leader: int, address: Address, log: str) -> None:
        if not self.is_known:  # else it has been led by another one before
            answer_commands(self._local, listener, lambda: self.leader)
        self.listener, self.number, self.leader, self.was_in = listener, number, leader, True
        self.agreement = Agreement(self._local.loop, listener, number, self._local.options.detect_s, log)
        self.agreement.hearer = self
        self._know(leader, address)
        send_on(listener, self._local.options.run_id, lambda: self._where.get(self.leader))

    def led_anew(self) -> None:
        self._reconciliation.all()

    def is_over(self, ended: JobEnded) -> None:
        if self.ended is None and self.has_begun:
            self.ended = ended
            self._note(Event(self._local.now(), self.coordination.generation, f"agent {self.leader}", ended))

    def passed(self, unit: Committed) -> bool:
        event = self.log.unit(unit)
        if event is not None:
            self._story.note(event)
        return event is not None

    def know(self, number: int, address: Address) -> None:
        if self.agreement is not None:
            self._know(number, address)

    @property
    def is_known(self) -> bool:
        return self.listener is not None

    @property
    def others(self) -> Mapping[int, Address]:
        return dict(self._where)

    def found(self, number: int) -> None:
        self.number = self.leader = number
        self.member.give_up_role()
        self._found(self)

    def forgotten(self, job_goes_on: bool) -> None:
        """What comes now is another agent's log, from its beginning."""
        self.close()
        self.agreement = None
        if job_goes_on:
            self.listener = None
        self._where.clear()
        self.coordination = Coordination(self._local.options)
        self._story = _Story()
        self._local.folder.begin_again()
        self.log = self._new_log()

    def can_follow(self, is_gone: bool) -> bool:
        if self.agreement is None or not self.agreement.could_go_on_without(self.leader):
            return False
        if is_gone:
            self.agreement.leader_is_gone(self.leader)
        return True

    @property
    def can_do_without(self) -> bool:
        return self.coordination.is_job_in_force

    def close(self) -> None:
        """The job is over."""
        if self.agreement is not None:
            self.agreement.close()

    # -- what all agents have decided ----------------------------------------------------------------------------------

    def _know(self, number: int, address: Address) -> None:
        assert self.agreement is not None
        self._where.setdefault(number, address)
        self.agreement.know(number, address)

    def decided(self, data: bytes) -> None:
        event = decode(data)
        if event.generation < 0:
            event = replace(event, generation=self.coordination.generation)
        match event.body:
            case JobStarted(agents=agents) as started:
                for agent in agents:
                    self._know_agent(agent)
                if rank_process.imports_odyssey(self._local.options):  # of which a take-over must not wait
                    threading.Thread(target=situations.import_all, name="imports", daemon=True).start()
                self._begins(started)
            case AgentJoined(agent=agent):
                self._know_agent(agent)
            case UnitFinal(result=result):
                self.member.reported.is_final(result.position)
        actions = self.coordination.take(event)
        if self._is_led_by_who_decides:
            self._reconciliation.follow(event, actions)
        self._note(event)
        for action in actions:
            if isinstance(action, Record):
                if isinstance(action.body, JobEnded):
                    self.ended = action.body
                elif isinstance(action.body, GenerationStarted):
                    self.member.reported.began(self.coordination.generation)
                self._note(Event(event.time, self.coordination.generation, "coordinator", action.body))

    @property
    def _reconciliation(self) -> Reconciliation:
        return Reconciliation(self._local.processes, self.coordination, self.number, self.member.spawn)

    @property
    def _is_led_by_who_decides(self) -> bool:
        """Its store is the one that ranks here are told. Else that follows, or this agent leads next."""
        return self.agreement is not None and self.agreement.leader == self.leader and self.member.is_led

    @property
    def has_begun(self) -> bool:
        """The job, as the log here tells."""
        return self.coordination.state.world.started is not None

    def _begins(self, started: JobStarted) -> None:
        """Or had begun before this agent came."""
        its = owner_of_folder(self._local, self.number, started, self.leader, self._where[self.leader])
        self.log.enter_registry(its)

    def _note(self, event: Event) -> None:
        self.log.append(event)
        if isinstance(event.body, JobStarted):
            event = replace(event, body=replace(event.body, folder=str(self._local.folder.path or "")))
        self._story.note(event)

    def retell(self) -> None:
        """To who watches, and has not seen what another agent led."""
        story, self._story = self._story, _Story()
        for event in story.events():
            self.watch(event)

    @property
    def hears_leader(self) -> bool:
        return self.member.hears_leader

    def snapshot(self) -> bytes:
        return self.coordination.snapshot()

    def vote(self, voters: frozenset[int]) -> None:
        """This agent among them, or not: the agreement knows."""

    def restore(self, snapshot: bytes) -> None:
        had_begun = self.has_begun
        self.coordination.restore(snapshot)
        world = self.coordination.state.world
        for agent in world.agents:
            self._know_agent(agent)
        if world.started is not None and not had_begun:  # nobody tells it any more, and it is what a log begins with
            started = replace(world.started, agents=world.seated)
            self._begins(started)
            bodies: list[Body] = [started]
            bodies += [AgentLost(agent, "before this agent came") for agent in world.seated if agent not in world.agents]
            bodies += [AgentJoined(agent) for agent in world.agents if agent not in world.seated]
            for body in bodies:
                self._note(Event(world.started_at, self.coordination.generation, "agent", body))
        if self._is_led_by_who_decides:
            self.led_anew()

    def _know_agent(self, agent: AgentInfo) -> None:
        if agent.address:
            self._know(agent.number, Address(agent.address, agent.port))

    def led_by(self, number: int) -> None:
        if number != self.leader and self._local.code is None and number in self._where:
            self.leader = number
            self.member.follow(self._where[number])

    def leads(self, does_it: bool) -> None:
        if does_it and self._local.code is None:
            self.member.give_up_role()
            self._take_over(self)
