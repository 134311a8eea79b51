"""Tests, in rooms as the packages have; here is what several rooms share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository's folder."""
