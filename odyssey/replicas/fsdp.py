"""Whether a collective is FSDP's, whose ranks have a part of the model each. DDP may have another model beside it."""

from __future__ import annotations

import sys
from types import FrameType

_FSDP = "torch.distributed.fsdp"


def is_of_shards(frame: FrameType | None) -> bool:
    """Whether torch's FSDP, of either kind, has called this, through whatever is between."""
    if _FSDP not in sys.modules:
        return False  # most scripts never import it, and each of their collectives asks
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_FSDP):
            return True
        frame = frame.f_back
    return False
