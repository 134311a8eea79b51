"""Tests with a real SLURM of four nodes on this machine (slurm.sh), and what they submit.

cluster.py   clusters, and jobs of them as a user sees them
slurm.sh     sets it up and takes it down
"""
