"""Ranks as processes of this host: asked for, watched until they end, ended, reaped.

local_agent.py  what every agent has on its host, from start to end
ranks.py        all processes of the job here
own_ranks.py    what they do, as seen from outside
stillness.py    ranks stand still while their agent is cut off
shutdown.py     ranks are asked to end, and killed if they do not
orphans_of_ranks.py what those that are gone have left
spawner.py      starts them: forks of the zygote, or plain spawns
services.py     the process beside the ranks that watches timers
rank_process.py one rank's process, and the zygote's; rank_reports.py: what it says
fork_rules.py   where a fork would not behave as a process of its own
warm_zygote.py  the zygote of the next start, made ready in the background
environment.py  what a rank finds in its environment
store.py        the address of the job's store; store_process.py: who serves it
"""
