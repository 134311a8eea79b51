"""The agent of a job: events in, actions out.

start.py         a job, or a member's part of one, from its options to its exit code
part.py          what an agent has of its job, whether it leads or not: log, state, ranks
member.py        one that another one leads; following.py: how it finds that one and holds on to it; succession.py: how it is
                 kept up, and takes that one's place
leading.py       the leading agent, put together
replication.py   what it says is agreed upon, as long as it leads; other_jobs.py: or others do, elsewhere
agent.py         it takes one event after the other: events in, actions out
coordination.py  the coordinator's state, as the agent reads it; reconciliation.py: what runs here is made what it says
executor.py      does what the coordinator has decided; orders.py: what it tells ranks
report_router.py what ranks say, as events and to those whom it concerns; units.py: which units are final;
                 introductions.py: where they reach each other
job_log.py       what is told of the job to people and programs
job_start.py     how a job begins; job_end.py: how it ends; leaving.py: how it goes on without this agent;
                 voice.py: which votes on for a moment
remote_commands.py  what commands of `odyssey` find of an agent, from any host; notice_socket.py: where there is one agent
awaited.py       what the leading agent waits for
drills.py        `--drill`: faults on purpose
"""
