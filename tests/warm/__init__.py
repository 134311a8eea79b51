"""Processes of tests begin warm: forks of one that has imported torch, once for all tests of a pytest process.

Each job that a test starts would import torch anew, and scipy for its searches, which is most of what most tests take. So
`subprocess.Popen` is replaced, in the process of the tests and in the agents that it starts:

    start.py       what a process is to be
    templates.py   imports torch, what Jobs need and our programs; forks of it become zygotes, agents and planners
    programs.py    an agent or a planner in such a fork
    ending.py      how all of these end
    popen.py       sends what is to be started to the templates, where nothing but the time can tell the difference

An environment that changes how Python or torch begin, and any process but these, start as they always do. The soak starts all
as users do (`--cold`), but for what it has most of: sequences, protected jobs and scripts with their own loops.
"""
