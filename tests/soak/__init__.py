"""The soak: random jobs, random faults, one oracle. Everything of a job is drawn from one seed.

    draw.py ─► Case (case.py) ─► run.py starts drive.py: the agent, whose ranks run train.py, and strikes.py at its side
                                     └─► the job's log and results ─► verdict.py, against the oracle (recipe.py) ─► Outcome

`python -m tests.soak --seed 17` runs one job by hand, `--faults 1000` as many jobs as it takes; see __main__.py.
"""
