"""What is decided: state machines over the event log, without clocks, processes or files.

machine.py         `step(state, event) -> (state, actions)`
state.py           what is known: of every script, of a plain one, of a Job
ranks.py           each rank in one state, and which may follow which
workers.py         what ranks report, folded into what workers are
actions.py         what is wanted done; decision.py: the end
job.py             the machine of a Job: start, loss, finish
transition.py      from a pause to go; gate.py: what must agree before it
growth.py          ranks that are taken in, or let go; newcomers.py: that start beside the others
finish.py          ranks end their scripts: all, or one before the others
rank_failure.py    a Job's script that fails on one rank
next_job.py        one Job after another in a script
replicas.py        a script whose ranks each have everything, and its own loop
elastic.py         the machine of plain scripts, which start again together
restart_policy.py  whether and when they do
rank_assignment.py which rank sits where
decided_again.py          a log through the machine again
"""
