"""Whether a collective is FSDP's, whose ranks have a part of the model each. DDP may have another model beside it."""

from __future__ import annotations

from types import FrameType


def is_of_shards(frame: FrameType | None) -> bool:
    """Whether torch's FSDP, of either kind, has called this, through whatever is between."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return True
        frame = frame.f_back
    return False
