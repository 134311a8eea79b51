"""The other agents of a job: how they find each other, what they say, who is lost.

endpoint.py  where they meet, and who leads
roster.py    who has come, who is refused
quorum.py    until there are enough
leader.py    the leading agent's side of the others
member.py    an agent that another one leads
nodes.py     all ranks behind one door, wherever they live
wire.py      what agents say to each other; channel.py: a connection
"""
