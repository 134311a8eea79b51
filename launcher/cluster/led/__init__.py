"""An agent that another one leads.

member.py    starts the ranks that it is told to, and tells what becomes of them
leader_search.py how it finds the one that leads; leader_session.py: and holds on to it
hold.py      while its ranks stand still
reported.py  what it has reported of its ranks, and may have to say again
successors.py what it asks of whoever keeps it up to lead the job itself
"""
