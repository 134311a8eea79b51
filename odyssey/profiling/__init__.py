"""What a rank measures when a job starts: its layers, its links, and whole steps.

measure.py             the chain of layers, each on its rank; links.py: what is between ranks
beside_reduction.py    how much a reduction slows down what computes beside it
approximate_cost.py    what an approximate backward takes; saved_bytes.py: what a backward keeps in memory
sample_independence.py whether micro-batches may be cut
trial_run.py           a few whole steps
"""
