"""A layout, the length of each pipeline, as people write and read it: `2x4`, `3+2+3`, `8+62x1`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from odyssey.errors import UsageError

_LAYOUT = re.compile(r"([1-9]\d{0,5}x)?[1-9]\d{0,5}(\+([1-9]\d{0,5}x)?[1-9]\d{0,5})*")


def parse_layout(text: str) -> tuple[int, ...] | None:
    """`2x4` (pipelines x stages), `3+2+3` (lengths) or both, `2x4+3`, as lengths; None for `auto`.

    What `layout_text` writes. Raises UsageError for anything else.
    """
    if text == "auto":
        return None
    if not _LAYOUT.fullmatch(text):
        raise UsageError(f"{text!r} is no layout", "write `auto`, `2x4` (2 pipelines of 4 stages) or `3+2+3`")
    lengths: list[int] = []
    for part in text.split("+"):
        n_pipelines, _, length = part.rpartition("x")
        lengths += [int(length)] * int(n_pipelines or 1)
    return tuple(lengths)


def layout_text(lengths: Sequence[int]) -> str:
    """`2x4` for equal pipelines, `3+2+3` for unequal ones, `8+62x1` where more than two of a length follow each other."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    if len(runs) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return "+".join(f"{n}x{length}" if n > 2 else "+".join([str(length)] * n) for length, n in runs)
