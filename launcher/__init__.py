"""Agents: they spawn ranks, watch them, log what happens, decide with the coordinator, and leave nothing behind.

In reading order, each room importing only from those below it:

agent        the loop that ties all together: events in, actions out
cluster      the other agents of a job, and how they find each other
processes    ranks as processes of this host: environment, fork or spawn, end
planning     what to do after a change: the profile kept true, the search, plans computed ahead
health       ranks that hang or stall, and all else that is waited for
output       what ranks print, and where it goes
coordinator  the decisions: pure state machines over the event log
failures     from the end of a process to a cause that a person understands
joblog       the event log, and what else is written down of a job
host         this operating system: loop, signals, processes
consensus    a log that the agents agree on, whichever of them are lost
options.py   what one `odyssey run` was asked to do

May import `strategies`, `perfmodel`, `odyssey.plan`, `odyssey.protocol` and `odyssey.zygote.protocol`,
and no torch: only torch_logs_specs.py and torch_events.py do, where they are asked for.
"""
