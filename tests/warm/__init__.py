"""Processes of tests begin warm: zygotes as forks of one that has imported torch, once for all tests of a pytest process.

Each job that a test starts would import torch anew, which is most of what most tests take. So `subprocess.Popen` is replaced,
in the process of the tests and in the agents that it starts:

    templates.py   imports torch, then what Jobs need; forks of it become zygotes, or execute an agent that has such a template
    agent.py       the agent: a process of its own, whose zygotes are forks of the template that it was given
    popen.py       sends what is to be started to the templates, where nothing but the time can tell the difference

An environment that changes how Python or torch begin, and any process but these, start as they always do. The soak starts all
as users do (`--cold`).
"""
