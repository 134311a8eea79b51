"""Whether a host is fit for a job: what it says of itself, and how hosts that should be alike compare.

findings.py    what is known of a host, bounded, as other hosts hear it
measure_host.py makes it, in a process that may import torch
child.py     has it measured for an agent, which may not
judgement.py what is wrong, from the reports of all hosts
"""
