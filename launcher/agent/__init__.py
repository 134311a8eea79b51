"""The agent of a job: events in, actions out.

start.py          a job, or a member's part of one, from its options to its exit code
agent.py          the leading agent, which decides
report_router.py  what ranks say, as events and to those whom it concerns
awaited.py        what the leading agent waits for
drills.py         `--drill`: faults on purpose
"""
