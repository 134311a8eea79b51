"""`odyssey check`: hosts are looked at before a job needs them, by a job of one rank on each.

check.py     the command: the job, the table at its end, the exit code
probe.py     the script that the ranks run
links.py     how far and how fast one host reaches another, and its clock
report.py    what the ranks find together
judgement.py what is wrong with it, beside what is wrong with a host by itself (launcher/host/fitness)
table.py     how it is shown
"""
