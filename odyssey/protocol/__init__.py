"""What a rank and its agent say to each other.

orders.py    what an agent tells a rank; reports.py: what a rank tells its agent
units.py     what ranks do together, and its result; model_spec.py: what they were given to train
frames.py    messages on a socket; link.py: the rank's end of it
calls.py     the calls of a script that all ranks make together
trial.py     the plan of the steps that are tried when a job starts
"""
