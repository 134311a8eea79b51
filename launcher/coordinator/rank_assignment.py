"""It assigns ranks to the agents of a job: from the agents in their order to torchrun's numbers for every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import msgspec

from launcher.joblog.events import AgentInfo
from odyssey.codec import Count
from odyssey.plan.worker import Rank, RankNumber, numbers_from


class RankAssignment(msgspec.Struct, frozen=True):
    """Where a rank sits in the present world: what torchrun's variables tell it.

    `node`: number of its agent, or of its failure domain where there is only one agent. `role_rank`,
    `n_role_ranks`: among the ranks of agents with the same role. `n_restarts`: of the job so far, of `max_restarts`.
    `attempt`: how often all ranks have been started again. `last_failure`: why they had to be, in a line; empty before the
    first time.
    """

    rank: RankNumber
    local_rank: Count
    node: Count
    n_ranks: Count
    n_local_ranks: Count
    n_nodes: Count
    role_rank: Count
    n_role_ranks: Count
    n_restarts: int = 0
    attempt: int = 0
    max_restarts: int = 0
    last_failure: str = ""


def in_order(agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """By the node ranks that they ask for, where all ask and none twice; else in the order in which they came.

    So with static numbering node 0 has ranks 0 and up, and an agent that comes back takes its old place.
    """
    asked = [agent.node_rank for agent in agents]
    if None not in asked and len(set(asked)) == len(asked):
        return tuple(sorted(agents, key=lambda agent: (agent.node_rank or 0, agent.number)))
    return tuple(sorted(agents, key=lambda agent: agent.number))


def seats_with(
    seated: tuple[AgentInfo, ...], agent: AgentInfo, is_vacant: Callable[[AgentInfo], bool]
) -> tuple[AgentInfo, ...]:
    """A Job goes on, so each rank keeps its number: who comes late takes the place of an agent that is gone and had as many
    ranks, of its own host if there is one, or has its ranks behind all others."""
    vacant = [at for at, one in enumerate(seated) if one.n_ranks == agent.n_ranks and is_vacant(one)]
    if not vacant:
        return (*seated, agent)
    at = min(vacant, key=lambda at: (seated[at].host != agent.host, at))
    return (*seated[:at], agent, *seated[at + 1 :])


@lru_cache(maxsize=2)  # asked for again and again, of the same ones
def homes(agents: tuple[AgentInfo, ...]) -> Mapping[Rank, int]:
    """rank -> number of the agent that has it. Ranks are numbered through the agents in their order."""
    numbers = [agent.number for agent in agents for _ in range(agent.n_ranks)]
    return dict(zip(numbers_from(Rank(0), len(numbers)), numbers, strict=True))


def assignments(agents: Sequence[AgentInfo], n_restarts: int, attempt: int) -> dict[Rank, RankAssignment]:
    """rank -> its seat, for agents of any sizes and roles."""
    n_ranks = sum(agent.n_ranks for agent in agents)
    n_of_role: dict[str, int] = {}
    for agent in agents:
        n_of_role[agent.role] = n_of_role.get(agent.role, 0) + agent.n_ranks
    met_of_role = dict.fromkeys(n_of_role, 0)
    found: dict[Rank, RankAssignment] = {}
    for node, agent in enumerate(agents):
        for local_rank in range(agent.n_ranks):
            rank = Rank(len(found))
            found[rank] = RankAssignment(
                rank=rank,
                local_rank=local_rank,
                node=node,
                n_ranks=n_ranks,
                n_local_ranks=agent.n_ranks,
                n_nodes=len(agents),
                role_rank=met_of_role[agent.role] + local_rank,
                n_role_ranks=n_of_role[agent.role],
                n_restarts=n_restarts,
                attempt=attempt,
            )
        met_of_role[agent.role] += agent.n_ranks
    return found


def assignments_on_one_host(n_nodes: int, n_ranks_per_node: int, n_restarts: int, attempt: int) -> dict[Rank, RankAssignment]:
    """Seats where one agent's host has several nodes, which are failure domains. Local ranks are numbered through the host:
    scripts choose their GPU by them."""
    n_ranks = n_nodes * n_ranks_per_node
    return {
        rank: RankAssignment(
            rank=rank,
            local_rank=rank,
            node=rank // n_ranks_per_node,
            n_ranks=n_ranks,
            n_local_ranks=n_ranks,
            n_nodes=n_nodes,
            role_rank=rank,
            n_role_ranks=n_ranks,
            n_restarts=n_restarts,
            attempt=attempt,
        )
        for rank in numbers_from(Rank(0), n_ranks)
    }
