"""This operating system, as the agent sees it.

loop.py    one thread that sleeps until something happens
own_clock.py a clock that stands still while this agent does
worker_thread.py  what would hold it up, in a thread
signals.py signals as events of it
group_signals.py whether ranks have got one, too
handle.py  a process that may be signalled, and no other of its number
orphans.py what ranks have started, found and ended
send_buffer.py sends without waiting
limits.py  what to do about a limit that is reached
proc.py    the one reader of /proc
tcp.py     what went over the connections of this host
kernel.py  what only the kernel can be asked for
fitness/   whether this host is fit for a job, measured and compared with others
"""
