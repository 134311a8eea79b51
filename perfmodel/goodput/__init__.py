"""What a plan is worth: its goodput, the useful samples a second that are expected of it as losses go on. In reading order:

- reliability.py: how long until the next loss
- objective.py: useful samples a second
- checkpointing.py: what a return to a checkpoint costs
- horizon.py: how long a job is in each of its layouts over a given time
- escalation.py: when to act on a rank that is slow
"""
