"""A cluster that is not there, rehearsed.
The launcher, the ranks, their groups and messages are real, and only arithmetic and links are replaced by the time that they
would take.

rehearse.py   the command: one job for each strategy, and the table at its end; failures.py: what is lost, and when
rank.py       the script that the ranks run
emulation.py  what stands in for devices and links in a rank; device.py: one device, network.py: the links
comparison.py     what was predicted against what was rehearsed; disturbance.py: whether the machine was free for it
"""
