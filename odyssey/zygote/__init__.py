"""A process that has imported torch and done nothing with it: ranks and the store are forks of it.

protocol.py what an agent asks and is answered
server.py   the zygote itself
entry.py    what a fork does to be the script's process; shadowing_modules.py: modules that only the script's folder hides
ahead.py    forks that wait to become ranks, or the store; heap.py: memory that is theirs before they allocate it
preload.py  what else the next ranks are spared to import
services.py forks that serve the job itself
numa.py     binds a rank to processors
"""
