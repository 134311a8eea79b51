"""Replays of traces."""
