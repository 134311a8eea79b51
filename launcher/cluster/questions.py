"""What a command of `odyssey` asks an agent of a job from another host: where its ranks are, what they wrote, to end the job.

Each question has one answer, and the next one comes after it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from launcher.health.stacks import Stack
from launcher.output.log_reader import MAX_FILES, MAX_PIECE_BYTES, KeptFile, Size
from odyssey.codec import Count, Name
from odyssey.plan.worker import RankNumber

MAX_QUESTION_BYTES = 4096


class Ask(msgspec.Struct, frozen=True, tag=True):
    """First words of such a command."""


# -- questions ---------------------------------------------------------------------------------------------------------


class AskStacks(msgspec.Struct, frozen=True, tag=True):
    """Where are this agent's ranks in their Python code?"""


class AskFiles(msgspec.Struct, frozen=True, tag=True):
    """Which files have they written?"""


class AskPiece(msgspec.Struct, frozen=True, tag=True):
    """What is in one of them?"""

    file: KeptFile
    offset: Size


class AskLife(msgspec.Struct, frozen=True, tag=True):
    """Is this agent there, and is the job to end?"""


class AskEnd(msgspec.Struct, frozen=True, tag=True):
    """End the job, as SIGTERM would. `now`: if its end has begun, do not wait for ranks any longer."""

    now: bool


class AskLeave(msgspec.Struct, frozen=True, tag=True):
    """Have these ranks leave the job, what they hold moved away first.
    `within_s`: until they will be lost; None where nobody knows."""

    ranks: Annotated[tuple[RankNumber, ...], msgspec.Meta(min_length=1, max_length=1024)]
    within_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


Question = AskStacks | AskFiles | AskPiece | AskLife | AskEnd | AskLeave

# -- answers -----------------------------------------------------------------------------------------------------------


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """Those of each living rank."""

    stacks: dict[RankNumber, Stack]


class Files(msgspec.Struct, frozen=True, tag=True):
    """Each file is told with the first byte of its stream that it holds, and the one behind the last."""

    files: Annotated[tuple[tuple[KeptFile, tuple[Size, Size]], ...], msgspec.Meta(max_length=MAX_FILES)]


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Empty at the file's end, where there is none, and of what is not kept any more."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_PIECE_BYTES)]


class Ending(msgspec.Struct, frozen=True, tag=True):
    """`has_begun`: it is decided that the job ends, and ranks are told to."""

    has_begun: bool


class Noted(msgspec.Struct, frozen=True, tag=True):
    """It is told to the job."""


class NotLeading(msgspec.Struct, frozen=True, tag=True):
    """Ask the one that does."""

    leader: Count


class CannotTell(msgspec.Struct, frozen=True, tag=True):
    """This agent has tried to find it out. `why`: it could not."""

    why: Name


Answer = Stacks | Files | Piece | Ending | Noted | NotLeading | CannotTell
