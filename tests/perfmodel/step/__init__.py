"""The time and memory of a step."""
