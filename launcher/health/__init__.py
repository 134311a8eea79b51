"""It finds ranks that live and make no progress, or less than others.

life.py      who lives, by what is seen of it
waits.py     one watch over all that an agent waits for
job_hangs.py a Job's ranks, which are asked where they are; standstill.py: whether they all only wait for each other
stalls.py    the ranks of plain scripts, whose stacks are compared; stall_watch.py: when, and what comes of it
traffic.py   what ranks say to each other, as the kernel counts it
slow_ranks.py  which ranks compute slowly
stacks.py    where a process is in its Python code
"""
