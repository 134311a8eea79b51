"""Whether torch.compile asks for a number of ranks: the code that it makes keeps the answer, whoever is lost later."""

from __future__ import annotations

from types import FrameType

_THROUGH, _DYNAMO = "torch.distributed.", "torch._dynamo.variables."


def is_compiled_in(frame: FrameType | None) -> bool:
    """Whether Dynamo has called this for the code that it reads, at once or through torch.distributed. Its log, which asks too,
    does so through other modules."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_THROUGH):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_DYNAMO)
