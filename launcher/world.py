"""Who is in the job, and which rank sits where: from the agents in their order to torchrun's numbers for every rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from launcher.options import Seat


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent of the job. `number`: its own for the whole job, the leading one's is 0; where it stands among the others
    (GROUP_RANK) changes with the membership. `node_rank`: what its command line asks for."""

    number: int
    host: str
    pid: int
    n_ranks: int
    role: str = "default"
    node_rank: int | None = None


def in_order(agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """By the node ranks that they ask for, where all ask and none twice; else in the order in which they came.

    So with static numbering node 0 has ranks 0 and up, and an agent that comes back takes its old place.
    """
    asked = [agent.node_rank for agent in agents]
    if None not in asked and len(set(asked)) == len(asked):
        return tuple(sorted(agents, key=lambda agent: (agent.node_rank or 0, agent.number)))
    return tuple(sorted(agents, key=lambda agent: agent.number))


def homes(agents: Sequence[AgentInfo]) -> dict[int, int]:
    """rank -> number of the agent that has it. Ranks are numbered through the agents in their order."""
    ranks = (agent.number for agent in agents for _ in range(agent.n_ranks))
    return dict(enumerate(ranks))


def seats(agents: Sequence[AgentInfo], n_restarts: int, attempt: int) -> dict[int, Seat]:
    """rank -> its seat, for agents of any sizes and roles."""
    n_ranks = sum(agent.n_ranks for agent in agents)
    n_of_role: dict[str, int] = {}
    for agent in agents:
        n_of_role[agent.role] = n_of_role.get(agent.role, 0) + agent.n_ranks
    met_of_role = dict.fromkeys(n_of_role, 0)
    found: dict[int, Seat] = {}
    for node, agent in enumerate(agents):
        for local_rank in range(agent.n_ranks):
            found[len(found)] = Seat(
                rank=len(found),
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


def seats_of_nodes(n_nodes: int, n_ranks_per_node: int, n_restarts: int, attempt: int) -> dict[int, Seat]:
    """Seats where one agent's host has several nodes, which are failure domains."""
    n_ranks = n_nodes * n_ranks_per_node
    return {
        rank: Seat(
            rank=rank,
            local_rank=rank % n_ranks_per_node,
            node=rank // n_ranks_per_node,
            n_ranks=n_ranks,
            n_local_ranks=n_ranks_per_node,
            n_nodes=n_nodes,
            role_rank=rank,
            n_role_ranks=n_ranks,
            n_restarts=n_restarts,
            attempt=attempt,
        )
        for rank in range(n_ranks)
    }
