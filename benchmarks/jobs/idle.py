"""Imports nothing that takes time, and waits for its end: what is left of a start is the launcher's own."""

from __future__ import annotations

import signal

import first_line

first_line.note()
signal.pause()
