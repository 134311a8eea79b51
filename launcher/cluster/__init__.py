"""The other agents of a job: how they find each other, what they say, who is lost.

endpoint.py  where they meet, and who leads
roster.py    who has come, who is refused; comparison.py: whose host is left out
quorum.py    until there are enough
cluster.py   all ranks of a job: one way to address them, wherever they live
inspection.py what they do, asked of each agent
leader.py    the leading agent takes others in; sessions.py: what connects them; remote_agent.py: one, as the leading one has it
member.py    an agent that another one leads; leader_search.py: how it finds that one; leader_session.py: and holds on to it
reported.py  what a member has reported of its ranks, and may have to say again
agreement.py the log that all agents keep together (../consensus); mesh.py: their links for it
reception.py where other agents come in; redirects.py: from where the job is not led any more, to who leads it
visitors.py  commands of `odyssey` from other hosts come in there, too
wire.py      what agents say to each other; questions.py: what such a command asks
links/       connections between agents: proof of the secret, sealed frames, sessions
"""
