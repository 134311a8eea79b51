"""The other agents of a job: how they find each other, what they say, who is lost.

endpoint.py  where they meet, and who leads at first; endpoint_watch.py: that no other job begins there
leading/     at the agent that leads: who comes, who is lost, all ranks of the job
led/         at the others: how they find and hold on to the one that leads
agreement.py the log that all agents keep together (../consensus); mesh.py: their links for it
listener.py where other agents come in
command_server.py  commands of `odyssey` from other hosts come in there, too
wire.py      what agents say to each other; questions.py: what such a command asks
links/       connections between agents: proof of the secret, sealed frames, sessions
"""
