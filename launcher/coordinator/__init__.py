"""What is decided: pure state machines over the event log, without clocks, processes or files.

machine.py      `step(state, event) -> (state, actions)`: the table of who handles what
state.py        what is known of the job; actions.py, decision.py: what is answered
transition.py   from a pause to go; gate.py: what must agree before it
rank_failure.py a Job's script that fails on one rank
next_job.py     one Job after another in a script
elastic.py      scripts without a Job, which start again together
restart_policy.py whether and when they do
membership.py   agents that come and go
rank_assignment.py which rank sits where
replay.py       a log through the machine again
"""
