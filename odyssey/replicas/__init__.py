"""A script with a loop of its own goes on when ranks are lost: what torch.distributed hands out to it is a group of ours.

Nothing of the script changes. Every collective is a unit of the session (odyssey/runtime), as the steps of a Job are: who
survives a loss does it again without the lost ranks, from inputs that no cut operation has touched. All reductions of one
backward are one unit, which is final before any gradient is: so no step is ever applied in parts, or on some ranks only.
Sums need no commit point for that, as a rank that has them hands them on to those that lack them.

install.py    takes the place of torch's own groups; what is not ours to carry stays torch's, and makes a loss a restart
group.py      the group that the script sees: its calls as operations; its size and numbers as they are behind each unit
operation.py  a collective that can be begun anew, and what becomes of it
sized_objects.py  objects in several collectives: gathers of them are to be of the ranks whose sizes are known
backward.py   those that a backward starts, which become final together
optimizer_step.py  whether an optimizer shares out among ranks what it has
compiled.py   whether torch.compile asks for a number of ranks, and keeps it
fsdp.py       whether FSDP has shared out the model
second_thread.py  what another thread of the script asks for, which torch's own group does
replica.py    what such a rank holds, and its part in a generation: the State and the Runner of its session
"""
