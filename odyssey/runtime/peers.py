"""Whether those that are connected as the members of a group are its members.

Gloo takes whoever connects first and names a number, which counts from 0, for the one that the number is meant for: a stranger
that calls at a rank's port in the moment that a group is built would stand in for a rank, and send it what it trains on. So any
two members tell each other, on the connection that they will use, what only they and their agents know.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import torch

from odyssey.runtime.cut import Cut

_PROOF_BYTES = 16
_TAG = 0x70656572
"""No operation of a step or a move has it."""


def prove(group: Any, place: int, tokens: Sequence[bytes]) -> None:
    """Blocks until each member has proved itself. `group`: just connected; `place`: this rank's in it; `tokens`: of the
    members, secrets that they have told each other by their agents.

    Raises Cut if somebody else is at the other end, and RuntimeError where nobody is any more.
    """
    others = [other for other in range(len(tokens)) if other != place]
    said = {other: torch.frombuffer(bytearray(_proof(tokens, place, other)), dtype=torch.uint8) for other in others}
    heard = {other: torch.zeros(_PROOF_BYTES, dtype=torch.uint8) for other in others}
    works = [group.send([said[other]], other, _TAG) for other in others]
    works += [group.recv([heard[other]], other, _TAG) for other in others]
    for work in works:
        work.wait()
    for other in others:
        if not hmac.compare_digest(bytes(heard[other].tolist()), _proof(tokens, other, place)):
            raise Cut("somebody else is connected in place of a rank")


def _proof(tokens: Sequence[bytes], sender: int, receiver: int) -> bytes:
    return hashlib.blake2b(tokens[sender] + tokens[receiver], digest_size=_PROOF_BYTES).digest()
