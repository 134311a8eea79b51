"""A trace of lost and returned nodes against a job, by simulation.

replay.py     `odyssey replay`
recorded.py   a job's own log once more
ask.py        what is asked, and the answer; answer.py: how it looks; drawing.py: as SVG
policies.py   what is compared
elastic.py    our own jobs on the nodes of a trace; simulated_job.py: one of them, with the coordinator of a real one
restarting.py a job under torchrun on the nodes of a trace
first_plans.py how a job starts on some nodes
restart_costs.py      what checkpoints and restarts cost
nodes.py      which nodes are there
ledger.py     where the time went; outcome.py: of a policy
traces.py     files of traces; generators.py: drawn ones
"""
