"""The Plan, which ranks and agents both speak, and all that follows from it without torch. Planning may import it.

In reading order:

plan.py           who holds which layers and runs which micro-batch; moves.py: what is moved and kept for that
estimate.py       what the performance model says of it
worker.py         what a plan places layers on, and the ranks of that
pipelines.py      its pipelines, alike ones written once; layout.py: `2x4`, as people write and read them;
                  form.py: a plan in such words
samples.py        which samples of a step each micro-batch has; sharded.py: who computes which of a sharded model
approximation.py  whose gradients are approximate
proof.py          that a plan can be done, and is exact
renaming.py       the same plan for other workers
schedule.py       the ops of it, worker by worker; split.py: with the backward in halves
buckets.py        what is reduced when; needs.py: which groups all that goes through
rest.py           what is left of a step that was cut
"""
