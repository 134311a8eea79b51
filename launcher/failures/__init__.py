"""From the end of a process to a cause that a person understands.

exit_status.py a wait status in words
diagnostics.py what a rank has left behind
root_cause.py  which failure came first, and what is only its consequence
history.py     all failures of a job, and what came of each
hints.py       what to do about it
"""
