"""How many examples a property is tried on."""

from __future__ import annotations

import hypothesis

SHARE = 4


def examples(n: int) -> int:
    """So many where they are others every time, as in `make soak`, and a quarter of them where they are always the same."""
    return n if hypothesis.settings.get_current_profile_name() == "random" else -(-n // SHARE)
