"""What a rank is doing, and how that looks: a glyph that reads without colour, and a colour."""

from __future__ import annotations

import enum


class RankState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    MOVING = "moving"
    READY = "ready"
    IDLE = "idle"
    LOST = "lost"
    FINISHED = "finished"


_LOOKS = {
    RankState.STARTING: ("◌", ".", "dim"),
    RankState.RUNNING: ("●", "o", "green"),
    RankState.PAUSED: ("‖", "=", "yellow"),
    RankState.MOVING: ("◆", ">", "cyan"),
    RankState.READY: ("◇", "+", "cyan"),
    RankState.IDLE: ("○", "-", "dim"),
    RankState.LOST: ("✕", "x", "bold red"),
    RankState.FINISHED: ("✓", "v", "green"),
}


def glyph(state: RankState, ascii_only: bool = False) -> str:
    return _LOOKS[state][1 if ascii_only else 0]


def style(state: RankState) -> str:
    return _LOOKS[state][2]
