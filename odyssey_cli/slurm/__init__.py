"""Inside a step of SLURM: what it says of this job's hosts, and how its tasks share the work.

hostlist.py   lists of hosts, as SLURM writes them
step.py       what a task is told, from the environment alone
address.py    where the first host of a step is reached
node_tasks.py several tasks of a node: one is its agent, the others wait for its end
recipe.py     whether SLURM lets a job outlive a lost task or node
time_limit.py when SLURM ends the job
"""
