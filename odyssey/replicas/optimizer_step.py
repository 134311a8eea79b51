"""Whether a collective is an optimizer's own: one that its step makes, and not the closure that the script gives to that.

Such an optimizer may have shared out its state: each rank steps a part of the parameters, and then all gather them. What a lost
rank had of that nobody else has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

_STEP = Optimizer.profile_hook_step(lambda _: None).__code__
"""What torch puts around the step of every class of optimizers: one function's code for all of them."""


def is_in_step(frame: FrameType | None) -> bool:
    """Whether an optimizer's step has called this, through whatever is between. Where a step is left by an exception nothing
    is to be put right."""
    step = frame
    while step is not None:
        if step.f_code is _STEP and not _is_called(_code_of(_closure(step)), frame, step):
            return True
        step = step.f_back
    return False


def _is_called(code: CodeType | None, frame: FrameType | None, by: FrameType) -> bool:
    """Whether it is being run between `frame` and the one that has called all of it."""
    while frame is not None and frame is not by:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _closure(step: FrameType) -> Any:
    """What computes the loss anew, of the step that this frame is of: collectives in it are a backward's, or the script's."""
    _, its_arguments, its_named, values = inspect.getargvalues(step)
    assert its_arguments is not None and its_named is not None
    _, *arguments = values[its_arguments]
    return arguments[0] if arguments else values[its_named].get("closure")


def _code_of(call: Callable[..., Any] | None) -> CodeType | None:
    while isinstance(call, functools.partial):
        call = call.func
    return getattr(call, "__code__", None) or getattr(type(call).__call__, "__code__", None)
