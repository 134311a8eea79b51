"""Forks, and what they have ready."""
