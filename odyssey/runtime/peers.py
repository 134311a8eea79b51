"""Whether those that are connected as the members of a group are its members.

Gloo takes whoever connects first and names a number, which counts from 0, for the one that the number is meant for: a stranger
that calls at a rank's port in the moment that a group is built would stand in for a rank, and send it what it trains on. So any
two members tell each other, on the connection that they will use, what only they and their agents know. And whether they can
read each other's memory: who is read has to know it before.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from odyssey.plan.worker import Rank
from odyssey.runtime import peer_memory
from odyssey.runtime.cut import Cut

_PROOF_BYTES = 16
_TAG = 0x70656572
"""No operation of a step or a move has it."""


class Member(NamedTuple):
    """This rank as a member of a group that has just connected.
    It has its place, and the secrets and handles that the members have told each other by their agents, by place, as are their
    `ranks`."""

    group: Any
    place: int
    ranks: Sequence[Rank]
    tokens: Sequence[bytes]
    memory_handles: Sequence[bytes]


def prove(memberships: Sequence[Member]) -> set[Rank]:
    """Blocks until every member of each of these groups has proved itself: all at once, so that it costs one wait.

    Returns the ranks that can read this one's memory. Raises Cut if somebody else is at the other end, and RuntimeError where
    nobody is any more.
    """
    works, heard, said = [], [], []
    for group, place, ranks, tokens, memory_handles in memberships:
        for other in range(len(tokens)):
            if other == place:
                continue
            can_read = peer_memory.reach(memory_handles[other]) is not None
            mine, theirs = bytearray([*_proof(tokens, place, other), can_read]), bytearray(_PROOF_BYTES + 1)
            said.append(torch.frombuffer(mine, dtype=torch.uint8))
            works.append(group.send([said[-1]], other, _TAG))
            works.append(group.recv([torch.frombuffer(theirs, dtype=torch.uint8)], other, _TAG))
            heard.append((ranks[other], theirs, _proof(tokens, other, place)))
    for work in works:
        work.wait()
    if not all(hmac.compare_digest(theirs[:_PROOF_BYTES], proof) for _, theirs, proof in heard):
        raise Cut("somebody else is connected in place of a rank")
    return {rank for rank, theirs, _ in heard if theirs[_PROOF_BYTES]}


def _proof(tokens: Sequence[bytes], sender: int, receiver: int) -> bytes:
    return hashlib.blake2b(tokens[sender] + tokens[receiver], digest_size=_PROOF_BYTES).digest()
