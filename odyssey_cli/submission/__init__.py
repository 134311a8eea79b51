"""What is handed to a cluster: a batch script of SLURM for a command line of `odyssey run`.

batch.py  the script, from what was asked for
slurm.py  `odyssey slurm`: prints it, or submits it
"""
