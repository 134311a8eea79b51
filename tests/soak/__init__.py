"""The soak: random jobs, random faults, one oracle. Everything of a job is drawn from one seed.

    draw.py, worlds.py, sequences.py ─► Case (case.py) ─► run.py ─► start.py: each start of the job
        by drive.py a process of each agent, in the one that leads strikes.py, in the ranks train.py with points.py
            ─► what has struck, logs, results ─► verdict.py, against the oracle (recipe.py) ─► Outcome ─► a table by classes.py

`python -m tests.soak 17` runs one job by hand, `--faults 1000` as many jobs as it takes; `--sequences 1` runs the sequence of
changes of that seed; see __main__.py.
"""
