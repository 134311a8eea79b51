"""Whose a rank is, as the commands read it from a log: of who has started it, as the coordinator has it."""

from __future__ import annotations

from launcher.joblog.events import AgentInfo, AgentLost, Body, Event, JobStarted, RankStarted, Restarting
from odyssey.plan.worker import Rank
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.reports import Hello
from odyssey_cli.jobs.agents import Agents

AGENTS = tuple(AgentInfo(number, f"h{number}", 1, 1) for number in range(3))
SPEC = ModelSpec((), (), (), 4, 2, 100, 0, "cpu")


def seen(*bodies: Body) -> Agents:
    started = JobStarted("train.py", (), 3, 1, 3, "auto", "auto", None, "0.1.0", 1, host="h0", agents=AGENTS)
    ranks = [RankStarted(Rank(i), 10 + i, i, 0, f"h{i}") for i in range(3)]
    agents = Agents()
    for body in (started, *ranks, *bodies):
        agents.take(Event(0.0, 0, "agent", body))
    return agents


def test_a_job_that_goes_on_keeps_the_numbers_of_lost_ranks() -> None:
    found = seen(Hello(Rank(0), SPEC), AgentLost(AGENTS[1], "its host is gone"))
    assert found.home_of == {0: 0, 1: 1, 2: 2} and found.n_ranks == 3


def test_a_job_whose_ranks_all_start_again_is_numbered_anew() -> None:
    lost = AgentLost(AGENTS[1], "its host is gone")
    again = [RankStarted(Rank(0), 20, 0, 0, "h0"), RankStarted(Rank(1), 21, 1, 0, "h2")]
    found = seen(Hello(Rank(0), SPEC), lost, Restarting(1, "", "all ranks start again", 0.0), *again)
    assert found.n_ranks == 2
    assert (found.home_of[Rank(0)], found.home_of[Rank(1)]) == (0, 2)
    assert found.rank_at[2, 1, 0] == 1
