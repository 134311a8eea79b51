"""An agent has the processes that all have decided it has, whether it has followed each decision or hears of all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule

from launcher.agent.coordination import Coordination
from launcher.agent.reconciliation import Reconciliation
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.exit_status import KilledBy
from launcher.joblog.events import Cause, CauseKind, RankExited, RankLost
from launcher.options import RunOptions
from tests.examples import examples
from tests.launcher.coordinator.talk import Talk
from tests.launcher.coordinator.test_machine import Job


class Host:
    """Processes of an agent: one lives until it ends by itself, or is ended."""

    def __init__(self, agent: int = 0) -> None:
        self.ranks: dict[int, Any] = {}
        self.living: dict[int, int] = {}
        self.told_to_end: list[int] = []
        self.started: list[int] = []
        self.coordination = Coordination(RunOptions("train.py", n_nodes=64))
        self.within = Reconciliation(self, self.coordination, agent, self.spawn)  # type: ignore[arg-type]

    def spawn(self, assignment: RankAssignment, number: int) -> None:
        assert number not in self.started, "a process is started once"
        self.started.append(number)
        self.ranks[assignment.rank] = SimpleNamespace(number=number, killed_by=None)
        self.living[assignment.rank] = number

    def kill_rank(self, rank: int, cause: Cause | None) -> None:
        if self.living.get(rank) == self.ranks[rank].number:
            del self.living[rank]

    def forget(self, rank: int) -> None:
        assert rank not in self.living
        del self.ranks[rank]

    def terminate(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if rank in self.ranks:
                self.ranks[rank].killed_by = KilledBy.ENDED
                self.told_to_end.append(rank)

    def hear(self, talk: Talk, n_actions: int, *, follows: bool) -> None:
        """What was said last, with its actions. The process of a rank that was told as lost lives, as far as this host sees."""
        event = talk.events[-1]
        if isinstance(event.body, RankExited):
            self.living.pop(event.body.rank, None)
        self.coordination.state = talk.state
        if follows:
            self.within.follow(event, tuple(talk.actions[n_actions:]))

    def say(self, talk: Talk, *lines: str, follows: bool = True) -> None:
        for line in lines:
            n_actions = len(talk.actions)
            talk.say(line)
            self.hear(talk, n_actions, follows=follows)


class Reconciled(Job):
    """Random lives, of which one agent follows each event, and another one hears now and again."""

    def __init__(self) -> None:
        super().__init__()
        self.follower, self.late = Host(), Host()

    def take_news(self, body: Any, generation: int | None) -> None:
        n_actions = len(self.talk.actions)
        super().take_news(body, generation)
        self.follower.hear(self.talk, n_actions, follows=True)
        self.late.hear(self.talk, n_actions, follows=False)
        assert self.follower.living == self.follower.coordination.processes_at(0)

    @rule()
    def catch_up(self) -> None:
        self.late.within.all()
        assert self.late.living == self.late.coordination.processes_at(0)


TestReconciledLives = Reconciled.TestCase
TestReconciledLives.settings = settings(
    stateful_step_count=25, suppress_health_check=list(HealthCheck), max_examples=examples(20)
)


def test_a_process_that_has_died_is_not_started_again_before_that_is_decided() -> None:
    talk, host = Talk(), Host()
    host.say(talk, "start 2 restarts=1")
    del host.living[1]
    host.within.all()
    assert host.living == {0: 1}
    host.say(talk, "lost 1 signal", "exit 0")
    assert host.living == {0: 3, 1: 4}, "all ranks of a plain script have started again"


def test_ranks_that_move_to_another_agent_are_nobodys_here() -> None:
    """All start again on the agents that are left, and the first of them has the first ranks now."""
    talk, hosts = Talk(), [Host(agent) for agent in range(2)]
    for line in ("start 2 agents restarts=1", "gone 0", "exit 1"):
        n_actions = len(talk.actions)
        talk.say(line)
        for host in hosts:
            host.hear(talk, n_actions, follows=True)
    assert [host.living for host in hosts] == [{}, {0: 3}]
    assert 0 not in hosts[0].ranks


def test_who_hears_of_all_at_once_ends_what_is_to_end_and_once() -> None:
    talk, host = Talk(), Host()
    host.say(talk, "start 3", "join 0 1 2", "fail 1", follows=False)
    host.within.all()
    assert sorted(host.living) == [0, 1, 2] and sorted(host.told_to_end) == [0, 1, 2]
    host.within.all()
    assert len(host.told_to_end) == 3
    host.say(talk, "lost 1 exit")
    assert sorted(host.living) == [0, 2]


def test_a_rank_that_is_told_as_lost_is_ended_where_it_lives() -> None:
    """It did not answer in time, or was hanging: whoever leads says no more than that it is lost."""
    talk, host = Talk(), Host()
    host.say(talk, "start 2 ours", "join 0")
    n_actions = len(talk.actions)
    talk.feed(RankLost(1, Cause(CauseKind.HANG, "nothing is heard of it"), False))
    host.hear(talk, n_actions, follows=True)
    assert host.living == {0: 1}
