"""Measurements of the finished product: `python -m benchmarks.NAME`.

Each prints a table and writes benchmarks/results/NAME.json; `python -m benchmarks.summary` makes docs/internals/benchmarks.md
of these files. They start real jobs as a user would and read what the jobs leave (`events.jsonl`, the ranks' own time
stamps), so this package imports only `launcher.joblog.events` and what that needs.

`run.py` ends what a benchmark has started, `apart.py` bounds a measurement in a process of its own, `kept.py` has what a run
that was cut has measured, `report.py` what a whole one has found. `loss_picture.py` draws what
`loss_curve.py` has recorded.
"""
