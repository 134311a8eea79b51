"""How benchmarks run: what they leave, what they keep, and what `python -m benchmarks` makes of those that fail."""
