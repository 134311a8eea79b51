"""Who is alive and makes no progress.

waits.py     one watch over all that an agent waits for
job_hangs.py a Job's ranks, which are asked where they are
stalls.py    the ranks of plain scripts, whose stacks are compared; stall_watch.py: when, and what comes of it
traffic.py   what ranks say to each other, as the kernel counts it
stacks.py    where a process is in its Python code
"""
