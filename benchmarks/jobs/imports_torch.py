"""Imports torch, and waits for its end: what every script does first, and what an idle rank weighs."""

from __future__ import annotations

import signal

import first_line
import torch

first_line.note()
assert torch.distributed.is_available()
signal.pause()
