"""What an agent that another one leads (../../agent/member.py) has of that one.

leader_search.py how it finds the one that leads; leader_session.py: and holds on to it
hold.py      while its ranks stand still
reported.py  what it has reported of its ranks, and may have to say again
"""
