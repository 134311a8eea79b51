"""What a rank is told whose waits on other ranks have ended early."""

from __future__ import annotations


class Cut(Exception):
    """The generation's communication ended before this wait did: `reason` says by what."""
