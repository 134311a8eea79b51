"""SLURM and Kubernetes, without either."""
