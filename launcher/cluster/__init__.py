"""The other agents of a job: how they find each other, what they say, who is lost.

endpoint.py  where they meet, and who leads
roster.py    who has come, who is refused
quorum.py    until there are enough
cluster.py   all ranks of a job: one way to address them, wherever they live
leader.py    the leading agent takes others in; remote_agent.py: one of them, as the leading one has it
member.py    an agent that another one leads; leader_search.py: how it finds that one
wire.py      what agents say to each other; channel.py: a connection
"""
